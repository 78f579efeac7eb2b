// The step between iterations of a routing, in the lanes' registers: an iteration's sums become parents, and these the
// next query. Values that separate launches would store in the children's type are rounded to it here too.
#pragma once

#include <cfloat>

#include "../algebra/pooling.h"
#include "make_votes.h"

namespace fastcaps::gpu {

// A pose that several lanes of a warp hold. All of them call these functions together.
template <class Pose, int R>
struct PoseInLanes {
  using X = float;
  const Lane<Pose, R>& lane;
  Patch<Pose>& x;

  template <class F>
  FASTCAPS_DEVICE void each(F&& f) const {
    each_number<Pose>([&](int i, int j) {
      if (lane.inside(i, j)) f(x[i][j], lane.number(i, j));
    });
  }
  template <class F>
  FASTCAPS_DEVICE float sum(F&& f) const {
    float sum = 0.0f;
    each_number<Pose>([&](int i, int j) { sum += f(x[i][j], 0); });  // values outside the pose are 0
    return lane.sum_pose(sum);
  }
  template <class F>
  FASTCAPS_DEVICE float mean(F&& f) const {
    return sum(f) * (1.0f / float(lane.C() * lane.E()));
  }
  FASTCAPS_DEVICE float largest() const {
    float largest = 0.0f;
    each_number<Pose>([&](int i, int j) { largest = fmaxf(largest, fabsf(x[i][j])); });
    return lane.max_pose(largest);
  }
};

// <Q, x> / |x| of a pose, and 1 / |x| as a product of `inverse` and `lift`, so that it cannot overflow: `lift` is 1
// unless x is denormal. The direction of 0 is 0.
struct Direction {
  float along, inverse, lift;
};

// `counts`: whether this lane uses the result. All lanes of a warp call this together; a pose's result does not depend
// on the other poses, not even in its last bit.
template <class Pose, int R>
FASTCAPS_DEVICE Direction direction(const Lane<Pose, R>& lane, const Patch<Pose>& query, Patch<Pose>& x, bool counts) {
  const float squares = dot(lane, x, x);
  const bool within = squares > 1e-30f && squares < 1e30f;
  Direction found{dot(lane, query, x), pooling::inverse_length(squares), 1.0f};
  if (any_lane(counts && !within)) {  // by all lanes, for those whose squares are lost
    const PoseInLanes<Pose, R> pose{lane, x};
    const float lift = pose.largest() < 4 * FLT_MIN ? 18446744073709551616.0f : 1.0f;  // 2^64
    pose.each([&](float& number, int) { number *= lift; });
    const Direction safe{dot(lane, query, x), inverse_or_zero(length(pose)), lift};
    pose.each([&](float& number, int) { number *= 1.0f / lift; });
    if (!within) found = safe;
  }
  found.along *= found.inverse;
  return found;
}

// store_parent in the children's type.
template <class Pose, int R>
FASTCAPS_DEVICE void store_rounded(const Lane<Pose, R>& lane, void* parts, int part, int r, int p,
                                   const Patch<Pose>& x) {
  if (!lane.alive(r, p)) return;
  const int64_t at = lane.part(part) * lane.C() * lane.E() + parent_offset(lane, r, p);
  each_number<Pose>([&](int i, int j) {
    if (lane.inside(i, j)) store_number(parts, at + lane.number(i, j), x[i][j], lane.args.storage);
  });
}

// Stores S of an iteration in the history, and makes the next query (or the result) of it. ROUNDS: pooling, whose
// history has the children's type. `first`: there was no query yet. All lanes of a warp call this together.
template <bool ROUNDS, class Pose, int R>
FASTCAPS_DEVICE void update_query(const Lane<Pose, R>& lane, int r, int p, int iteration, bool first, Patch<Pose>& sums,
                                  Patch<Pose>& query) {
  const PassArgs& args = lane.args;
  const bool last = iteration + 1 == args.iterations;
  if constexpr (ROUNDS) {
    store_rounded(lane, args.history, iteration, r, p, sums);
    if (args.rule == Rule::kUnit)  // parents are the stored sums
      each_number<Pose>([&](int i, int j) { sums[i][j] = rounded(sums[i][j], args.storage); });
  } else {
    store_parent(lane, args.sums, iteration, r, p, sums);
  }
  const PoseInLanes<Pose, R> pose{lane, sums};
  between<ROUNDS>(args, pose, last);
  if (!ROUNDS && args.rule == Rule::kLayerNorm) pose.each([&](float& x, int k) { x = affine(args, x, k); });
  if (last) store_rounded(lane, args.result, 0, r, p, sums);
  const bool replaces = first || args.rule == Rule::kLayerNorm || args.rule == Rule::kPlain;
  each_number<Pose>([&](int i, int j) {
    const float step = rounded(sums[i][j], args.storage);
    query[i][j] = replaces ? step : rounded(query[i][j] + step, args.storage);
  });
}

// The same for all of a lane's poses, one after another, by way of local memory: unrolled, this would be half of a
// kernel. The sums are 0 afterwards.
template <bool ROUNDS, class Pose, int R>
FASTCAPS_DEVICE void update_queries(const Lane<Pose, R>& lane, int iteration, bool first, Patches<Pose, R>& sums,
                                    Patches<Pose, R>& query) {
  struct {  // a type of its own: a compiler puts arrays of one type into the same memory, even those in registers
    Patch<Pose> sums, query;
  } kept[R * Pose::kEach];
  each_patch<Pose, R>([&](int r, int p) {
    auto& one = kept[r * Pose::kEach + p];
    each_number<Pose>([&](int i, int j) { one.sums[i][j] = sums[r][p][i][j], one.query[i][j] = query[r][p][i][j]; });
  });
  FASTCAPS_NO_UNROLL
  for (int k = 0; k < R * Pose::kEach; ++k)
    update_query<ROUNDS>(lane, k / Pose::kEach, k % Pose::kEach, iteration, first, kept[k].sums, kept[k].query);
  each_patch<Pose, R>([&](int r, int p) {
    const auto& one = kept[r * Pose::kEach + p];
    each_number<Pose>([&](int i, int j) { sums[r][p][i][j] = 0.0f, query[r][p][i][j] = one.query[i][j]; });
  });
}

}  // namespace fastcaps::gpu
