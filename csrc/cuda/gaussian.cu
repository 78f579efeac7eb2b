// The ops of routings whose parents are Gaussians: check, schedule, allocate, launch.
#include "../algebra/gaussian.h"
#include "ends.h"

namespace fastcaps::gpu {
namespace {

// ---- behind the forward kernel: the moments of several ranges of children, joined -----------------------------------
struct JoinArgs {
  PassArgs pass;  // of the previous launch: counts, evidence, base, offsets and spread have a part for each range
  Sharing by;
  int64_t count;  // parents in all: B * Ho * Wo * M
  int numbers;    // of a parent
  float *counts, *scores;
};

// What a range of children has found of four neighbours of a parent's pose; 0 where there is none.
struct Moments {
  float count, evidence, base[4], offset[4], spread[4];
};

// add(moments) for each of the lane's ranges; those of some are on their way at a time.
template <class Add>
FASTCAPS_DEVICE void each_part(const JoinArgs& join, int64_t parent, int number, int inside, Add&& add) {
  constexpr int kAtOnce = Sharing::kAtOnce;
  const PassArgs& args = join.pass;
  const bool vector = join.numbers % 4 == 0;
  FASTCAPS_NO_UNROLL
  for (int chunk = join.by.share(); chunk < args.chunks; chunk += kAtOnce * join.by.shares) {
    Moments part[kAtOnce];
    FASTCAPS_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      const int64_t at = (chunk + j * join.by.shares) * join.count + parent;
      const int there = chunk + j * join.by.shares < args.chunks ? inside : 0;
      const int64_t first = at * join.numbers + number;
      part[j].count = there > 0 ? args.counts[at] : 0.0f;
      part[j].evidence = there > 0 ? args.evidence[at] : 0.0f;
      load_four(args.mean ? args.mean + parent * join.numbers + number : args.base + first, there, vector,
                part[j].base);
      load_four(args.offsets + first, there, vector, part[j].offset);
      load_four(args.spread + first, there, vector, part[j].spread);
    }
    FASTCAPS_UNROLL
    for (int j = 0; j < kAtOnce; ++j) add(part[j]);
  }
}

// In double: differences from the base may be small beside it. First the mean of all, then the squares about it.
FASTCAPS_KERNEL(256, 2)
gaussian_join_kernel(const FASTCAPS_CONSTANT JoinArgs join) {
  const PassArgs& args = join.pass;
  const Sharing& by = join.by;
  each_parent(join.count, by.lanes * by.shares, [&](int64_t parent, bool exists) {
    const bool stores = exists && by.share() == 0;
    float evidence = 0.0f, log_sigma = 0.0f;
    double n = 0.0;
    FASTCAPS_NO_UNROLL
    for (int row = 0; row < join.numbers; row += by.lanes * 4) {
      const int number = row + by.first(), inside = exists ? join.numbers - number : 0;
      double mean[4] = {}, square[4] = {};
      evidence = 0.0f, n = 0.0;
      each_part(join, parent, number, inside, [&](const Moments& part) {
        n += part.count, evidence += part.evidence;
        FASTCAPS_UNROLL
        for (int v = 0; v < 4; ++v) mean[v] += part.count * (double(part.base[v]) + part.offset[v]);
      });
      by.add_shares(n), by.add_shares(evidence);
      const double eps = args.eps, each = inverse_or_zero(n), one = inverse_or_zero(n + eps);
      FASTCAPS_UNROLL
      for (int v = 0; v < 4; ++v) by.add_shares(mean[v]), mean[v] *= each;
      each_part(join, parent, number, inside, [&](const Moments& part) {
        FASTCAPS_UNROLL
        for (int v = 0; v < 4; ++v) {
          const double d = part.base[v] - mean[v] + part.offset[v];
          square[v] += part.spread[v] + part.count * d * d;
        }
      });
      float means[4], variances[4], last_variances[4];
      FASTCAPS_UNROLL
      for (int v = 0; v < 4; ++v) {
        by.add_shares(square[v]);
        gaussian::finish(0.0, n, eps, one, mean[v], square[v]);
        means[v] = float(mean[v]), variances[v] = float(square[v]), last_variances[v] = variances[v] + args.eps;
        if (v < inside) log_sigma += gaussian::log_sigma(last_variances[v]);
      }
      if (!stores) continue;
      const int64_t at = parent * join.numbers + number;
      const auto store = [&](float* to, const float* x) {
        store_four(to, at, inside, join.numbers % 4 == 0, x, Storage::kFloat32);
      };
      store(args.means, means), store(args.last_mean, means);
      store(args.variances, variances), store(args.last_variance, last_variances);
    }
    by.add_lanes(log_sigma);
    if (!stores || by.first() != 0) return;
    const int m = int(parent % args.M);
    if (args.rule == Rule::kEM)
      evidence = gaussian::em_score(args.temperatures[0], args.activation[m],
                                    float(join.numbers) * args.cost_of_numbers[m], log_sigma, float(n));
    join.counts[parent] = float(n), join.scores[parent] = args.score[parent] = evidence;
  });
}

// ---- before the backward kernel: what a vote's weight gains, as a parabola in the vote ------------------------------
struct PrepareArgs {
  PassArgs pass;  // of the next launch, for which this one makes u, s and the constant
  Sharing by;
  int64_t count;
  const float* dcounts;  // [count] or null
  PosesView dmeans, dvariances;
  const float* variances;
  float *u, *s, *constant;
  float* tight;  // [positions], zeros: counts parents whose variance is small beside the square of their mean; or null
};

FASTCAPS_KERNEL(256, 1)
gaussian_prepare_kernel(const FASTCAPS_CONSTANT PrepareArgs prepare) {
  const PassArgs& args = prepare.pass;
  const Sharing& by = prepare.by;
  const int numbers = args.C * args.E;
  const bool vector = numbers % 4 == 0;
  each_parent(prepare.count, by.lanes, [&](int64_t parent, bool exists) {
    const int64_t from_means = offset_of_parent(prepare.dmeans, exists ? parent : 0, args.M, args.Ho, args.Wo);
    const int64_t from_variances = offset_of_parent(prepare.dvariances, exists ? parent : 0, args.M, args.Ho, args.Wo);
    const float inverse = exists ? inverse_or_zero(args.counts[parent] + args.eps) : 0.0f;
    float constant = 0.0f, tight = 0.0f;
    for (int number = by.first(); exists && number < numbers; number += by.lanes * 4) {
      const int inside = numbers - number;
      const int64_t at = parent * numbers + number;
      float mean[4], variance[4], u[4], s[4];
      load_four(args.means + at, inside, vector, mean);
      load_four(prepare.variances + at, inside, vector, variance);
      prepare.dmeans.load(from_means, number, inside, u);
      prepare.dvariances.load(from_variances, number, inside, s);
      FASTCAPS_UNROLL
      for (int v = 0; v < 4; ++v) {
        s[v] *= inverse;
        u[v] = u[v] * inverse - 2.0f * (args.eps * inverse) * mean[v] * s[v];
        constant -= s[v] * variance[v];
        if (64.0f * variance[v] < mean[v] * mean[v]) tight = 1.0f;
      }
      store_four(prepare.s, at, inside, vector, s, Storage::kFloat32);
      store_four(prepare.u, at, inside, vector, u, Storage::kFloat32);
    }
    by.add_lanes(constant), by.add_lanes(tight);
    if (!exists || by.first() != 0) return;
    prepare.constant[parent] = constant + (prepare.dcounts ? prepare.dcounts[parent] : 0.0f);
    if (tight != 0.0f && prepare.tight) atomic_add(prepare.tight + parent / args.M, 1.0f);
  });
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
  const int64_t count = v.positions() * v.M, numbers = v.parent_size();
  const JoinArgs join{args, Sharing(numbers, c.chunks), count, int(numbers), floats(counts), floats(scores)};
  launch(&gaussian_join_kernel, join.by.grid(count), join);
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
    const auto poses = [&](const MaybeTensor& x) { return PosesView(all.view(x, k), args.C, args.E); };
    const Sharing by(v.parent_size());
    launch(&gaussian_prepare_kernel, by.grid(count),
           PrepareArgs{args, by, count, dcounts, poses(op.grad_means), poses(op.grad_variances), spread, floats(u),
                       floats(s), floats(constant), tight});
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
