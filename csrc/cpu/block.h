// A block: units of children for a few rows, with their poses, gates and, if they fit, votes. Unit j of row t has slot
// t * block_children + j. Forward and backward walk over children in such blocks.
#pragma once

#include "votes.h"
#include "weights.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

template <class T, class Pose, Lanes kLane, class Call>
struct Block {
  using V = Vec<T>;
  static constexpr bool kChildLanes = kLane != Lanes::kPositions;
  using X = std::conditional_t<kChildLanes, T, V>;  // one of a row's values
  using Weights = WeightsOf<T, kLane, Pose::kDynamic || Pose::kTiles != 1>;
  using Weight = typename Weights::Weight;
  using Units = UnitsOf<T, kChildLanes>;
  static constexpr int n = kLanes<T>;
  static constexpr bool kUnitsShare = kLane == Lanes::kSharing && Pose::kUnits > 1;
  // Whether each vote is used as soon as it is made: not if those of several parents, units or tiles are made together,
  // or child by child.
  bool made_one_by_one(int64_t rows) const {
    if (kLane == Lanes::kChildren) return !votes_by_child;
    return Pose::kTogether == 1 && !kUnitsShare && (Pose::kTiles == 1 || rows == 1);
  }
  const Call& call;
  const Votes& in;
  const Schedule& schedule;
  const Pose pose;
  Weights weights;
  const int64_t slots, CE, CD;
  Tile<T>* tiles;  // the rows' positions
  V *P, *gates, *votes_kept;
  T* votes_by_child;  // of a unit for a parent; null where matrices are transposed
  Range range{};      // the children of the walk

  Block(const Call& call, const Pose& pose, Arena& arena, int64_t rows)
      : call(call),
        in(call.votes),
        schedule(call.schedule),
        pose(pose),
        weights(call.votes, arena, schedule.block_children),
        slots(schedule.block_rows * schedule.block_children),
        CE(int64_t(pose.C) * pose.E),
        CD(in.child_size()),
        tiles(arena.take<Tile<T>>(rows)),
        P(arena.take<V>(slots * CD)),
        gates(arena.take<V>(slots)),
        votes_kept(arena.take<V>(schedule.keep_votes ? slots * in.M * CE : CE)),
        votes_by_child(makes_votes_by_child() ? arena.take<T>(n * CE) : nullptr) {}

  // A child's own large matrix would take longer to transpose to lanes than to read.
  bool makes_votes_by_child() const {
    return kLane == Lanes::kChildren && Pose::kDynamic && in.weight && in.D * in.E >= kLargeMatrix && in.E % n == 0 &&
           !in.matrices.transposed();
  }

  int64_t children_at_once() const { return schedule.block_children * Units::kUnit; }
  // Where one of the schedule's ranges of `all` children begins: at a whole unit, so that only the last unit has empty
  // lanes.
  int64_t edge(int64_t at, int64_t all) const {
    return min(at * ((all + Units::kUnit - 1) / Units::kUnit) / schedule.ranges * Units::kUnit, all);
  }
  // Units of a block that begins with child q of the range.
  int64_t units_from(int64_t q) const {
    return (min(children_at_once(), range.count - q) + Units::kUnit - 1) / Units::kUnit;
  }
  int64_t child_of(int64_t first, int64_t j) const { return first + j * Units::kUnit; }
  V* votes_of(int64_t m, int64_t slot) const { return votes_kept + (m * slots + slot) * CE; }

  // Poses and gates of `count` units from child q on, as row t of the block sees them.
  void load(const Tile<T>& tile, int64_t t, int64_t q, int64_t count) {
    const int64_t slot = t * schedule.block_children;
    Units::gather(in, tile, in.storage, in.children, in.gate, range, q, count, P + slot * CD, gates + slot);
  }
  // The same, with zeros for every child whose gate is 0: forward they add nothing, so finite ones may be zeroed too.
  void load_silenced(const Tile<T>& tile, int64_t t, int64_t q, int64_t count) {
    const int64_t slot = t * schedule.block_children;
    load(tile, t, q, count);
    if (in.gate.data) silence<T>(P + slot * CD, gates + slot, count, CD);
  }

