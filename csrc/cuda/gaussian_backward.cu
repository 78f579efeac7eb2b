// The Gaussian pass, backward: docs/algebra.md, ../algebra/gaussian.h. The gradient t of a vote's weight is a parabola
// in the vote. The kernel gets u_m, s_m and c_m = dcounts_m - <s_m, variances_m>:
//   t_im = c_m + <u_m + s_m d_im, d_im> + (beta_use_im + beta_ignore_im) devidence_m
//
// u holds -2 s rest / N with rest_m = sum_i w_im d_im. On paper the rest is eps means_m. But means are rounded, and if
// a parent's variance is tiny beside its squared mean, that rounding is large beside d and must cancel in u + 2 s d.
// Weights computed again also differ slightly from those that were counted. So for positions with such a parent
// (`tight`) a launch before the others measures the rest and n, and corrects u and s.
#include "backward.h"
#include "gaussian.h"
#include "poses.h"

namespace fastcaps::gpu {

template <class Pose, int R, bool LEAN>
struct GaussianBackward {
  static constexpr bool kGates = true, kMeasures = true;
  const Lane<Pose, R>& lane;
  const PassArgs& args = lane.args;
  Patches<Pose, R> mean, precision, means, u, s;  // precision: p = 1 / (2 variance)
  Patches<Pose, R> first, second;                 // sums of da d' and of da d'^2
  Numbers<Pose, R> log_weight, constant, devidence, dlog_weight, duse, dignore;
  LaneBetas<Pose, R> betas;

  FASTCAPS_DEVICE explicit GaussianBackward(const Lane<Pose, R>& lane_) : lane(lane_), betas(lane_) {
    each_patch<Pose, R>([&](int r, int p) {
      each_number<Pose>([&](int i, int j) { mean[r][p][i][j] = first[r][p][i][j] = second[r][p][i][j] = 0.0f; });
      if (args.mean) load_parent(lane, args.mean, r, p, mean[r][p]);
      load_precision(lane, r, p, precision[r][p]);
      load_parent(lane, args.means, r, p, means[r][p]);
      load_parent(lane, args.dsums, r, p, u[r][p]);
      load_parent(lane, args.dsquares, r, p, s[r][p]);
      log_weight[r][p] = load_scalar(lane, args.log_weight, r, p, 0.0f);
      constant[r][p] = load_scalar(lane, args.dconstant, r, p, 0.0f);
      devidence[r][p] = load_scalar(lane, args.devidence, r, p, 0.0f);
      dlog_weight[r][p] = duse[r][p] = dignore[r][p] = 0.0f;
    });
  }

  // Coefficients r, gains t, and average = sum_m r_m t_m.
  FASTCAPS_DEVICE bool dscore(const Stage<Pose>& stage, const Patches<Pose, R>& votes, Numbers<Pose, R>& coefficient,
                              Numbers<Pose, R>& gain, float (&average)[R]) {
    Numbers<Pose, R> logit;
    betas.next(stage.t);
    each_patch<Pose, R>([&](int r, int p) {
      float distance = 0.0f, sum = 0.0f;
      each_number<Pose>([&](int i, int j) {
        distance += gaussian::distance(votes[r][p][i][j] - mean[r][p][i][j], precision[r][p][i][j]);
        sum += gaussian::gain(u[r][p][i][j], s[r][p][i][j], votes[r][p][i][j] - means[r][p][i][j]);
      });
      logit[r][p] = kLog2E * (log_weight[r][p] - (args.mean ? lane.sum_pose(distance) : 0.0f));
      gain[r][p] = constant[r][p] + lane.sum_pose(sum) + (betas.use[p] + betas.ignore[p]) * devidence[r][p];
    });
    return compete<1, LEAN>(lane, stage, logit, gain, coefficient, average);
  }

