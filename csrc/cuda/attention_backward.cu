// The attention pass, backward: docs/algebra.md. Votes are made again; gain_im = <dS_m, V_im>.
#include "../algebra/attention.h"
#include "backward.h"
#include "poses.h"

namespace fastcaps::gpu {

template <class Pose, int R, bool LEAN>
struct AttentionBackward : QueryGradients<Pose, R> {
  static constexpr bool kGates = false, kLean = Pose::kFixed;
  using Base = QueryGradients<Pose, R>;
  using Base::lane, Base::args, Base::query, Base::dsums, Base::dquery;
  Numbers<Pose, R> logit, gain, weight, dlogit;  // of one child
  bool counts[R][Pose::kEach];

  // Queries are scaled here, once: <query, vote> is a logit in units of log2.
  FASTCAPS_DEVICE explicit AttentionBackward(const Lane<Pose, R>& lane_) : Base(lane_, lane_.args.scale * kLog2E) {}

  // Takes W columns of a vote into account, from the e-th on, one after the other.
  template <int W>
  FASTCAPS_DEVICE void score(int r, int p, int e, const float (&vote)[Pose::kPatchRows][W]) {
    float a = e == 0 ? 0.0f : logit[r][p], h = e == 0 ? 0.0f : gain[r][p];
    each_number<Pose, W>([&](int i, int j) {
      a += query[r][p][i][e + j] * vote[i][j];
      h += dsums[r][p][i][e + j] * vote[i][j];
    });
    logit[r][p] = a, gain[r][p] = h;
  }

  // Once a child's votes have their scores. Returns false where the launch only collects statistics.
  FASTCAPS_DEVICE bool settle(const Stage<Pose>& stage, const StageGradients<Pose, R>& gradients) {
    float average[R];
    each_patch<Pose, R>([&](int r, int p) {
      logit[r][p] = LEAN || args.query.data ? lane.sum_pose(logit[r][p]) : 0.0f;  // without: 1 / M for all
      gain[r][p] = lane.sum_pose(gain[r][p]);
    });
    if (!compete<1, LEAN>(lane, stage, logit, gain, weight, average)) return false;
    each_patch<Pose, R>([&](int r, int p) {
      // Lean: positions and parents that do not exist have zeros for all that is theirs. Votes of zeros that matrices
      // make NaN show in what exists, too, but where coefficients are constants.
      counts[r][p] = !LEAN || !args.detach || lane.at(r).exists();
      if constexpr (!LEAN) {
        const int at = lane.in_tile(r);
        const Seen seen = stage.seen[at];
        if (args.dgate && lane.m(p) == 0 && lane.speaks_for_pose())
          gradients.add_gate(seen, lane.tile[at].cell + gradients.offset->cell, average[r]);
        counts[r][p] = seen.gate != 0.0f && lane.alive(p);  // padding has a gate of 0
        weight[r][p] *= seen.gate;
      }
      if (!counts[r][p]) weight[r][p] = 0.0f;
      const bool pulls = counts[r][p] && (LEAN || args.query.data) && !args.detach;
      dlogit[r][p] = pulls ? attention::dlogit(weight[r][p], gain[r][p], average[r], 1.0f) : 0.0f;
    });
    return true;
  }

  // From W columns of a vote to their gradients, times `lift`.
  template <int W>
  FASTCAPS_DEVICE void dvote(int r, int p, int e, float (&vote)[Pose::kPatchRows][W], float lift = 1.0f) {
    if (!LEAN && !counts[r][p])  // one branch, not one for each number
      return each_number<Pose, W>([&](int i, int j) { vote[i][j] = 0.0f; });
    const float share = lift * weight[r][p], pull = lift * kLn2 * dlogit[r][p];
    each_number<Pose, W>([&](int i, int j) {
      dquery[r][p][i][e + j] += dlogit[r][p] * vote[i][j];
      vote[i][j] = attention::dvote(share, dsums[r][p][i][e + j], pull, query[r][p][i][e + j]);
    });
  }

  FASTCAPS_DEVICE bool dvote(const Stage<Pose>& stage, const StageGradients<Pose, R>& gradients,
                             Patches<Pose, R>& votes) {
    each_patch<Pose, R>([&](int r, int p) { score(r, p, 0, votes[r][p]); });
    if (!settle(stage, gradients)) return false;
    each_patch<Pose, R>([&](int r, int p) { dvote(r, p, 0, votes[r][p]); });
    return true;
  }

  FASTCAPS_DEVICE static bool adds() { return true; }

  FASTCAPS_DEVICE void store(int chunk) {
    each_patch<Pose, R>(
        [&](int r, int p) { each_number<Pose>([&](int i, int j) { dquery[r][p][i][j] *= args.scale; }); });
    Base::store(chunk);
  }
};

PassKernels attention_backward_kernels() {
  return backward_kernels<AttentionBackward,
#ifdef FASTCAPS_EXPERIMENTS
                          Named<Pose4x4Swapped<16>, 1, 384>, Named<Pose4x4x32One, 2>, Named<Pose4x4x32One, 2, 384>,
                          Named<Pose4x4x32One, 1, 384>, Named<Pose4x4x32One, 1, 256, 2>,
                          Named<Pose4x4Swapped<8>, 1, 384>, Named<Pose4x4x16One, 2>, Named<Pose4x4x16One, 1, 384>,
                          Named<Pose4x4x16One, 1, 256, 2>, Named<Tensor4x4x16Widened, 1, 384>,
#endif
                          Built<Pose4x4Swapped<4>>, Built<Pose4x4Swapped<8>>, Built<Pose4x4Swapped<16>>, Built<Pose6x6>,
                          Built<Pose8x8>, Built<Pose1x8, 4>, Built<Pose1x8, 2>, Built<Pose1x16, 4>, Built<Pose1x16, 2>,
                          Built<Pose1x64InPlace, 4>, Built<Pose1x16x64InPlace, 4>, Built<Tensor4x4x16Widened>,
                          Built<Tensor4x4x32Widened>, Built<Tensor6x6Widened>, Built<Tensor8x8Widened>,
                          Built<Tensor1x64InPlace<1>, 2>, Built<Tensor1x64InPlace<3>, 2>, Built<PoseMatrix>,
                          Built<PoseVector>>();
}

}  // namespace fastcaps::gpu