  // Makes all votes of a block, to be kept. If a parent's votes have few values, those of several parents are made at
  // once: each value read from a pose then serves many products.
  void make_votes(int64_t count, int64_t rows) {
    if constexpr (kLane == Lanes::kChildren && Pose::kDynamic)
      if (votes_by_child) return make_votes_by_child(count, rows);
    constexpr int kMany = kLane == Lanes::kChildren ? 1 : Pose::kTogether;  // matrices are transposed one by one
    int64_t m = 0;
    for (; m + kMany <= in.M; m += kMany) make_votes<kMany>(count, rows, m);
    for (; m < in.M; ++m) make_votes<1>(count, rows, m);
  }
  template <int kMany>
  void make_votes(int64_t count, int64_t rows, int64_t m) {
    const auto make = [&](auto units, int64_t slot, int64_t next_slot, int64_t j) FASTCAPS_LAMBDA {
      const Weight* W = weights.matrix(j, m);
      const Weight* bias = weights.bias_of(j, m);
      const auto keep = [&](int unit, int which, int k, V v)
                            FASTCAPS_LAMBDA { votes_of(m + which, slot + unit * next_slot)[k] = v; };
      if constexpr (Pose::kUnits > 1)
        votes_of_rows<units, kMany, T>(pose, P + slot * CD, next_slot * CD, W, weights.layout.parent, bias,
                                       weights.bias_m, weights.after(j, m), keep);
      else
        votes<T>(pose, P + slot * CD, W, bias, [&](int k, V v) FASTCAPS_LAMBDA { keep(0, 0, k, v); });
    };
    const int64_t stride = schedule.block_children;
    if constexpr (kUnitsShare)
      for (int64_t t = 0; t < rows; ++t)
        each_group<Pose::kUnits>(count, [&](int64_t j, auto units) { make(units, t * stride + j, 1, j); });
    else
      for (int64_t j = 0; j < count; ++j)
        each_group<Pose::kTiles>(rows, [&](int64_t t, auto tiles) { make(tiles, t * stride + j, stride, j); });
  }

  static constexpr int kAhead = 2048;  // values; a child's matrices follow one another

  // The same child by child: a vector holds part of a matrix row, and the votes are transposed instead of the matrix.
  void make_votes_by_child(int64_t count, int64_t rows) {
    const int64_t row = in.matrices.row;
    for (int64_t j = 0; j < count; ++j)
      for (int64_t m = 0; m < in.M; ++m)
        for (int64_t t = 0; t < rows; ++t) {
          const int64_t slot = t * schedule.block_children + j;
          const T* lane[n];
          for (int r = 0; r < n; ++r) {
            T* mine = votes_by_child + r * CE;
            const auto meet = [&](const auto* W) FASTCAPS_LAMBDA {
              product<1, Pose::kCols, V>(
                  pose.C, pose.E / n, pose.D,
                  [&](int c, int d) FASTCAPS_LAMBDA { return broadcast<T>(P[slot * CD + c * pose.D + d][r]); },
                  [&](int d, int e) FASTCAPS_LAMBDA {
                    __builtin_prefetch(W + d * row + e * n + kAhead);
                    return load_as<T>(W + d * row + e * n);
                  },
                  FromZero{}, [&](int c, int e, V v) FASTCAPS_LAMBDA { store<T>(mine + c * pose.E + e * n, v); });
            };
            lane[r] = weights.as_it_lies(j, r, m, meet) ? mine : nullptr;
          }
          V* votes = votes_of(m, slot);
          gather_rows<T>(lane, CE, votes);
          const Weight* bias = weights.bias_of(j, m);
          for (int k = 0; bias && k < CE; ++k) votes[k] += bias[k];
        }
  }
};

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
