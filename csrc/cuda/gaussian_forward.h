// The Gaussian pass, forward: r_im = softmax over m of log_weight_m - sum (V_im - mean_m)^2 / (2 variance_m), w = g r;
// counts n_m = sum_i w_im, means and variances of the votes weighed by w, evidence.
#pragma once

#include <cfloat>

#include "../algebra/gaussian.h"
#include "forward.h"
#include "softmax.h"
#include "turns.h"

namespace fastcaps::gpu {

// A sum that gives back with the next number what rounding took from it (Kahan 1965).
struct Compensated {
  float &sum, &lost;

  FASTCAPS_FORMULA operator float() const { return sum; }
  FASTCAPS_FORMULA void operator+=(float x) {
    const float whole = x - lost, next = sum + whole;
    lost = (next - sum) - whole;
    sum = next;
  }
};

// What a child brings, and what it costs to leave it, at the lane's parents.
template <class Pose>
struct LaneBetas {
  float use[Pose::kEach], ignore[Pose::kEach];

  FASTCAPS_DEVICE void load(const PassArgs& a, const Lane<Pose>& lane, int i) {
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) {
      const bool exists = a.beta_use && lane.alive(a, p);
      use[p] = exists ? a.beta_use[i * a.use_stride_i + lane.m(p) * a.use_stride_m] : 0.0f;
      ignore[p] = exists ? a.beta_ignore[i * a.ignore_stride_i + lane.m(p) * a.ignore_stride_m] : 0.0f;
    }
  }
  FASTCAPS_DEVICE void next(const PassArgs& a, const Lane<Pose>& lane, int t) {
    if (a.use_stride_i || a.ignore_stride_i) load(a, lane, Child(a, t).i);
  }
};

// p = 1 / (2 variance): 1 where there is none, and the exponent is a plain squared distance; 0 without a mean.
template <class Pose>
FASTCAPS_DEVICE void load_precision(const PassArgs& a, const Lane<Pose>& lane, const Seat& seat, int p,
                                    Patch<Pose>& to) {
  if (a.variance) load_parent<Pose>(a, lane, a.variance, seat, p, to);
  const bool exists = seat.position >= 0 && lane.alive(a, p);
  each_number<Pose>([&](int i, int j) {
    const bool inside = a.mean && exists && lane.inside(a, i, j);
    to[i][j] = !inside ? 0.0f : a.variance ? gaussian::precision(to[i][j]) : 1.0f;
  });
}

template <class Pose, int R, bool PLAIN>
struct GaussianForward {
  static constexpr bool kSilences = false, kIdentity = true;
  using Numbers = float[R][Pose::kEach];
  Patches<Pose, R> base, precision;  // base: the mean, or else the first vote; precision: p
  Patches<Pose, R> offset, spread;   // of the votes so far: their mean, seen from the base, and the squares about it
  Numbers log_weight, count, lost, evidence;
  // Where a base is far from the votes, its digits are lost to theirs; free poses have registers to make up for it.
  static constexpr bool kCompensated = !Pose::kFixed;
  Patches<Pose, kCompensated ? R : 1> lost_offset;
  LaneBetas<Pose> betas;
  bool placed, asks;  // parents have a mean; or at least a log-weight

  FASTCAPS_DEVICE void load(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats) {
    placed = a.mean, asks = a.mean || a.log_weight;
    each_tile<Pose, R>([&](int r, int p) {
      const Seat& seat = seats[lane.template seat<R>(r)];
      each_number<Pose>([&](int i, int j) { base[r][p][i][j] = offset[r][p][i][j] = spread[r][p][i][j] = 0.0f; });
      if (a.mean) load_parent<Pose>(a, lane, a.mean, seat, p, base[r][p]);
      load_precision<Pose>(a, lane, seat, p, precision[r][p]);
      log_weight[r][p] = load_scalar<Pose>(a, lane, a.log_weight, seat, p, 0.0f);
      count[r][p] = lost[r][p] = evidence[r][p] = 0.0f;
      if constexpr (kCompensated) each_number<Pose>([&](int i, int j) { lost_offset[r][p][i][j] = 0.0f; });
    });
    betas.load(a, lane, 0);
  }

