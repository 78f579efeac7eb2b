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

// Sums about a base lose digits where the mean is far from it, measured in standard deviations: where squares about the
// mean are less than 1 / kMostLoss of those about the base, the tile is lost.
constexpr float kMostLoss = 16.0f;

// What a lean walk adds up: n = sum w, S1 = sum w d, S2 = sum w d^2, d = V - base. ASKS: w = g r, and parents have
// means, which are the bases; else w = g. Votes start at -base, so that subtracting it costs nothing.
template <class State, class Pose, int R, bool ASKS>
struct GaussianSums {
  static constexpr bool kBegins = true, kCompetes = ASKS, kGates = true, kLoadsAhead = !ASKS;
  static constexpr bool kRounds =
      kMayRound<Pose, R> && Pose::kEach * Pose::kPatchColumns * (Pose::kPatchRows * (4 * R + 4) + Pose::kD) <= 224;
  struct Round {
    Patch<Pose> votes[Pose::kEach], squares[Pose::kEach];
    float weight[Pose::kEach], gate;

    FASTCAPS_DEVICE void clear() {
      gate = 0.0f;
      FASTCAPS_UNROLL
      for (int p = 0; p < Pose::kEach; ++p) {
        weight[p] = 1.0f;
        each_number<Pose>([&](int i, int j) { votes[p][i][j] = squares[p][i][j] = 0.0f; });
      }
    }
  };
  State& of;
  Numbers<Pose, R> count;  // n of this stage: so few values are added one by one
  uint32_t worst = 0;      // of all totals
  // Many children are added up in parts: one by one, their sums would lose more digits than torch's.
  static constexpr int kStages = 6;
  Patches<Pose, R> sums, squares;
  int stages = 0;

  FASTCAPS_DEVICE explicit GaussianSums(State& of_) : of(of_) {
    each_patch<Pose, R>([&](int r, int p) { count[r][p] = 0.0f; });
    set_to_zero<Pose, R>(sums);
    set_to_zero<Pose, R>(squares);
  }

  FASTCAPS_DEVICE void begin(int r, Patch<Pose> (&votes)[Pose::kEach]) const {
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p)
      each_number<Pose>([&](int i, int j) { votes[p][i][j] = -of.base[r][p][i][j]; });
  }
  FASTCAPS_DEVICE void score(int r, const Seen* seen, Round& one) const {
    one.gate = seen->gate;
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) {
      float distance = 0.0f;
      each_number<Pose>([&](int i, int j) {
        one.squares[p][i][j] = one.votes[p][i][j] * one.votes[p][i][j];
        if constexpr (ASKS) distance += of.precision[r][p][i][j] * one.squares[p][i][j];
      });
      if constexpr (ASKS) one.weight[p] = exp2_fast(of.log_weight[r][p] - of.lane.sum_pose(distance));
    }
  }
  FASTCAPS_DEVICE void add(int r, const Round& one, float total) {
    float share = one.gate;
    if constexpr (ASKS) {
      total = one.gate == 0.0f ? 1.0f : total;  // padding is far from all parents
      note_total(worst, total);
      share *= reciprocal(total);
    }
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) {
      const float weight = ASKS ? share * one.weight[p] : share;
      count[r][p] += weight;
      each_number<Pose>([&](int i, int j) {
        of.offset[r][p][i][j] += weight * one.votes[p][i][j];
        of.spread[r][p][i][j] += weight * one.squares[p][i][j];
      });
    }
  }
  FASTCAPS_DEVICE void flush() {
    each_patch<Pose, R>([&](int r, int p) { of.count[r][p] += count[r][p], count[r][p] = 0.0f; });
    if (++stages % kStages == 0) collect();
  }
  // Adds to the sums of stages before. A loop over the children has no registers for these.
  FASTCAPS_DEVICE void collect() {
    each_patch<Pose, R>([&](int r, int p) {
      each_number<Pose>([&](int i, int j) {
        sums[r][p][i][j] += of.offset[r][p][i][j], squares[r][p][i][j] += of.spread[r][p][i][j];
        of.offset[r][p][i][j] = of.spread[r][p][i][j] = 0.0f;
      });
    });
  }
  FASTCAPS_DEVICE void conclude() {
    each_patch<Pose, R>([&](int r, int p) {
      each_number<Pose>([&](int i, int j) {
        of.offset[r][p][i][j] += sums[r][p][i][j], of.spread[r][p][i][j] += squares[r][p][i][j];
      });
    });
  }
};

