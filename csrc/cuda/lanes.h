// Poses and lanes: which values of which vote a lane holds, and sums over lanes.
#pragma once

#include "window.h"

namespace fastcaps::gpu {

// A pose known when compiled: C x D children, C x E parents. COLUMNS lanes share a parent's pose; each holds all C rows
// of TE columns, in runs of VECTOR neighbours that are read at once, for EACH parents; PARENTS lanes take other
// parents. Weights lie in shared memory, STRIDE floats from parent to parent, so that a warp's reads have no bank
// conflicts. STRIDE 0: they are too large for shared memory and are read in place. SWAPS: half of the lanes' positions
// take their two parents the other way round, so that sums over positions are exchanged without choosing between them.
template <int C, int D, int E, int TE, int VECTOR, int COLUMNS, int PARENTS, int EACH, int STRIDE, bool SWAPS = false>
struct FixedPose {
  static constexpr bool kFixed = true;
  static constexpr int kProducts = 0;      // tensor-core products that make one product: see tensor.h; 0: none
  static constexpr bool kStored = false;   // half precision is read as it is stored, never widened
  static constexpr bool kRounded = false;  // weights in float32 are rounded to tf32 before the launch
  static constexpr int kC = C, kD = D, kE = E;
  static constexpr int kPatchRows = C, kPatchColumns = TE;
  static constexpr int kVector = D % 4 == 0 ? 4 : D % 2 == 0 ? 2 : 1;  // of a child's row
  static constexpr int kWeightVector = VECTOR;
  static constexpr int kWeightCopy = STRIDE % 4 == 0 && D * E % 4 == 0 ? 4 : STRIDE % 2 == 0 && D * E % 2 == 0 ? 2 : 1;
  static constexpr int kWeightStride = STRIDE;
  static constexpr bool kSwaps = SWAPS;
  static constexpr bool kTurns = false;  // see Turned
  // From a lane's parent to its next one. Lanes that read their first parents and lanes that read their second ones, at
  // the same time, use different banks.
  static constexpr int kGroupStride = PARENTS * STRIDE + (SWAPS && PARENTS * STRIDE % 32 == 0 ? 16 : 0);
  // Backward: from parent to parent in the warps' parts of dW. Vectors of four need no padding: see in_slot.
  static constexpr int kSlotStride = STRIDE > 0 && VECTOR == 4 ? D * E : STRIDE;
  static constexpr int kWeightRow = E;  // from row to row
  static constexpr int kColumns = COLUMNS, kParents = PARENTS, kEach = EACH;
  static constexpr int kPositions = 32 / (COLUMNS * PARENTS);
  static constexpr int kDepthUnroll = D <= 16 ? D / kVector : 2;
  static_assert(TE * COLUMNS == E && TE % VECTOR == 0 && 32 % (COLUMNS * PARENTS) == 0);
  static constexpr int kRowStride = D;  // of a child's rows in shared memory
  // Padding after a child in shared memory: the rows of 8 positions then use all banks. Those of two need none.
  static constexpr int kChildPad = C == 4 && D == 4 && kPositions >= 4 ? 4 : 0;
  static_assert(!SWAPS || (EACH == 2 && kPositions > 1));
};

// Lanes take the four rows of their poses in different orders, by their number / 8: so sums over the parents of a warp
// are exchanged without choosing between rows (see scatter_sums). For backwards.
template <class Pose>
struct Turned : Pose {
  static_assert(Pose::kC == 4 && Pose::kPatchColumns == Pose::kE && Pose::kParents >= 4);
  static constexpr bool kTurns = true;
};

// Any other pose: a lane holds TC x TE of its values, other lanes the rest. Values outside the pose are zero.
template <int TC, int TE>
struct FreePose {
  static constexpr bool kFixed = false, kStored = false, kRounded = false, kSwaps = false, kTurns = false;
  static constexpr int kC = 0, kD = 0, kE = 0;
  static constexpr int kPatchRows = TC, kPatchColumns = TE;
  static constexpr int kVector = 4, kWeightVector = 1, kWeightCopy = 1, kWeightStride = 0, kGroupStride = 0,
                       kSlotStride = 0, kDepthUnroll = 1;
  static constexpr int kColumns = 0, kParents = 0, kPositions = 0, kEach = 1, kRowStride = 0, kChildPad = 0,
                       kProducts = 0;
};

// A lane's part of one pose; all parts that it holds at R positions; and a value for each of these.
template <class Pose>
using Patch = float[Pose::kPatchRows][Pose::kPatchColumns];
template <class Pose, int R>
using Patches = Patch<Pose>[R][Pose::kEach];
template <class Pose, int R>
using Numbers = float[R][Pose::kEach];

template <class Pose, int COLUMNS = Pose::kPatchColumns, class Body>
FASTCAPS_DEVICE void each_number(Body&& body) {
  FASTCAPS_UNROLL
  for (int i = 0; i < Pose::kPatchRows; ++i) {
    FASTCAPS_UNROLL
    for (int j = 0; j < COLUMNS; ++j) body(i, j);
  }
}
template <class Pose, class Body>
FASTCAPS_DEVICE void each_vector(Body&& body) {  // of kWeightVector neighbours
  FASTCAPS_UNROLL
  for (int i = 0; i < Pose::kPatchRows; ++i) {
    FASTCAPS_UNROLL
    for (int j = 0; j < Pose::kPatchColumns; j += Pose::kWeightVector) body(i, j);
  }
}
template <class Pose, int R, class Body>
FASTCAPS_DEVICE void each_patch(Body&& body) {
  FASTCAPS_UNROLL
  for (int r = 0; r < R; ++r) {
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) body(r, p);
  }
}

