// One pass, backward, by recomputation. What is common to the passes is here: votes are made again, the gradient of
// each goes to its child (dP = dV W^T), its matrix (dW = P^T dV) and its bias.
//
// An item owns a group of samples and a range of child types n (with all their places in the window), so that nobody
// else writes the children's gradients it writes. It walks block by block of children, and for each block over all rows
// of its group, so that the gradient of those children's matrices is gathered on chip.
//
// What a pass is, its policy says (attention.h, pooling.h, gaussian.h), with X the type of a row's numbers:
//   prepare   the parents of a row and the gradients of its results, once for all items
//   listen    a vote against a parent: its logit, and what the gradients say to it
//   compete   from logits to shares and the logits' gradients; returns the gate's
//   gradient  the vote's gradient, and what the vote adds to its parent's
//   finish    the parents' gradients are written
#pragma once

#include "votes.h"
#include "weights.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

template <class T, class Pose, Lanes kLane, template <class, class> class Policy>
struct BackwardItem {
  using V = Vec<T>;
  static constexpr bool kChildLanes = kLane != Lanes::kPositions;
  using X = std::conditional_t<kChildLanes, T, V>;
  using Rule = Policy<T, X>;
  using Call = BackwardCall<typename Rule::Operands>;
  using Weight = typename WeightsOf<T, kLane>::Weight;
  using Sits = Seats<T, kChildLanes>;
  static constexpr int n = kLanes<T>;
  // dW of vector poses is a matmul over the lanes: poses and vote gradients turned back into rows of scalars. Poses
  // with small matrices keep a vector over the lanes for each weight instead and add the lanes up once, at the end.
  static constexpr bool kByRows = Pose::kWeightGradientByRows && kLane != Lanes::kChildren;

  const Call& call;
  const Geometry& g;
  const Cut& cut;
  const Pose pose;
  const WeightsOf<T, kLane> weights;
  const Rule rule;
  const int64_t CE, CD, DE, slots, state_size, result_size;
  const bool shared;      // children of a walk have all the same matrices,
  const bool one_matrix;  // of which a lane's sums are kept to its end
  V *P, *dP, *gates, *rows, *highest, *votes_kept, *dV, *dW_lanes, *local;
  T *P_rows, *dV_rows;
  X* scratch;
  Tile<T>* tiles;
  const X* states = nullptr;  // of the item's group, made by prepare()
  X* results = nullptr;
  int64_t item = 0;
  Range range{};  // of children of this item: some types, at every place in the window

  BackwardItem(const Call& call_, const Pose& pose_, Arena& arena)
      : call(call_),
        g(call.in.geometry),
        cut(call.cut),
        pose(pose_),
        weights(call.in, arena),
        rule(call),
        CE(g.parent_pose()),
        CD(g.child_pose()),
        DE(g.D * g.E),
        slots(cut.block_rows * cut.block_children),
        state_size(Rule::state_numbers(call)),
        result_size(Rule::result_numbers(g, g.M)),
        shared(kLane == Lanes::kSharing || (kLane == Lanes::kPositions && g.G == 1)),
        one_matrix(shared && !kByRows && g.M * DE * int64_t(sizeof(V)) <= kOneMatrixBytes) {
    tiles = arena.take<Tile<T>>(cut.rows_per_group);
    P = arena.take<V>(slots * CD);
    dP = arena.take<V>(slots * CD);
    gates = arena.take<V>(slots);
    rows = arena.take<V>(Rule::kRows * slots * g.M);
    highest = arena.take<V>(slots);
    votes_kept = arena.take<V>(cut.keep_votes ? slots * g.M * CE : CE);
    dV = arena.take<V>(CE);
    const int64_t matrices = kLane == Lanes::kChildren || (g.G == 1 && !one_matrix) ? 1
                             : one_matrix                                           ? g.M
                                                                                    : cut.block_children * g.M;
    dW_lanes = call.dweight && !kByRows ? arena.take<V>(matrices * DE) : nullptr;
    local = kChildLanes ? arena.take<V>(cut.block_rows * Rule::result_numbers(g, 1)) : nullptr;
    P_rows = call.dweight && kByRows ? arena.take<T>(slots * n * g.D) : nullptr;
    dV_rows = call.dweight && kByRows ? arena.take<T>(cut.block_rows * n * g.E) : nullptr;
    scratch = arena.take<X>(Rule::prepare_scratch(g));
  }

