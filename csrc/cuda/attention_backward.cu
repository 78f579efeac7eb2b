// The attention pass, backward: docs/algebra.md. Votes are made again; gain_im = <dS_m, V_im>.
#include "../algebra/attention.h"
#include "backward.h"
#include "poses.h"

namespace fastcaps::gpu {

template <class Pose, int R, bool LEAN>
struct AttentionBackward : QueryGradients<Pose, R> {
  static constexpr bool kSilences = true, kIdentity = !LEAN, kGates = false, kMeasures = false;
  using Base = QueryGradients<Pose, R>;
  using Base::Base, Base::lane, Base::args, Base::query, Base::dsums, Base::dquery;

  FASTCAPS_DEVICE bool dvote(const Stage<Pose>& stage, const StageGradients<Pose, R>&, Patches<Pose, R>& votes) {
    const bool asks = LEAN || args.query.data;  // else all coefficients are 1 / M
    Numbers<Pose, R> logit, coefficient, gain;
    float average[R];
    each_patch<Pose, R>([&](int r, int p) {
      logit[r][p] = asks ? args.scale * kLog2E * dot(lane, query[r][p], votes[r][p]) : 0.0f;
      gain[r][p] = dot(lane, dsums[r][p], votes[r][p]);
    });
    if (!compete<1, LEAN>(lane, stage, logit, gain, coefficient, average)) return false;
    each_patch<Pose, R>([&](int r, int p) {
      const Seen seen = stage.seen[lane.in_tile(r)];
      const bool open = seen.gate != 0.0f, counts = open && lane.alive(p);  // padding has a gate of 0
      const bool learns = seen.exists != 0.0f && (open || fabsf(average[r]) < INFINITY);
      if (args.dgate && learns && lane.m(p) == 0 && lane.speaks_for_pose())
        add(args.dgate + Child(args, stage.t).cell(args, lane.at(r)), average[r], args.alone_with_children);
      const float weight = counts ? coefficient[r][p] * seen.gate : 0.0f;
      const bool pulls = counts && asks && !args.detach;
      const float da = pulls ? attention::dlogit(weight, gain[r][p], average[r], args.scale) : 0.0f;
      each_number<Pose>([&](int i, int j) {
        float& vote = votes[r][p][i][j];
        if (counts) dquery[r][p][i][j] += da * vote;
        vote = counts ? attention::dvote(weight, dsums[r][p][i][j], da, query[r][p][i][j]) : 0.0f;
      });
    });
    return true;
  }
};

PassKernels attention_backward_kernels() {
  return backward_kernels<AttentionBackward, true,
#ifdef FASTCAPS_EXPERIMENTS
                          Named<Pose4x4x32Back, 1, 384>, Named<Pose4x4x32One, 2>, Named<Pose4x4x32One, 2, 384>,
                          Named<Pose4x4x32One, 1, 384>, Named<Pose4x4x32One, 1, 256, 2>, Named<Pose4x4x16, 1, 384>,
                          Named<Pose4x4x16One, 2>, Named<Pose4x4x16One, 1, 384>, Named<Pose4x4x16One, 1, 256, 2>,
                          Named<Tensor4x4x16Back<1>, 1, 384>, Named<Tensor4x4x16Back<3>, 1, 384>,
#endif
                          Built<Pose4x4x8>, Built<Pose4x4x16>, Built<Pose4x4x32Back>, Built<Pose6x6>, Built<Pose8x8>,
                          Built<Pose1x8, 2>, Built<Pose1x16, 2>, Built<Pose1x64Back, 4>, Built<Pose16x64Back, 4>,
                          Built<Tensor4x4x16Back<1>>, Built<Tensor1x64Back<1>, 2>, Built<Tensor4x4x16Back<3>>,
                          Built<Tensor1x64Back<3>, 2>, Built<PoseMatrix>, Built<PoseVector>>();
}

}  // namespace fastcaps::gpu
