// The Gaussian pass, backward: docs/algebra.md, ../algebra/gaussian.h. The gradient t of a vote's weight is a parabola
// in the vote. The kernel gets u_m, s_m and c_m = dcounts_m - <s_m, variances_m>:
//   t_im = c_m + <u_m + s_m d_im, d_im> + (beta_use_im + beta_ignore_im) devidence_m
//
// u holds -2 s rest / N with rest_m = sum_i w_im d_im. On paper the rest is eps means_m. But means are rounded, and if
// a parent's variance is tiny beside its squared mean, that rounding is large beside d and must cancel in u + 2 s d.
// Weights computed again also differ slightly from those that were counted. So for positions with such a parent
// (`tight`) a launch before the others measures the rest and n, and corrects u and s. Tight, too, is a variance that is
// small beside the square of the way from the old mean, about which lean walks compute.
#include "backward.h"
#include "gaussian.h"
#include "poses.h"

namespace fastcaps::gpu {

template <class Pose, int R, bool LEAN>
struct GaussianBackward {
  static constexpr bool kGates = true, kMeasures = true, kSees = true, kStarts = false;
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
      if (args.dgate) gradients.put_gate(stage, r, lane.sum_parents(dgate));
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

// The lean walk (see LeanCall), of one parent and one position a lane: betas are the same for all children, and tight
// positions are left to the walk above. MOVES: parents have a mean; else, as in a first iteration, all coefficients are
// 1 / M. Votes are made relative to one base, the mean or else the new mean, from which a bias is subtracted
// beforehand. There t is another parabola: with `apart` = mean - means
//   <u + s (d + apart), d + apart> = <u + 2 s apart + s d, d> + <u + s apart, apart>
template <class Pose, bool MOVES>
struct LeanGaussian {
  static constexpr bool kGates = true, kMeasures = true, kSees = true, kStarts = true;
  const Lane<Pose, 1>& lane;
  const PassArgs& args = lane.args;
  Patch<Pose> begin, precision, u, s;                    // begin: bias - base
  Patch<Pose> first, second;                             // sums of -2 p da d and of -2 p da d^2
  float log_weight, constant;                            // in units of log2; all of t that no vote changes
  float dlog_weight = 0.0f, used = 0.0f, unused = 0.0f;  // sums of da, w and w - g
  float kept = 0.0f, ignored = 0.0f;  // of one child of the stage, sum_m r t; and what its gate's gradient is less
  bool counts;

  FASTCAPS_DEVICE explicit LeanGaussian(const Lane<Pose, 1>& lane_) : lane(lane_) {
    load_parent(lane, MOVES ? args.mean : args.means, 0, 0, begin);
    load_parent(lane, args.dsums, 0, 0, u);
    load_parent(lane, args.dsquares, 0, 0, s);
    constant = load_scalar(lane, args.dconstant, 0, 0, 0.0f);
    if constexpr (MOVES) {
      Patch<Pose> means;
      load_precision(lane, 0, 0, precision);
      load_parent(lane, args.means, 0, 0, means);
      each_number<Pose>([&](int i, int j) {
        const float apart = begin[i][j] - means[i][j];
        constant += gaussian::gain(u[i][j], s[i][j], apart);
        u[i][j] += 2.0f * s[i][j] * apart;
      });
    }
    const float* bias = args.bias && lane.alive(0) ? args.bias + lane.m(0) * args.bias_stride_m : nullptr;
    each_number<Pose>([&](int i, int j) {
      begin[i][j] = (bias ? bias[lane.number(i, j)] : 0.0f) - begin[i][j];
      first[i][j] = second[i][j] = 0.0f;
    });
    const LaneBetas<Pose, 1> betas(lane);
    constant += (betas.use[0] + betas.ignore[0]) * load_scalar(lane, args.devidence, 0, 0, 0.0f);
    log_weight = kLog2E * load_scalar(lane, args.log_weight, 0, 0, 0.0f);
    if (args.dgate) ignored = ignored_by_all();
  }

  FASTCAPS_DEVICE float ignored_by_all() const {
    const Position& at = lane.at(0);
    const float* ignores = static_cast<const float*>(args.betas.ignore);
    float sum = 0.0f;
    if (ignores && args.devidence && at.exists())
      for (int m = lane.parent; m < args.M; m += lane.parents)
        sum += ignores[m * args.betas.ignore_stride_m] * args.devidence[at.index * args.M + m];
    return lane.sum_parents(sum);
  }

  FASTCAPS_DEVICE void start(Patches<Pose, 1>& votes) const {
    each_number<Pose>([&](int i, int j) { votes[0][0][i][j] = begin[i][j]; });
  }

