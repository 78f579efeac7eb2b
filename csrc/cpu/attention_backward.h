// Attention pass, backward, by recomputation: from dS,
//   h = <dS, V>, da = g r (h - sum_m r h), dV = g r dS + s da Q,
//   dQ = s sum_i da V, dg = sum_m r h, dP = sum_m dV W^T, dW = sum P^T dV, dbias = sum dV.
//
// An item owns a group of samples and a range of child types n (with all their places in the window), so that nobody
// else writes the children's gradients it writes. It walks child by child, and for each child over all tiles of its
// group, so that the gradient of that child's matrices is gathered on chip.
#pragma once

#include "attention_forward.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

// The positions of a group of samples.
struct Span {
  int64_t begin, end;
};

FASTCAPS_INLINE Span group_span(const AttentionBackward& call, int64_t group) {
  const Geometry& g = call.in.geometry;
  const int64_t size = call.cut.samples * g.Ho * g.Wo, begin = group * size;
  return {begin, begin + size < g.positions() ? begin + size : g.positions()};
}

template <class T, class Pose, bool kChildLanes>
struct BackwardItem {
  using V = Vec<T>;
  using Weight = std::conditional_t<kChildLanes, V, T>;
  using Parent = std::conditional_t<kChildLanes, T, V>;
  using Sits = Seats<T, kChildLanes>;
  static constexpr int n = kLanes<T>;
  // dW of vector poses is a matmul over positions: poses and vote gradients turned back into rows of scalars. Poses
  // with small matrices keep a vector over the lanes for each weight instead and add the lanes up once, at the end.
  static constexpr bool kByRows = Pose::kWeightGradientByRows && !kChildLanes;

  const AttentionBackward& call;
  const Geometry& g;
  const Cut& cut;
  const Pose pose;
  const WeightsOf<T, kChildLanes> weights;
  const int64_t MCE, CE, CD, DE, slots;
  V *sums, *P, *dP, *gates, *r, *h, *highest, *votes_kept, *dV, *dW_lanes, *dQ_lanes, *dnorm;
  T *P_rows, *dV_rows, *parent_rows;
  Tile<T>* tiles;
  const Parent *Q = nullptr, *dS = nullptr;  // of the item's group, made by prepare()
  V* dQ = nullptr;
  Range range{};  // of children of this item: some types, at every place in the window

  BackwardItem(const AttentionBackward& call_, const Pose& pose_, Arena& arena)
      : call(call_),
        g(call.in.geometry),
        cut(call.cut),
        pose(pose_),
        weights(call.in, arena),
        MCE(g.parents()),
        CE(g.parent_pose()),
        CD(g.child_pose()),
        DE(g.D * g.E),
        slots(cut.block_tiles * cut.block_children) {
    tiles = arena.take<Tile<T>>(kChildLanes ? n : cut.tiles_per_group);
    sums = arena.take<V>(MCE);
    P = arena.take<V>(slots * CD);
    dP = arena.take<V>(slots * CD);
    gates = arena.take<V>(slots);
    r = arena.take<V>(slots * g.M);
    h = arena.take<V>(slots * g.M);
    highest = arena.take<V>(slots);
    votes_kept = cut.keep_votes ? arena.take<V>(slots * MCE) : nullptr;
    dV = arena.take<V>(CE);
    dnorm = arena.take<V>(2 * CE);
    const int64_t matrices = kChildLanes ? 1 : cut.block_children * g.M;
    dW_lanes = call.dweight && !kByRows ? arena.take<V>(matrices * DE) : nullptr;
    dQ_lanes = kChildLanes && call.partial ? arena.take<V>(cut.block_tiles * MCE) : nullptr;
    parent_rows = kChildLanes ? arena.take<T>(2 * cut.block_tiles * MCE) : nullptr;
    P_rows = call.dweight && kByRows ? arena.take<T>(slots * n * g.D) : nullptr;
    dV_rows = call.dweight && kByRows ? arena.take<T>(cut.block_tiles * n * g.E) : nullptr;
  }