// How a warp's lanes are cut: those that share a pose's columns, its rows, ... Known when compiled for a fixed pose.
template <class Pose, bool FIXED = Pose::kFixed>
struct LaneCut {
  static constexpr int columns = Pose::kColumns, rows = 1, parents = Pose::kParents, positions = Pose::kPositions;

  FASTCAPS_DEVICE explicit LaneCut(const PassArgs&) {}
};
template <class Pose>
struct LaneCut<Pose, false> {
  int columns, rows, parents, positions;

  FASTCAPS_DEVICE explicit LaneCut(const PassArgs& args)
      : columns(args.columns), rows(args.rows), parents(args.parents), positions(kWarp / (columns * parents * rows)) {}
};

// Joins x of COUNT lanes that lie FIRST apart; every lane ends with the result. By recursion: a compiler does not
// unroll a loop over masks that double.
template <int FIRST, int COUNT, class Join>
FASTCAPS_DEVICE float join_lanes(float x, Join&& join) {
  if constexpr (COUNT > 1)
    return join_lanes<FIRST * 2, COUNT / 2>(join(x, shuffle_xor(x, FIRST)), join);
  else
    return x;
}

// 0, which a compiler does not know.
FASTCAPS_DEVICE int unknown_zero(const PassArgs& args) { return args.zero; }

// Weights too large for shared memory: they are read in place, and their gradient is made by the whole block.
template <class Pose>
constexpr bool kLargeWeights = Pose::kFixed && Pose::kWeightStride == 0;

// What a lane knows of its call, and its place in the warp and in the block. It holds patches of kEach parents at R
// positions; the letters are r: which of its positions, p: which of its parents, i, j: row and column within the patch.
template <class Pose, int R>
struct Lane : LaneCut<Pose> {
  using LaneCut<Pose>::columns, LaneCut<Pose>::rows, LaneCut<Pose>::parents, LaneCut<Pose>::positions;
  const PassArgs& args;
  char* shared;
  const Position* tile;                     // [tile_size]
  int lane, column, row, parent, position;  // the last four count within the warp
  int warp_parent, warp_position;           // of the block's warps
  int first_parent;                         // of the block

  FASTCAPS_DEVICE explicit Lane(const PassArgs& args_)
      : LaneCut<Pose>(args_),
        args(args_),
        shared(shared_memory()),
        tile(reinterpret_cast<const Position*>(shared + args.shared_tile)) {
    const unsigned thread = unsigned(thread_index()), number = thread % kWarp, warp = thread / kWarp;
    const unsigned c = columns, q = positions, m = parents, share = args.warps_parents;
    lane = int(number);
    column = int(number % c);
    position = int(number / c % q);
    parent = int(number / (c * q) % m);
    row = int(number / (c * q * m));
    warp_parent = int(warp % share);
    warp_position = int(warp / share);
    first_parent = args.first_parent + int(block_y()) * block_parents();
  }

