// Votes V = P W + bias: made where they are used, in registers, as often as they are needed.
#pragma once

#include "tensor.h"

namespace fastcaps::gpu {

template <class Pose, int R>
FASTCAPS_DEVICE void add_bias(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage,
                              Patches<Pose, R>& votes) {
  FASTCAPS_UNROLL
  for (int p = 0; p < Pose::kEach; ++p) {
    if (!lane.alive(a, p)) continue;
    const float* bias = a.bias + Child(a, stage.t).i * a.bias_stride_i + lane.m(p) * a.bias_stride_m;
    each_number<Pose>([&](int i, int j) {
      if (!lane.inside(a, i, j)) return;
      const float number = bias[lane.number(a, i, j)];
      FASTCAPS_UNROLL
      for (int r = 0; r < R; ++r) votes[r][p][i][j] += number;
    });
  }
}

template <class Pose, int R, Storage S>
FASTCAPS_DEVICE void multiply(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage,
                              Patches<Pose, R>& votes) {
  constexpr int V = Pose::kVector, TC = Pose::kPatchRows, TE = Pose::kPatchColumns;
  each_tile<Pose, R>([&](int r, int p) { each_number<Pose>([&](int i, int j) { votes[r][p][i][j] = 0.0f; }); });
  const int depth = Pose::padded_depth(a);
  _Pragma("unroll Pose::kDepthUnroll") for (int d = 0; d < depth; d += V) {
    float rows[R][TC][V];
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      FASTCAPS_UNROLL
      for (int i = 0; i < TC; ++i)
        load_vector<V>(child_row(a, lane, stage, lane.template seat<R>(r), i) + d, rows[r][i]);
    }
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) {
      float w[V][TE];
      Weights<Pose, S>(a, lane, stage, p).rows(a, lane, d, w);
      FASTCAPS_UNROLL
      for (int r = 0; r < R; ++r) {
        FASTCAPS_UNROLL
        for (int v = 0; v < V; ++v)
          each_number<Pose>([&](int i, int j) { votes[r][p][i][j] += rows[r][i][v] * w[v][j]; });
      }
    }
  }
  if constexpr (!Pose::kFixed)  // what is no number of the pose must not be 0 * inf
    each_tile<Pose, R>([&](int r, int p) {
      each_number<Pose>([&](int i, int j) { votes[r][p][i][j] = lane.inside(a, i, j) ? votes[r][p][i][j] : 0.0f; });
    });
}

// Votes that are the children themselves, the same for every parent.
template <class Pose, int R>
FASTCAPS_DEVICE void take_children(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage,
                                   Patches<Pose, R>& votes) {
  constexpr int V = Pose::kWeightVector;
  FASTCAPS_UNROLL
  for (int r = 0; r < R; ++r) {
    each_vector<Pose>([&](int i, int j) {
      float part[V] = {};
      if (lane.inside(a, i, j))
        load_vector<V>(child_row(a, lane, stage, lane.template seat<R>(r), i) + lane.e(a, j), part);
      FASTCAPS_UNROLL
      for (int p = 0; p < Pose::kEach; ++p) {
        FASTCAPS_UNROLL
        for (int v = 0; v < V; ++v) votes[r][p][i][j + v] = part[v];
      }
    });
  }
}

// PLAIN kernels (here and below) leave out what most calls do without: a bias, padding, parents beyond one block.
// IDENTITY: there may be no weights.
template <class Pose, int R, bool PLAIN, bool IDENTITY>
FASTCAPS_DEVICE void make_votes(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage,
                                Patches<Pose, R>& votes) {
  if (IDENTITY && Pose::kProducts == 0 && !a.weight)
    take_children<Pose, R>(a, lane, stage, votes);
  else
    with_weights<Pose>(a, [&](auto stored) {
      if constexpr (Pose::kProducts > 0)
        multiply_on_tensor_cores<stored()>(a, lane, stage, votes);
      else
        multiply<Pose, R, stored()>(a, lane, stage, votes);
    });
  if constexpr (!PLAIN)
    if (a.bias) add_bias<Pose, R>(a, lane, stage, votes);
}

// <x, y> over the whole pose.
template <class Pose>
FASTCAPS_DEVICE float dot(const PassArgs& a, const Patch<Pose>& x, const Patch<Pose>& y) {
  float sum = 0.0f;
  each_number<Pose>([&](int i, int j) { sum += x[i][j] * y[i][j]; });
  return sum_pose<Pose>(a, sum);
}

// A patch of a parent's pose, in dense memory [positions, M, C, E]; zero where there is none.
template <class Pose>
FASTCAPS_DEVICE int64_t parent_offset(const PassArgs& a, const Lane<Pose>& lane, int64_t position, int p) {
  return (position * a.M + lane.m(p)) * Pose::C_(a) * Pose::E_(a);
}

template <class Pose>
FASTCAPS_DEVICE void load_parent(const PassArgs& a, const Lane<Pose>& lane, const float* from, const Seat& seat, int p,
                                 Patch<Pose>& to) {
  constexpr int V = Pose::kWeightVector;
  const bool exists = seat.position >= 0 && lane.alive(a, p);
  const int64_t at = parent_offset(a, lane, seat.position, p);
  each_vector<Pose>([&](int i, int j) {
    float part[V] = {};
    if (exists && lane.inside(a, i, j)) load_vector<V>(from + at + lane.number(a, i, j), part);
    FASTCAPS_UNROLL
    for (int v = 0; v < V; ++v) to[i][j + v] = part[v];
  });
}

template <class Pose>
FASTCAPS_DEVICE void store_parent(const PassArgs& a, const Lane<Pose>& lane, float* to, const Seat& seat, int p,
                                  const Patch<Pose>& from) {
  constexpr int V = Pose::kWeightVector;
  if (seat.position < 0 || !lane.alive(a, p)) return;
  const int64_t at = parent_offset(a, lane, seat.position, p);
  each_vector<Pose>([&](int i, int j) {
    if (lane.inside(a, i, j)) store_vector<V>(to + at + lane.number(a, i, j), &from[i][j]);
  });
}

// The query, times scale; its layout and type are the caller's.
template <class Pose>
FASTCAPS_DEVICE void load_query(const PassArgs& a, const Lane<Pose>& lane, const Seat& seat, int p, float scale,
                                Patch<Pose>& to) {
  const int64_t* stride = a.query.stride;
  const bool exists = a.query.data && seat.position >= 0 && lane.alive(a, p);
  const int64_t at = seat.query + lane.m(p) * stride[3];
  each_number<Pose>([&](int i, int j) {
    to[i][j] = exists && lane.inside(a, i, j)
                   ? scale * load_number(a.query.data, at + lane.c(i) * stride[4] + lane.e(a, j) * stride[5], a.storage)
                   : 0.0f;
  });
}

// One number for each parent, in dense memory [positions, M].
template <class Pose>
FASTCAPS_DEVICE float load_scalar(const PassArgs& a, const Lane<Pose>& lane, const float* from, const Seat& seat, int p,
                                  float otherwise) {
  return from && seat.position >= 0 && lane.alive(a, p) ? from[seat.position * a.M + lane.m(p)] : otherwise;
}
template <class Pose>
FASTCAPS_DEVICE void store_scalar(const PassArgs& a, const Lane<Pose>& lane, float* to, const Seat& seat, int p,
                                  float x) {
  if (to && seat.position >= 0 && lane.alive(a, p) && lane.speaks_for_pose()) to[seat.position * a.M + lane.m(p)] = x;
}

}  // namespace fastcaps::gpu
