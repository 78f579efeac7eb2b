// Attention pass, forward: V = P W, a = s <Q, V>, r = softmax over parents, S = sum_i g r V, LayerNorm.
//
// A tile of positions walks through its children in blocks. Votes of a block exist in registers and, where they fit,
// in cache until the softmax is known; otherwise they are computed again. Either way none reaches memory.
// Where positions are few, the lanes are children instead: see Seats in lanes.h.
#pragma once

#include "attention.h"
#include "lanes.h"
#include "layer_norm.h"
#include "votes.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

// Hands out pieces of a thread's scratch memory; with a null base it only counts.
struct Arena {
  char* base;
  int64_t used = 0;

  template <class U>
  U* take(int64_t count) {
    U* piece = base ? reinterpret_cast<U*>(base + used) : nullptr;
    used += (count * int64_t(sizeof(U)) + 63) / 64 * 64;
    return piece;
  }
};

// The weights and biases of a unit of children for one parent: where the user put them, or, where lanes are children,
// turned to lanes in scratch memory and good until the next call.
template <class T, bool kChildLanes>
struct WeightsOf {
  using Weight = std::conditional_t<kChildLanes, Vec<T>, T>;
  const T* weight;
  const T* bias;
  const int64_t G, M, size, pose, bias_i, bias_m;
  Vec<T>*weight_lanes = nullptr, *bias_lanes = nullptr;

  WeightsOf(const AttentionInputs& in, Arena& arena)
      : weight(static_cast<const T*>(in.weight)),
        bias(static_cast<const T*>(in.bias)),
        G(in.geometry.G),
        M(in.geometry.M),
        size(in.geometry.D * in.geometry.E),
        pose(in.geometry.parent_pose()),
        bias_i(in.bias_stride_i),
        bias_m(in.bias_stride_m) {
    if (kChildLanes) weight_lanes = arena.take<Vec<T>>(size);
    if (kChildLanes && bias) bias_lanes = arena.take<Vec<T>>(pose);
  }

  FASTCAPS_INLINE int64_t offset(int64_t i, int64_t m) const { return (i % G * M + m) * size; }

  FASTCAPS_INLINE const T* bias_at(int64_t i, int64_t m) const { return bias + i * bias_i + m * bias_m; }

  FASTCAPS_INLINE const Weight* matrix(const Range& range, int64_t q, int64_t m) const {
    if constexpr (kChildLanes) {
      const T* lane[kLanes<T>];
      for (int r = 0; r < kLanes<T>; ++r)
        lane[r] = q + r < range.count ? weight + offset(range.child(q + r), m) : nullptr;
      gather_rows<T>(lane, size, weight_lanes);
      return weight_lanes;
    } else {
      return weight + offset(range.child(q), m);
    }
  }

  FASTCAPS_INLINE const Weight* bias_of(const Range& range, int64_t q, int64_t m) const {
    if (bias == nullptr) return nullptr;
    if constexpr (kChildLanes) {
      const T* lane[kLanes<T>];
      for (int r = 0; r < kLanes<T>; ++r) lane[r] = q + r < range.count ? bias_at(range.child(q + r), m) : nullptr;
      gather_rows<T>(lane, pose, bias_lanes);
      return bias_lanes;
    } else {
      return bias_at(range.child(q), m);
    }
  }
};

// logits -> gate * softmax over m, in place, given the highest.
template <class T>
FASTCAPS_INLINE void softmax(Vec<T>* a, int64_t M, Vec<T> highest, Vec<T> gate) {
  Vec<T> sum[2] = {};
  int64_t m = 0;
  for (; m + 2 <= M; m += 2)
    unroll<2>([&](auto k) FASTCAPS_LAMBDA {
      a[m + k] = exp_nonpositive(a[m + k] - highest);
      sum[k] += a[m + k];
    });
  if (m < M) sum[0] += a[m] = exp_nonpositive(a[m] - highest);
  const Vec<T> share = gate / (sum[0] + sum[1]);
  for (m = 0; m < M; ++m) a[m] *= share;
}

// With lanes of positions a "tile" below is kLanes positions, with lanes of children it is a single one.
template <class T, class Pose, bool kChildLanes>
struct ForwardItem {
  using V = Vec<T>;
  using Weight = std::conditional_t<kChildLanes, V, T>;
  using Parent = std::conditional_t<kChildLanes, T, V>;
  using Sits = Seats<T, kChildLanes>;
  static constexpr int n = kLanes<T>;
  const AttentionForward& call;
  const Geometry& g;
  const Pose pose;
  const WeightsOf<T, kChildLanes> weights;
  const int64_t slots, MCE, CE, CD;
  Parent* Q;
  V *S, *P, *gates, *a, *highest, *votes_kept, *sums;
  T* rows;
  Tile<T>* tiles;
  Range range{};  // of children of this item

