// Sums over the lanes of a warp that hold parts of one child's gradient.
#pragma once

#include "lanes.h"

namespace fastcaps::gpu {

// How a warp's lanes share the columns of dP (rows of the weights): kRows of them are summed together, and every lane
// ends with a few of the sums. In the first kOrdered exchanges a lane always keeps the lower half; so lanes take blocks
// of rows in different orders, by their number / 8: the lanes of a quarter warp, which a vector load serves together,
// agree.
template <class Pose, int R>
struct ChildSums {
  static_assert(Pose::kColumns <= 1 || Pose::kParents == 1 || Pose::kPositions == 1,
                "the lanes of a sum over columns and parents must be neighbours");
  static constexpr int kTogether = Pose::kFixed && Pose::kPatchRows == 1 ? R : 1;  // positions
  static constexpr int kCells = kTogether * Pose::kPatchRows;                      // of a column
  static constexpr int kRows = Pose::kWeightStride > 0 ? Pose::kD : Pose::kVector, kSums = kRows * kCells;
  static constexpr int kFirst = Pose::kColumns == 1 ? Pose::kPositions : 1;
  static constexpr int kLanes = Pose::kFixed ? Pose::kColumns * Pose::kParents : 1;
  static constexpr int kMost = (kSums - 1) / kLanes + 1;     // sums of a lane
  static constexpr int kPlaces = kTogether > 1 ? kMost : 1;  // their positions
  static constexpr int kOrdered = kLanes >= 4 && kFirst * kLanes == kWarp && Pose::kWeightVector == 4 ? 2 : 0;
  static constexpr bool kByRow = Pose::kTurns;  // sums are those of [rows of the pose, kRows], rows in the lane's order
  static constexpr int kBlock = kRows >> kOrdered;
  int begin, count;  // the lane's sums, of [kRows, kTogether, rows of the pose]
  int order;
  bool speaks;  // for other lanes with the same sums

  FASTCAPS_DEVICE explicit ChildSums(const Lane<Pose, R>& lane) : order(lane.lane / (kWarp >> kOrdered)) {
    scattered<kSums, kFirst, kLanes, kOrdered>(lane.lane, begin, count);
    speaks = Pose::kFixed ? lane.lane / kFirst % lanes_with_the_same(kSums, kLanes) == 0
                          : lane.column == 0 && lane.parent == 0;
  }
  FASTCAPS_DEVICE void add_up(float (&x)[kSums], const Lane<Pose, R>& lane) const {
    if constexpr (Pose::kFixed) {
      scatter_sums<kSums, kFirst, kLanes, kOrdered>(x, lane.lane);
    } else {
      FASTCAPS_UNROLL
      for (int n = 0; n < kSums; ++n) x[n] = lane.sum_parents(lane.sum_columns(x[n]));
    }
  }
  FASTCAPS_DEVICE int row(int v) const {  // taken as the v-th
    return kByRow ? v : (v / kBlock ^ order) * kBlock + v % kBlock;
  }
  static constexpr int number(int v, int r, int i) {
    return kByRow ? i * kRows + v : (v * kTogether + r) * Pose::kPatchRows + i;
  }
  // Of the n-th of the lane's sums.
  FASTCAPS_DEVICE int d(int n) const { return kByRow ? (begin + n) % kRows : row((begin + n) / kCells); }
  FASTCAPS_DEVICE int r(int n) const { return (begin + n) / Pose::kPatchRows % kTogether; }
  FASTCAPS_DEVICE int i(int n) const { return kByRow ? (begin + n) / kRows : (begin + n) % Pose::kPatchRows; }
};

// Sums over the warp's parents. Lanes that have rows in other orders give the one that the lane has.
template <class Pose, int R>
FASTCAPS_DEVICE void sum_parents(const Lane<Pose, R>& lane, Patch<Pose>& x) {
  if constexpr (Pose::kTurns) {
    FASTCAPS_UNROLL
    for (int mask = Pose::kPositions; mask < kWarp; mask *= 2) {
      Patch<Pose> other;
      each_number<Pose>([&](int i, int j) { other[i][j] = shuffle_xor(x[i ^ mask / 8][j], mask); });
      each_number<Pose>([&](int i, int j) { x[i][j] += other[i][j]; });
    }
  } else {
    each_number<Pose>([&](int i, int j) { x[i][j] = lane.sum_parents(x[i][j]); });
  }
}

}  // namespace fastcaps::gpu
