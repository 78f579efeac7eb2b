// Attention pass, forward: V = P W, a = s <Q, V>, r = softmax over parents, S = sum_i g r V, LayerNorm.
//
// A tile of positions walks through its children in blocks. Votes of a block exist in registers and, where they fit,
// in cache until the softmax is known; otherwise they are computed again. Either way none reaches memory.
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

template <class T>
struct WeightsOf {
  const T* weight;
  const T* bias;
  int64_t G, M, size, bias_i, bias_m;

  explicit WeightsOf(const AttentionInputs& in)
      : weight(static_cast<const T*>(in.weight)),
        bias(static_cast<const T*>(in.bias)),
        G(in.geometry.G),
        M(in.geometry.M),
        size(in.geometry.D * in.geometry.E),
        bias_i(in.bias_stride_i),
        bias_m(in.bias_stride_m) {}
  FASTCAPS_INLINE int64_t group(int64_t i) const { return i % G; }
  FASTCAPS_INLINE const T* matrix(int64_t i, int64_t m) const { return weight + (group(i) * M + m) * size; }
  FASTCAPS_INLINE const T* bias_of(int64_t i, int64_t m) const {
    return bias ? bias + i * bias_i + m * bias_m : nullptr;
  }
};

// logits -> gate * softmax over m, in place.
template <class T>
FASTCAPS_INLINE void softmax(Vec<T>* a, int64_t M, Vec<T> gate) {
  Vec<T> highest = a[0];
  for (int64_t m = 1; m < M; ++m) highest = max(highest, a[m]);
  Vec<T> sum{};
  for (int64_t m = 0; m < M; ++m) {
    a[m] = exp_nonpositive(a[m] - highest);
    sum += a[m];
  }
  const Vec<T> share = gate / sum;
  for (int64_t m = 0; m < M; ++m) a[m] *= share;
}

template <class T, class Pose>
struct ForwardItem {
  using V = Vec<T>;
  const AttentionForward& call;
  const Geometry& g;
  const Pose pose;
  const WeightsOf<T> weights;
  const int64_t slots, MCE, CE, CD;
  V *Q, *S, *P, *gates, *a, *votes_kept, *normed;
  Tile<T>* tiles;

  ForwardItem(const AttentionForward& call_, const Pose& pose_, Arena& arena)
      : call(call_),
        g(call.in.geometry),
        pose(pose_),
        weights(call.in),
        slots(call.cut.block_tiles * call.cut.block_children),
        MCE(g.parents()),
        CE(g.parent_pose()),
        CD(g.child_pose()) {
    tiles = arena.take<Tile<T>>(call.cut.block_tiles);
    Q = call.in.query.data ? arena.take<V>(call.cut.block_tiles * MCE) : nullptr;
    S = arena.take<V>(call.cut.block_tiles * MCE);
    P = arena.take<V>(slots * CD);
    gates = arena.take<V>(slots);
    a = arena.take<V>(slots * g.M);
    votes_kept = call.cut.keep_votes ? arena.take<V>(slots * MCE) : nullptr;
    normed = arena.take<V>(CE);
  }

  // Children [first, first + count) of tiles [0, nt): slot k = t * block_children + (i - first).
  void block(int64_t first, int64_t count, int64_t nt) {
    const int64_t stride = call.cut.block_children;
    for (int64_t t = 0; t < nt; ++t)
      gather_children<T>(g, tiles[t], call.in.storage, call.in.children, call.in.gate, first, count,
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
          softmax<T>(row, g.M, gates[t * stride + j]);
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
        const T* W = weights.matrix(first + j, m);
        const T* bias = weights.bias_of(first + j, m);
        for (int64_t t = 0; t < nt; ++t) {
          const int64_t slot = t * call.cut.block_children + j;
          const V* q = Q + t * MCE + m * CE;
          V* kept = kKeep ? votes_kept + (slot * g.M + m) * CE : nullptr;
          V dot[2] = {};
          votes<T>(pose, P + slot * CD, W, bias, [&](int k, V v) FASTCAPS_LAMBDA {
            dot[k & 1] += q[k] * v;
            if constexpr (kKeep) kept[k] = v;
          });
          a[slot * g.M + m] = (dot[0] + dot[1]) * scale;
        }
      }
  }