  // The parents of one tile, turned to lanes once for all items: Q, and the gradient of the sums S through LayerNorm.
  void prepare(int64_t tile) {
    const Span span = group_span(call, tile / cut.tiles_per_group);
    const int64_t first = span.begin + tile % cut.tiles_per_group * n;
    if (first >= span.end) return;
    Tile<T>& where = tiles[0];
    where.place(g, first, span.end);
    if (call.in.query.data)
      gather_parents<T>(g, where, call.in.storage, call.in.query, static_cast<V*>(call.query_lanes) + tile * MCE);
    V* ds = static_cast<V*>(call.dsums_lanes) + tile * MCE;
    zero(ds, MCE);
    if (call.grad_parents.data) {
      gather_parents<T>(g, where, call.in.storage, call.grad_parents, ds);
      if (call.in.normalize) {
        const T* lane[n];
        where.row(static_cast<const T*>(call.sums), MCE, lane);
        gather_rows<T>(lane, MCE, sums);
        V* dweight = call.dnorm ? dnorm : nullptr;
        if (dweight) zero(dnorm, 2 * CE);
        for (int64_t m = 0; m < g.M; ++m)
          layer_norm_backward<T>(sums + m * CE, CE, T(call.in.eps), static_cast<const T*>(call.in.norm_weight),
                                 ds + m * CE, dweight, dweight ? dnorm + CE : nullptr);
        if (dweight) add_lane_sums<T>(dnorm, 2 * CE, static_cast<T*>(call.dnorm) + tile * 2 * CE);
      }
    }
    if (call.grad_sums.data) {
      gather_parents<T>(g, where, sizeof(T) == 8 ? Storage::kFloat64 : Storage::kFloat32, call.grad_sums, sums);
      for (int64_t k = 0; k < MCE; ++k) ds[k] += sums[k];
    }
  }

  void run(int64_t item) {
    const int64_t chunk = item % cut.chunks, group = item / cut.chunks, first_tile = group * cut.tiles_per_group;
    const Span span = group_span(call, group);
    const V* dS_lanes = static_cast<const V*>(call.dsums_lanes) + first_tile * MCE;
    const V* Q_lanes = call.in.query.data ? static_cast<const V*>(call.query_lanes) + first_tile * MCE : nullptr;
    V* dQ_tiles = call.partial ? static_cast<V*>(call.partial) + (chunk * cut.tiles() + first_tile) * MCE : nullptr;
    int64_t tile_count = (span.end - span.begin + n - 1) / n;
    if constexpr (kChildLanes) {  // a single tile of positions, taken apart
      tile_count = span.end - span.begin;
      for (int64_t t = 0; t < tile_count; ++t) tiles[t].place(g, span.begin + t, span.begin + t + 1);
      dS = take_apart(dS_lanes, tile_count, parent_rows);
      Q = Q_lanes ? take_apart(Q_lanes, tile_count, parent_rows + cut.block_tiles * MCE) : nullptr;
      dQ = dQ_lanes;
    } else {
      for (int64_t t = 0; t < tile_count; ++t) tiles[t].place(g, span.begin + t * n, span.end);
      dS = dS_lanes;
      Q = Q_lanes;
      dQ = dQ_tiles;
    }
    if (dQ) zero(dQ, tile_count * MCE);
    T* dW = static_cast<T*>(call.dweight);
    if (dW) dW += (call.weight_parts == cut.groups ? group : item) * g.G * g.M * DE;
    T* dB = static_cast<T*>(call.dbias);
    if (dB) dB += item * call.bias_numbers;
    const int64_t type = chunk * g.N / cut.chunks, types = (chunk + 1) * g.N / cut.chunks - type;
    range = {type, types, g.N, types * g.window.kh * g.window.kw};
    walk(tile_count, dW, dB);
    if constexpr (kChildLanes) {
      if (!dQ) return;
      const T* lane[n];
      T* rows = parent_rows;
      std::memset(rows, 0, size_t(tile_count * MCE) * sizeof(T));
      for (int64_t t = 0; t < tile_count; ++t) add_lane_sums<T>(dQ + t * MCE, MCE, rows + t * MCE);
      for (int k = 0; k < n; ++k) lane[k] = k < tile_count ? rows + k * MCE : nullptr;
      gather_rows<T>(lane, MCE, dQ_tiles);
    }
  }

  // Lanes of positions become one row each.
  const T* take_apart(const V* lanes, int64_t positions, T* rows) {
    T* lane[n];
    for (int k = 0; k < n; ++k) lane[k] = k < positions ? rows + k * MCE : nullptr;
    scatter_rows<false, T>(lane, MCE, lanes);
    return rows;
  }

  // All children of the range, block by block, each over all tiles.
  void walk(int64_t tile_count, T* dW, T* dB) {
    const int64_t size = cut.block_children * Sits::kUnit;
    for (int64_t first = 0; first < range.count; first += size) {
      const int64_t count = (min(size, range.count - first) + Sits::kUnit - 1) / Sits::kUnit;
      if (dW && g.G == g.children()) clear_matrices(first, min(size, range.count - first), dW);
      for (int64_t t = 0; t < tile_count; t += cut.block_tiles)
        block(first, count, t, min(cut.block_tiles, tile_count - t), dW, dB);
      if (dW_lanes && !kChildLanes)
        for (int64_t j = 0; j < count; ++j)
          add_lane_sums<T>(dW_lanes + j * g.M * DE, g.M * DE, dW + weights.offset(range.child(first + j), 0));
    }
  }

