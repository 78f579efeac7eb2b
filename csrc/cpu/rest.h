// The rest that rounding leaves in a Gaussian's moments (gaussian.h): before the gradients, another sweep over a row's
// children sums w and w (V - means), from the same values that the gradients will use.
#pragma once

#include "backward.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

// For iteration k of the current row, whose parents are in `state`.
template <class Item>
void find_rest(Item& item, int64_t k, typename Item::X* state) {
  const Votes& in = item.in;
  const bool by_group = Item::kSharing && in.G > 1;
  for (int64_t c = 0; c < (by_group ? in.G : 1); ++c) {
    item.range = by_group ? Range{c, 1, in.G, in.I / in.G} : Range{0, in.N, in.N, in.I};
    for (int64_t first = 0; first < item.range.count; first += item.children_at_once())
      add_rest(item, k, first, item.units_from(first));
  }
  item.passes[k].take_rest(state, item.scratch);
}

template <class Item>
void add_rest(Item& item, int64_t k, int64_t first, int64_t units) {
  using V = typename Item::V;
  using T = typename Item::Number;
  const Votes& in = item.in;
  const auto& pass = item.passes[k];
  const auto* state = item.state(0, k);
  item.block = {first, units, 0, 1};
  item.weights.enter(item.range, first, units);
  item.load_silenced(item.tiles[0], 0, first, units);
  if (pass.shares_known())
    item.take_known_shares(k);
  else
    item.template score<Source::kMade>(k);
  for (int64_t j = 0; j < units; ++j) {
    V* row = item.scores_of(k) + j * in.M;
    if (!pass.shares_known()) softmax<T>(row, in.M, item.highest[k * item.slots + j], item.gates[j]);
    for (int64_t m = 0; m < in.M; ++m) {
      const V w = item.gates[j] == 0 ? V{} : row[m];
      votes<T>(item.pose, item.P + j * item.CD, item.weights.matrix(j, m), item.weights.bias_of(j, m),
               [&](int at, V v) FASTCAPS_LAMBDA { item.dV[at] = v; });
      auto *count = pass.count(item.scratch) + m, *rest = pass.rest(item.scratch) + m * item.CE;
      if constexpr (Item::kChildLanes) {
        zero(item.votes_kept, item.CE);
        pass.add_rest(item.pose, state, m, w, item.dV, item.votes_kept);
        add_lane_sums<T>(item.votes_kept, item.CE, rest);
        add_lane_sums<T>(&w, 1, count);
      } else {
        pass.add_rest(item.pose, state, m, w, item.dV, rest);
        *count += w;
      }
    }
  }
}

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
