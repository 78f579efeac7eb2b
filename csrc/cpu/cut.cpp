#include "cut.h"

#include <algorithm>

namespace fastcaps {
namespace {

// Sizes that the figures in docs/performance.md were measured with. Votes of a block live in the second-level cache
// (1 MiB a core on the machines measured), beside the weights and parents that meet them.
constexpr int64_t kVoteBytes = 256 << 10;        // votes kept at once, if a single child's do not need more
constexpr int64_t kVoteBytesMost = 1 << 20;      // beyond this a child's votes are computed twice instead
constexpr int64_t kStayBytes = 3 << 19;          // a row's children, with their votes, from turn to turn
constexpr int64_t kParentBytes = 1 << 20;        // parents of the tiles of a block
constexpr int64_t kWeightBytes = 64 << 10;       // a child's matrices beyond this are shared by several tiles
constexpr int64_t kPartialShare = 64;            // partial results of all items together: a part of all votes' bytes,
constexpr int64_t kPartialBytesLeast = 1 << 20;  // within these bounds
constexpr int64_t kPartialBytes = 32 << 20;
constexpr int64_t kWeightParts = 64 << 20;       // weight gradients of items that share their weights, all together
constexpr int64_t kItems = 32;                   // enough to keep the threads of a large machine busy
constexpr int64_t kOperationsPerItem = 1 << 17;  // less than this is not worth an item of its own

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

double votes_bytes(const Geometry& g, const Sizes& sizes) {
  return double(g.positions()) * double(g.children()) * double(g.parents()) * double(sizes.number);
}

// Bytes for partial results of a kind.
int64_t partial_bytes(const Geometry& g, const Sizes& sizes) {
  return int64_t(std::clamp(votes_bytes(g, sizes) / kPartialShare, double(kPartialBytesLeast), double(kPartialBytes)));
}

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

// Bytes of what is kept of a unit of children, one row of positions: poses, votes, logits.
int64_t unit_bytes(const Geometry& g, const Sizes& sizes) {
  return sizes.lanes * sizes.number * (g.child_pose() + (sizes.identity || sizes.folded ? 0 : g.parents()) + g.M + 2);
}

int64_t units(const Geometry& g, const Sizes& sizes, bool child_lanes) {
  return child_lanes ? ceil_div(g.children(), sizes.lanes) : g.children();
}

// Every row's children fit in cache, for all turns.
bool fit(const Geometry& g, const Sizes& sizes, bool child_lanes) {
  return sizes.turns > 1 && units(g, sizes, child_lanes) * unit_bytes(g, sizes) <= kStayBytes;
}

// Children in the lanes that have all the same weights, which stay scalars: where positions are too few, or where the
// votes of one position's children fit in cache and those of a whole tile do not.
bool share_weights(const Geometry& g, const Sizes& sizes) {
  if (!sizes.shared || g.children() / g.G < sizes.lanes) return false;
  const bool stays = g.G == 1 && g.children() >= 4 * sizes.lanes && fit(g, sizes, true) && !fit(g, sizes, false);
  return g.positions() * 2 <= sizes.lanes || stays;
}

// Too few positions to fill the lanes: children do. Where each has its own weights, that is at the price of turning
// them to lanes as they are met.
bool use_child_lanes(const Geometry& g, const Sizes& sizes) {
  return share_weights(g, sizes) || (!sizes.folded && g.positions() * 4 <= sizes.lanes && g.children() >= sizes.lanes);
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

// Children that share their weights: nothing is saved by meeting several rows at once, and results cost a sum over the
// lanes at the end of every block, so that a block should be long, if need be too long to be kept.
void cut_block_of_sharing_lanes(const Geometry& g, const Sizes& sizes, Cut& cut) {
  cut.child_lanes = cut.shared_weights = true;
  cut.block_rows = 1;
  const int64_t vec = sizes.lanes * sizes.number, votes = g.parents() * vec, least = sizes.results > 0 ? 4 : 1;
  cut.keep_votes = least * votes <= kVoteBytesMost;
  cut.block_children =
      std::clamp<int64_t>(cut.keep_votes ? kVoteBytesMost / votes : kVoteBytes / (vec * g.M), least, 8);
}

// Where all children of a row fit, they are met once for all turns. Votes that are the children themselves, or that
// nobody makes, are kept by nobody else.
void let_children_stay(const Geometry& g, const Sizes& sizes, Cut& cut) {
  if (sizes.identity || sizes.folded) {
    cut.keep_votes = false;
    cut.block_children =
        std::clamp<int64_t>(2 * kVoteBytes / std::max<int64_t>(cut.block_rows * unit_bytes(g, sizes), 1), 1, 16);
  }
  cut.stay =
      cut.block_rows == 1 && fit(g, sizes, cut.child_lanes) && (g.G == 1 || !(cut.shared_weights || sizes.folded));
  if (!cut.stay) return;
  cut.keep_votes = !sizes.identity && !sizes.folded;
  cut.block_children = units(g, sizes, cut.child_lanes);
}

int64_t operations(const Geometry& g, int64_t positions, int64_t children) {
  return positions * children * g.M * (g.C * g.D * g.E + 2 * g.C * g.E);
}

}  // namespace

bool folds(const Geometry& g, bool shared, bool bias) { return shared && !bias && g.children() / g.G >= 8; }

Cut cut_forward(const Geometry& g, const Sizes& sizes) {
  Cut cut;
  cut.folded = sizes.folded;
  const int64_t tiles = ceil_div(g.positions(), sizes.lanes), I = g.children();
  if (share_weights(g, sizes)) {
    cut_block_of_sharing_lanes(g, sizes, cut);
    cut.groups = g.positions();
  } else if (use_child_lanes(g, sizes)) {
    cut_block_of_child_lanes(g, sizes, cut);
  } else {
    cut_block(g, sizes, tiles, 0, cut);
    cut.groups = ceil_div(tiles, cut.block_rows);
    cut.rows_per_group = cut.block_rows = ceil_div(tiles, std::max<int64_t>(cut.groups, 1));
  }
  let_children_stay(g, sizes, cut);
  const int64_t positions = cut.rows_per_group * (cut.child_lanes ? 1 : sizes.lanes);
  const int64_t row_bytes = sizes.results * sizes.number * (cut.child_lanes ? 1 : sizes.lanes);
  const int64_t most = std::min({
      ceil_div(kItems, std::max<int64_t>(cut.groups, 1)),
      cut.child_lanes ? ceil_div(I, sizes.lanes) : I / std::max<int64_t>(cut.block_children, 2 * sizes.lanes),
      operations(g, positions, I) / kOperationsPerItem,
      partial_bytes(g, sizes) / std::max<int64_t>(cut.rows() * row_bytes, 1),
  });
  cut.chunks = std::max<int64_t>(most, 1);
  if (cut.chunks > 1) cut.stay = false;
  return cut;
}

// Groups of samples each need their own weight gradient, ranges of children their own parents' gradient: the cheapest
// mix of both that makes enough items and wastes few lanes.
Cut cut_backward(const Geometry& g, const Sizes& sizes) {
  const int64_t L = g.Ho * g.Wo, lanes = sizes.lanes, number = sizes.number;
  const double weights = double(g.G * g.M * g.D * g.E) * double(number);
  const int64_t partials = std::min(2 * partial_bytes(g, sizes), kPartialBytes);
  const double own = std::max(1.0, double(sizes.own * number));
  const double work = 3.0 * double(operations(g, g.positions(), g.children()));
  const double weight_parts = std::min(double(kWeightParts), votes_bytes(g, sizes) / 32);
  Cut best;
  double best_cost = 0;
  Sizes once = sizes;
  once.turns = 1;                                     // nothing stays from turn to turn
  const bool child_lanes = use_child_lanes(g, once);  // then all positions are one group
  const bool by_group = (sizes.folded || (child_lanes && share_weights(g, once))) && g.G > 1;
  const bool owned = g.G % g.N == 0 || by_group;  // a range's weights are nobody else's
  const int64_t most_ranges = by_group ? g.G : child_lanes ? ceil_div(g.N, lanes) : g.N;
  const int64_t most_groups = child_lanes ? 1 : std::clamp<int64_t>(g.B, 1, kItems);
  for (int64_t wanted = 1; wanted <= most_groups; wanted *= 2) {
    Cut cut;
    cut.samples = ceil_div(g.B, wanted);
    cut.groups = cut.samples ? ceil_div(g.B, cut.samples) : 0;
    cut.rows_per_group = ceil_div(cut.samples * L, lanes);
    const double filled = child_lanes ? 1 : double(g.positions()) / double(std::max<int64_t>(cut.rows() * lanes, 1));
    if (child_lanes) {
      cut_block_of_child_lanes(g, once, cut);
      if (cut.shared_weights) cut_block_of_sharing_lanes(g, once, cut);
    }
    const double row = double(sizes.results * number) * double(child_lanes ? 1 : lanes);
    const double room = std::max(1.0, row * double(cut.rows()));
    cut.chunks = std::max<int64_t>(
        1, std::min<int64_t>({ceil_div(kItems / 2, std::max<int64_t>(cut.groups, 1)), most_ranges,
                              int64_t(work / 3.0 / double(std::max<int64_t>(cut.groups, 1) * kOperationsPerItem)),
                              int64_t(double(partials) / room),
                              int64_t(double(partials) / own) / std::max<int64_t>(cut.groups, 1),
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
  if (sizes.identity) best.keep_votes = false;
  if (sizes.folded) {  // row by row, and no votes; what is kept of a unit of children is its shares, of every turn
    best.folded = true;
    best.keep_votes = false;
    best.block_rows = 1;
    best.block_children = std::clamp<int64_t>(kVoteBytesMost / (g.M * lanes * number * 2 * sizes.turns), 1, 8);
  }
  best.weight_parts = owned ? best.groups : best.items();
  return best;
}

}  // namespace fastcaps