  // A child with matrices of its own is met once: their gradient is cleared here, while it is about to be in cache.
  void clear_matrices(int64_t first, int64_t children, T* dW) {
    for (int64_t q = first; q < first + children; ++q)
      std::memset(dW + weights.offset(range.child(q), 0), 0, size_t(g.M * DE) * sizeof(T));
  }

  // Units [0, count) of children from number `first` of the range on, for tiles [t0, t0 + nt): slot t * block_children
  // + j.
  void block(int64_t first, int64_t count, int64_t t0, int64_t nt, T* dW, T* dB) {
    const int64_t stride = cut.block_children;
    for (int64_t t = 0; t < nt; ++t) {
      Sits::gather(g, tiles[t0 + t], call.in.storage, call.in.children, call.in.gate, range, first, count,
                   P + t * stride * CD, gates + t * stride);
      if (call.dchildren) zero(dP + t * stride * CD, count * CD);
      if (P_rows)
        for (int64_t j = 0; j < count; ++j) {
          T* lane[n];
          for (int k = 0; k < n; ++k) lane[k] = P_rows + ((j * cut.block_tiles + t) * n + k) * g.D;
          scatter_rows<false, T>(lane, g.D, P + (t * stride + j) * CD);
        }
    }
    if (votes_kept)
      agreements<true>(first, count, t0, nt);
    else
      agreements<false>(first, count, t0, nt);
    for (int64_t t = 0; t < nt; ++t)
      for (int64_t j = 0; j < count; ++j) softmax_backward(first + j * Sits::kUnit, t0 + t, t * stride + j);
    if (votes_kept)
      gradients<true>(first, count, t0, nt, dW, dB);
    else
      gradients<false>(first, count, t0, nt, dW, dB);
    if (call.dchildren) add_child_gradients(first, count, t0, nt);
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

  // a -> r's row, h -> h's row; the votes stay where there is room.
  template <bool kKeep>
  void agreements(int64_t first, int64_t count, int64_t t0, int64_t nt) {
    const T scale = T(call.in.scale);
    for (int64_t m = 0; m < g.M; ++m)
      for (int64_t j = 0; j < count; ++j) {
        const Weight* W = weights.matrix(range, first + j * Sits::kUnit, m);
        const Weight* bias = weights.bias_of(range, first + j * Sits::kUnit, m);
        for (int64_t t = 0; t < nt; ++t) {
          const int64_t slot = t * cut.block_children + j;
          const Parent* ds = dS + (t0 + t) * MCE + m * CE;
          const Parent* q = Q ? Q + (t0 + t) * MCE + m * CE : ds;
          V* kept = kKeep ? votes_kept + (m * slots + slot) * CE : nullptr;
          V agreement[2] = {}, gain[2] = {};
          votes<T>(pose, P + slot * CD, W, bias, [&](int k, V v) FASTCAPS_LAMBDA {
            agreement[k & 1] += q[k] * v;
            gain[k & 1] += ds[k] * v;
            if constexpr (kKeep) kept[k] = v;
          });
          const V logit = (agreement[0] + agreement[1]) * scale;
          r[slot * g.M + m] = logit;
          highest[slot] = m ? max(highest[slot], logit) : logit;
          h[slot * g.M + m] = gain[0] + gain[1];
        }
      }
  }

  // r's row becomes g r, h's row becomes s da; the gate's gradient is written.
  void softmax_backward(int64_t q, int64_t tile, int64_t slot) {
    V *row = r + slot * g.M, *gain = h + slot * g.M;
    const V gate = gates[slot];
    if (Q)
      softmax<T>(row, g.M, highest[slot], broadcast(T(1)));
    else
      for (int64_t m = 0; m < g.M; ++m) row[m] = broadcast(T(1) / T(g.M));
    V mean{};
    for (int64_t m = 0; m < g.M; ++m) mean += row[m] * gain[m];
    const V scaled = gate * T(call.in.scale);
    for (int64_t m = 0; m < g.M; ++m) {
      gain[m] = scaled * row[m] * (gain[m] - mean);
      row[m] *= gate;
    }
    if (call.dgate) {
      const int64_t stride[4] = {g.H * g.W * g.N, g.W * g.N, g.N, 1};
      T* lane[n];
      Sits::find(g, tiles[tile], static_cast<T*>(call.dgate), stride, range, q, lane);
      scatter_rows<true, T>(lane, 1, &mean);
    }
  }

  template <bool kKept>
  void gradients(int64_t first, int64_t count, int64_t t0, int64_t nt, T* dW, T* dB) {
    for (int64_t m = 0; m < g.M; ++m)
      for (int64_t j = 0; j < count; ++j) {
        const int64_t q = first + j * Sits::kUnit;
        const Weight* W = weights.matrix(range, q, m);
        const Weight* bias = weights.bias_of(range, q, m);
        V* dW_unit = dW_lanes + (kChildLanes ? 0 : (j * g.M + m) * DE);
        for (int64_t t = 0; t < nt; ++t) {
          const int64_t slot = t * cut.block_children + j, at = (t0 + t) * MCE + m * CE;
          const V share = r[slot * g.M + m], da = h[slot * g.M + m];
          vote_gradient(share, da, at);
          if (dQ) {
            if constexpr (kKept) {
              const V* v = votes_kept + (m * slots + slot) * CE;
              V* dq = dQ + at;
              for (int64_t k = 0; k < CE; ++k) dq[k] += da * v[k];
            } else {
              add_weighted_votes<T>(pose, P + slot * CD, da, W, bias, dQ + at);
            }
          }
          if (call.dchildren) add_child_gradient<T>(pose, dV, W, dP + slot * CD);
          if (dW_lanes) add_weight_gradient<T>(pose, P + slot * CD, dV, t0 + t == 0, dW_unit);
          if (dV_rows) {
            T* lane[n];
            for (int k = 0; k < n; ++k) lane[k] = dV_rows + (t * n + k) * g.E;
            scatter_rows<false, T>(lane, g.E, dV);
          }
          if (dB) add_bias_gradient(q, m, dB);
        }
        if constexpr (kByRows)
          if (dV_rows)
            add_weight_gradient_by_rows(P_rows + j * cut.block_tiles * n * g.D, nt * n,
                                        dW + weights.offset(range.child(q), m));
        if (kChildLanes && dW_lanes) {
          T* lane[n];
          for (int k = 0; k < n; ++k)
            lane[k] = q + k < range.count ? dW + weights.offset(range.child(q + k), m) : nullptr;
          scatter_rows<true, T>(lane, DE, dW_unit);
        }
      }
  }

  // dV = g r dS + s da Q
  FASTCAPS_INLINE void vote_gradient(V share, V da, int64_t at) {
    const Parent* ds = dS + at;
    if (Q) {
      const Parent* q = Q + at;
      for (int64_t k = 0; k < CE; ++k) dV[k] = share * ds[k] + da * q[k];
    } else {
      for (int64_t k = 0; k < CE; ++k) dV[k] = share * ds[k];
    }
  }

  void add_bias_gradient(int64_t q, int64_t m, T* dB) {
    const auto at = [&](int64_t k) { return dB + range.child(k) * weights.bias_i + m * weights.bias_m; };
    if constexpr (kChildLanes) {
      T* lane[n];
      for (int k = 0; k < n; ++k) lane[k] = q + k < range.count ? at(q + k) : nullptr;
      scatter_rows<true, T>(lane, CE, dV);
    } else {
      add_lane_sums<T>(dV, CE, at(q));
    }
  }

  // dW[d, e] += sum over positions of P[d] dV[e]: e in vectors now.
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

  static FASTCAPS_INLINE void zero(V* p, int64_t count) { std::memset(p, 0, size_t(count) * sizeof(V)); }
  static FASTCAPS_INLINE int64_t min(int64_t x, int64_t y) { return x < y ? x : y; }
};

// dQ of tiles [begin, end): the chunks' parts in their order, turned back into rows.
template <class T>
void finish_query_gradient(const AttentionBackward& call, int64_t begin, int64_t end) {
  constexpr int n = kLanes<T>;
  const Geometry& g = call.in.geometry;
  const int64_t MCE = g.parents();
  Vec<T>* partial = static_cast<Vec<T>*>(call.partial);
  for (int64_t tile = begin; tile < end; ++tile) {
    const Span span = group_span(call, tile / call.cut.tiles_per_group);
    const int64_t at = span.begin + tile % call.cut.tiles_per_group * n;
    if (at >= span.end) continue;
    for (int64_t chunk = 1; chunk < call.cut.chunks; ++chunk)
      for (int64_t k = 0; k < MCE; ++k) partial[tile * MCE + k] += partial[(chunk * call.cut.tiles() + tile) * MCE + k];
    Tile<T> where;
    where.place(g, at, span.end);
    T* lane[n];
    where.row(static_cast<T*>(call.dquery), MCE, lane);
    scatter_rows<false, T>(lane, MCE, partial + tile * MCE);
  }
}

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
