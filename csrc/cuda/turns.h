// Between the turns of a routing: a turn's sums become parents, and those the next turn's question, where they are: in
// the lanes' registers. Numbers that a loop of passes would hand on in the children's type are rounded to it here too.
#pragma once

#include <cfloat>

#include "votes.h"

namespace fastcaps::gpu {

// How a turn's sums S become parents, and parents the next query.
enum Rule : int {
  kSequential,    // LayerNorm(S); the query is the parents
  kDynamic,       // squash(S); the query is their sum so far
  kVectorNormed,  // S, in the end; the query is the sum of S / |S| so far
};

FASTCAPS_DEVICE float rounded(float x, Storage storage) {
  switch (storage) {
    case Storage::kBFloat16: return bfloat16_to_float(float_to_bfloat16(x));
    case Storage::kFloat16: return float16_to_float(float_to_float16(x));
    default: return x;
  }
}

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
FASTCAPS_DEVICE void squash(const PassArgs& a, Tile<Pose>& x) {
  const float inverse = inverse_length<Pose>(a, x, true), length = inverse == 0.0f ? 0.0f : 1.0f / inverse;
  const float factor = length / (1.0f + length * length);
  each_number<Pose>([&](int i, int j) { x[i][j] *= inverse != inverse ? inverse : factor; });
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

// The last parents, in the children's type.
template <class Pose>
FASTCAPS_DEVICE void store_result(const PassArgs& a, const Lane<Pose>& lane, const Seat& seat, int p,
                                  const Tile<Pose>& x) {
  if (seat.position < 0 || !lane.alive(a, p)) return;
  const int64_t at = parent_offset<Pose>(a, lane, seat.position, p);
  each_number<Pose>([&](int i, int j) {
    if (lane.inside(a, i, j)) store_number(a.result, at + lane.number(a, i, j), x[i][j], a.storage);
  });
}

// From S of a turn, which takes its place in the history, to the next query (or the result). `first`: there was no
// query yet. All lanes of a warp come here together.
template <class Pose>
FASTCAPS_DEVICE void take_turn(const PassArgs& a, const Lane<Pose>& lane, const Seat& seat, int p, int turn, bool first,
                               Tile<Pose>& sums, Tile<Pose>& query) {
  const bool last = turn + 1 == a.turns;
  if (!a.normalized_parents) each_number<Pose>([&](int i, int j) { sums[i][j] = rounded(sums[i][j], a.storage); });
  store_parent<Pose>(a, lane, a.sums + turn * a.positions * a.M * Pose::C_(a) * Pose::E_(a), seat, p, sums, 1.0f);
  if (a.rule == kDynamic) {
    squash<Pose>(a, sums);
  } else if (a.rule == kVectorNormed && !last) {
    const float inverse = inverse_length<Pose>(a, sums, true);
    each_number<Pose>([&](int i, int j) { sums[i][j] *= inverse; });
  } else if (a.normalized_parents) {
    layer_norm<Pose>(a, lane, sums);
  }
  if (last) store_result<Pose>(a, lane, seat, p, sums);
  each_number<Pose>([&](int i, int j) {
    const float step = rounded(sums[i][j], a.storage);
    query[i][j] = first || a.rule == kSequential ? step : rounded(query[i][j] + step, a.storage);
    sums[i][j] = 0.0f;
  });
}

}  // namespace fastcaps::gpu
