// The ops of routings whose parents are Gaussians: check, schedule, allocate, launch.
#include "../algebra/gaussian.h"
#include "call.h"
#include "stage.h"

namespace fastcaps::gpu {
namespace {

// ---- behind the forward kernel: the moments of several ranges of children, joined; a few lanes hold one parent ------
struct JoinArgs {
  PassArgs pass;  // of the previous launch: counts, evidence, base, offsets and spread have a part for each range
  int64_t count;  // parents in all: B * Ho * Wo * M
  int numbers;    // of a parent
  int lanes;      // for a parent: a power of two
  float *counts, *scores;
};

FASTCAPS_KERNEL(256, 1)
gaussian_join_kernel(const FASTCAPS_CONSTANT JoinArgs join) {
  const PassArgs& args = join.pass;
  const int first = thread_index() % join.lanes;
  each_parent(join.count, join.lanes, [&](int64_t parent, bool exists) {
    float count = 0.0f, evidence = 0.0f, log_sigma = 0.0f;
    for (int number = first; number < join.numbers && exists; number += join.lanes) {
      const int64_t k = parent * join.numbers + number;
      double n = 0, mean = 0, square = 0;  // in double: each range would round the mean of those before it
      for (int chunk = 0; chunk < args.chunks; ++chunk) {
        const int64_t part = chunk * join.count * join.numbers + k;
        const double more = args.counts[chunk * join.count + parent], sum = n + more,
                     fraction = more * inverse_or_zero(sum);
        const double base = args.mean ? args.mean[k] : args.base[part];
        gaussian::join(base + args.offsets[part], double(args.spread[part]), fraction, n * fraction, mean, square);
        n = sum;
      }
      const double eps = args.eps;
      gaussian::finish(0.0, n, eps, inverse_or_zero(n + eps), mean, square);
      const float variance = float(square);
      args.means[k] = args.last_mean[k] = float(mean), args.variances[k] = variance,
      args.last_variance[k] = variance + args.eps;
      log_sigma += gaussian::log_sigma(variance + args.eps);
      count = float(n);
    }
    FASTCAPS_NO_UNROLL
    for (int mask = 1; mask < join.lanes; mask *= 2) log_sigma += shuffle_xor(log_sigma, mask);
    if (!exists || first != 0) return;
    for (int chunk = 0; chunk < args.chunks; ++chunk) evidence += args.evidence[chunk * join.count + parent];
    const int m = int(parent % args.M);
    if (args.rule == Rule::kEM)
      evidence = gaussian::em_score(args.temperatures[0], args.activation[m],
                                    float(join.numbers) * args.cost_of_numbers[m], log_sigma, count);
    join.counts[parent] = count, join.scores[parent] = args.score[parent] = evidence;
  });
}

// ---- before the backward kernel: what a vote's weight gains, as a parabola in the vote ------------------------------
struct PrepareArgs {
  PassArgs pass;  // of the next launch, for which this one makes u, s and the constant
  int64_t count;
  const float* dcounts;     // [count] or null
  View dmeans, dvariances;  // [B, Ho, Wo, M, C, E] or null
  const float* variances;
  float *u, *s, *constant;
  float* tight;  // [positions], zeros: counts parents whose variance is small beside the square of their mean; or null
};

FASTCAPS_KERNEL(256, 1)
gaussian_prepare_kernel(const FASTCAPS_CONSTANT PrepareArgs prepare) {
  const PassArgs& args = prepare.pass;
  for (int64_t parent = block_x() * block_threads() + thread_index(); parent < prepare.count;
       parent += blocks_x() * block_threads()) {
    const int64_t from_means = offset_of_parent(prepare.dmeans, parent, args.M, args.Ho, args.Wo);
    const int64_t from_variances = offset_of_parent(prepare.dvariances, parent, args.M, args.Ho, args.Wo);
    const float inverse = inverse_or_zero(args.counts[parent] + args.eps);
    const auto number = [&](const View& view, int64_t from, int c, int e) {
      return view.data ? static_cast<const float*>(view.data)[from + c * view.stride[4] + e * view.stride[5]] : 0.0f;
    };
    float constant = prepare.dcounts ? prepare.dcounts[parent] : 0.0f;
    bool tight = false;
    for (int c = 0; c < args.C; ++c)
      for (int e = 0; e < args.E; ++e) {
        const int64_t at = (parent * args.C + c) * args.E + e;
        const float mean = args.means[at], variance = prepare.variances[at];
        const float s = number(prepare.dvariances, from_variances, c, e) * inverse;
        prepare.s[at] = s;
        prepare.u[at] = number(prepare.dmeans, from_means, c, e) * inverse - 2.0f * (args.eps * inverse) * mean * s;
        constant -= s * variance;
        tight = tight || 64.0f * variance < mean * mean;
      }
    prepare.constant[parent] = constant;
    if (tight && prepare.tight) atomic_add(prepare.tight + parent / args.M, 1.0f);
  }
}

std::vector<Tensor> gaussian_routing(Stack stack) {
  const GaussianRouting op{stack};
  const Tensor& children = op.votes.children;
  const DeviceGuard guard(children);
  Call call("gaussian", op.votes, op.options);
  const Votes& v = call.votes;
  PassArgs& args = call.args;
  const int64_t iterations = int64_t(op.temperatures.size());
  op.check(v);
  args.eps = float(op.eps), args.rule = op.rule;
  call.take_state(op.mean, op.variance, op.log_weight);
  if (op.rule == Rule::kEM)
    args.cost_of_numbers = call.table(op.beta_use), args.activation = call.table(op.beta_ignore);
  else
    args.betas = call.betas(op.beta_use, op.beta_ignore);
  const Schedule c = call.schedule_forward(iterations);
  for (int64_t k = 0; k < iterations; ++k) args.temperatures[k] = float(op.temperatures[size_t(k)]);
  const Tensor score = call.empty(call.numbers()), last_mean = call.empty(call.poses());
  const Tensor last_variance = call.empty(call.poses()), counts = call.empty(call.numbers(iterations));
  const Tensor means = call.empty(call.poses(iterations)), variances = call.empty(call.poses(iterations));
  const Tensor scores = call.empty(call.numbers(iterations));
  const std::vector<Tensor> results{score, last_mean, last_variance, counts, means, variances, scores};
  if (v.positions() == 0) return results;
  call.take(c);
  const Tensor statistics = op.mean || op.log_weight ? call.collect(c, 2) : Tensor();
  args.score = floats(score), args.last_mean = floats(last_mean), args.last_variance = floats(last_variance);
  args.means = floats(means), args.variances = floats(variances);
  if (c.chunks == 1) {
    args.iterations = int(iterations);
    args.counts = floats(counts), args.evidence = floats(scores);
    call.launch(c, 0, c.parent_blocks);
    return results;
  }
  const Tensor parts = call.empty(call.parts(c, false)), evidences = call.empty(call.parts(c, false));
  const Tensor offsets = call.empty(call.parts(c, true)), spreads = call.empty(call.parts(c, true));
  const Tensor bases = call.empty(op.mean ? Shape{0} : call.parts(c, true));
  args.counts = floats(parts), args.evidence = floats(evidences);
  args.offsets = floats(offsets), args.spread = floats(spreads), args.base = floats(bases);
  call.launch(c, 0, c.parent_blocks);
  JoinArgs join{args, v.positions() * v.M, int(v.parent_size()), 1, floats(counts), floats(scores)};
  while (join.lanes < 32 && join.lanes < join.numbers) join.lanes *= 2;
  launch(&gaussian_join_kernel, blocks_for(join.count * join.lanes), join);
  return results;
}

std::vector<Tensor> gaussian_routing_backward(Stack stack) {
  const GaussianBackward op{stack};
  const Tensor& children = op.votes.children;
  const DeviceGuard guard(children);
  Call call("gaussian", op.votes, op.options);
  const Votes& v = call.votes;
  PassArgs& args = call.args;
  const Iterations all = op.check(v);
  const bool listens = op.has_evidence(), empty = v.positions() == 0 || !op.any();
  args.betas = call.betas(op.beta_use, op.beta_ignore);
  const bool wants_mean = op.wants_mean(), wants_variance = op.wants_variance(), wants_log = op.wants_log_weight();
  const bool wants_use = listens && op.wants(kBetaUse, op.beta_use);
  const bool wants_ignore = listens && op.wants(kBetaIgnore, op.beta_ignore);
  const int64_t every = v.I * v.M;  // betas if every child has its own; others are summed by position
  args.eps = float(op.eps);
  VoteGradients gradients(call, op.needs, wants_use && args.betas.use_stride_i ? every : 0,
                          wants_ignore && args.betas.ignore_stride_i ? every : 0);
  const auto room = [&](bool wanted, bool poses) {
    Shape shape = call.parts(gradients.schedule, poses);
    if (!wanted) return call.empty({0});
    shape[0] *= all.count;
    return empty ? call.zeros(shape) : call.empty(shape);
  };
  const Tensor dmean = room(wants_mean, true), dvariance = room(wants_variance, true);
  const Tensor dlog_weight = room(wants_log, false);
  const Tensor shared_use = room(wants_use && !args.betas.use_stride_i, false);
  const Tensor shared_ignore = room(wants_ignore && !args.betas.ignore_stride_i, false);
  const int64_t count = v.positions() * v.M, slots = call.parts(gradients.schedule, false)[0] * count;
  const Tensor u = call.empty({count * v.parent_size()}), s = call.empty({count * v.parent_size()});
  const Tensor constant = call.empty({count});
  args.dsums = floats(u), args.dsquares = floats(s), args.dconstant = floats(constant);
  args.dquery = floats(dmean), args.dvariance = floats(dvariance), args.dlog_weight = floats(dlog_weight);
  const size_t kept = call.kept.size();
  const bool measures = op.grad_means || op.grad_variances;
  const Tensor tights = call.zeros({measures && !empty ? all.count * v.positions() : 0});
  for (int64_t k = 0; k < all.count && !empty; ++k) {
    const auto of = [&](const MaybeTensor& x) { return all.at(x, k); };
    float* tight = measures ? floats(tights) + k * v.positions() : nullptr;
    call.take_state(of(op.mean), of(op.variance), of(op.log_weight));
    args.means = call.table(of(op.means)), args.counts = call.table(of(op.counts));
    const float *spread = call.table(of(op.variances)), *dcounts = call.table(of(op.grad_counts));
    launch(&gaussian_prepare_kernel, blocks_for(count),
           PrepareArgs{args, count, dcounts, all.view(op.grad_means, k), all.view(op.grad_variances, k), spread,
                       floats(u), floats(s), floats(constant), tight});
    if (listens) args.devidence = call.table(of(op.grad_evidence));
    if (wants_use && !args.betas.use_stride_i) args.duse = floats(shared_use) + k * slots;
    if (wants_ignore && !args.betas.ignore_stride_i) args.dignore = floats(shared_ignore) + k * slots;
    if (measures) gradients.measure(3, floats(u), floats(s), tight);
    gradients.run(3);
    call.kept.resize(kept);
  }
  const auto summed = [&](bool wanted, const Tensor& x, const Shape& shape) {
    return wanted ? torch::stable::view(over(x, 0), shape) : gradients.none();
  };
  const auto betas = [&](bool wanted, const MaybeTensor& beta, const Tensor& by_child, const Tensor& by_position) {
    if (!wanted) return gradients.none();
    return gradients.table(beta->size(0) == 1 ? by_position : by_child, shape_of(*beta));
  };
  return {gradients.children(),
          gradients.weight(),
          gradients.bias(),
          gradients.gate(),
          summed(wants_mean, dmean, call.poses()),
          summed(wants_variance, dvariance, call.poses()),
          summed(wants_log, dlog_weight, call.numbers()),
          betas(wants_use, op.beta_use, gradients.use(), shared_use),
          betas(wants_ignore, op.beta_ignore, gradients.ignore(), shared_ignore)};
}

}  // namespace

FASTCAPS_REGISTER(gaussian_routing)

}  // namespace fastcaps::gpu
