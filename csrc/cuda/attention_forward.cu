// The attention pass, forward: S_m = sum_i g_i r_im V_im with r_im = softmax over m of scale <Q_m, V_im>.
#include "forward.h"
#include "iterations.h"
#include "poses.h"

namespace fastcaps::gpu {

template <class Pose, int R, bool LEAN>
struct AttentionForward {
  static constexpr bool kLeanIterations = false;
  const Lane<Pose, R>& lane;
  const PassArgs& args = lane.args;
  Patches<Pose, R> query, sums;
  bool asks;  // there is a query; else all coefficients are 1 / M

  FASTCAPS_DEVICE explicit AttentionForward(const Lane<Pose, R>& lane_) : lane(lane_) { reset(); }

  FASTCAPS_DEVICE void reset() {
    asks = args.query.data;
    set_to_zero<Pose, R>(query);
    set_to_zero<Pose, R>(sums);
  }

  // scale * log2 e makes logits of products. In one iteration the query takes it, so that this walk has the bits of a
  // lean one; in several, where queries change, each product does.
  FASTCAPS_DEVICE float factor(bool of_query) const {
    return of_query == (args.iterations <= 1) ? args.scale * kLog2E : 1.0f;
  }
  FASTCAPS_DEVICE void begin_options() const {}
  FASTCAPS_DEVICE void load() {
    each_patch<Pose, R>([&](int r, int p) { load_query(lane, r, p, factor(true), query[r][p]); });
  }

  FASTCAPS_DEVICE bool score(const Stage<Pose>& stage, const Patches<Pose, R>& votes,
                             Numbers<Pose, R>& coefficient) const {
    if (!asks) {
      each_patch<Pose, R>([&](int r, int p) { coefficient[r][p] = 1.0f / float(args.M); });
      return true;
    }
    Numbers<Pose, R> logit;
    float none[R];
    each_patch<Pose, R>([&](int r, int p) { logit[r][p] = factor(false) * dot(lane, query[r][p], votes[r][p]); });
    return compete<0, false>(lane, stage, logit, logit, coefficient, none);
  }

  FASTCAPS_DEVICE void add(const Stage<Pose>& stage, const Patches<Pose, R>& votes,
                           const Numbers<Pose, R>& coefficient) {
    each_patch<Pose, R>([&](int r, int p) {
      const float gate = stage.seen[lane.in_tile(r)].gate, weight = gate * coefficient[r][p];
      if (gate == 0.0f) return;  // as of padding: it silences even NaN
      each_number<Pose>([&](int i, int j) { sums[r][p][i][j] += weight * votes[r][p][i][j]; });
    });
  }

  FASTCAPS_DEVICE void store(int chunk) const { store_parents(lane, args.sums, chunk, sums); }

  FASTCAPS_DEVICE void finish(int iteration) {
    update_queries<false>(lane, iteration, !asks, sums, query);
    asks = true;
  }
};

template <class Pose, int R>
struct AttentionForward<Pose, R, true> {
  static constexpr bool kLeanIterations = false, kBegins = false, kCompetes = true, kGates = false, kLoadsAhead = true;
  static constexpr bool kRounds =
      kMayRound<Pose, R> && Pose::kEach * Pose::kPatchColumns * (Pose::kPatchRows * (2 * R + 2) + Pose::kD) <= 224;
  struct Round {
    Patch<Pose> votes[Pose::kEach];
    float weight[Pose::kEach];

    FASTCAPS_DEVICE void clear() {
      FASTCAPS_UNROLL
      for (int p = 0; p < Pose::kEach; ++p) {
        weight[p] = 1.0f;
        each_number<Pose>([&](int i, int j) { votes[p][i][j] = 0.0f; });
      }
    }
  };
  const Lane<Pose, R>& lane;
  Patches<Pose, R> query, sums;  // query: times scale, for logits in units of log2
  float first[Pose::kEach];      // what logits begin with, -inf for parents that do not exist
  uint32_t worst = 0;            // of all totals

  FASTCAPS_DEVICE explicit AttentionForward(const Lane<Pose, R>& lane_) : lane(lane_) {
    each_patch<Pose, R>([&](int r, int p) { load_query(lane, r, p, lane.args.scale * kLog2E, query[r][p]); });
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) first[p] = lane.alive(p) ? 0.0f : -INFINITY;
    set_to_zero<Pose, R>(sums);
  }

  FASTCAPS_DEVICE void score(int r, const Seen*, Round& one) const {
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) {
      float logit = first[p];
      each_number<Pose>([&](int i, int j) { logit += query[r][p][i][j] * one.votes[p][i][j]; });
      one.weight[p] = exp2_fast(lane.sum_pose(logit));
    }
  }
  FASTCAPS_DEVICE void add(int r, const Round& round, float total) {
    note_total(worst, total);
    const float one = reciprocal(total);
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) {
      const float share = round.weight[p] * one;
      each_number<Pose>([&](int i, int j) { sums[r][p][i][j] += share * round.votes[p][i][j]; });
    }
  }
  FASTCAPS_DEVICE void flush() const {}
  FASTCAPS_DEVICE bool lost() const { return is_lost(worst); }
  FASTCAPS_DEVICE void store(int chunk) const { store_parents(lane, lane.args.sums, chunk, sums); }
};

PassKernels attention_forward_kernels() {
  return forward_kernels<
      AttentionForward, true,
#ifdef FASTCAPS_EXPERIMENTS
      Named<Pose4x4x32>, Named<Pose4x4x32Two, 2, 128, 2>, Named<Pose4x4x32Two, 1, 384>, Named<Pose4x4x32One, 2, 384>,
      Named<Pose4x4x16, 2>, Named<Pose4x4x16One, 1, 256, 2>, Named<Tensor4x4x32<1>, 1, 128, 2>,
      Named<Tensor4x4x32<3>, 1, 128, 2>, Named<Tensor6x6>, Named<Tensor8x8, 1, 128, 2>,
#endif
      Built<Pose4x4x8>, Built<Pose4x4x12>, Built<Pose4x4x16>, Built<Pose4x4x32Two, 2>, Built<Pose6x6>, Built<Pose8x8>,
      Built<Pose1x8x12, 2>, Built<Pose1x8, 4>, Built<Pose1x16, 4>, Built<Pose1x64, 8>, Built<Pose1x16x64, 8>,
      Built<Tensor4x4x16<1>>, Built<Tensor4x4x32<1>>, Built<Tensor6x6, 1, 384>, Built<Tensor8x8>, Built<Tensor1x8, 2>,
      Built<Tensor1x64<1>, 2>, Built<Tensor4x4x16<3>>, Built<Tensor4x4x32<3>>, Built<Tensor1x64<3>, 2>,
      Built<PoseMatrix>, Built<PoseVector, 1, 256, 2>>();
}

}  // namespace fastcaps::gpu
