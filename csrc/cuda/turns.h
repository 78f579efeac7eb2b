// Between the turns of a routing: a turn's sums become parents, and those the next turn's query, where they are: in
// the lanes' registers. Numbers that a loop of passes would hand on in the children's type are rounded to it here too.
#pragma once

#include <cfloat>

#include "../algebra/pooling.h"
#include "../algebra/turns.h"
#include "make_votes.h"

namespace fastcaps::gpu {

// The length of a pose that lies in several lanes: as in algebra/turns.h, no square overflows or vanishes. All lanes of
// a warp come here together.
template <class Pose>
FASTCAPS_DEVICE float length(const PassArgs& a, const Patch<Pose>& x) {
  float largest = 0.0f, sum = 0.0f;
  each_number<Pose>([&](int i, int j) { largest = fmaxf(largest, fabsf(x[i][j])); });
  largest = max_pose<Pose>(a, largest);
  const float by = largest > 0.0f && largest < INFINITY ? largest : 1.0f;
  each_number<Pose>([&](int i, int j) { sum += (x[i][j] / by) * (x[i][j] / by); });
  return sqrtf(sum_pose<Pose>(a, sum)) * by;
}

// 1 / |x|, and 0 where that is more than a number can be.
FASTCAPS_DEVICE float inverse_of_length(float size) { return size < FLT_MIN ? 0.0f : 1.0f / size; }

// The same of a pose. `counts`: this lane wants to know. All lanes of a warp come here together; what a pose gets does
// not depend on the others', not even in its last digit.
template <class Pose>
FASTCAPS_DEVICE float inverse_length(const PassArgs& a, const Patch<Pose>& x, bool counts) {
  const float squares = dot<Pose>(a, x, x);
  const bool within = squares > 1e-30f && squares < 1e30f;
  float inverse = pooling::inverse_length(squares);
  if (any_lane(counts && !within)) {
    const float safe = inverse_of_length(length<Pose>(a, x));  // by all lanes, for those whose squares are lost
    inverse = within ? inverse : safe;
  }
  return inverse;
}

template <class Pose>
FASTCAPS_DEVICE void layer_norm(const PassArgs& a, const Lane<Pose>& lane, Patch<Pose>& x) {
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
                                   int64_t first, const Patch<Pose>& x) {
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
                               Patch<Pose>& sums, Patch<Pose>& query) {
  const bool last = turn + 1 == a.turns;
  const int64_t at = turn * a.positions * a.M * Pose::C_(a) * Pose::E_(a);
  if constexpr (ROUNDS) {
    store_rounded<Pose>(a, lane, seat, p, a.history, at, sums);
    if (a.rule == Rule::kUnit)  // parents are what was stored
      each_number<Pose>([&](int i, int j) { sums[i][j] = rounded(sums[i][j], a.storage); });
  } else {
    store_parent<Pose>(a, lane, a.sums + at, seat, p, sums);
  }
  if (a.rule == Rule::kLayerNorm) {
    layer_norm<Pose>(a, lane, sums);
  } else if (a.rule == Rule::kSquash || (a.rule == Rule::kUnit && !last)) {
    const float size = length<Pose>(a, sums);
    const float factor = a.rule == Rule::kSquash ? squash_share(size) : inverse_of_length(size);
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