  // Votes become what they are seen from the base.
  FASTCAPS_DEVICE bool score(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, const Seat* seats,
                             char* shared, Patches<Pose, R>& votes, Numbers& share) {
    if (placed)
      each_tile<Pose, R>(
          [&](int r, int p) { each_number<Pose>([&](int i, int j) { votes[r][p][i][j] -= base[r][p][i][j]; }); });
    if (!asks) {
      each_tile<Pose, R>([&](int r, int p) { share[r][p] = 1.0f / float(a.M); });
      return true;
    }
    float logit[R][Pose::kEach], none[R];
    each_tile<Pose, R>([&](int r, int p) {
      float distance = 0.0f;
      if (placed) {
        each_number<Pose>(
            [&](int i, int j) { distance += gaussian::distance(votes[r][p][i][j], precision[r][p][i][j]); });
        distance = sum_pose<Pose>(a, distance);
      }
      logit[r][p] = kLog2E * (log_weight[r][p] - distance);
    });
    return compete<Pose, R, 0, PLAIN>(a, lane, stage, seats, shared, logit, logit, share, none);
  }

  FASTCAPS_DEVICE void add(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, Patches<Pose, R>& votes,
                           const Numbers& share) {
    betas.next(a, lane, stage.t);
    each_tile<Pose, R>([&](int r, int p) {
      const Seen seen = stage.seen[lane.template seat<R>(r)];
      if (seen.exists == 0.0f || seen.gate == 0.0f) return;  // leaves no trace, whatever it is
      const float weight = share[r][p] * seen.gate, before = count[r][p], after = before + weight;
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

  // Of several ranges of children the moments are put down as they are, for a kernel that joins them.
  FASTCAPS_DEVICE void store(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats, int chunk) {
    const int64_t parents = chunk * a.positions * a.M, numbers = parents * Pose::C_(a) * Pose::E_(a);
    each_tile<Pose, R>([&](int r, int p) {
      const Seat& seat = seats[lane.template seat<R>(r)];
      store_scalar<Pose>(a, lane, a.counts + parents, seat, p, count[r][p]);
      store_scalar<Pose>(a, lane, a.evidence + parents, seat, p, evidence[r][p]);
      store_parent<Pose>(a, lane, a.offsets + numbers, seat, p, offset[r][p]);
      store_parent<Pose>(a, lane, a.spread + numbers, seat, p, spread[r][p]);
      if (!a.mean) store_parent<Pose>(a, lane, a.base + numbers, seat, p, base[r][p]);
    });
  }

  FASTCAPS_DEVICE void finish(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats, int turn) {
    const bool last = turn + 1 == a.turns;
    const int64_t parents = turn * a.positions * a.M, numbers = parents * Pose::C_(a) * Pose::E_(a);
    each_tile<Pose, R>([&](int r, int p) {
      const Seat& seat = seats[lane.template seat<R>(r)];
      const float n = count[r][p], one = inverse_or_zero(n + a.eps);
      each_number<Pose>([&](int i, int j) {
        gaussian::finish(base[r][p][i][j], n, a.eps, one, offset[r][p][i][j], spread[r][p][i][j]);
        base[r][p][i][j] = offset[r][p][i][j];
      });
      store_scalar<Pose>(a, lane, a.counts + parents, seat, p, n);
      store_parent<Pose>(a, lane, a.means + numbers, seat, p, base[r][p]);
      store_parent<Pose>(a, lane, a.variances + numbers, seat, p, spread[r][p]);
      float log_sigma = 0.0f;
      each_number<Pose>([&](int i, int j) {
        spread[r][p][i][j] += a.eps;
        if (lane.inside(a, i, j)) log_sigma += gaussian::log_sigma(spread[r][p][i][j]);
      });
      log_sigma = sum_pose<Pose>(a, log_sigma);
      float score = evidence[r][p];
      if (a.rule == Rule::kEM && lane.alive(a, p))
        score = gaussian::em_score(a.temperatures[turn], a.activation[lane.m(p)],
                                   float(Pose::C_(a) * Pose::E_(a)) * a.cost_of_numbers[lane.m(p)], log_sigma, n);
      store_scalar<Pose>(a, lane, a.evidence + parents, seat, p, score);
      if (last) {
        store_scalar<Pose>(a, lane, a.score, seat, p, score);
        store_parent<Pose>(a, lane, a.last_mean, seat, p, base[r][p]);
        store_parent<Pose>(a, lane, a.last_variance, seat, p, spread[r][p]);
      }
      log_weight[r][p] = Number<float>::log_sigmoid(score) - (a.rule == Rule::kKMeans ? 0.0f : log_sigma);
      count[r][p] = lost[r][p] = evidence[r][p] = 0.0f;
      each_number<Pose>([&](int i, int j) {
        const float p_of_it = a.rule == Rule::kKMeans ? 1.0f : gaussian::precision(spread[r][p][i][j]);
        precision[r][p][i][j] = lane.inside(a, i, j) ? p_of_it : 0.0f;
        offset[r][p][i][j] = spread[r][p][i][j] = 0.0f;
        if constexpr (kCompensated) lost_offset[r][p][i][j] = 0.0f;
      });
    });
    placed = asks = true;
  }
};

}  // namespace fastcaps::gpu