  // From d to its gradient, by that of the weight, w, and, if parents have a mean, that of the logit, da.
  FASTCAPS_DEVICE void differentiate(float w, float da, Patch<Pose>& d) {
    const float two = -2.0f * da;
    dlog_weight += da, used += w;
    each_number<Pose>([&](int i, int j) {
      float rest = -w * u[i][j];
      if constexpr (MOVES) {
        const float pull = two * (precision[i][j] * d[i][j]);
        first[i][j] += pull, second[i][j] += pull * d[i][j];
        rest += pull;
      }
      d[i][j] = (w + w) * (u[i][j] + s[i][j] * d[i][j]) + rest;
    });
  }

  FASTCAPS_DEVICE bool dvote(const Stage<Pose>& stage, const StageGradients<Pose, 1>& gradients,
                             Patches<Pose, 1>& votes) {
    Patch<Pose>& d = votes[0][0];
    const Seen seen = stage.seen[lane.in_tile(0)];
    counts = seen.gate != 0.0f;  // padding has a gate of 0
    float distance = 0.0f, sum = 0.0f;
    each_number<Pose>([&](int i, int j) {
      if constexpr (MOVES) distance += d[i][j] * (precision[i][j] * d[i][j]);
      sum += gaussian::gain(u[i][j], s[i][j], d[i][j]);
    });
    const Numbers<Pose, 1> logit{{log_weight - kLog2E * distance}}, gain{{constant + sum}};
    Numbers<Pose, 1> coefficient{{1.0f / float(args.M)}};
    float average[1] = {0.0f};
    if constexpr (MOVES) {
      compete<1, true>(lane, stage, logit, gain, coefficient, average);
    } else if (args.dgate) {
      average[0] = coefficient[0][0] * lane.sum_parents(gain[0][0]);
      if (args.warps_parents > 1) meet(lane, stage.t & 1, average);
    }
    if (lane.parent == gradients.k) kept = average[0];
    const float w = counts ? coefficient[0][0] * seen.gate : 0.0f;
    const float da = MOVES && counts ? w * (gain[0][0] - average[0]) : 0.0f;
    unused += w - seen.gate;
    if (counts || fabsf(logit[0][0] + gain[0][0]) < INFINITY)
      differentiate(w, da, d);
    else  // 0 times what is not finite
      each_number<Pose>([&](int i, int j) { d[i][j] = 0.0f; });
    return true;
  }

  FASTCAPS_DEVICE bool adds() const { return counts; }

  // Lanes have kept one child each.
  FASTCAPS_DEVICE void put_gates(const Stage<Pose>& stage, const StageGradients<Pose, 1>& gradients, int count) const {
    if (!args.dgate || lane.parent >= count || lane.warp_parent != 0) return;
    const int at = lane.in_tile(0);
    gradients.add_gate(stage.seen[lane.parent * args.tile_size + at],
                       lane.tile[at].cell + gradients.offset[lane.parent - count].cell, kept - ignored);
  }

  FASTCAPS_DEVICE void store(int chunk) {
    const float devidence = load_scalar(lane, args.devidence, 0, 0, 0.0f);
    each_number<Pose>([&](int i, int j) {
      if constexpr (MOVES) second[i][j] *= -precision[i][j];
      first[i][j] = -first[i][j];
    });
    store_parent(lane, args.dquery, chunk, 0, 0, first);
    store_parent(lane, args.dvariance, chunk, 0, 0, second);
    store_scalar(lane, args.dlog_weight, chunk, 0, 0, dlog_weight);
    store_scalar(lane, args.duse, chunk, 0, 0, used * devidence);
    store_scalar(lane, args.dignore, chunk, 0, 0, unused * devidence);
  }
};

template <class Pose, int R>
struct GaussianBackward<Pose, R, true> : LeanGaussian<Pose, true> {
  static constexpr bool kLean = kHolds<Pose, R> && Pose::kEach == 1 && Pose::kParents >= kMostChildren;
  using First = LeanGaussian<Pose, false>;
  using LeanGaussian<Pose, true>::LeanGaussian;
};

PassKernels gaussian_backward_kernels() {
  return backward_kernels<GaussianBackward, Built<Pose4x4x8Turned>, Built<Pose4x4x16Turned>, Built<Pose4x4x32Turned>,
                          Built<Pose1x8, 2>, Built<Pose1x16, 2>, Built<PoseMatrix>, Built<PoseVector>>();
}

}  // namespace fastcaps::gpu
