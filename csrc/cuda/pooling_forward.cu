// The pooling pass, forward: S_m = sum_i r_im V_im with r_im = g_i exp(a_im) / Z_m, Z_m the sum over the children,
// a_im = scale <Q_m, K_im>, K = V or V / |V|. Parents are independent: a lane's sums are relative to its largest logit.
#include <cfloat>

#include "forward.h"
#include "iterations.h"
#include "poses.h"

namespace fastcaps::gpu {

// Sums are rescaled only if a logit exceeds `top`, to which they are relative, by this much (in units of log2): rarely
// more than once.
constexpr float kSlack = 8.0f;

template <class Pose, int R, bool LEAN>
struct PoolingForward {
  static constexpr bool kLeanIterations = false;
  const Lane<Pose, R>& lane;
  const PassArgs& args = lane.args;
  Patches<Pose, R> query, sums;
  Numbers<Pose, R> top, total;
  bool asks;

  FASTCAPS_DEVICE explicit PoolingForward(const Lane<Pose, R>& lane_) : lane(lane_) { reset(); }

  FASTCAPS_DEVICE void reset() {
    asks = args.query.data;
    set_to_zero<Pose, R>(query);
    set_to_zero<Pose, R>(sums);
    clear();
  }

  FASTCAPS_DEVICE void clear() {
    each_patch<Pose, R>([&](int r, int p) { top[r][p] = -INFINITY, total[r][p] = 0.0f; });
  }
  FASTCAPS_DEVICE void begin_options() const {}
  FASTCAPS_DEVICE void load() {
    each_patch<Pose, R>([&](int r, int p) { load_query(lane, r, p, 1.0f, query[r][p]); });
  }

  static FASTCAPS_DEVICE float shift(float top) { return fmaxf(top, -FLT_MAX); }

  // The coefficient is relative to `top`, and not yet divided by the sum of all.
  FASTCAPS_DEVICE bool score(const Stage<Pose>& stage, Patches<Pose, R>& votes, Numbers<Pose, R>& coefficient) {
    Numbers<Pose, R> logit;
    bool rises = false;
    each_patch<Pose, R>([&](int r, int p) {
      const bool counts = stage.seen[lane.in_tile(r)].counts();
      float x = 0.0f;
      if (asks) {
        x = args.normalize ? direction(lane, query[r][p], votes[r][p], counts).along
                           : dot(lane, query[r][p], votes[r][p]);
        x *= args.scale * kLog2E;
      }
      logit[r][p] = counts ? x : -INFINITY;
      rises = rises || logit[r][p] > top[r][p] + kSlack;
    });
    if (any_lane(rises))
      each_patch<Pose, R>([&](int r, int p) {
        const float before = top[r][p];
        top[r][p] = fmaxf(before, logit[r][p]);
        const float factor = exp2_fast(before - shift(top[r][p]));
        total[r][p] *= factor;
        each_number<Pose>([&](int i, int j) { sums[r][p][i][j] *= factor; });
      });
    each_patch<Pose, R>([&](int r, int p) {
      const Seen seen = stage.seen[lane.in_tile(r)];
      coefficient[r][p] = seen.counts() ? seen.gate * exp2_fast(logit[r][p] - shift(top[r][p])) : 0.0f;
    });
    return true;
  }

  FASTCAPS_DEVICE void add(const Stage<Pose>& stage, const Patches<Pose, R>& votes,
                           const Numbers<Pose, R>& coefficient) {
    each_patch<Pose, R>([&](int r, int p) {
      const Seen seen = stage.seen[lane.in_tile(r)];
      if (!seen.counts()) return;  // no effect, even if it is NaN
      total[r][p] += coefficient[r][p];
      each_number<Pose>([&](int i, int j) { sums[r][p][i][j] += coefficient[r][p] * votes[r][p][i][j]; });
    });
  }

  // Every range of children has its own sums and log-sum-exp.
  FASTCAPS_DEVICE void store(int chunk) {
    each_patch<Pose, R>([&](int r, int p) { conclude(chunk, r, p); });
    store_parents(lane, args.sums, chunk, sums);
  }

  FASTCAPS_DEVICE void finish(int iteration) {
    each_patch<Pose, R>([&](int r, int p) { conclude(iteration, r, p); });
    update_queries<true>(lane, iteration, !asks, sums, query);
    clear();
    asks = true;
  }

  // The sums become S.
  FASTCAPS_DEVICE void conclude(int part, int r, int p) {
    const bool empty = total[r][p] == 0.0f;
    const float one = empty ? 0.0f : 1.0f / total[r][p];
    each_number<Pose>([&](int i, int j) { sums[r][p][i][j] *= one; });
    store_scalar(lane, args.logsumexp, part, r, p, empty ? -INFINITY : top[r][p] * kLn2 + logf(total[r][p]));
  }
};

PassKernels pooling_forward_kernels() {
  return forward_kernels<PoolingForward, false, Built<Pose4x4x8>, Built<Pose1x8, 4>,
                         Built<SinglePose1x16<4>, 1, 256, 2>, Built<Pose1x16, 4>, Built<PoseMatrix, 1, 256, 2>,
                         Built<PoseVector, 1, 256, 2>>();
}

}  // namespace fastcaps::gpu
