// The pooling pass, forward: S_m = sum_i r_im V_im with r_im = g_i exp(a_im) / Z_m, Z_m the sum over the children,
// a_im = scale <Q_m, K_im>, K = V or V / |V|. No parent asks for another: a lane sums below the largest logit so far.
#pragma once

#include <cfloat>

#include "forward.h"

namespace fastcaps::gpu {

constexpr float kLn2 = 0.6931471805599453f;

// 1 / |x| over the whole pose, 0 for a pose of zeros. Neither the squares of very long vectors overflow nor those of
// very short ones vanish; `counts` says that anybody wants to know. All lanes of a warp come here together.
template <class Pose>
FASTCAPS_DEVICE float inverse_length(const PassArgs& a, const Tile<Pose>& x, bool counts) {
  const float squares = dot<Pose>(a, x, x);
  float inverse = squares > 0.0f ? reciprocal_sqrt(squares) : 0.0f;
  if (any_lane(counts && !(squares > 1e-30f && squares < 1e30f))) {
    float largest = 0.0f;
    each_number<Pose>([&](int i, int j) { largest = fmaxf(largest, fabsf(x[i][j])); });
    largest = max_rows<Pose>(a, max_columns<Pose>(a, largest));
    float sum = 0.0f;
    each_number<Pose>([&](int i, int j) {
      const float part = x[i][j] / largest;
      sum += part * part;
    });
    sum = sum_rows<Pose>(a, sum_columns<Pose>(a, sum));
    inverse = largest < FLT_MIN && squares == 0.0f ? 0.0f : reciprocal_sqrt(sum) / largest;
  }
  return inverse;
}

// Exponentials below the largest logit are rescaled only where a logit exceeds what they are taken below by this much
// (in units of log2): rarely more than once.
constexpr float kSlack = 8.0f;

template <class Pose, int R, bool PLAIN>
struct PoolingForward {
  static constexpr bool kHushes = false, kIdentity = true;
  Tiles<Pose, R> query, sums;
  float top[R][Pose::kEach], total[R][Pose::kEach];

  FASTCAPS_DEVICE void load(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats) {
    each_tile<Pose, R>([&](int r, int p) {
      load_query<Pose>(a, lane, seats[lane.template seat<R>(r)], p, a.scale * kLog2E, query[r][p]);
      each_number<Pose>([&](int i, int j) { sums[r][p][i][j] = 0.0f; });
      top[r][p] = -INFINITY;
      total[r][p] = 0.0f;
    });
  }

  static FASTCAPS_DEVICE float shift(float top) { return fmaxf(top, -FLT_MAX); }

  FASTCAPS_DEVICE void hear(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, const Seat*, char*,
                            const Tiles<Pose, R>& votes) {
    float logit[R][Pose::kEach];
    bool rises = false;
    each_tile<Pose, R>([&](int r, int p) {
      const Seen seen = stage.seen[lane.template seat<R>(r)];
      const bool counts = seen.exists != 0.0f && seen.gate != 0.0f;
      float x = 0.0f;
      if (a.query.data) {
        x = dot<Pose>(a, query[r][p], votes[r][p]);
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
      if (seen.exists == 0.0f || seen.gate == 0.0f) return;
      const float share = seen.gate * exp2_fast(logit[r][p] - shift(top[r][p]));
      total[r][p] += share;
      each_number<Pose>([&](int i, int j) { sums[r][p][i][j] += share * votes[r][p][i][j]; });
    });
  }

  // Every range of children has parents and a log-sum-exp of its own.
  FASTCAPS_DEVICE void store(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats, int chunk) const {
    const int64_t parents = chunk * a.positions * a.M;
    each_tile<Pose, R>([&](int r, int p) {
      const Seat& seat = seats[lane.template seat<R>(r)];
      const bool empty = total[r][p] == 0.0f;
      store_parent<Pose>(a, lane, a.sums + parents * Pose::C_(a) * Pose::E_(a), seat, p, sums[r][p],
                         empty ? 0.0f : 1.0f / total[r][p]);
      store_scalar<Pose>(a, lane, a.logsumexp + parents, seat, p,
                         empty ? -INFINITY : top[r][p] * kLn2 + logf(total[r][p]));
    });
  }
};

}  // namespace fastcaps::gpu