  // Where a row's lanes are; false where its group has ended before it.
  bool place(int64_t row, Tile<T>& tile) const {
    if (kChildLanes) {
      tile.place(g, row, row + 1);
      return true;
    }
    const int64_t size = cut.samples * g.Ho * g.Wo, group = row / cut.rows_per_group;
    const int64_t end = min((group + 1) * size, g.positions());
    const int64_t first = group * size + row % cut.rows_per_group * n;
    if (first < end) tile.place(g, first, end);
    return first < end;
  }

  void prepare(int64_t row) {
    if (place(row, tiles[0])) rule.prepare(tiles[0], row, static_cast<X*>(call.state) + row * state_size, scratch);
  }

  // The parents' gradients of one row: the chunks' parts in their order.
  void finish_row(int64_t row) {
    if (!place(row, tiles[0])) return;
    X* partial = static_cast<X*>(call.partial);
    X* sum = partial + row * result_size;
    for (int64_t chunk = 1; chunk < cut.chunks; ++chunk)
      for (int64_t k = 0; k < result_size; ++k) sum[k] += partial[(chunk * cut.rows() + row) * result_size + k];
    rule.finish(tiles[0], static_cast<const X*>(call.state) + row * state_size, sum);
  }

  void run(int64_t which) {
    item = which;
    const int64_t chunk = item % cut.chunks, group = item / cut.chunks, first_row = group * cut.rows_per_group;
    states = static_cast<const X*>(call.state) + first_row * state_size;
    results = call.partial ? static_cast<X*>(call.partial) + (chunk * cut.rows() + first_row) * result_size : nullptr;
    int64_t count = 0;
    while (count < cut.rows_per_group && place(first_row + count, tiles[count])) ++count;
    if (results) zero(results, count * result_size);
    T* dW = static_cast<T*>(call.dweight);
    if (dW) dW += (call.weight_parts == cut.groups ? group : item) * g.G * g.M * DE;
    T* dB = static_cast<T*>(call.dbias);
    if (dB) dB += item * call.bias_numbers;
    const int64_t type = chunk * g.N / cut.chunks, types = (chunk + 1) * g.N / cut.chunks - type;
    const int64_t places = g.window.kh * g.window.kw;
    if (kLane == Lanes::kSharing && g.G > 1) {  // one type after another: its places share weights
      for (int64_t n = type; n < type + types; ++n) {
        range = {n, 1, g.N, places};
        walk(count, dW, dB);
      }
    } else {
      range = {type, types, g.N, types * places};
      walk(count, dW, dB);
    }
  }

  // All children of the range, block by block, each over all rows.
  void walk(int64_t row_count, T* dW, T* dB) {
    const int64_t size = cut.block_children * Sits::kUnit;
    if (dW_lanes && one_matrix) zero(dW_lanes, g.M * DE);
    for (int64_t first = 0; first < range.count; first += size) {
      const int64_t count = (min(size, range.count - first) + Sits::kUnit - 1) / Sits::kUnit;
      if (dW && g.G == g.children()) clear_matrices(first, min(size, range.count - first), dW);
      for (int64_t t = 0; t < row_count; t += cut.block_rows)
        block(first, count, t, min(cut.block_rows, row_count - t), dW, dB);
      if (dW_lanes && !kChildLanes && !shared)
        for (int64_t j = 0; j < count; ++j)
          add_lane_sums<T>(dW_lanes + j * g.M * DE, g.M * DE, dW + weights.offset(range.child(first + j), 0));
    }
    if (dW_lanes && one_matrix) add_lane_sums<T>(dW_lanes, g.M * DE, dW + weights.offset(range.child(0), 0));
  }

