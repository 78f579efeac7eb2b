// The ops of routings whose parents are Gaussians: EM routing, and Heinsen's.
#include "calls.h"
#include "ops.h"

namespace fastcaps {
namespace {

// What the betas of evidence keep alive.
struct BetaTensors {
  MaybeTensor use, ignore;

  void take(const Given& given, const VoteTensors& tensors, const MaybeTensor& beta_use, const MaybeTensor& beta_ignore,
            Gaussian& with) {
    STD_TORCH_CHECK(beta_use.has_value() == beta_ignore.has_value(),
                    "fastcaps: beta_use and beta_ignore come together or not at all");
    if (!beta_use) return;
    tensors.check_table(*beta_use, "beta_use", given.votes, given.compute);
    tensors.check_table(*beta_ignore, "beta_ignore", given.votes, given.compute);
    const auto strides = [](const Tensor& beta, int64_t& i, int64_t& m) {
      m = beta.size(1) > 1 ? 1 : 0;
      i = beta.size(0) > 1 ? beta.size(1) : 0;
    };
    with.beta_use = given.dense(*beta_use, use);
    with.beta_ignore = given.dense(*beta_ignore, ignore);
    strides(*use, with.use_stride_i, with.use_stride_m);
    strides(*ignore, with.ignore_stride_i, with.ignore_stride_m);
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
  const Given given(call.votes);
  const Votes& votes = given.votes;
  const int64_t turns = int64_t(call.schedule.size());
  STD_TORCH_CHECK(call.rule == Rule::kEM || call.rule == Rule::kHeinsen || call.rule == Rule::kKMeans,
                  "fastcaps: rule must be 4 (EM), 5 (Heinsen) or 6 (k-means), got ", int(call.rule));
  STD_TORCH_CHECK(turns >= 1, "fastcaps: schedule must have a number for every turn");
  STD_TORCH_CHECK(call.mean || !call.variance, "fastcaps: a variance wants a mean");
  ForwardCall<Gaussian> run{votes};
  Gaussian& with = run.with;
  run.total = turns;
  with.eps = call.eps;
  with.rule = call.rule;
  with.schedule = call.schedule.data();
  with.mean = given.view(call.mean, "mean", poses_shape(votes), given.compute);
  with.variance = given.view(call.variance, "variance", poses_shape(votes), given.compute);
  with.log_weight = given.view(call.log_weight, "log_weight", numbers_shape(votes), given.compute);
  BetaTensors betas;
  if (call.rule == Rule::kEM) {
    STD_TORCH_CHECK(call.beta_use && call.beta_ignore, "fastcaps: EM routing wants beta_u and beta_a");
    with.beta_u = given.table(call.beta_use, "beta_use", {votes.M}, given.compute, betas.use);
    with.beta_a = given.table(call.beta_ignore, "beta_ignore", {votes.M}, given.compute, betas.ignore);
  } else {
    betas.take(given, call.votes, call.beta_use, call.beta_ignore, with);
  }
  const Tensor counts = given.result(numbers_shape(votes, turns), with.counts);
  const Tensor means = given.result(poses_shape(votes, turns), with.means);
  const Tensor variances = given.result(poses_shape(votes, turns), with.variances);
  const Tensor scores = given.result(numbers_shape(votes, turns), with.scores);
  run_forward(given, run);
  const auto last = [&](const Tensor& x) { return torch::stable::clone(torch::stable::select(x, 0, turns - 1)); };
  const Tensor variance = last(variances);
  if (given.is_double)
    add<double>(variance, call.eps);
  else
    add<float>(variance, call.eps);
  return {last(scores), last(means), variance, counts, means, variances, scores};
}

std::vector<Tensor> gaussian_routing_backward(Stack stack) {
  const GaussianBackward call{stack};
  const Given given(call.votes);
  const Votes& votes = given.votes;
  const Shape shape = poses_shape(votes), numbers = numbers_shape(votes);
  const ScalarType type = given.compute;
  const Turns turns(call.votes, call.counts.dim() > 0 ? call.counts.size(0) : 0);
  turns.check(call.grad_counts, "grad_counts", numbers, type);
  turns.check(call.grad_means, "grad_means", shape, type);
  turns.check(call.grad_variances, "grad_variances", shape, type);
  turns.check(call.grad_evidence, "grad_evidence", numbers, type);
  STD_TORCH_CHECK(call.mean || !call.variance, "fastcaps: a variance wants a mean");
  turns.check(call.mean, "mean", shape, type, false);
  turns.check(call.variance, "variance", shape, type, false);
  turns.check(call.log_weight, "log_weight", numbers, type, false);
  turns.check(call.counts, "counts", numbers, type);
  turns.check(call.means, "means", shape, type);
  turns.check(call.variances, "variances", shape, type);

  BackwardCall<Gaussian> run{votes};
  Gaussian all;
  all.eps = call.eps;
  BetaTensors betas;
  betas.take(given, call.votes, call.beta_use, call.beta_ignore, all);
  const bool evidence = call.grad_evidence && all.beta_use;
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
  const auto wants = [&](int64_t bit, const MaybeTensor& x) { return (call.needs & bit) && x; };
  const bool dmean = wants(kMean, call.mean), dvariance = wants(kVariance, call.variance);
  const bool dlog_weight = wants(kLogWeight, call.log_weight), state = dmean || dvariance || dlog_weight;
  STD_TORCH_CHECK(!state || turns.count == 1, "fastcaps: a state has gradients in a single turn alone");
  const auto size = [](const MaybeTensor& x) { return x ? int64_t(x->numel()) : 0; };
  run.schedule = schedule_of(run, given.is_double, state,
                             (given.bias ? given.bias->numel() : 0) + size(call.beta_use) + size(call.beta_ignore));
  const bool empty =
      votes.positions() == 0 || (!call.grad_counts && !call.grad_means && !call.grad_variances && !evidence);
  Gaussian& first = run.with[0];
  const MaybeTensor mean = given.maybe(dmean, shape, first.dmean, empty);
  const MaybeTensor variance = given.maybe(dvariance, shape, first.dvariance, empty);
  const MaybeTensor log_weight = given.maybe(dlog_weight, numbers, first.dlog_weight, empty);
  const auto parts = [&](int64_t bit, const MaybeTensor& beta) {
    return given.partial(evidence && call.needs & bit, run.schedule.items(), beta ? shape_of(*beta) : Shape{});
  };
  const Partial uses = parts(kBetaUse, call.beta_use), ignores = parts(kBetaIgnore, call.beta_ignore);
  for (Gaussian& with : run.with) with.duse = uses.parts, with.dignore = ignores.parts;
  const Gradients found = run_backward(given, run, call.needs, state, empty);
  return {found.children,
          found.weight,
          found.bias,
          found.gate,
          given.summed(mean),
          given.summed(variance),
          given.summed(log_weight),
          given.summed(uses.sum()),
          given.summed(ignores.sum())};
}

}  // namespace fastcaps
