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

// A lane's part of one pose: its rows and columns.
template <class Pose>
using Tile = float[Pose::kTileRows][Pose::kTileColumns];

// One child's weights towards the lane's parent.
template <class Pose>
struct Weights {
  static constexpr int V = Pose::kVector, TE = Pose::kTileColumns, WV = Pose::kWeightVector;
  const float* from;

  FASTCAPS_DEVICE Weights(const AttentionArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, int k, int g) {
    if constexpr (Pose::kWeightStride > 0) {
      from = stage.weight + (k * a.warps_parents * Pose::kParents + lane.m_block) * Pose::kWeightStride;
    } else {
      const int m = lane.alive ? lane.m : a.M - 1;  // whose numbers are not used
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
FASTCAPS_DEVICE void make_votes(const AttentionArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, int k,
                                const Child& child, Tile<Pose> (&votes)[R]) {
  constexpr int V = Pose::kVector, TC = Pose::kTileRows, TE = Pose::kTileColumns;
  FASTCAPS_UNROLL
  for (int i = 0; i < TC; ++i) FASTCAPS_UNROLL
  for (int j = 0; j < TE; ++j) {
    float bias = 0.0f;
    if (a.bias && lane.alive && lane.inside(a, i, j))
      bias = a.bias[child.i * a.bias_stride_i + lane.m * a.bias_stride_m + lane.c(i) * Pose::E_(a) + lane.e(a, j)];
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) votes[r][i][j] = bias;
  }
  const Weights<Pose> weights(a, lane, stage, k, child.g);
  const int depth = Pose::padded_depth(a);
  _Pragma("unroll Pose::kDepthUnroll") for (int d = 0; d < depth; d += V) {
    float w[V][TE];
    weights.rows(a, lane, d, w);
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) FASTCAPS_UNROLL
    for (int i = 0; i < TC; ++i) {
      float p[V];
      load_vector<V>(child_row(a, lane, stage, k, lane.template seat<R>(r), i) + d, p);
      FASTCAPS_UNROLL
      for (int v = 0; v < V; ++v) FASTCAPS_UNROLL
      for (int j = 0; j < TE; ++j) votes[r][i][j] += p[v] * w[v][j];
    }
  }
}

template <class Pose>
FASTCAPS_DEVICE float dot(const Tile<Pose>& x, const Tile<Pose>& y) {
  float sum = 0.0f;
  FASTCAPS_UNROLL
  for (int i = 0; i < Pose::kTileRows; ++i) FASTCAPS_UNROLL
  for (int j = 0; j < Pose::kTileColumns; ++j) sum += x[i][j] * y[i][j];
  return sum;
}

// The lane's tile of a parent's pose, in dense memory [positions, M, C, E]; zero where there is none.
template <class Pose>
FASTCAPS_DEVICE int64_t parent_offset(const AttentionArgs& a, const Lane<Pose>& lane, int64_t position) {
  return (position * a.M + lane.m) * Pose::C_(a) * Pose::E_(a);
}

template <class Pose>
FASTCAPS_DEVICE void load_parents(const AttentionArgs& a, const Lane<Pose>& lane, const float* from, const Seat& seat,
                                  Tile<Pose>& to) {
  const int64_t at = parent_offset(a, lane, seat.position);
  FASTCAPS_UNROLL
  for (int i = 0; i < Pose::kTileRows; ++i) FASTCAPS_UNROLL
  for (int j = 0; j < Pose::kTileColumns; ++j)
    to[i][j] = seat.position >= 0 && lane.alive && lane.inside(a, i, j)
                   ? from[at + lane.c(i) * Pose::E_(a) + lane.e(a, j)]
                   : 0.0f;
}

template <class Pose>
FASTCAPS_DEVICE void store_parents(const AttentionArgs& a, const Lane<Pose>& lane, float* to, const Seat& seat,
                                   const Tile<Pose>& from, float factor) {
  if (seat.position < 0 || !lane.alive) return;
  const int64_t at = parent_offset(a, lane, seat.position);
  FASTCAPS_UNROLL
  for (int i = 0; i < Pose::kTileRows; ++i) FASTCAPS_UNROLL
  for (int j = 0; j < Pose::kTileColumns; ++j)
    if (lane.inside(a, i, j)) to[at + lane.c(i) * Pose::E_(a) + lane.e(a, j)] = factor * from[i][j];
}

// The query, times scale; its layout and type are the caller's.
template <class Pose>
FASTCAPS_DEVICE void load_query(const AttentionArgs& a, const Lane<Pose>& lane, const Seat& seat, float scale,
                                Tile<Pose>& to) {
  const int64_t* stride = a.query.stride;
  FASTCAPS_UNROLL
  for (int i = 0; i < Pose::kTileRows; ++i) FASTCAPS_UNROLL
  for (int j = 0; j < Pose::kTileColumns; ++j)
    to[i][j] =
        a.query.data && seat.position >= 0 && lane.alive && lane.inside(a, i, j)
            ? scale * load_number(a.query.data,
                                  seat.query + lane.m * stride[3] + lane.c(i) * stride[4] + lane.e(a, j) * stride[5],
                                  a.storage)
            : 0.0f;
}

}  // namespace fastcaps::gpu