  // A child with matrices of its own is met once: their gradient is cleared here, while it is about to be in cache.
  void clear_matrices(int64_t first, int64_t children, T* dW) {
    for (int64_t q = first; q < first + children; ++q) zero(dW + weights.offset(range.child(q), 0), g.M * DE);
  }

  // Units [0, count) of children from number `first` of the range on, for rows [t0, t0 + nt): slot t * block_children
  // + j.
  void block(int64_t first, int64_t count, int64_t t0, int64_t nt, T* dW, T* dB) {
    const int64_t stride = cut.block_children;
    for (int64_t t = 0; t < nt; ++t) {
      Sits::gather(g, tiles[t0 + t], call.in.storage, call.in.children, call.in.gate, range, first, count,
                   P + t * stride * CD, gates + t * stride);
      if (call.dchildren) zero(dP + t * stride * CD, count * CD);
    }
    const bool plain = rule.plain();
    if (plain) {
      share_plainly(count, t0, nt);
    } else {
      if (cut.keep_votes)
        listen<true>(first, count, t0, nt);
      else
        listen<false>(first, count, t0, nt);
      for (int64_t t = 0; t < nt; ++t)
        for (int64_t j = 0; j < count; ++j) compete(first + j * Sits::kUnit, t0 + t, t * stride + j);
    }
    if (P_rows)
      for (int64_t t = 0; t < nt; ++t)
        for (int64_t j = 0; j < count; ++j) {
          T* lane[n];
          for (int k = 0; k < n; ++k) lane[k] = P_rows + ((j * cut.block_rows + t) * n + k) * g.D;
          scatter_rows<false, T>(lane, g.D, P + (t * stride + j) * CD);
        }
    if (cut.keep_votes && !plain)
      gradients<true>(first, count, t0, nt, dW, dB);
    else
      gradients<false>(first, count, t0, nt, dW, dB);
    if (call.dchildren) add_child_gradients(first, count, t0, nt);
  }

  // Shares that no vote has a say in, and nobody asks for the gates' gradients.
  void share_plainly(int64_t count, int64_t t0, int64_t nt) {
    for (int64_t t = 0; t < nt; ++t) {
      const int64_t first = t * cut.block_children;
      if constexpr (Rule::kSilent)
        if (call.in.gate.data) silence<T>(P + first * CD, gates + first, count, CD);
      for (int64_t slot = first; slot < first + count; ++slot)
        for (int64_t m = 0; m < g.M; ++m) {
          V* row = rows + slot * g.M + m;
          for (int r = 1; r < Rule::kRows; ++r) row[r * slots * g.M] = V{};
          row[0] = gates[slot] * rule.plain_share(states + (t0 + t) * state_size, m);
        }
    }
  }

  void add_child_gradients(int64_t first, int64_t count, int64_t t0, int64_t nt) {
    const int64_t stride[6] = {g.H * g.W * g.N * CD, g.W * g.N * CD, g.N * CD, CD, g.D, 1};
    for (int64_t t = 0; t < nt; ++t)
      for (int64_t j = 0; j < count;) {
        const int64_t q = first + j * Sits::kUnit, run = Sits::neighbours(g, range, q, count - j);
        T* lane[n];
        Sits::find(g, tiles[t0 + t], static_cast<T*>(call.dchildren), stride, range, q, lane);
        scatter_rows<true, T>(lane, run * CD, dP + (t * cut.block_children + j) * CD);
        j += run;
      }
  }

