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
  each_parent(join.count, by.lanes * by.shares, blocks_x(), [&](int64_t parent, bool exists) {
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
  // [positions], zeros: counts parents whose variance is small beside the square of their mean, or of the way to it; or
  // null
  float* tight;
  Zeros zeros;
};

FASTCAPS_KERNEL(256, 1)
gaussian_prepare_kernel(const FASTCAPS_CONSTANT PrepareArgs prepare) {
  if (set_to_zero(prepare.zeros)) return;
  const PassArgs& args = prepare.pass;
  const Sharing& by = prepare.by;
  const int numbers = args.C * args.E;
  const bool vector = numbers % 4 == 0;
  each_parent(prepare.count, by.lanes, prepare.zeros.working, [&](int64_t parent, bool exists) {
    const int64_t from_means = offset_of_parent(prepare.dmeans, exists ? parent : 0, args.M, args.Ho, args.Wo);
    const int64_t from_variances = offset_of_parent(prepare.dvariances, exists ? parent : 0, args.M, args.Ho, args.Wo);
    const float inverse = exists ? inverse_or_zero(args.counts[parent] + args.eps) : 0.0f;
    float constant = 0.0f, tight = 0.0f;
    for (int number = by.first(); exists && number < numbers; number += by.lanes * 4) {
      const int inside = numbers - number;
      const int64_t at = parent * numbers + number;
      float mean[4], before[4], variance[4], u[4], s[4];
      load_four(args.means + at, inside, vector, mean);
      load_four((args.mean ? args.mean : args.means) + at, inside, vector, before);
      load_four(prepare.variances + at, inside, vector, variance);
      prepare.dmeans.load(from_means, number, inside, u);
      prepare.dvariances.load(from_variances, number, inside, s);
      FASTCAPS_UNROLL
      for (int v = 0; v < 4; ++v) {
        s[v] *= inverse;
        u[v] = u[v] * inverse - 2.0f * (args.eps * inverse) * mean[v] * s[v];
        constant -= s[v] * variance[v];
        const float way = mean[v] - before[v];
        if (64.0f * variance[v] < fmaxf(mean[v] * mean[v], way * way)) tight = 1.0f;
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
  const int64_t values = call.parts(c, false).all(), poses = call.parts(c).all();
  const Tensor memory = call.workspace({{&args.counts, values},
                                        {&args.evidence, values},
                                        {&args.offsets, poses},
                                        {&args.spread, poses},
                                        {&args.base, op.mean ? 0 : poses}});
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
  const bool own_use = args.betas.use_stride_i, own_ignore = args.betas.ignore_stride_i;  // every child has its own
  args.eps = float(op.eps);
  VoteGradients gradients(call, op.needs, !empty, v.I * v.M * ((wants_use && own_use) + (wants_ignore && own_ignore)));
  const Made poses_made = call.parts(gradients.schedule), numbers_made = call.parts(gradients.schedule, false);
  const ScalarType wide = call.compute;
  const Tensor dmean = gradients.add(wants_mean, args.dquery, poses_made, call.poses(), wide);
  const Tensor dvariance = gradients.add(wants_variance, args.dvariance, poses_made, call.poses(), wide);
  const Tensor dlog_weight = gradients.add(wants_log, args.dlog_weight, numbers_made, call.numbers(), wide);
  float *duse = nullptr, *dignore = nullptr;  // of children, or, where these share a beta, of positions
  const auto add_betas = [&](bool wanted, const MaybeTensor& beta, bool own, float*& place) {
    const Shape shape = wanted ? shape_of(*beta) : Shape{0, 0};
    const int64_t parts = own ? gradients.parts() : all.count * numbers_made.parts * v.positions();
    return gradients.add(wanted, place, gradients.table(parts, own ? v.I : 1, 1, shape), shape, wide, own);
  };
  const Tensor dbeta_use = add_betas(wants_use, op.beta_use, own_use, duse);
  const Tensor dbeta_ignore = add_betas(wants_ignore, op.beta_ignore, own_ignore, dignore);
  const int64_t count = v.positions() * v.M, slots = numbers_made.all();
  float *u = nullptr, *s = nullptr, *constant = nullptr;
  gradients.reserve(u, count * v.parent_size()), gradients.reserve(s, count * v.parent_size());
  gradients.reserve(constant, count);
  Zeros zeros = gradients.allocate();
  args.dsums = u, args.dsquares = s, args.dconstant = constant;
  const size_t kept = call.kept.size();
  const bool measures = op.grad_means || op.grad_variances;
  Tensor tights = call.empty({measures && !empty ? all.count * v.positions() : 0});
  if (tights.numel() > 0) torch::stable::zero_(tights);  // before the launches that count in it
  for (int64_t k = 0; k < all.count && !empty; ++k) {
    const auto of = [&](const MaybeTensor& x) { return all.at(x, k); };
    float* tight = measures ? floats(tights) + k * v.positions() : nullptr;
    call.take_state(of(op.mean), of(op.variance), of(op.log_weight));
    args.means = call.table(of(op.means)), args.counts = call.table(of(op.counts));
    const float *spread = call.table(of(op.variances)), *dcounts = call.table(of(op.grad_counts));
    const auto poses = [&](const MaybeTensor& x) { return PosesView(all.view(x, k), args.C, args.E); };
    const Sharing by(v.parent_size());
    Grid grid = by.grid(count);
    zeros.add_blocks(grid);
    launch(&gaussian_prepare_kernel, grid,
           PrepareArgs{args, by, count, dcounts, poses(op.grad_means), poses(op.grad_variances), spread, u, s, constant,
                       tight, zeros});
    zeros.pieces = 0;
    if (listens) args.devidence = call.table(of(op.grad_evidence));
    args.duse = duse && !own_use ? duse + k * slots : duse;
    args.dignore = dignore && !own_ignore ? dignore + k * slots : dignore;
    if (measures) gradients.measure(3, u, s, tight);
    gradients.run(3, tight);
    call.kept.resize(kept);
  }
  gradients.add_up();
  return {gradients.children, gradients.weight, gradients.bias, gradients.gate, dmean,
          dvariance,          dlog_weight,      dbeta_use,      dbeta_ignore};
}

}  // namespace

FASTCAPS_REGISTER(gaussian_routing)

}  // namespace fastcaps::gpu
