// Between the turns of a routing: a turn's sums become parents, and those the next turn's question, where they are: in
// the lanes' registers. Numbers that a loop of passes would hand on in the children's type are rounded to it here too.
#pragma once

#include <cfloat>

#include "make_votes.h"

namespace fastcaps::gpu {

template <class Pose>
FASTCAPS_DEVICE float sum_pose(const PassArgs& a, float x) {
  return sum_rows<Pose>(a, sum_columns<Pose>(a, x));
}

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
    sum = sum_pose<Pose>(a, sum);
    inverse = largest < FLT_MIN && squares == 0.0f ? 0.0f : reciprocal_sqrt(sum) / largest;
  }
  return inverse;
}

template <class Pose>
FASTCAPS_DEVICE void layer_norm(const PassArgs& a, const Lane<Pose>& lane, Tile<Pose>& x) {
  const float one = 1.0f / float(Pose::C_(a) * Pose::E_(a));
  for (int turn = 0; turn < 2; ++turn) {  // centred twice, as in layer_norm.h
    float sum = 0.0f;
    each_number<Pose>([&](int i, int j) { sum += x[i][j]; });
    sum = sum_pose<Pose>(a, sum) * one;
    each_number<Pose>([&](int i, int j) { x[i][j] = lane.inside(a, i, j) ? x[i][j] - sum : 0.0f; });
  }
  const float inverse = reciprocal_sqrt(dot<Pose>(a, x, x) * one + a.eps);
  each_number<Pose>([&](int i, int j) {
    if (!lane.inside(a, i, j)) return;
    const int number = lane.number(a, i, j);
    x[i][j] *= inverse;
    if (a.norm_weight) x[i][j] *= load_number(a.norm_weight, number, a.storage);
    if (a.norm_bias) x[i][j] += load_number(a.norm_bias, number, a.storage);
  });
}

// A pose for each parent in the children's type, [positions, M, C, E], `first` numbers behind `to`.
template <class Pose>
FASTCAPS_DEVICE void store_rounded(const PassArgs& a, const Lane<Pose>& lane, const Seat& seat, int p, void* to,
                                   int64_t first, const Tile<Pose>& x) {
  if (seat.position < 0 || !lane.alive(a, p)) return;
  const int64_t at = first + parent_offset<Pose>(a, lane, seat.position, p);
  each_number<Pose>([&](int i, int j) {
    if (lane.inside(a, i, j)) store_number(to, at + lane.number(a, i, j), x[i][j], a.storage);
  });
}

// From S of a turn, which takes its place in the history, to the next query (or the result). ROUNDS: the history is in
// the children's type. `first`: there was no query yet. All lanes of a warp come here together.
template <class Pose, bool ROUNDS>
FASTCAPS_DEVICE void take_turn(const PassArgs& a, const Lane<Pose>& lane, const Seat& seat, int p, int turn, bool first,
                               Tile<Pose>& sums, Tile<Pose>& query) {
  const bool last = turn + 1 == a.turns;
  const int64_t at = turn * a.positions * a.M * Pose::C_(a) * Pose::E_(a);
  if constexpr (ROUNDS) {
    store_rounded<Pose>(a, lane, seat, p, a.history, at, sums);
    if (a.rule == Rule::kUnit)  // parents are what was stored
      each_number<Pose>([&](int i, int j) { sums[i][j] = rounded(sums[i][j], a.storage); });
  } else {
    store_parent<Pose>(a, lane, a.sums + at, seat, p, sums, 1.0f);
  }
  if (a.rule == Rule::kLayerNorm) {
    layer_norm<Pose>(a, lane, sums);
  } else if (a.rule == Rule::kSquash || (a.rule == Rule::kUnit && !last)) {
    const float inverse = inverse_length<Pose>(a, sums, true);
    const float factor = a.rule == Rule::kSquash ? squash_factor(inverse) : inverse;
    each_number<Pose>([&](int i, int j) { sums[i][j] *= factor; });
  }
  if (last) store_rounded<Pose>(a, lane, seat, p, a.result, 0, sums);
  const bool replaces = first || a.rule == Rule::kLayerNorm || a.rule == Rule::kPlain;
  each_number<Pose>([&](int i, int j) {
    const float step = rounded(sums[i][j], a.storage);
    query[i][j] = replaces ? step : rounded(query[i][j] + step, a.storage);
    sums[i][j] = 0.0f;
  });
}

}  // namespace fastcaps::gpu