  ForwardItem(const AttentionForward& call_, const Pose& pose_, Arena& arena)
      : call(call_),
        g(call.in.geometry),
        pose(pose_),
        weights(call.in, arena),
        slots(call.cut.block_tiles * call.cut.block_children),
        MCE(g.parents()),
        CE(g.parent_pose()),
        CD(g.child_pose()) {
    tiles = arena.take<Tile<T>>(call.cut.block_tiles);
    Q = call.in.query.data ? arena.take<Parent>(call.cut.block_tiles * MCE) : nullptr;
    S = arena.take<V>(call.cut.block_tiles * MCE);
    P = arena.take<V>(slots * CD);
    gates = arena.take<V>(slots);
    a = arena.take<V>(slots * g.M);
    highest = arena.take<V>(slots);
    votes_kept = call.cut.keep_votes ? arena.take<V>(slots * MCE) : nullptr;
    sums = kChildLanes ? arena.take<V>(MCE) : S;
    rows = kChildLanes ? arena.take<T>(call.cut.block_tiles * MCE) : nullptr;
  }

  // Units [0, count) of children from number `first` of the range on, for tiles [0, nt): unit j of tile t has slot t *
  // block_children + j.
  void block(int64_t first, int64_t count, int64_t nt) {
    const int64_t stride = call.cut.block_children;
    for (int64_t t = 0; t < nt; ++t)
      Sits::gather(g, tiles[t], call.in.storage, call.in.children, call.in.gate, range, first, count,
                   P + t * stride * CD, gates + t * stride);
    if (Q) {
      if (votes_kept)
        agreements<true>(first, count, nt);
      else
        agreements<false>(first, count, nt);
    }
    for (int64_t t = 0; t < nt; ++t)
      for (int64_t j = 0; j < count; ++j) {
        V* row = a + (t * stride + j) * g.M;
        if (Q) {
          softmax<T>(row, g.M, highest[t * stride + j], gates[t * stride + j]);
        } else {
          for (int64_t m = 0; m < g.M; ++m) row[m] = gates[t * stride + j] / T(g.M);
        }
      }
    if (Q && votes_kept)
      add_kept(count, nt);
    else
      add_again(first, count, nt);
  }

  template <bool kKeep>
  void agreements(int64_t first, int64_t count, int64_t nt) {
    const T scale = T(call.in.scale);
    for (int64_t m = 0; m < g.M; ++m)
      for (int64_t j = 0; j < count; ++j) {
        const Weight* W = weights.matrix(range, first + j * Sits::kUnit, m);
        const Weight* bias = weights.bias_of(range, first + j * Sits::kUnit, m);
        for (int64_t t = 0; t < nt; ++t) {
          const int64_t slot = t * call.cut.block_children + j;
          const Parent* q = Q + t * MCE + m * CE;
          V* kept = kKeep ? votes_kept + (m * slots + slot) * CE : nullptr;
          V dot[2] = {};
          votes<T>(pose, P + slot * CD, W, bias, [&](int k, V v) FASTCAPS_LAMBDA {
            dot[k & 1] += q[k] * v;
            if constexpr (kKeep) kept[k] = v;
          });
          const V agreement = (dot[0] + dot[1]) * scale;
          a[slot * g.M + m] = agreement;
          highest[slot] = m ? max(highest[slot], agreement) : agreement;
        }
      }
  }

  void add_kept(int64_t count, int64_t nt) {
    constexpr int kBlock = 8;
    for (int64_t t = 0; t < nt; ++t)
      for (int64_t m = 0; m < g.M; ++m) {
        V* s = S + t * MCE + m * CE;
        const int64_t slot = t * call.cut.block_children;
        const V* v = votes_kept + (m * slots + slot) * CE;
        const V* r = a + slot * g.M + m;
        int64_t k = 0;
        for (; k + kBlock <= CE; k += kBlock) {
          V sum[kBlock];
          unroll<kBlock>([&](auto u) FASTCAPS_LAMBDA { sum[u] = s[k + u]; });
          for (int64_t j = 0; j < count; ++j)
            unroll<kBlock>([&](auto u) FASTCAPS_LAMBDA { sum[u] += r[j * g.M] * v[j * CE + k + u]; });
          unroll<kBlock>([&](auto u) FASTCAPS_LAMBDA { s[k + u] = sum[u]; });
        }
        for (; k < CE; ++k) {
          V sum = s[k];
          for (int64_t j = 0; j < count; ++j) sum += r[j * g.M] * v[j * CE + k];
          s[k] = sum;
        }
      }
  }

  void add_again(int64_t first, int64_t count, int64_t nt) {
    for (int64_t m = 0; m < g.M; ++m)
      for (int64_t j = 0; j < count; ++j) {
        const Weight* W = weights.matrix(range, first + j * Sits::kUnit, m);
        const Weight* bias = weights.bias_of(range, first + j * Sits::kUnit, m);
        for (int64_t t = 0; t < nt; ++t) {
          const int64_t slot = t * call.cut.block_children + j;
          add_weighted_votes<T>(pose, P + slot * CD, a[slot * g.M + m], W, bias, S + t * MCE + m * CE);
        }
      }
  }