  template <bool kKeep>
  void listen(int64_t first, int64_t count, int64_t t0, int64_t nt) {
    for (int64_t m = 0; m < g.M; ++m)
      for (int64_t j = 0; j < count; ++j) {
        const int64_t q = first + j * Sits::kUnit;
        const Weight* W = weights.matrix(range, q, m);
        const Weight* bias = weights.bias_of(range, q, m);
        for (int64_t t = 0; t < nt; ++t) {
          const int64_t slot = t * cut.block_children + j;
          V* kept = kKeep ? votes_kept + (m * slots + slot) * CE : nullptr;
          V* row = rows + slot * g.M + m;
          rule.template listen<kKeep>(pose, states + (t0 + t) * state_size, m, P + slot * CD, W, bias, kept, row,
                                      slots * g.M, highest[slot]);
          if constexpr (Rule::kBetas)
            row[slots * g.M] += rule.heard_evidence(states + (t0 + t) * state_size, m, Sits{}, range, q);
        }
      }
  }

  void compete(int64_t q, int64_t row, int64_t slot) {
    const V gate = gates[slot];
    V dgate = rule.compete(rows + slot * g.M, slots * g.M, highest[slot], gate);
    if constexpr (Rule::kBetas) dgate += rule.ignored_evidence(states + row * state_size, Sits{}, range, q);
    if constexpr (Rule::kSilent) {
      if (call.in.gate.data) {  // a broken child behind a gate of 0 gets nothing and gives nothing
        const auto broken = (gate == 0) & ((dgate - dgate) != 0);
        T any[n];
        store<T>(any, broken ? broadcast(T(1)) : V{});
        bool some = false;
        for (int r = 0; r < n; ++r) some = some || any[r] != 0;
        if (some) {
          dgate = broken ? V{} : dgate;
          const V whole = broken ? V{} : broadcast(T(1));
          for (int64_t k = 0; k < CD; ++k) P[slot * CD + k] = whole != 0 ? P[slot * CD + k] : V{};
          for (int64_t m = 0; m < g.M; ++m) {
            for (int r = 0; r < Rule::kRows; ++r) {
              V& number = rows[(r * slots + slot) * g.M + m];
              number = whole != 0 ? number : V{};
            }
            V* kept = votes_kept + (m * slots + slot) * CE;
            for (int64_t k = 0; cut.keep_votes && k < CE; ++k) kept[k] = whole != 0 ? kept[k] : V{};
          }
        }
      }
    }
    if (call.dgate) {
      const int64_t stride[4] = {g.H * g.W * g.N, g.W * g.N, g.N, 1};
      T* lane[n];
      Sits::find(g, tiles[row], static_cast<T*>(call.dgate), stride, range, q, lane);
      scatter_rows<true, T>(lane, 1, &dgate);
    }
  }

  // Where parent m of row t gathers its gradient: in the row's, or, where lanes are children, in the block's own.
  Planes<V> target(int64_t t0, int64_t t) const {
    if constexpr (kChildLanes)
      return Rule::planes(local + t * Rule::result_numbers(g, 1), g, 1);
    else
      return Rule::planes(results + (t0 + t) * result_size, g, g.M);
  }

