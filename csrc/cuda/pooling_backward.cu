// The pooling pass, backward: docs/algebra.md. The kernel gets the part of t_im that does not depend on the child.
// Below, c_im = scale r_im t_im / |V_im| (without normalised keys: without |V|).
#include "backward.h"
#include "iterations.h"
#include "poses.h"

namespace fastcaps::gpu {

template <class Pose, int R, bool LEAN>
struct PoolingBackward : QueryGradients<Pose, R> {
  static constexpr bool kGates = true, kLean = false;
  using Base = QueryGradients<Pose, R>;
  using Base::lane, Base::args, Base::query, Base::dsums, Base::dquery;
  Numbers<Pose, R> constant, shift;  // shift: the log-sum-exp, in units of log2

  FASTCAPS_DEVICE explicit PoolingBackward(const Lane<Pose, R>& lane_) : Base(lane_) {
    each_patch<Pose, R>([&](int r, int p) {
      constant[r][p] = load_scalar(lane, args.dconstant, r, p, 0.0f);
      const float logsumexp = load_scalar(lane, args.logsumexp, r, p, -INFINITY);
      shift[r][p] = logsumexp == -INFINITY ? INFINITY : logsumexp * kLog2E;  // no children: all coefficients are 0
    });
  }

  FASTCAPS_DEVICE bool dvote(const Stage<Pose>& stage, const StageGradients<Pose, R>& gradients,
                             Patches<Pose, R>& votes) {
    const bool asks = args.query.data;
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      const Seen seen = stage.seen[lane.in_tile(r)];
      float dgate = 0.0f;
      FASTCAPS_UNROLL
      for (int p = 0; p < Pose::kEach; ++p) {
        const bool exists = seen.exists != 0.0f && lane.alive(p), counts = exists && seen.gate != 0.0f;
        const float t = dot(lane, dsums[r][p], votes[r][p]) + constant[r][p];
        Direction key{0.0f, 1.0f, 1.0f};
        if (asks && args.normalize) key = direction(lane, query[r][p], votes[r][p], exists);
        if (asks && !args.normalize) key.along = dot(lane, query[r][p], votes[r][p]);
        const float free = exists ? exp2_fast(args.scale * kLog2E * key.along - shift[r][p]) : 0.0f;
        const float coefficient = counts ? seen.gate * free : 0.0f;
        if (exists) dgate += free * t;
        const float c = counts && asks && !args.detach ? args.scale * coefficient * t * key.lift * key.inverse : 0.0f;
        const float d = args.normalize ? c * key.along * key.inverse : 0.0f;
        if (counts)  // one branch, not one for each number
          each_number<Pose>([&](int i, int j) {
            float& vote = votes[r][p][i][j];
            dquery[r][p][i][j] += c * vote;
            vote = pooling::dvote(coefficient, dsums[r][p][i][j], c, query[r][p][i][j], d, vote * key.lift);
          });
        else
          each_number<Pose>([&](int i, int j) { votes[r][p][i][j] = 0.0f; });
      }
      if (args.dgate) gradients.put_gate(stage, r, lane.sum_parents(dgate));
    }
    return true;
  }
};

PassKernels pooling_backward_kernels() {
  return backward_kernels<PoolingBackward, Built<Pose4x4Swapped<4>>, Built<Pose1x8, 2>, Built<SinglePose1x16<2>>,
                          Built<Pose1x16, 2>, Built<PoseMatrix>, Built<PoseVector>>();
}

}  // namespace fastcaps::gpu
