// The Gaussian pass, forward: r_im = softmax over m of log_weight_m - sum (V_im - mean_m)^2 / (2 variance_m), w = g r;
// counts n_m = sum_i w_im, means and variances of the votes weighed by w, evidence.
#include <cfloat>

#include "forward.h"
#include "gaussian.h"
#include "poses.h"

namespace fastcaps::gpu {

// A compensated sum (Kahan 1965): with the next value it also adds what rounding has lost.
struct Compensated {
  float &sum, &lost;

  FASTCAPS_FORMULA operator float() const { return sum; }
  FASTCAPS_FORMULA void operator+=(float x) {
    const float whole = x - lost, next = sum + whole;
    lost = (next - sum) - whole;
    sum = next;
  }
};

template <class Pose, int R, bool LEAN>
struct GaussianForward {
  // If the base is far from the votes, sums lose digits. Free poses have registers to compensate for that.
  static constexpr bool kCompensated = !Pose::kFixed;
  const Lane<Pose, R>& lane;
  const PassArgs& args = lane.args;
  Patches<Pose, R> base, precision;  // base: the mean, or else the first vote; precision: p
  Patches<Pose, R> offset, spread;   // of the votes so far: their mean relative to the base, and the squares about it
  Patches<Pose, kCompensated ? R : 1> lost_offset;
  Numbers<Pose, R> log_weight, count, lost, evidence;
  LaneBetas<Pose, R> betas;
  bool placed = args.mean, asks = placed || args.log_weight;  // parents have a mean; or at least a log-weight

  FASTCAPS_DEVICE explicit GaussianForward(const Lane<Pose, R>& lane_) : lane(lane_), betas(lane_) {
    set_to_zero<Pose, R>(base);
    set_to_zero<Pose, R>(precision);
    each_patch<Pose, R>([&](int r, int p) { log_weight[r][p] = 0.0f, clear(r, p); });
  }

  FASTCAPS_DEVICE void load() {
    each_patch<Pose, R>([&](int r, int p) {
      if (args.mean) load_parent(lane, args.mean, r, p, base[r][p]);
      load_precision(lane, r, p, precision[r][p]);
      log_weight[r][p] = load_scalar(lane, args.log_weight, r, p, 0.0f);
    });
  }

  FASTCAPS_DEVICE void clear(int r, int p) {
    count[r][p] = lost[r][p] = evidence[r][p] = 0.0f;
    each_number<Pose>([&](int i, int j) {
      offset[r][p][i][j] = spread[r][p][i][j] = 0.0f;
      if constexpr (kCompensated) lost_offset[r][p][i][j] = 0.0f;
    });
  }

  // Makes votes relative to the base, if the parents have one.
  FASTCAPS_DEVICE bool score(const Stage<Pose>& stage, Patches<Pose, R>& votes, Numbers<Pose, R>& coefficient) const {
    if (placed)
      each_patch<Pose, R>(
          [&](int r, int p) { each_number<Pose>([&](int i, int j) { votes[r][p][i][j] -= base[r][p][i][j]; }); });
    if (!asks) {
      each_patch<Pose, R>([&](int r, int p) { coefficient[r][p] = 1.0f / float(args.M); });
      return true;
    }
    Numbers<Pose, R> logit;
    float none[R];
    each_patch<Pose, R>([&](int r, int p) {
      float distance = 0.0f;
      if (placed) {
        each_number<Pose>(
            [&](int i, int j) { distance += gaussian::distance(votes[r][p][i][j], precision[r][p][i][j]); });
        distance = lane.sum_pose(distance);
      }
      logit[r][p] = kLog2E * (log_weight[r][p] - distance);
    });
    return compete<0, false>(lane, stage, logit, logit, coefficient, none);
  }