  FASTCAPS_DEVICE int C() const { return Pose::kFixed ? Pose::kC : args.C; }
  FASTCAPS_DEVICE int D() const { return Pose::kFixed ? Pose::kD : args.D; }
  FASTCAPS_DEVICE int E() const { return Pose::kFixed ? Pose::kE : args.E; }
  FASTCAPS_DEVICE int padded_rows() const { return Pose::kFixed ? Pose::kC : args.rows * Pose::kPatchRows; }
  FASTCAPS_DEVICE int padded_depth() const { return Pose::kFixed ? Pose::kD : (args.D + 3) / 4 * 4; }
  FASTCAPS_DEVICE int row_stride() const { return Pose::kFixed ? Pose::kRowStride : padded_depth(); }
  // Of children in shared memory, the unit-th vector of kVector neighbours: whose it is, its row, and its first column.
  struct ChildVector {
    int child, c, d;
  };
  FASTCAPS_DEVICE ChildVector vector_of_child(int unit) const {
    constexpr int V = Pose::kVector;
    if constexpr (Pose::kFixed) {
      return {unit / (Pose::kD / V) / Pose::kC, unit / (Pose::kD / V) % Pose::kC, unit % (Pose::kD / V) * V};
    } else {
      const int row = args.by_depth.quotient(unit), child = args.by_rows.quotient(row);
      return {child, args.by_rows.remainder(row, child), args.by_depth.remainder(unit, row) * V};
    }
  }
  // From one position's child to the next one's, in shared memory.
  FASTCAPS_DEVICE int child_stride() const { return padded_rows() * row_stride() + Pose::kChildPad; }
  // Parents of the block.
  FASTCAPS_DEVICE int block_parents() const { return args.warps_parents * parents * Pose::kEach; }
  // Floats of a child's matrices towards them.
  FASTCAPS_DEVICE int matrices() const { return args.warps_parents * Pose::kEach * Pose::kGroupStride; }
  // The block's warps that take other positions.
  FASTCAPS_DEVICE int warps_positions() const { return int(unsigned(args.tile_size) / unsigned(R * positions)); }

  // The r-th of the lane's positions: its place within the block's tile, and what the tile has there.
  FASTCAPS_DEVICE int in_tile(int r) const { return (warp_position * R + r) * positions + position; }
  FASTCAPS_DEVICE const Position& at(int r) const { return tile[in_tile(r)]; }
  // The p-th of the lane's parents, within the block and of all; whether there is such a one.
  FASTCAPS_DEVICE int group(int p) const {
    return warp_parent * Pose::kEach + (Pose::kSwaps && position >= Pose::kPositions / 2 ? p ^ 1 : p);
  }
  FASTCAPS_DEVICE int in_block(int p) const { return group(p) * parents + parent; }
  FASTCAPS_DEVICE int m(int p) const { return first_parent + in_block(p); }
  FASTCAPS_DEVICE bool alive(int p) const { return m(p) < args.M; }
  FASTCAPS_DEVICE bool alive(int r, int p) const { return at(r).exists() && alive(p); }
  // How many parents lie before part `number` of results that are made in parts.
  FASTCAPS_DEVICE int64_t part(int number) const { return number * args.positions * args.M; }
  FASTCAPS_DEVICE int c(int i) const { return Pose::kTurns ? i ^ lane / 8 : row * Pose::kPatchRows + i; }
  FASTCAPS_DEVICE int e(int j) const {
    constexpr int V = Pose::kWeightVector;
    return (j / V * columns + column) * V + j % V;
  }
  FASTCAPS_DEVICE int number(int i, int j) const { return c(i) * E() + e(j); }
  FASTCAPS_DEVICE bool inside(int i, int j) const { return Pose::kFixed || (c(i) < args.C && e(j) < args.E); }
  // Whether the lane writes for all lanes with the same poses; or for all with the same position.
  FASTCAPS_DEVICE bool speaks_for_pose() const { return column == 0 && row == 0; }
  FASTCAPS_DEVICE bool speaks_for_position() const { return speaks_for_pose() && parent == 0; }

