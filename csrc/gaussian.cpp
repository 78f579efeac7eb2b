// The ops of routings whose parents are Gaussians: EM routing, and Heinsen's.
#include "cpu/call.h"

namespace fastcaps {
namespace {

// What the betas of evidence keep alive.
struct BetaTensors {
  MaybeTensor use, ignore;

  void take(const CpuCall& cpu, const MaybeTensor& beta_use, const MaybeTensor& beta_ignore, Gaussian& with) {
    if (!beta_use) return;
    with.beta_use = cpu.table(beta_use, use);
    with.beta_ignore = cpu.table(beta_ignore, ignore);
    table_strides(*use, 1, with.use_stride_i, with.use_stride_m);
    table_strides(*ignore, 1, with.ignore_stride_i, with.ignore_stride_m);
  }
};

template <class T>
void add(const Tensor& x, double number) {
  T* data = static_cast<T*>(data_of(x));
  for (int64_t k = 0; k < x.numel(); ++k) data[k] += T(number);
}

}  // namespace

std::vector<Tensor> gaussian_routing(Stack stack) {
  const GaussianRouting call{stack};
  const CpuCall cpu(call.votes);
  const Votes& votes = cpu.votes;
  const int64_t turns = int64_t(call.temperatures.size());
  call.check(votes);
  ForwardCall<Gaussian> run{votes};
  Gaussian& with = run.with;
  run.total = turns;
  with.eps = call.eps;
  with.rule = call.rule;
  with.temperatures = call.temperatures.data();
  with.mean = cpu.view(call.mean);
  with.variance = cpu.view(call.variance);
  with.log_weight = cpu.view(call.log_weight);
  BetaTensors betas;
  if (call.rule == Rule::kEM) {
    with.beta_u = cpu.table(call.beta_use, betas.use);
    with.beta_a = cpu.table(call.beta_ignore, betas.ignore);
  } else {
    betas.take(cpu, call.beta_use, call.beta_ignore, with);
  }
  const Tensor counts = cpu.result("counts", numbers_shape(votes, turns), with.counts);
  const Tensor means = cpu.result("means", poses_shape(votes, turns), with.means);
  const Tensor variances = cpu.result("variances", poses_shape(votes, turns), with.variances);
  const Tensor scores = cpu.result("scores", numbers_shape(votes, turns), with.scores);
  run_forward(cpu, run);
  const auto last = [&](const Tensor& x) { return copied(torch::stable::select(x, 0, turns - 1), cpu.compute); };
  const Tensor variance = last(variances);
  if (votes.is_double())
    add<double>(variance, call.eps);
  else
    add<float>(variance, call.eps);
  return {last(scores), last(means), variance, counts, means, variances, scores};
}

std::vector<Tensor> gaussian_routing_backward(Stack stack) {
  const GaussianBackward call{stack};
  const CpuCall cpu(call.votes);
  const Votes& votes = cpu.votes;
  const Shape shape = poses_shape(votes), numbers = numbers_shape(votes);
  const Turns turns = call.check(votes);

  BackwardCall<Gaussian> run{votes};
  Gaussian all;
  all.eps = call.eps;
  BetaTensors betas;
  betas.take(cpu, call.beta_use, call.beta_ignore, all);
  const bool evidence = call.has_evidence();
  for (int64_t k = 0; k < turns.count; ++k) {
    Gaussian with = all;
    const auto take = [&](const MaybeTensor& x, View& view) { view = turns.view(x, k); };
    take(call.grad_counts, with.grad_counts);
    take(call.grad_means, with.grad_means);
    take(call.grad_variances, with.grad_variances);
    if (evidence) take(call.grad_evidence, with.grad_evidence);
    take(call.mean, with.mean);
    take(call.variance, with.variance);
    take(call.log_weight, with.log_weight);
    take(call.counts, with.given_counts);
    take(call.means, with.given_means);
    take(call.variances, with.given_variances);
    run.with.push_back(with);
  }
  const bool state = call.wants_state();
  const auto size = [](const MaybeTensor& x) { return x ? int64_t(x->numel()) : 0; };
  run.schedule = schedule_of(run, state, size(cpu.bias) + size(call.beta_use) + size(call.beta_ignore));
  const bool empty = votes.positions() == 0 || !call.any();
  Gaussian& first = run.with[0];
  const MaybeTensor mean = cpu.maybe("dmean", call.wants_mean(), shape, first.dmean, empty);
  const MaybeTensor variance = cpu.maybe("dvariance", call.wants_variance(), shape, first.dvariance, empty);
  const MaybeTensor log_weight = cpu.maybe("dlog_weight", call.wants_log_weight(), numbers, first.dlog_weight, empty);
  const auto parts = [&](int64_t bit, const MaybeTensor& beta) {
    return cpu.partial("dbeta", evidence && call.needs & bit, run.schedule.items(), beta ? shape_of(*beta) : Shape{});
  };
  const Partial uses = parts(kBetaUse, call.beta_use), ignores = parts(kBetaIgnore, call.beta_ignore);
  for (Gaussian& with : run.with) with.duse = uses.parts, with.dignore = ignores.parts;
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

}  // namespace fastcaps