  void run(int64_t item) {
    const Cut& cut = call.cut;
    const int64_t chunk = item % cut.chunks, group = item / cut.chunks, I = g.children(), positions = g.positions();
    const int64_t begin = chunk * I / cut.chunks, count = (chunk + 1) * I / cut.chunks - begin;
    range = {begin, count, 0, count};
    const int64_t last = min((group + 1) * cut.tiles_per_group, (positions + n - 1) / n);
    const int64_t step = kChildLanes ? 1 : cut.block_tiles;  // tiles of positions taken together
    for (int64_t first_tile = group * cut.tiles_per_group; first_tile < last; first_tile += step) {
      const int64_t nt = kChildLanes ? min(n, positions - first_tile * n) : min(step, last - first_tile);
      place(first_tile, nt);
      for (int64_t k = 0; k < nt * MCE; ++k) S[k] = V{};
      const int64_t block_size = cut.block_children * Sits::kUnit;
      for (int64_t q = 0; q < count; q += block_size)
        block(q, (min(block_size, count - q) + Sits::kUnit - 1) / Sits::kUnit, nt);
      if constexpr (kChildLanes) add_lanes(nt);
      for (int64_t t = 0; t < (kChildLanes ? 1 : nt); ++t) {
        V* s = kChildLanes ? sums : S + t * MCE;
        if (cut.chunks == 1) {
          if (kChildLanes) tiles[0].place(g, first_tile * n, positions);
          finish(tiles[t], s);
        } else {
          std::memcpy(static_cast<V*>(call.partial) + (chunk * cut.tiles() + first_tile + t) * MCE, s,
                      size_t(MCE) * sizeof(V));
        }
      }
    }
  }

  // Tiles [0, nt) and their parents of the iteration before.
  void place(int64_t first_tile, int64_t nt) {
    const int64_t positions = g.positions(), first = first_tile * n;
    if constexpr (kChildLanes) {
      if (Q) {
        T* lane[n];
        tiles[0].place(g, first, positions);
        gather_parents<T>(g, tiles[0], call.in.storage, call.in.query, sums);
        for (int r = 0; r < n; ++r) lane[r] = r < nt ? Q + r * MCE : nullptr;
        scatter_rows<false, T>(lane, MCE, sums);
      }
      for (int64_t t = 0; t < nt; ++t) tiles[t].place(g, first + t, first + t + 1);
    } else {
      for (int64_t t = 0; t < nt; ++t) {
        tiles[t].place(g, first + t * n, positions);
        if (Q) gather_parents<T>(g, tiles[t], call.in.storage, call.in.query, Q + t * MCE);
      }
    }
  }

  // Lanes of children: their sum is a position's row; the rows turn into lanes of positions.
  void add_lanes(int64_t nt) {
    const T* lane[n];
    std::memset(rows, 0, size_t(nt * MCE) * sizeof(T));
    for (int64_t t = 0; t < nt; ++t) add_lane_sums<T>(S + t * MCE, MCE, rows + t * MCE);
    for (int r = 0; r < n; ++r) lane[r] = r < nt ? rows + r * MCE : nullptr;
    gather_rows<T>(lane, MCE, sums);
  }

  // Sum the chunks of one tile in their order, then normalise and write.
  void finish_tile(int64_t tile) {
    tiles[0].place(g, tile * n, g.positions());
    const V* partial = static_cast<const V*>(call.partial);
    for (int64_t k = 0; k < MCE; ++k) {
      V sum = partial[tile * MCE + k];
      for (int64_t chunk = 1; chunk < call.cut.chunks; ++chunk)
        sum += partial[(chunk * call.cut.tiles() + tile) * MCE + k];
      sums[k] = sum;
    }
    finish(tiles[0], sums);
  }

  void finish(const Tile<T>& tile, V* s) {
    with_storage(call.in.storage, call.parents, [&](auto* data) FASTCAPS_LAMBDA {
      using Out = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
      if (call.sums) {
        T* lane[kLanes<T>];
        tile.row(static_cast<T*>(call.sums), MCE, lane);
        scatter_rows<false, T>(lane, MCE, s);
      }
      if (call.in.normalize)
        for (int64_t m = 0; m < g.M; ++m)
          layer_norm<T>(s + m * CE, CE, T(call.in.eps), static_cast<const T*>(call.in.norm_weight),
                        static_cast<const T*>(call.in.norm_bias), s + m * CE);
      Out* lane[kLanes<T>];
      tile.row(static_cast<Out*>(call.parents), MCE, lane);
      scatter_rows<false, T>(lane, MCE, s);
    });
  }

  static FASTCAPS_INLINE int64_t min(int64_t x, int64_t y) { return x < y ? x : y; }
};

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
