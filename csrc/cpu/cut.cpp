#include "cut.h"

#include <algorithm>

namespace fastcaps {
namespace {

// Sizes that the figures in docs/performance.md were measured with. Votes of a block live in the second-level cache
// (1 MiB a core on the machines measured), beside the weights and parents that meet them.
constexpr int64_t kVoteBytes = 256 << 10;        // votes kept at once, if a single child's do not need more
constexpr int64_t kVoteBytesMost = 1 << 20;      // beyond this a child's votes are computed twice instead
constexpr int64_t kParentBytes = 1 << 20;        // parents of the tiles of a block
constexpr int64_t kWeightBytes = 64 << 10;       // a child's matrices beyond this are shared by several tiles
constexpr int64_t kPartialBytes = 16 << 20;      // partial results of all items together
constexpr int64_t kWeightParts = 64 << 20;       // weight gradients of items that share their weights, all together
constexpr int64_t kItems = 32;                   // enough to keep the threads of a large machine busy
constexpr int64_t kOperationsPerItem = 1 << 17;  // less than this is not worth an item of its own

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void cut_block(const Geometry& g, const Sizes& sizes, int64_t rows, int64_t per_child, Cut& cut) {
  const int64_t vec = sizes.lanes * sizes.number, votes = g.parents() * vec;
  const int64_t weights = g.M * g.D * g.E * sizes.number;
  const int64_t parents = votes + (sizes.state + sizes.results) * vec;
  cut.block_rows = weights > kWeightBytes ? std::clamp<int64_t>(kParentBytes / parents, 1, 4) : 1;
  cut.block_rows = std::clamp<int64_t>(cut.block_rows, 1, std::max<int64_t>(rows, 1));
  cut.keep_votes = votes * cut.block_rows <= kVoteBytesMost;
  cut.block_children = std::clamp<int64_t>(kVoteBytes / (cut.block_rows * (votes + per_child)), 1, 8);
  if (!cut.keep_votes) cut.block_children = 4;
}

// Children in the lanes that have all the same weights, which stay scalars.
bool share_weights(const Geometry& g, const Sizes& sizes) {
  return sizes.shared && g.positions() * 2 <= sizes.lanes && g.children() / g.G >= sizes.lanes;
}

// Too few positions to fill the lanes: children do. Where each has its own weights, that is at the price of turning
// them to lanes as they are met.
bool use_child_lanes(const Geometry& g, const Sizes& sizes) {
  return share_weights(g, sizes) || (g.positions() * 4 <= sizes.lanes && g.children() >= sizes.lanes);
}

void cut_block_of_child_lanes(const Geometry& g, const Sizes& sizes, Cut& cut) {
  cut.child_lanes = true;
  cut.shared_weights = share_weights(g, sizes);
  cut.groups = g.positions() > 0 ? 1 : 0;
  cut.rows_per_group = cut.block_rows = std::max<int64_t>(g.positions(), 1);
  const int64_t votes = g.parents() * sizes.lanes * sizes.number * cut.block_rows;
  cut.keep_votes = votes <= 2 * kVoteBytesMost;
  cut.block_children = cut.keep_votes ? std::clamp<int64_t>(kVoteBytes / votes, 1, 8) : 4;
}

// Votes that are the children themselves are kept by nobody else; where all of them fit, they are gathered once for all
// turns.
void keep_children(const Geometry& g, const Sizes& sizes, Cut& cut) {
  const int64_t units = cut.child_lanes ? ceil_div(g.children(), sizes.lanes) : g.children();
  const int64_t bytes = units * cut.block_rows * sizes.lanes * sizes.number * (g.child_pose() + g.M + 2);
  cut.keep_votes = false;
  if (bytes <= kVoteBytesMost) cut.block_children = units;
}

int64_t operations(const Geometry& g, int64_t positions, int64_t children) {
  return positions * children * g.M * (g.C * g.D * g.E + 2 * g.C * g.E);
}

}  // namespace

Cut cut_forward(const Geometry& g, const Sizes& sizes) {
  Cut cut;
  const int64_t tiles = ceil_div(g.positions(), sizes.lanes), I = g.children();
  if (use_child_lanes(g, sizes)) {
    cut_block_of_child_lanes(g, sizes, cut);
  } else {
    cut_block(g, sizes, tiles, 0, cut);
    cut.groups = ceil_div(tiles, cut.block_rows);
    cut.rows_per_group = cut.block_rows = ceil_div(tiles, std::max<int64_t>(cut.groups, 1));
  }
  if (sizes.identity) keep_children(g, sizes, cut);
  const int64_t positions = cut.child_lanes ? g.positions() : sizes.lanes * cut.rows_per_group;
  const int64_t row_bytes = sizes.results * sizes.number * (cut.child_lanes ? 1 : sizes.lanes);
  const int64_t most = std::min({
      ceil_div(kItems, std::max<int64_t>(cut.groups, 1)),
      cut.child_lanes ? ceil_div(I, sizes.lanes) : I / std::max<int64_t>(cut.block_children, 2 * sizes.lanes),
      operations(g, positions, I) / kOperationsPerItem,
      kPartialBytes / std::max<int64_t>(cut.rows() * row_bytes, 1),
  });
  cut.chunks = std::max<int64_t>(most, 1);
  return cut;
}

// Groups of samples each need their own weight gradient, ranges of children their own parents' gradient: the cheapest
// mix of both that makes enough items and wastes few lanes.
Cut cut_backward(const Geometry& g, const Sizes& sizes) {
  const int64_t L = g.Ho * g.Wo, lanes = sizes.lanes, number = sizes.number;
  const double weights = double(g.G * g.M * g.D * g.E) * double(number);
  const bool owned = g.G % g.N == 0;  // a child type's weights are nobody else's
  const double work = 3.0 * double(operations(g, g.positions(), g.children()));
  const double votes = double(g.positions()) * double(g.children()) * double(g.parents()) * double(number);
  const double weight_parts = std::min(double(kWeightParts), votes / 32);
  Cut best;
  double best_cost = 0;
  const bool child_lanes = use_child_lanes(g, sizes);  // then all positions are one group
  const int64_t most_groups = child_lanes ? 1 : std::clamp<int64_t>(g.B, 1, kItems);
  for (int64_t wanted = 1; wanted <= most_groups; wanted *= 2) {
    Cut cut;
    cut.samples = ceil_div(g.B, wanted);
    cut.groups = cut.samples ? ceil_div(g.B, cut.samples) : 0;
    cut.rows_per_group = ceil_div(cut.samples * L, lanes);
    const double filled = child_lanes ? 1 : double(g.positions()) / double(std::max<int64_t>(cut.rows() * lanes, 1));
    if (child_lanes) cut_block_of_child_lanes(g, sizes, cut);
    const double room =
        double(sizes.results * number) * double(child_lanes ? 1 : lanes) * double(std::max<int64_t>(cut.rows(), 1));
    cut.chunks = std::max<int64_t>(
        1, std::min<int64_t>({ceil_div(kItems / 2, std::max<int64_t>(cut.groups, 1)),
                              child_lanes ? ceil_div(g.N, lanes) : g.N,
                              int64_t(work / 3.0 / double(std::max<int64_t>(cut.groups, 1) * kOperationsPerItem)),
                              int64_t(double(2 * kPartialBytes) / room),
                              owned ? kItems : std::max<int64_t>(2, int64_t(weight_parts / weights))}));
    const double busy = std::min<double>(1.0, double(cut.items()) / 8.0);
    const double parts = double(owned ? cut.groups : cut.items());
    // Bytes weigh as much as 8 multiply-adds each: about what a core computes while memory moves one.
    const double cost = work / std::max(filled * busy, 1e-9) + 8.0 * (parts * weights + double(cut.chunks) * room);
    if (best_cost == 0 || cost < best_cost) {
      best_cost = cost;
      best = cut;
    }
  }
  if (!child_lanes) cut_block(g, sizes, best.rows_per_group, g.M * g.D * g.E * number, best);
  return best;
}

}  // namespace fastcaps