  FASTCAPS_DEVICE bool dvote(const Stage<Pose>& stage, const StageGradients<Pose, R>& gradients,
                             Patches<Pose, R>& votes) {
    const bool asks = args.mean || args.log_weight;  // else all coefficients are 1 / M
    Numbers<Pose, R> gain, coefficient, weight;
    float average[R];
    if (!dscore(stage, votes, coefficient, gain, average)) return false;
    if (args.measured) {
      each_patch<Pose, R>([&](int r, int p) {
        const Seen seen = stage.seen[lane.in_tile(r)];
        if (!seen.counts() || !lane.alive(p)) return;
        each_number<Pose>([&](int i, int j) {
          first[r][p][i][j] += coefficient[r][p] * seen.gate * (votes[r][p][i][j] - means[r][p][i][j]);
        });
        dlog_weight[r][p] += coefficient[r][p] * seen.gate;
      });
      return false;
    }
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      const Seen seen = stage.seen[lane.in_tile(r)];
      const bool exists = seen.exists != 0.0f;
      float dgate = 0.0f;
      FASTCAPS_UNROLL
      for (int p = 0; p < Pose::kEach; ++p) {
        const bool counts = exists && seen.gate != 0.0f && lane.alive(p);
        const float w = counts ? coefficient[r][p] * seen.gate : 0.0f;
        const float da = counts && asks ? w * (gain[r][p] - average[r]) : 0.0f;
        weight[r][p] = w;
        dgate += (lane.m(p) == 0 ? average[r] : 0.0f) - betas.ignore[p] * devidence[r][p];
        dlog_weight[r][p] += da;
        duse[r][p] += w * devidence[r][p];
        dignore[r][p] += exists ? (w - seen.gate) * devidence[r][p] : 0.0f;
        if (counts)  // one branch, not one for each number
          each_number<Pose>([&](int i, int j) {
            float& vote = votes[r][p][i][j];
            const float from_mean = vote - mean[r][p][i][j], d = vote - means[r][p][i][j];
            first[r][p][i][j] += da * from_mean, second[r][p][i][j] += da * from_mean * from_mean;
            vote = gaussian::dvote(w, u[r][p][i][j], s[r][p][i][j], d, da, precision[r][p][i][j], from_mean);
          });
        else
          each_number<Pose>([&](int i, int j) { votes[r][p][i][j] = 0.0f; });
      }
      if (args.dgate) gradients.put_gate(stage, r, dgate);
    }
    differentiate_betas(stage, weight);
    return true;
  }

  // Betas of every child; those that all children share are summed up in the lane.
  FASTCAPS_DEVICE void differentiate_betas(const Stage<Pose>& stage, const Numbers<Pose, R>& weight) const {
    const bool uses = args.duse && args.betas.use_stride_i, ignores = args.dignore && args.betas.ignore_stride_i;
    if (!uses && !ignores) return;
    const int64_t row = int64_t(Child(args, stage.t).i) * args.M;
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) {
      float used = 0.0f, ignored = 0.0f;
      FASTCAPS_UNROLL
      for (int r = 0; r < R; ++r) {
        const Seen seen = stage.seen[lane.in_tile(r)];
        used += weight[r][p] * devidence[r][p];
        if (seen.exists != 0.0f) ignored += (weight[r][p] - seen.gate) * devidence[r][p];
      }
      used = lane.sum_positions(used);
      ignored = lane.sum_positions(ignored);
      if (lane.position != 0 || !lane.speaks_for_pose() || !lane.alive(p)) continue;
      if (uses) add(part_of(args, args.duse, args.dbeta_part) + row + lane.m(p), used, args.alone_with_weights);
      if (ignores)
        add(part_of(args, args.dignore, args.dbeta_part) + row + lane.m(p), ignored, args.alone_with_weights);
    }
  }

  // Corrects u and s by the measured rest and n (n is in dlog_weight).
  FASTCAPS_DEVICE void correct() {
    each_patch<Pose, R>([&](int r, int p) {
      const float given = load_scalar(lane, args.counts, r, p, 0.0f) + args.eps;
      const float one = inverse_or_zero(dlog_weight[r][p] + args.eps), change = given * one;
      const bool tight = lane.at(r).exists() && args.tight[lane.at(r).index] != 0.0f;  // whatever its neighbours are
      each_number<Pose>([&](int i, int j) {
        if (!tight) return;
        const float more = args.eps * inverse_or_zero(given) * means[r][p][i][j] - one * first[r][p][i][j];
        u[r][p][i][j] = change * (u[r][p][i][j] + 2.0f * s[r][p][i][j] * more);
        s[r][p][i][j] *= change;
      });
      store_parent(lane, args.measured, 0, r, p, u[r][p]);
      store_parent(lane, args.measured_squares, 0, r, p, s[r][p]);
    });
  }

  FASTCAPS_DEVICE void store(int chunk) {
    if (args.measured) return correct();
    each_patch<Pose, R>([&](int r, int p) {
      each_number<Pose>([&](int i, int j) {
        const float two = 2.0f * precision[r][p][i][j];
        first[r][p][i][j] *= two;
        second[r][p][i][j] *= 0.5f * two * two;
      });
    });
    store_parents(lane, args.dquery, chunk, first);
    store_parents(lane, args.dvariance, chunk, second);
    store_scalars(lane, args.dlog_weight, chunk, dlog_weight);
    if (!args.betas.use_stride_i) store_scalars(lane, args.duse, chunk, duse);
    if (!args.betas.ignore_stride_i) store_scalars(lane, args.dignore, chunk, dignore);
  }
};

PassKernels gaussian_backward_kernels() {
  return backward_kernels<GaussianBackward, false, Built<Pose4x4x8One>, Built<Pose4x4x16One>, Built<Pose4x4x32One>,
                          Built<Pose1x8, 2>, Built<Pose1x16, 2>, Built<PoseMatrix>, Built<PoseVector>>();
}

}  // namespace fastcaps::gpu