  template <bool kKept>
  void gradients(int64_t first, int64_t count, int64_t t0, int64_t nt, T* dW, T* dB) {
    for (int64_t m = 0; m < g.M; ++m) {
      if (kChildLanes && results) zero(local, nt * Rule::result_numbers(g, 1));
      V* dW_shared = dW_lanes + (one_matrix ? m * DE : 0);  // of all children, where they share one
      for (int64_t j = 0; j < count; ++j) {
        const int64_t q = first + j * Sits::kUnit;
        const Weight* W = weights.matrix(range, q, m);
        const Weight* bias = weights.bias_of(range, q, m);
        V* dW_unit = shared ? dW_shared : dW_lanes + (kChildLanes ? 0 : (j * g.M + m) * DE);
        for (int64_t t = 0; t < nt; ++t) {
          const int64_t slot = t * cut.block_children + j;
          const X* state = states + (t0 + t) * state_size;
          const V* row = rows + slot * g.M + m;
          const V* vote = kKept ? votes_kept + (m * slots + slot) * CE : votes_kept;
          if (!kKept && rule.needs_vote()) rule.vote_again(pose, state, m, P + slot * CD, W, bias, votes_kept);
          rule.gradient(state, m, row, slots * g.M, vote, dV, target(t0, t), kChildLanes ? 0 : m);
          if (call.dchildren) add_child_gradient<T>(pose, dV, W, dP + slot * CD);
          if (dW_lanes) {
            const bool is_new = shared ? !one_matrix && j + t == 0 : t0 + t == 0;
            add_weight_gradient<T>(pose, P + slot * CD, dV, is_new, dW_unit);
          }
          if (dV_rows) {
            T* lane[n];
            for (int k = 0; k < n; ++k) lane[k] = dV_rows + (t * n + k) * g.E;
            scatter_rows<false, T>(lane, g.E, dV);
          }
          if (dB) add_bias_gradient(q, m, dB);
          if constexpr (Rule::kBetas) rule.add_betas(state, m, *row, gates[slot], Sits{}, range, q, item);
        }
        if constexpr (kByRows)
          if (dV_rows)
            add_weight_gradient_by_rows(P_rows + j * cut.block_rows * n * g.D, nt * n,
                                        dW + weights.offset(range.child(q), m));
        if (kLane == Lanes::kChildren && dW_lanes) {
          T* lane[n];
          for (int k = 0; k < n; ++k)
            lane[k] = q + k < range.count ? dW + weights.offset(range.child(q + k), m) : nullptr;
          scatter_rows<true, T>(lane, DE, dW_unit);
        }
      }
      if (dW_lanes && shared && !one_matrix)
        add_lane_sums<T>(dW_shared, DE, dW + weights.offset(range.child(first), m));
      if constexpr (kChildLanes)
        if (results)
          for (int64_t t = 0; t < nt; ++t) {
            const Planes<V> from = target(t0, t);
            const Planes<T> to = Rule::planes(results + (t0 + t) * result_size, g, g.M);
            for (int plane = 0; plane < from.poses; ++plane)
              add_lane_sums<T>(from.pose(plane, 0), CE, to.pose(plane, m));
            for (int plane = 0; plane < Rule::kResultNumbers; ++plane)
              add_lane_sums<T>(from.number(plane, 0), 1, to.number(plane, m));
          }
    }
  }

  void add_bias_gradient(int64_t q, int64_t m, T* dB) {
    const auto at = [&](int64_t k) { return dB + range.child(k) * weights.bias_i + m * weights.bias_m; };
    if constexpr (kLane == Lanes::kChildren) {
      T* lane[n];
      for (int k = 0; k < n; ++k) lane[k] = q + k < range.count ? at(q + k) : nullptr;
      scatter_rows<true, T>(lane, CE, dV);
    } else {
      add_lane_sums<T>(dV, CE, at(q));
    }
  }

  // dW[d, e] += sum over lanes of P[d] dV[e]: e in vectors now.
  void add_weight_gradient_by_rows(const T* poses, int64_t positions, T* dW) {
    if constexpr (kByRows) {
      constexpr int kCols = Pose::E / n < (kManyRegisters ? 4 : 2) ? Pose::E / n : (kManyRegisters ? 4 : 2);
      product<4, kCols, V>(
          Pose::D, Pose::E / n, int(positions), [&](int d, int k) FASTCAPS_LAMBDA { return poses[k * Pose::D + d]; },
          [&](int k, int e) FASTCAPS_LAMBDA { return load<T>(dV_rows + k * Pose::E + e * n); },
          [&](int d, int e) FASTCAPS_LAMBDA { return load<T>(dW + d * Pose::E + e * n); },
          [&](int d, int e, V x) FASTCAPS_LAMBDA { store<T>(dW + d * Pose::E + e * n, x); });
    }
  }

  static constexpr int64_t kOneMatrixBytes = 1 << 20;
};

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