  // ---- sums over lanes; every lane ends with the result; a pose's: over all lanes that hold the same one ----
  FASTCAPS_DEVICE float sum_columns(float x) const { return over_columns(x, Sum()); }
  FASTCAPS_DEVICE float sum_rows(float x) const { return over_rows(x, Sum()); }
  FASTCAPS_DEVICE float sum_pose(float x) const { return sum_rows(sum_columns(x)); }
  FASTCAPS_DEVICE float max_pose(float x) const { return over_rows(over_columns(x, Max()), Max()); }
  FASTCAPS_DEVICE float sum_parents(float x) const { return over_parents(x, Sum()); }
  FASTCAPS_DEVICE float max_parents(float x) const { return over_parents(x, Max()); }
  FASTCAPS_DEVICE float sum_positions(float x) const {
    return over<Pose::kColumns, Pose::kPositions>(x, columns, positions, Sum());
  }

 private:
  struct Sum {
    FASTCAPS_DEVICE float operator()(float x, float y) const { return x + y; }
  };
  struct Max {
    FASTCAPS_DEVICE float operator()(float x, float y) const { return fmaxf(x, y); }
  };
  // FIRST and COUNT are those of a fixed pose; the arguments, of any.
  template <int FIRST, int COUNT, class Join>
  static FASTCAPS_DEVICE float over(float x, int first, int count, Join join) {
    if constexpr (Pose::kFixed) {
      return join_lanes<FIRST, COUNT>(x, join);
    } else {
      FASTCAPS_NO_UNROLL
      for (int mask = first; mask < first * count; mask *= 2) x = join(x, shuffle_xor(x, mask));
      return x;
    }
  }
  template <class Join>
  FASTCAPS_DEVICE float over_columns(float x, Join join) const {
    return over<1, Pose::kColumns>(x, 1, columns, join);
  }
  template <class Join>
  FASTCAPS_DEVICE float over_rows(float x, Join join) const {
    if constexpr (Pose::kFixed) return x;  // its lanes hold whole columns
    return over<1, 1>(x, kWarp / rows, rows, join);
  }
  template <class Join>
  FASTCAPS_DEVICE float over_parents(float x, Join join) const {
    return over<Pose::kColumns * Pose::kPositions, Pose::kParents>(x, columns * positions, parents, join);
  }
};

// How many neighbouring lanes end with the same sums if N sums are scattered over `span` lanes.
FASTCAPS_DEVICE constexpr int lanes_with_the_same(int N, int span) {
  for (; N > 1 && span > 1; span /= 2) N = (N + 1) / 2;
  return span;
}

// N sums over SPAN lanes that lie FIRST apart, at half the cost: with every exchange a lane keeps half of the values,
// the lower or the upper one. It ends with those that `scattered` finds, in x[0 .. count); several lanes may end with
// the same ones. In the first ORDERED exchanges every lane keeps the lower half: the caller has ordered its values so.
template <int N, int FIRST, int SPAN, int ORDERED = 0>
FASTCAPS_DEVICE void scatter_sums(float* x, int lane) {
  static_assert(ORDERED == 0 || N % 2 == 0);
  if constexpr (SPAN > 1) {
    constexpr int kMask = FIRST * SPAN / 2, kHalf = (N + 1) / 2, kLess = ORDERED > 0 ? ORDERED - 1 : 0;
    if constexpr (N == 1) {
      x[0] += shuffle_xor(x[0], kMask);
    } else {
      const bool upper = ORDERED == 0 && (lane & kMask) != 0;
      FASTCAPS_UNROLL
      for (int k = 0; k < kHalf; ++k) {
        const float low = x[k], high = k + kHalf < N ? x[k + kHalf] : 0.0f;
        x[k] = (upper ? high : low) + shuffle_xor(upper ? low : high, kMask);
      }
    }
    scatter_sums<kHalf, FIRST, SPAN / 2, kLess>(x, lane);
  }
}

// Which of the N sums a lane ends with: `count` of them from `begin` on.
template <int N, int FIRST, int SPAN, int ORDERED = 0>
FASTCAPS_DEVICE void scattered(int lane, int& begin, int& count) {
  begin = 0, count = N;
  if constexpr (SPAN > 1) {
    constexpr int kHalf = (N + 1) / 2, kLess = ORDERED > 0 ? ORDERED - 1 : 0;
    scattered<kHalf, FIRST, SPAN / 2, kLess>(lane, begin, count);
    if (N > 1 && ORDERED == 0 && (lane & FIRST * SPAN / 2)) begin += kHalf;
    if (begin + count > N) count = N - begin;  // values past the end were zero
  }
}

}  // namespace fastcaps::gpu