template <class Pose, int R, bool LEAN>
struct GaussianForward {
  static constexpr bool kLeanIterations = LEAN;
  // Whether a lean walk may share parents between warps: the other 4 x 4 kernels give way to one that has more parents.
  static constexpr bool kMeets = Pose::kC != 4 || Pose::kParents * Pose::kEach >= 64;
  // If the base is far from the votes, sums lose digits. Free poses have registers to compensate for that.
  static constexpr bool kCompensated = !Pose::kFixed;
  const Lane<Pose, R>& lane;
  const PassArgs& args = lane.args;
  Patches<Pose, R> base,
      precision;  // base: the mean; without one, about the mean of the votes so far; precision: p log2 e
  Patches<Pose, R> offset, spread;  // of the votes so far: their mean relative to the base, and the squares about it
  Patches<Pose, kCompensated ? R : 1> lost_offset;
  Numbers<Pose, R> log_weight, count, lost, evidence;
  LaneBetas<Pose, R> betas;
  bool placed, asks;  // parents have a mean; or at least a log-weight

  FASTCAPS_DEVICE explicit GaussianForward(const Lane<Pose, R>& lane_) : lane(lane_), betas(lane_, false) { reset(); }

  FASTCAPS_DEVICE void reset() {
    placed = args.mean, asks = placed || args.log_weight;
    set_to_zero<Pose, R>(base);
    set_to_zero<Pose, R>(precision);
    each_patch<Pose, R>([&](int r, int p) { log_weight[r][p] = 0.0f, clear(r, p); });
  }

  FASTCAPS_DEVICE void load() {
    each_patch<Pose, R>([&](int r, int p) {
      if (args.mean) load_parent(lane, args.mean, r, p, base[r][p]);
      load_precision(lane, r, p, precision[r][p]);
      each_number<Pose>([&](int i, int j) { precision[r][p][i][j] *= kLog2E; });
      log_weight[r][p] = lane.alive(p) ? kLog2E * load_scalar(lane, args.log_weight, r, p, 0.0f) : -INFINITY;
    });
  }

  FASTCAPS_DEVICE void begin_options() { betas.load(0); }  // not before: a lean loop has no registers for them

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
      logit[r][p] = log_weight[r][p] - distance;
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

  // ---- the lean walk: sums about the mean of the iteration before, or about that of the first stage of children ----

  // Returns false if something was lost: then it is as if nothing had been done.
  FASTCAPS_DEVICE bool walk_lean(const ChildRange& range) {
    if ((asks && !placed) || (!kMeets && args.warps_parents > 1)) return false;
    bool lost = false;
    move_base(-1.0f);
    if (placed) {
      lost = add_all<true>(range);
    } else {
      ChildRange few = range;
      few.last = range.first + args.stage < range.last ? range.first + args.stage : range.last;
      add_all<false>(few);
      each_patch<Pose, R>([&](int r, int p) {
        each_number<Pose>([&](int i, int j) { base[r][p][i][j] += offset[r][p][i][j]; });
        clear(r, p);
      });
      lost = add_all<false>(range);
    }
    lost = !move_base(1.0f) || lost;
    lost = any_thread(args, lane.shared, lost);
    barrier();
    if (lost)
      each_patch<Pose, R>([&](int r, int p) {
        clear(r, p);
        if (!placed) each_number<Pose>([&](int i, int j) { base[r][p][i][j] = 0.0f; });
      });
    return !lost;
  }

