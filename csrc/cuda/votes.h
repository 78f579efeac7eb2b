// Votes V = P W + bias: made where they are used, in registers, as often as they are needed.
#pragma once

#include "stage.h"

namespace fastcaps::gpu {

template <int N>
FASTCAPS_DEVICE void load_vector(const float* from, float (&to)[N]) {
  static_assert(N == 1 || N == 2 || N == 4);
  if constexpr (N == 4) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (N == 2) {
    const float2 v = *reinterpret_cast<const float2*>(from);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = *from;
  }
}

// One child's weights towards one of the lane's parents.
template <class Pose>
struct Weights {
  static constexpr int V = Pose::kVector, TE = Pose::kTileColumns, WV = Pose::kWeightVector;
  const float* from;

  FASTCAPS_DEVICE Weights(const AttentionArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, int k, int g,
                          int p) {
    if constexpr (Pose::kWeightStride > 0) {
      from = stage.weight + (k * Lane<Pose>::block_parents(a) + lane.own(p)) * Pose::kWeightStride;
    } else {
      const int m = lane.alive(a, p) ? lane.m(p) : a.M - 1;  // whose numbers are not used
      from = a.weight + (int64_t(g) * a.M + m) * Pose::D_(a) * Pose::E_(a);
    }
  }

  // Rows d .. d + V of the lane's columns.
  FASTCAPS_DEVICE void rows(const AttentionArgs& a, const Lane<Pose>& lane, int d, float (&w)[V][TE]) const {
    FASTCAPS_UNROLL
    for (int v = 0; v < V; ++v) {
      if constexpr (Pose::kFixed) {
        FASTCAPS_UNROLL
        for (int j = 0; j < TE; j += WV) {
          float part[WV];
          load_vector<WV>(from + (d + v) * Pose::kE + lane.e(a, j), part);
          FASTCAPS_UNROLL
          for (int x = 0; x < WV; ++x) w[v][j + x] = part[x];
        }
      } else {
        FASTCAPS_UNROLL
        for (int j = 0; j < TE; ++j) {
          const int e = lane.e(a, j);
          w[v][j] = d + v < a.D && e < a.E ? from[int64_t(d + v) * a.E + e] : 0.0f;
        }
      }
    }
  }
};

// Rows of the child's pose at one of the lane's positions: d .. d + V of row i.
template <class Pose>
FASTCAPS_DEVICE const float* child_row(const AttentionArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, int k,
                                       int seat, int i) {
  const int depth = Pose::padded_depth(a);
  return stage.children + ((int64_t(k) * a.tile + seat) * Pose::padded_rows(a) + lane.c(i)) * depth;
}

template <class Pose, int R>
FASTCAPS_DEVICE void add_bias(const AttentionArgs& a, const Lane<Pose>& lane, const Child& child,
                              Tiles<Pose, R>& votes) {
  FASTCAPS_UNROLL
  for (int p = 0; p < Pose::kEach; ++p) {
    if (!lane.alive(a, p)) continue;
    const float* bias = a.bias + child.i * a.bias_stride_i + lane.m(p) * a.bias_stride_m;
    each_number<Pose>([&](int i, int j) {
      if (!lane.inside(a, i, j)) return;
      const float number = bias[lane.number(a, i, j)];
      FASTCAPS_UNROLL
      for (int r = 0; r < R; ++r) votes[r][p][i][j] += number;
    });
  }
}

// PLAIN kernels (here and below) leave out what most calls do without: a bias, padding, parents beyond one block.
template <class Pose, int R, bool PLAIN>
FASTCAPS_DEVICE void make_votes(const AttentionArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, int k,
                                const Child& child, Tiles<Pose, R>& votes) {
  constexpr int V = Pose::kVector, TC = Pose::kTileRows, TE = Pose::kTileColumns;
  each_tile<Pose, R>([&](int r, int p) { each_number<Pose>([&](int i, int j) { votes[r][p][i][j] = 0.0f; }); });
  const int depth = Pose::padded_depth(a);
  _Pragma("unroll Pose::kDepthUnroll") for (int d = 0; d < depth; d += V) {
    float rows[R][TC][V];
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      FASTCAPS_UNROLL
      for (int i = 0; i < TC; ++i)
        load_vector<V>(child_row(a, lane, stage, k, lane.template seat<R>(r), i) + d, rows[r][i]);
    }
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) {
      float w[V][TE];
      Weights<Pose>(a, lane, stage, k, child.g, p).rows(a, lane, d, w);
      FASTCAPS_UNROLL
      for (int r = 0; r < R; ++r) {
        FASTCAPS_UNROLL
        for (int v = 0; v < V; ++v)
          each_number<Pose>([&](int i, int j) { votes[r][p][i][j] += rows[r][i][v] * w[v][j]; });
      }
    }
  }
  if constexpr (!PLAIN)
    if (a.bias) add_bias<Pose, R>(a, lane, child, votes);
}

// <x, y> over the whole pose.
template <class Pose>
FASTCAPS_DEVICE float dot(const AttentionArgs& a, const Tile<Pose>& x, const Tile<Pose>& y) {
  float sum = 0.0f;
  each_number<Pose>([&](int i, int j) { sum += x[i][j] * y[i][j]; });
  return sum_rows<Pose>(a, sum_columns<Pose>(a, sum));
}

// A tile of a parent's pose, in dense memory [positions, M, C, E]; zero where there is none.
template <class Pose>
FASTCAPS_DEVICE int64_t parent_offset(const AttentionArgs& a, const Lane<Pose>& lane, int64_t position, int p) {
  return (position * a.M + lane.m(p)) * Pose::C_(a) * Pose::E_(a);
}

template <class Pose>
FASTCAPS_DEVICE void load_parent(const AttentionArgs& a, const Lane<Pose>& lane, const float* from, const Seat& seat,
                                 int p, Tile<Pose>& to) {
  const bool exists = seat.position >= 0 && lane.alive(a, p);
  const int64_t at = parent_offset(a, lane, seat.position, p);
  each_number<Pose>(
      [&](int i, int j) { to[i][j] = exists && lane.inside(a, i, j) ? from[at + lane.number(a, i, j)] : 0.0f; });
}

template <class Pose>
FASTCAPS_DEVICE void store_parent(const AttentionArgs& a, const Lane<Pose>& lane, float* to, const Seat& seat, int p,
                                  const Tile<Pose>& from, float factor) {
  if (seat.position < 0 || !lane.alive(a, p)) return;
  const int64_t at = parent_offset(a, lane, seat.position, p);
  each_number<Pose>([&](int i, int j) {
    if (lane.inside(a, i, j)) to[at + lane.number(a, i, j)] = factor * from[i][j];
  });
}

// The query, times scale; its layout and type are the caller's.
template <class Pose>
FASTCAPS_DEVICE void load_query(const AttentionArgs& a, const Lane<Pose>& lane, const Seat& seat, int p, float scale,
                                Tile<Pose>& to) {
  const int64_t* stride = a.query.stride;
  const bool exists = a.query.data && seat.position >= 0 && lane.alive(a, p);
  const int64_t at = seat.query + lane.m(p) * stride[3];
  each_number<Pose>([&](int i, int j) {
    to[i][j] = exists && lane.inside(a, i, j)
                   ? scale * load_number(a.query.data, at + lane.c(i) * stride[4] + lane.e(a, j) * stride[5], a.storage)
                   : 0.0f;
  });
}

}  // namespace fastcaps::gpu
