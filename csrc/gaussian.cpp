// The ops of routings whose parents are Gaussians: EM and Heinsen routing.
#include "cpu/call.h"

namespace fastcaps {
namespace {

template <class T>
void add(const Tensor& x, double number) {
  T* data = static_cast<T*>(data_of(x));
  for (int64_t k = 0; k < x.numel(); ++k) data[k] += T(number);
}

std::vector<Tensor> gaussian_routing(Stack stack) {
  const GaussianRouting call{stack};
  CpuCall cpu(call.votes);
  const Votes& votes = cpu.votes;
  const int64_t iterations = int64_t(call.temperatures.size());
  call.check(votes);
  ForwardCall<Gaussian> run{votes};
  Gaussian& with = run.with;
  run.total = iterations;
  with.eps = call.eps;
  with.rule = call.rule;
  with.temperatures = call.temperatures.data();
  with.mean = cpu.view(call.mean);
  with.variance = cpu.view(call.variance);
  with.log_weight = cpu.view(call.log_weight);
  if (call.rule == Rule::kEM)
    with.beta_u = cpu.table(call.beta_use), with.beta_a = cpu.table(call.beta_ignore);
  else
    with.betas = cpu.betas(call.beta_use, call.beta_ignore);
  const Tensor counts = cpu.result("counts", cpu.numbers(iterations), with.counts);
  const Tensor means = cpu.result("means", cpu.poses(iterations), with.means);
  const Tensor variances = cpu.result("variances", cpu.poses(iterations), with.variances);
  const Tensor scores = cpu.result("scores", cpu.numbers(iterations), with.scores);
  run_forward(cpu, run);
  const auto last = [&](const Tensor& x) { return cpu.entry(x, iterations - 1); };
  const Tensor variance = last(variances);
  if (votes.is_double())
    add<double>(variance, call.eps);
  else
    add<float>(variance, call.eps);
  return {last(scores), last(means), variance, counts, means, variances, scores};
}

std::vector<Tensor> gaussian_routing_backward(Stack stack) {
  const GaussianBackward call{stack};
  CpuCall cpu(call.votes);
  const Votes& votes = cpu.votes;
  const Iterations iterations = call.check(votes);

  BackwardCall<Gaussian> run{votes};
  Gaussian with;
  with.eps = call.eps;
  with.betas = cpu.betas(call.beta_use, call.beta_ignore);
  const bool evidence = call.has_evidence();
  for (int64_t k = 0; k < iterations.count; ++k) {
    const auto of = [&](const MaybeTensor& x) { return iterations.view(x, k); };
    with.grad_counts = of(call.grad_counts);
    with.grad_means = of(call.grad_means);
    with.grad_variances = of(call.grad_variances);
    if (evidence) with.grad_evidence = of(call.grad_evidence);
    with.mean = of(call.mean);
    with.variance = of(call.variance);
    with.log_weight = of(call.log_weight);
    with.given_counts = of(call.counts);
    with.given_means = of(call.means);
    with.given_variances = of(call.variances);
    run.with.push_back(with);
  }
  const bool state = call.wants_state();
  const auto size = [](const MaybeTensor& x) { return x ? int64_t(x->numel()) : 0; };
  run.schedule = schedule_of(run, state, cpu.bias_numbers() + size(call.beta_use) + size(call.beta_ignore));
  const bool empty = votes.positions() == 0 || !call.any();
  Gaussian& first = run.with[0];
  const MaybeTensor mean = cpu.maybe("dmean", call.wants_mean(), cpu.poses(), first.dmean, empty);
  const MaybeTensor variance = cpu.maybe("dvariance", call.wants_variance(), cpu.poses(), first.dvariance, empty);
  const MaybeTensor log_weight =
      cpu.maybe("dlog_weight", call.wants_log_weight(), cpu.numbers(), first.dlog_weight, empty);
  const auto parts = [&](int64_t bit, const MaybeTensor& beta) {
    return cpu.partial("dbeta", evidence && call.needs & bit, run.schedule.items(), beta ? shape_of(*beta) : Shape{});
  };
  const Partial uses = parts(kBetaUse, call.beta_use), ignores = parts(kBetaIgnore, call.beta_ignore);
  for (Gaussian& one : run.with) one.duse = uses.parts, one.dignore = ignores.parts;
  const Gradients found = run_backward(cpu, run, call.needs, state, empty);
  return {found.children,
          found.weight,
          found.bias,
          found.gate,
          cpu.summed(mean),
          cpu.summed(variance),
          cpu.summed(log_weight),
          cpu.summed(uses.sum()),
          cpu.summed(ignores.sum())};
}

}  // namespace

FASTCAPS_REGISTER(gaussian_routing)

}  // namespace fastcaps