  // A bias that all children share moves all votes: the base is one of votes without it. Without a mean the base is 0
  // at first. Returns false for an infinite bias, which could not be taken away and added again.
  FASTCAPS_DEVICE bool move_base(float sign) {
    bool finite = true;
    if (!args.bias) return finite;
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) {
      if (!lane.alive(p)) continue;
      each_number<Pose>([&](int i, int j) {
        const float number = args.bias[lane.m(p) * args.bias_stride_m + lane.number(i, j)];
        finite = finite && fabsf(number) <= FLT_MAX;
        if (!(fabsf(number) <= FLT_MAX) || (!placed && sign < 0.0f)) return;
        FASTCAPS_UNROLL
        for (int r = 0; r < R; ++r) base[r][p][i][j] += sign * number;
      });
    }
    return finite;
  }

  template <bool MEETS, class Sums>
  FASTCAPS_DEVICE void walk_sums(const ChildRange& range, Sums& sums) {
    if (MEETS && args.warps_parents == 1)
      walk_sums<false>(range, sums);
    else if constexpr (Sums::kRounds)
      walk_in_rounds<MEETS>(lane, range, sums);
    else
      walk_by_child<MEETS>(lane, range, sums);
  }

  // Returns whether something was lost.
  template <bool ASKS>
  FASTCAPS_DEVICE bool add_all(const ChildRange& range) {
    GaussianSums<GaussianForward, Pose, R, ASKS> sums(*this);
    begin_walk<false>(lane, range);
    walk_sums<ASKS && kMeets>(range, sums);
    sums.conclude();
    barrier();  // the ring, and what warps exchange, is read to the end
    bool lost = is_lost(sums.worst);
    float gates[R] = {};
    each_patch<Pose, R>([&](int r, int p) {
      const float n = count[r][p], each = n > FLT_MIN ? 1.0f / n : 0.0f;
      const bool hardly_counts = n * 0x1p60f <= args.eps;  // neither does what was lost
      each_number<Pose>([&](int i, int j) {
        float &sum = offset[r][p][i][j], &squares = spread[r][p][i][j];
        const float mean = sum * each, about_mean = squares - mean * sum;
        lost = lost || !(kMostLoss * about_mean >= squares || (hardly_counts && squares < INFINITY));
        sum = mean, squares = fmaxf(about_mean, 0.0f) * (ASKS ? 1.0f : 1.0f / float(args.M));
      });
      count[r][p] *= ASKS ? 1.0f : 1.0f / float(args.M);
      gates[r] += count[r][p];
    });
    // The children's gates: what all parents together have of them.
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) gates[r] = ASKS ? lane.sum_parents(gates[r]) : count[r][0] * float(args.M);
    if (ASKS && kMeets && args.warps_parents > 1) {
      meet(lane, 0, gates);
      barrier();
    }
    const LaneBetas<Pose, R> betas(lane);
    each_patch<Pose, R>([&](int r, int p) {
      evidence[r][p] = (betas.use[p] + betas.ignore[p]) * count[r][p] - betas.ignore[p] * gates[r];
    });
    return lost;
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
      const float prior = Number<float>::log_sigmoid(score) - (kmeans ? 0.0f : log_sigma);
      log_weight[r][p] = lane.alive(p) ? kLog2E * prior : -INFINITY;
      each_number<Pose>([&](int i, int j) {
        const float p_of_it = kmeans ? 1.0f : gaussian::precision(spread[r][p][i][j]);
        precision[r][p][i][j] = lane.inside(i, j) ? kLog2E * p_of_it : 0.0f;
      });
      clear(r, p);
    });
    placed = asks = true;
  }
};

PassKernels gaussian_forward_kernels() {
  return forward_kernels<GaussianForward, true,
#ifdef FASTCAPS_EXPERIMENTS
                         Named<Pose4x4x32Two>, Named<Pose4x4x16One>,
#endif
                         Built<Pose4x4x8One>, Built<Pose4x4x16One, 1, 384>, Built<Pose4x4x32One, 1, 384>,
                         Built<Pose4x4x64>, Built<Pose1x8, 2>, Built<Pose1x16InPlace>, Built<PoseMatrix>,
                         Built<PoseVector>>();
}

}  // namespace fastcaps::gpu
