// The attention pass, backward: docs/algebra.md. Votes are made again; gain_im = <dS_m, V_im>.
#include "../algebra/attention.h"
#include "backward.h"
#include "poses.h"

namespace fastcaps::gpu {

template <class Pose, int R, bool LEAN>
struct AttentionBackward : QueryGradients<Pose, R> {
  static constexpr bool kGates = false, kMeasures = false;
  using Base = QueryGradients<Pose, R>;
  using Base::lane, Base::args, Base::query, Base::dsums, Base::dquery;
  bool exists[R];

  // Queries are scaled here, once: <query, vote> is a logit in units of log2.
  FASTCAPS_DEVICE explicit AttentionBackward(const Lane<Pose, R>& lane_) : Base(lane_, lane_.args.scale * kLog2E) {
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) exists[r] = lane.at(r).exists();
  }

  FASTCAPS_DEVICE bool dvote(const Stage<Pose>& stage, const StageGradients<Pose, R>& gradients,
                             Patches<Pose, R>& votes) {
    Numbers<Pose, R> logit, coefficient, gain;
    float average[R];
    each_patch<Pose, R>([&](int r, int p) {
      logit[r][p] = LEAN || args.query.data ? dot(lane, query[r][p], votes[r][p]) : 0.0f;  // without: 1 / M for all
      gain[r][p] = dot(lane, dsums[r][p], votes[r][p]);
    });
    if (!compete<1, LEAN>(lane, stage, logit, gain, coefficient, average)) return false;
    each_patch<Pose, R>([&](int r, int p) {
      bool counts = exists[r];  // parents that do not exist have zeros for all that is theirs
      float weight = coefficient[r][p];
      if constexpr (!LEAN) {
        const int at = lane.in_tile(r);
        const Seen seen = stage.seen[at];
        if (args.dgate && lane.m(p) == 0 && lane.speaks_for_pose())
          gradients.add_gate(seen, lane.tile[at].cell + gradients.offset->cell, average[r]);
        counts = seen.gate != 0.0f && lane.alive(p);  // padding has a gate of 0
        weight *= seen.gate;
      }
      if (!counts) weight = 0.0f;
      const bool pulls = counts && (LEAN || args.query.data) && !args.detach;
      const float da = pulls ? attention::dlogit(weight, gain[r][p], average[r], 1.0f) : 0.0f, dvote = kLn2 * da;
      if (LEAN || counts)  // one branch, not one for each number
        each_number<Pose>([&](int i, int j) {
          float& vote = votes[r][p][i][j];
          dquery[r][p][i][j] += da * vote;
          vote = attention::dvote(weight, dsums[r][p][i][j], dvote, query[r][p][i][j]);
        });
      else
        each_number<Pose>([&](int i, int j) { votes[r][p][i][j] = 0.0f; });
    });
    return true;
  }

  FASTCAPS_DEVICE void store(int chunk) {
    each_patch<Pose, R>(
        [&](int r, int p) { each_number<Pose>([&](int i, int j) { dquery[r][p][i][j] *= args.scale; }); });
    Base::store(chunk);
  }
};

PassKernels attention_backward_kernels() {
  return backward_kernels<
      AttentionBackward, true,
#ifdef FASTCAPS_EXPERIMENTS
      Named<Pose4x4Swapped<16>, 1, 384>, Named<Pose4x4x32One, 2>, Named<Pose4x4x32One, 2, 384>,
      Named<Pose4x4x32One, 1, 384>, Named<Pose4x4x32One, 1, 256, 2>, Named<Pose4x4Swapped<8>, 1, 384>,
      Named<Pose4x4x16One, 2>, Named<Pose4x4x16One, 1, 384>, Named<Pose4x4x16One, 1, 256, 2>,
      Named<Tensor4x4x16Widened<1>, 1, 384>, Named<Tensor4x4x16Widened<3>, 1, 384>,
#endif
      Built<Pose4x4Swapped<4>>, Built<Pose4x4Swapped<8>>, Built<Pose4x4Swapped<16>>, Built<Pose6x6>, Built<Pose8x8>,
      Built<Pose1x8, 4>, Built<Pose1x8, 2>, Built<Pose1x16, 4>, Built<Pose1x16, 2>, Built<Pose1x64InPlace, 4>,
      Built<Pose1x16x64InPlace, 4>, Built<Tensor4x4x16Widened<1>>, Built<Tensor1x64InPlace<1>, 2>,
      Built<Tensor4x4x16Widened<3>>, Built<Tensor1x64InPlace<3>, 2>, Built<PoseMatrix>, Built<PoseVector>>();
}

}  // namespace fastcaps::gpu
