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
constexpr int64_t kItems = 32;                   // enough to keep the threads of a large machine busy
constexpr int64_t kOperationsPerItem = 1 << 17;  // less than this is not worth an item of its own

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void cut_block(const Geometry& g, int64_t vec, int64_t number, int64_t tiles, int64_t per_child, Cut& cut) {
  const int64_t votes = g.parents() * vec;
  const int64_t weights = g.M * g.D * g.E * number;
  cut.block_tiles = weights > kWeightBytes ? std::clamp<int64_t>(kParentBytes / (3 * votes), 1, 4) : 1;
  cut.block_tiles = std::clamp<int64_t>(cut.block_tiles, 1, std::max<int64_t>(tiles, 1));
  cut.keep_votes = votes * cut.block_tiles <= kVoteBytesMost;
  cut.block_children = std::clamp<int64_t>(kVoteBytes / (cut.block_tiles * (votes + per_child)), 1, 8);
  if (!cut.keep_votes) cut.block_children = 4;
}

// Too few positions to fill the lanes: children do, at the price of turning weights to lanes as they are met.
bool use_child_lanes(const Geometry& g, int64_t lanes) { return g.positions() * 4 <= lanes && g.children() >= lanes; }

void cut_block_of_child_lanes(const Geometry& g, int64_t vec, Cut& cut) {
  const int64_t votes = g.parents() * vec * g.positions();
  cut.child_lanes = true;
  cut.tiles_per_group = 1;
  cut.block_tiles = std::max<int64_t>(g.positions(), 1);
  cut.keep_votes = votes <= 2 * kVoteBytesMost;
  cut.block_children = 1;
}

int64_t operations(const Geometry& g, int64_t positions, int64_t children) {
  return positions * children * g.M * (g.C * g.D * g.E + 2 * g.C * g.E);
}

}  // namespace

Cut cut_forward(const Geometry& g, int64_t lanes, int64_t number) {
  Cut cut;
  const int64_t tiles = ceil_div(g.positions(), lanes), vec = lanes * number, I = g.children();
  if (use_child_lanes(g, lanes)) {
    cut_block_of_child_lanes(g, vec, cut);
    cut.groups = tiles;
  } else {
    cut_block(g, vec, number, tiles, 0, cut);
    cut.groups = ceil_div(tiles, cut.block_tiles);
    cut.tiles_per_group = cut.block_tiles = ceil_div(tiles, std::max<int64_t>(cut.groups, 1));
  }
  const int64_t positions = cut.child_lanes ? g.positions() : lanes * cut.tiles_per_group;
  const int64_t most = std::min({
      ceil_div(kItems, std::max<int64_t>(cut.groups, 1)),
      cut.child_lanes ? ceil_div(I, lanes) : I / std::max<int64_t>(cut.block_children, 2 * lanes),
      operations(g, positions, I) / kOperationsPerItem,
      kPartialBytes / std::max<int64_t>(tiles * g.parents() * vec, 1),
  });
  cut.chunks = std::max<int64_t>(most, 1);
  return cut;
}

// Groups of samples each need their own weight gradient, ranges of children their own parents' gradient: the cheapest
// mix of both that makes enough items and wastes few lanes.
Cut cut_backward(const Geometry& g, int64_t lanes, int64_t number) {
  const int64_t L = g.Ho * g.Wo, vec = lanes * number;
  const double weights = double(g.G * g.M * g.D * g.E) * double(number);
  const bool owned = g.G % g.N == 0;  // a child type's weights are nobody else's
  const double work = 3.0 * double(operations(g, g.positions(), g.children()));
  Cut best;
  double best_cost = 0;
  const bool child_lanes = use_child_lanes(g, lanes);  // then all positions are one tile, one group
  const int64_t most_groups = child_lanes ? 1 : std::clamp<int64_t>(g.B, 1, kItems);
  for (int64_t wanted = 1; wanted <= most_groups; wanted *= 2) {
    Cut cut;
    cut.samples = ceil_div(g.B, wanted);
    cut.groups = cut.samples ? ceil_div(g.B, cut.samples) : 0;
    cut.tiles_per_group = ceil_div(cut.samples * L, lanes);
    const double room = double(g.parents() * vec) * double(std::max<int64_t>(cut.tiles(), 1));
    cut.chunks = std::max<int64_t>(
        1, std::min<int64_t>({ceil_div(kItems / 2, std::max<int64_t>(cut.groups, 1)),
                              child_lanes ? ceil_div(g.N, lanes) : g.N,
                              int64_t(work / 3.0 / double(std::max<int64_t>(cut.groups, 1) * kOperationsPerItem)),
                              int64_t(double(2 * kPartialBytes) / room)}));
    const double filled = double(g.positions()) / double(std::max<int64_t>(cut.tiles() * lanes, 1));
    const double busy = std::min<double>(1.0, double(cut.items()) / 8.0);
    const double parts = double(owned ? cut.groups : cut.items());
    // Bytes weigh as much as 8 multiply-adds each: about what a core computes while memory moves one.
    const double cost = work / std::max(filled * busy, 1e-9) + 8.0 * (parts * weights + double(cut.chunks) * room);
    if (best_cost == 0 || cost < best_cost) {
      best_cost = cost;
      best = cut;
    }
  }
  if (child_lanes) {
    cut_block_of_child_lanes(g, vec, best);
    return best;
  }
  cut_block(g, vec, number, best.tiles_per_group, g.M * g.D * g.E * number, best);
  return best;
}

}  // namespace fastcaps
