// The pooling pass, forward: S_m = sum_i r_im V_im with r_im = g_i exp(a_im) / Z_m, Z_m the sum over the children,
// a_im = scale <Q_m, K_im>, K = V or V / |V|. No parent asks for another: a lane sums below the largest logit so far.
#pragma once

#include <cfloat>

#include "forward.h"
#include "turns.h"

namespace fastcaps::gpu {

constexpr float kLn2 = 0.6931471805599453f;

// Exponentials below the largest logit are rescaled only where a logit exceeds what they are taken below by this much
// (in units of log2): rarely more than once.
constexpr float kSlack = 8.0f;

template <class Pose, int R, bool PLAIN>
struct PoolingForward {
  static constexpr bool kSilences = false, kIdentity = true;
  Patches<Pose, R> query, sums;
  float top[R][Pose::kEach], total[R][Pose::kEach];
  bool asks;

  FASTCAPS_DEVICE void load(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats) {
    asks = a.query.data;
    each_tile<Pose, R>([&](int r, int p) {
      load_query<Pose>(a, lane, seats[lane.template seat<R>(r)], p, 1.0f, query[r][p]);
      each_number<Pose>([&](int i, int j) { sums[r][p][i][j] = 0.0f; });
      top[r][p] = -INFINITY;
      total[r][p] = 0.0f;
    });
  }

  static FASTCAPS_DEVICE float shift(float top) { return fmaxf(top, -FLT_MAX); }

  // The share is below the largest logit so far, and not divided by the sum of all.
  FASTCAPS_DEVICE bool score(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, const Seat*, char*,
                             const Patches<Pose, R>& votes, float (&share)[R][Pose::kEach]) {
    float logit[R][Pose::kEach];
    bool rises = false;
    each_tile<Pose, R>([&](int r, int p) {
      const Seen seen = stage.seen[lane.template seat<R>(r)];
      const bool counts = seen.exists != 0.0f && seen.gate != 0.0f;
      float x = 0.0f;
      if (asks) {
        x = a.scale * kLog2E * dot<Pose>(a, query[r][p], votes[r][p]);
        if (a.normalize) x *= inverse_length<Pose>(a, votes[r][p], counts);
      }
      logit[r][p] = counts ? x : -INFINITY;
      rises = rises || logit[r][p] > top[r][p] + kSlack;
    });
    if (any_lane(rises))
      each_tile<Pose, R>([&](int r, int p) {
        const float before = top[r][p];
        top[r][p] = fmaxf(before, logit[r][p]);
        const float factor = exp2_fast(before - shift(top[r][p]));
        total[r][p] *= factor;
        each_number<Pose>([&](int i, int j) { sums[r][p][i][j] *= factor; });
      });
    each_tile<Pose, R>([&](int r, int p) {
      const Seen seen = stage.seen[lane.template seat<R>(r)];
      const bool counts = seen.exists != 0.0f && seen.gate != 0.0f;
      share[r][p] = counts ? seen.gate * exp2_fast(logit[r][p] - shift(top[r][p])) : 0.0f;
    });
    return true;
  }

  FASTCAPS_DEVICE void add(const PassArgs&, const Lane<Pose>& lane, const Stage<Pose>& stage,
                           const Patches<Pose, R>& votes, const float (&share)[R][Pose::kEach]) {
    each_tile<Pose, R>([&](int r, int p) {
      const Seen seen = stage.seen[lane.template seat<R>(r)];
      if (seen.exists == 0.0f || seen.gate == 0.0f) return;  // leaves no trace, whatever it is
      total[r][p] += share[r][p];
      each_number<Pose>([&](int i, int j) { sums[r][p][i][j] += share[r][p] * votes[r][p][i][j]; });
    });
  }

  // Every range of children has sums and a log-sum-exp of its own.
  FASTCAPS_DEVICE void store(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats, int chunk) {
    const int64_t parents = chunk * a.positions * a.M;
    each_tile<Pose, R>([&](int r, int p) {
      const Seat& seat = seats[lane.template seat<R>(r)];
      conclude(a, lane, a.logsumexp + parents, seat, r, p);
      store_parent<Pose>(a, lane, a.sums + parents * Pose::C_(a) * Pose::E_(a), seat, p, sums[r][p]);
    });
  }

  FASTCAPS_DEVICE void finish(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats, int turn) {
    each_tile<Pose, R>([&](int r, int p) {
      const Seat& seat = seats[lane.template seat<R>(r)];
      conclude(a, lane, a.logsumexp + turn * a.positions * a.M, seat, r, p);
      take_turn<Pose, true>(a, lane, seat, p, turn, !asks, sums[r][p], query[r][p]);
      top[r][p] = -INFINITY;
      total[r][p] = 0.0f;
    });
    asks = true;
  }

  // The sums become S.
  FASTCAPS_DEVICE void conclude(const PassArgs& a, const Lane<Pose>& lane, float* logsumexp, const Seat& seat, int r,
                                int p) {
    const bool empty = total[r][p] == 0.0f;
    const float one = empty ? 0.0f : 1.0f / total[r][p];
    each_number<Pose>([&](int i, int j) { sums[r][p][i][j] *= one; });
    store_scalar<Pose>(a, lane, logsumexp, seat, p, empty ? -INFINITY : top[r][p] * kLn2 + logf(total[r][p]));
  }
};

}  // namespace fastcaps::gpu