  FASTCAPS_DEVICE void add(const Stage<Pose>& stage, Patches<Pose, R>& votes, const Numbers<Pose, R>& coefficient) {
    betas.next(stage.t);
    each_patch<Pose, R>([&](int r, int p) {
      const Seen seen = stage.seen[lane.in_tile(r)];
      if (!seen.counts()) return;  // no effect, even if it is NaN
      const float weight = coefficient[r][p] * seen.gate, before = count[r][p], after = before + weight;
      const float ratio = after > FLT_MIN ? weight * reciprocal(after) : 0.0f, step = before * ratio;
      evidence[r][p] += (betas.use[p] + betas.ignore[p]) * weight - betas.ignore[p] * seen.gate;
      if (!placed)  // the base follows the mean, and the offset holds what the base cannot
        each_number<Pose>([&](int i, int j) {
          const float old = before == 0.0f ? votes[r][p][i][j] : base[r][p][i][j];
          base[r][p][i][j] = old + offset[r][p][i][j];
          offset[r][p][i][j] = (old - base[r][p][i][j]) + offset[r][p][i][j];
          votes[r][p][i][j] -= base[r][p][i][j];
        });
      Compensated{count[r][p], lost[r][p]} += weight;
      each_number<Pose>([&](int i, int j) {
        if constexpr (kCompensated) {
          Compensated mean{offset[r][p][i][j], lost_offset[r][p][i][j]};
          gaussian::add(votes[r][p][i][j], ratio, step, mean, spread[r][p][i][j]);
        } else {
          gaussian::add(votes[r][p][i][j], ratio, step, offset[r][p][i][j], spread[r][p][i][j]);
        }
      });
    });
  }

  // Stores the moments of a range of children, for a kernel that joins the ranges.
  FASTCAPS_DEVICE void store(int chunk) const {
    store_scalars(lane, args.counts, chunk, count);
    store_scalars(lane, args.evidence, chunk, evidence);
    store_parents(lane, args.offsets, chunk, offset);
    store_parents(lane, args.spread, chunk, spread);
    if (!args.mean) store_parents(lane, args.base, chunk, base);
  }

  FASTCAPS_DEVICE void finish(int iteration) {
    const bool last = iteration + 1 == args.iterations, kmeans = args.rule == Rule::kKMeans;
    each_patch<Pose, R>([&](int r, int p) {
      const float n = count[r][p], one = inverse_or_zero(n + args.eps);
      each_number<Pose>([&](int i, int j) {
        gaussian::finish(base[r][p][i][j], n, args.eps, one, offset[r][p][i][j], spread[r][p][i][j]);
        base[r][p][i][j] = offset[r][p][i][j];
      });
      store_scalar(lane, args.counts, iteration, r, p, n);
      store_parent(lane, args.means, iteration, r, p, base[r][p]);
      store_parent(lane, args.variances, iteration, r, p, spread[r][p]);
      float log_sigma = 0.0f;
      each_number<Pose>([&](int i, int j) {
        spread[r][p][i][j] += args.eps;
        if (lane.inside(i, j)) log_sigma += gaussian::log_sigma(spread[r][p][i][j]);
      });
      log_sigma = lane.sum_pose(log_sigma);
      float score = evidence[r][p];
      if (args.rule == Rule::kEM && lane.alive(p))
        score = gaussian::em_score(args.temperatures[iteration], args.activation[lane.m(p)],
                                   float(lane.C() * lane.E()) * args.cost_of_numbers[lane.m(p)], log_sigma, n);
      store_scalar(lane, args.evidence, iteration, r, p, score);
      if (last) {
        store_scalar(lane, args.score, 0, r, p, score);
        store_parent(lane, args.last_mean, 0, r, p, base[r][p]);
        store_parent(lane, args.last_variance, 0, r, p, spread[r][p]);
      }
      log_weight[r][p] = Number<float>::log_sigmoid(score) - (kmeans ? 0.0f : log_sigma);
      each_number<Pose>([&](int i, int j) {
        const float p_of_it = kmeans ? 1.0f : gaussian::precision(spread[r][p][i][j]);
        precision[r][p][i][j] = lane.inside(i, j) ? p_of_it : 0.0f;
      });
      clear(r, p);
    });
    placed = asks = true;
  }
};

PassKernels gaussian_forward_kernels() {
  return forward_kernels<GaussianForward, false,
#ifdef FASTCAPS_EXPERIMENTS
                         Named<Pose4x4x32One, 1, 384>, Named<Pose4x4x32One, 1, 256, 2>, Named<Pose4x4x16One, 1, 384>,
#endif
                         Built<Pose4x4x8One, 1, 256, 2>, Built<Pose4x4x16One, 1, 256, 2>, Built<Pose4x4x32Two>,
                         Built<Pose1x8, 4>, Built<Pose1x16, 4>, Built<PoseMatrix>, Built<PoseVector>>();
}

}  // namespace fastcaps::gpu
