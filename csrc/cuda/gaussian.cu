// The op of routings whose parents are Gaussians: check, schedule, allocate, launch.
#include "../algebra/gaussian.h"
#include "ends.h"

namespace fastcaps::gpu {

std::vector<Tensor> gaussian_routing_backward(Stack stack);

namespace {

// ---- behind the forward kernel: the moments of several ranges of children, joined -----------------------------------
struct JoinArgs {
  PassArgs pass;  // of the previous launch: counts, evidence, base, offsets and spread have a part for each range
  Sharing by;
  int64_t count;  // parents in all: B * Ho * Wo * M
  int numbers;    // of a parent
  float *counts, *scores;
  float* log_weight;  // of the next iteration; null after the last
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
    if (join.log_weight)
      join.log_weight[parent] = Number<float>::log_sigmoid(evidence) - (args.rule == Rule::kKMeans ? 0.0f : log_sigma);
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
  const bool fused = iterations > 1 && call.fuses(iterations);
  const Schedule c = call.schedule_forward(fused);
  const Tensor score = call.empty(call.numbers()), last_mean = call.empty(call.poses());
  const Tensor last_variance = call.empty(call.poses()), counts = call.empty(call.numbers(iterations));
  const Tensor means = call.empty(call.poses(iterations)), variances = call.empty(call.poses(iterations));
  const Tensor scores = call.empty(call.numbers(iterations));
  const std::vector<Tensor> results{score, last_mean, last_variance, counts, means, variances, scores};
  if (v.positions() == 0) return results;
  call.take(c);
  args.score = floats(score), args.last_mean = floats(last_mean), args.last_variance = floats(last_variance);
  args.means = floats(means), args.variances = floats(variances);
  if (fused || (iterations == 1 && c.chunks == 1)) {
    const Tensor statistics = op.mean || op.log_weight ? call.collect(c, 2) : Tensor();
    for (int64_t k = 0; k < iterations; ++k) args.temperatures[k] = float(op.temperatures[size_t(k)]);
    args.iterations = int(iterations);
    args.counts = floats(counts), args.evidence = floats(scores);
    call.launch(c, 0, c.parent_blocks);
    return results;
  }
  const int64_t values = call.parts(c, false).all(), parts = call.parts(c).all();
  const int64_t count = v.positions() * v.M, numbers = v.parent_size();
  float* log_weight;
  const Tensor memory = call.workspace({{&args.counts, values},
                                        {&args.evidence, values},
                                        {&args.offsets, parts},
                                        {&args.spread, parts},
                                        {&args.base, op.mean ? 0 : parts},
                                        {&log_weight, iterations > 1 ? count : 0}});
  for (int64_t k = 0; k < iterations; ++k) {
    const Tensor statistics = args.mean || args.log_weight ? call.collect(c, 2) : Tensor();
    args.temperatures[0] = float(op.temperatures[size_t(k)]);
    call.launch(c, 0, c.parent_blocks);
    const JoinArgs join{args,
                        Sharing(numbers, c.chunks),
                        count,
                        int(numbers),
                        floats(counts) + k * count,
                        floats(scores) + k * count,
                        k + 1 < iterations ? log_weight : nullptr};
    launch(&gaussian_join_kernel, join.by.grid(count), join);
    args.mean = args.means, args.variance = op.rule == Rule::kKMeans ? nullptr : args.last_variance;
    args.log_weight = log_weight;
    args.means += count * numbers, args.variances += count * numbers;
  }
  return results;
}

}  // namespace

FASTCAPS_REGISTER(gaussian_routing)

}  // namespace fastcaps::gpu