  void add_kept(int64_t count, int64_t nt) {
    constexpr int kBlock = 8;
    for (int64_t t = 0; t < nt; ++t)
      for (int64_t m = 0; m < g.M; ++m) {
        V* s = S + t * MCE + m * CE;
        const int64_t slot = t * call.cut.block_children;
        const V* v = votes_kept + (slot * g.M + m) * CE;
        const V* r = a + slot * g.M + m;
        int64_t k = 0;
        for (; k + kBlock <= CE; k += kBlock) {
          V sum[kBlock];
          unroll<kBlock>([&](auto u) FASTCAPS_LAMBDA { sum[u] = s[k + u]; });
          for (int64_t j = 0; j < count; ++j)
            unroll<kBlock>([&](auto u) FASTCAPS_LAMBDA { sum[u] += r[j * g.M] * v[j * MCE + k + u]; });
          unroll<kBlock>([&](auto u) FASTCAPS_LAMBDA { s[k + u] = sum[u]; });
        }
        for (; k < CE; ++k) {
          V sum = s[k];
          for (int64_t j = 0; j < count; ++j) sum += r[j * g.M] * v[j * MCE + k];
          s[k] = sum;
        }
      }
  }

  void add_again(int64_t first, int64_t count, int64_t nt) {
    for (int64_t m = 0; m < g.M; ++m)
      for (int64_t j = 0; j < count; ++j) {
        const T* W = weights.matrix(first + j, m);
        const T* bias = weights.bias_of(first + j, m);
        for (int64_t t = 0; t < nt; ++t) {
          const int64_t slot = t * call.cut.block_children + j;
          add_weighted_votes<T>(pose, P + slot * CD, a[slot * g.M + m], W, bias, S + t * MCE + m * CE);
        }
      }
  }

  void run(int64_t item) {
    const Cut& cut = call.cut;
    const int64_t chunk = item % cut.chunks, group = item / cut.chunks, I = g.children(), positions = g.positions();
    const int64_t begin = chunk * I / cut.chunks, end = (chunk + 1) * I / cut.chunks;
    const int64_t last = min((group + 1) * cut.tiles_per_group, (positions + kLanes<T> - 1) / kLanes<T>);
    for (int64_t first_tile = group * cut.tiles_per_group; first_tile < last; first_tile += cut.block_tiles) {
      const int64_t nt = min(cut.block_tiles, last - first_tile);
      for (int64_t t = 0; t < nt; ++t) {
        tiles[t].place(g, (first_tile + t) * kLanes<T>, positions);
        if (Q) gather_parents<T>(g, tiles[t], call.in.storage, call.in.query, Q + t * MCE);
      }
      for (int64_t k = 0; k < nt * MCE; ++k) S[k] = V{};
      for (int64_t i = begin; i < end; i += cut.block_children) block(i, min(cut.block_children, end - i), nt);
      for (int64_t t = 0; t < nt; ++t) {
        if (cut.chunks == 1)
          finish(tiles[t], S + t * MCE);
        else
          std::memcpy(static_cast<V*>(call.partial) + (chunk * cut.tiles() + first_tile + t) * MCE, S + t * MCE,
                      size_t(MCE) * sizeof(V));
      }
    }
  }

  // Sum the chunks of one tile in their order, then normalise and write.
  void finish_tile(int64_t tile) {
    tiles[0].place(g, tile * kLanes<T>, g.positions());
    const V* partial = static_cast<const V*>(call.partial);
    for (int64_t k = 0; k < MCE; ++k) {
      V sum = partial[tile * MCE + k];
      for (int64_t chunk = 1; chunk < call.cut.chunks; ++chunk) sum += partial[(chunk * call.cut.tiles() + tile) * MCE + k];
      S[k] = sum;
    }
    finish(tiles[0], S);
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
