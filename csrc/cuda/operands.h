// What a vote is made from: rows of a child's pose and of its weights, as a lane reads them.
#pragma once

#include "stage.h"

namespace fastcaps::gpu {

template <int N>
FASTCAPS_DEVICE void load_vector(const float* from, float (&to)[N]) {
  static_assert(N == 1 || N == 2 || N == 4);
  if constexpr (N == 4) {
    const float4 v = load4(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (N == 2) {
    const float2 v = load2(from);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = *from;
  }
}

template <int N>
FASTCAPS_DEVICE void store_vector(float* to, const float* from) {
  static_assert(N == 1 || N == 2 || N == 4);
  if constexpr (N == 4)
    store4(to, make_float4(from[0], from[1], from[2], from[3]));
  else if constexpr (N == 2)
    store2(to, make_float2(from[0], from[1]));
  else
    *to = *from;
}

// The same of half precision.
template <Storage S, int N>
FASTCAPS_DEVICE void load_vector(const uint16_t* from, float (&to)[N]) {
  if constexpr (N == 4) {
    widen_vector<S>(load2(reinterpret_cast<const float*>(from)), to);
  } else {
    FASTCAPS_UNROLL
    for (int k = 0; k < N; ++k) to[k] = load_number(from, k, S);
  }
}
template <Storage, int N>
FASTCAPS_DEVICE void load_vector(const float* from, float (&to)[N]) {
  load_vector<N>(from, to);
}

// Calls body(type) with the type of the weights that a lane reads: the stored type, for which one branch decides, or
// float if they are widened in shared memory. Three products (tensor.h) take only float.
template <class Pose, class Body>
FASTCAPS_DEVICE void with_weights(const PassArgs& args, Body&& body) {
  if constexpr ((Pose::kWeightStride > 0 && !Pose::kStored) || Pose::kProducts == 3)
    body(Stored<Storage::kFloat32>());
  else
    with_type(args.storage, body);
}

// One child's weights towards one of the lane's parents, stored as S.
template <class Pose, int R, Storage S = Storage::kFloat32>
struct Weights {
  static constexpr int V = Pose::kVector, TE = Pose::kPatchColumns, WV = Pose::kWeightVector;
  const Lane<Pose, R>& lane;
  const Element<S>* from;
  bool alive;

  FASTCAPS_DEVICE Weights(const Lane<Pose, R>& lane_, const Stage<Pose>& stage, int p)
      : lane(lane_), alive(lane.alive(p)) {
    const PassArgs& args = lane.args;
    if constexpr (Pose::kWeightStride > 0) {
      from = stage.template weight_as<S>() + lane.group(p) * Pose::kGroupStride + lane.parent * Pose::kWeightStride;
    } else {
      const int m = alive ? lane.m(p) : args.M - 1;  // its values are read but not used
      from = static_cast<const Element<S>*>(args.weight) +
             (int64_t(args.by_group.quotient(stage.t)) * args.M + m) * lane.D() * lane.E();
    }
  }

  // Rows d .. d + V of the lane's columns; or one row.
  FASTCAPS_DEVICE void rows(int d, float (&w)[V][TE]) const {
    FASTCAPS_UNROLL
    for (int v = 0; v < V; ++v) row(d + v, w[v]);
  }
  FASTCAPS_DEVICE void row(int d, float (&w)[TE]) const {
    const PassArgs& args = lane.args;
    if constexpr (Pose::kFixed) {
      FASTCAPS_UNROLL
      for (int j = 0; j < TE; j += WV) {
        float part[WV];
        load_vector<S>(from + d * Pose::kE + lane.e(j), part);
        FASTCAPS_UNROLL
        for (int x = 0; x < WV; ++x) w[j + x] = Pose::kWeightStride > 0 || alive ? part[x] : 0.0f;
      }
    } else {
      FASTCAPS_UNROLL
      for (int j = 0; j < TE; ++j) {
        const int e = lane.e(j);
        w[j] = alive && d < args.D && e < args.E ? load_number(from, int64_t(d) * args.E + e, S) : 0.0f;
      }
    }
  }
};

// Rows of the child's pose at one of the lane's positions: d .. d + V of row i.
template <class Pose, int R>
FASTCAPS_DEVICE const float* child_row(const Lane<Pose, R>& lane, const Stage<Pose>& stage, int r, int i) {
  return stage.children + lane.in_tile(r) * lane.child_stride() + lane.c(i) * lane.row_stride();
}

}  // namespace fastcaps::gpu
