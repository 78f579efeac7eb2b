// Votes V = P W + bias: made where they are used, in registers, as often as they are needed.
#pragma once

#include "tensor.h"

namespace fastcaps::gpu {

template <class Pose, int R>
FASTCAPS_DEVICE void set_to_zero(Patches<Pose, R>& values) {
  each_patch<Pose, R>([&](int r, int p) { each_number<Pose>([&](int i, int j) { values[r][p][i][j] = 0.0f; }); });
}

// Adds the bias towards the lane's p-th parent to its votes, vote_of(r): to W columns, from the e-th on.
template <int W, class Pose, int R, class VoteOf>
FASTCAPS_DEVICE void add_bias(const Lane<Pose, R>& lane, const Stage<Pose>& stage, int p, int e, VoteOf&& vote_of) {
  const PassArgs& args = lane.args;
  if (!lane.alive(p)) return;
  const float* bias = args.bias + Child(args, stage.t).i * args.bias_stride_i + lane.m(p) * args.bias_stride_m;
  each_number<Pose, W>([&](int i, int j) {
    if (!lane.inside(i, e + j)) return;
    const float number = bias[lane.number(i, e + j)];
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) vote_of(r)[i][j] += number;
  });
}

// ADDS: to what the votes are.
template <Storage S, bool ADDS, class Pose, int R>
FASTCAPS_DEVICE void multiply(const Lane<Pose, R>& lane, const Stage<Pose>& stage, Patches<Pose, R>& votes) {
  constexpr int V = Pose::kVector, TC = Pose::kPatchRows, TE = Pose::kPatchColumns;
  if constexpr (!ADDS) set_to_zero<Pose, R>(votes);
  const int depth = lane.padded_depth();
  _Pragma("unroll Pose::kDepthUnroll") for (int d = 0; d < depth; d += V) {
    float rows[R][TC][V];
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      FASTCAPS_UNROLL
      for (int i = 0; i < TC; ++i) load_vector<V>(child_row(lane, stage, r, i) + d, rows[r][i]);
    }
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) {
      float w[V][TE];
      Weights<Pose, R, S>(lane, stage, p).rows(d, w);
      FASTCAPS_UNROLL
      for (int r = 0; r < R; ++r) {
        FASTCAPS_UNROLL
        for (int v = 0; v < V; ++v)
          each_number<Pose>([&](int i, int j) { votes[r][p][i][j] += rows[r][i][v] * w[v][j]; });
      }
    }
  }
  if constexpr (!Pose::kFixed)  // outside the pose 0 * inf must not make NaN
    each_patch<Pose, R>([&](int r, int p) {
      each_number<Pose>([&](int i, int j) { votes[r][p][i][j] = lane.inside(i, j) ? votes[r][p][i][j] : 0.0f; });
    });
}

// A child in registers: its matrices for the lane's parents, and its pose at a position. from: where the first parent's
// matrix lies in shared memory, and the pose.
template <class Pose>
using Matrices = float[Pose::kEach][Pose::kD][Pose::kPatchColumns];
template <class Pose>
using Rows = float[Pose::kPatchRows][Pose::kD];

template <class Pose, int R>
FASTCAPS_DEVICE void load_matrices(const Lane<Pose, R>& lane, const float* from, Matrices<Pose>& to) {
  constexpr int WV = Pose::kWeightVector;
  FASTCAPS_UNROLL
  for (int p = 0; p < Pose::kEach; ++p) {
    FASTCAPS_UNROLL
    for (int d = 0; d < Pose::kD; ++d) {
      FASTCAPS_UNROLL
      for (int j = 0; j < Pose::kPatchColumns; j += WV)
        load_vector<WV>(from + (lane.group(p) - lane.group(0)) * Pose::kGroupStride + d * Pose::kE + lane.e(j),
                        reinterpret_cast<float (&)[WV]>(to[p][d][j]));
    }
  }
}

template <class Pose, int R>
FASTCAPS_DEVICE void load_rows(const Lane<Pose, R>& lane, const float* from, Rows<Pose>& to) {
  constexpr int V = Pose::kVector;
  FASTCAPS_UNROLL
  for (int i = 0; i < Pose::kPatchRows; ++i) {
    FASTCAPS_UNROLL
    for (int d = 0; d < Pose::kD; d += V)
      load_vector<V>(from + lane.c(i) * Pose::kRowStride + d, reinterpret_cast<float (&)[V]>(to[i][d]));
  }
}

// ADDS: to what the votes are.
template <class Pose, bool ADDS = false>
FASTCAPS_DEVICE void multiply(const Rows<Pose>& rows, const Matrices<Pose>& matrices,
                              Patch<Pose> (&votes)[Pose::kEach]) {
  FASTCAPS_UNROLL
  for (int i = 0; i < Pose::kPatchRows; ++i) {
    FASTCAPS_UNROLL
    for (int d = 0; d < Pose::kD; ++d) {
      FASTCAPS_UNROLL
      for (int p = 0; p < Pose::kEach; ++p) {
        FASTCAPS_UNROLL
        for (int j = 0; j < Pose::kPatchColumns; ++j) {
          float& vote = votes[p][i][j];
          vote = d == 0 && !ADDS ? rows[i][0] * matrices[p][0][j] : vote + rows[i][d] * matrices[p][d][j];
        }
      }
    }
  }
}

// Votes that are the children themselves, the same for every parent.
template <class Pose, int R>
FASTCAPS_DEVICE void take_children(const Lane<Pose, R>& lane, const Stage<Pose>& stage, Patches<Pose, R>& votes) {
  constexpr int V = Pose::kWeightVector;
  FASTCAPS_UNROLL
  for (int r = 0; r < R; ++r) {
    each_vector<Pose>([&](int i, int j) {
      float part[V] = {};
      if (lane.inside(i, j)) load_vector<V>(child_row(lane, stage, r, i) + lane.e(j), part);
      FASTCAPS_UNROLL
      for (int p = 0; p < Pose::kEach; ++p) {
        FASTCAPS_UNROLL
        for (int v = 0; v < V; ++v) votes[r][p][i][j + v] = part[v];
      }
    });
  }
}

// LEAN: see LeanCall.
template <bool LEAN, bool ADDS = false, class Pose, int R>
FASTCAPS_DEVICE void make_votes(const Lane<Pose, R>& lane, const Stage<Pose>& stage, Patches<Pose, R>& votes) {
  const PassArgs& args = lane.args;
  if (!LEAN && Pose::kProducts == 0 && !args.weight)
    take_children(lane, stage, votes);
  else
    with_weights<Pose>(args, [&](auto stored) {
      if constexpr (Pose::kProducts > 0)
        multiply_on_tensor_cores<stored()>(lane, stage, votes);
      else
        multiply<stored(), ADDS>(lane, stage, votes);
    });
  if constexpr (!LEAN) {
    if (!args.bias) return;
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p)
      add_bias<Pose::kPatchColumns>(lane, stage, p, 0, [&](int r) -> Patch<Pose>& { return votes[r][p]; });
  }
}

// <x, y> over the whole pose.
template <class Pose, int R>
FASTCAPS_DEVICE float dot(const Lane<Pose, R>& lane, const Patch<Pose>& x, const Patch<Pose>& y) {
  float sum = 0.0f;
  each_number<Pose>([&](int i, int j) { sum += x[i][j] * y[i][j]; });
  return lane.sum_pose(sum);
}

// Where a parent's pose begins in dense memory, [positions, M, C, E]; a patch of it there, zero where there is none.
template <class Pose, int R>
FASTCAPS_DEVICE int64_t parent_offset(const Lane<Pose, R>& lane, int r, int p) {
  return (lane.at(r).index * lane.args.M + lane.m(p)) * lane.C() * lane.E();
}
template <class Pose, int R>
FASTCAPS_DEVICE void load_parent(const Lane<Pose, R>& lane, const float* from, int r, int p, Patch<Pose>& to) {
  constexpr int V = Pose::kWeightVector;
  const bool exists = lane.alive(r, p);
  const int64_t at = parent_offset(lane, r, p);
  each_vector<Pose>([&](int i, int j) {
    float part[V] = {};
    if (exists && lane.inside(i, j)) load_vector<V>(from + at + lane.number(i, j), part);
    FASTCAPS_UNROLL
    for (int v = 0; v < V; ++v) to[i][j + v] = part[v];
  });
}
// Stores to one of several parts, [parts, positions, M, C, E]; null: not wanted.
template <class Pose, int R>
FASTCAPS_DEVICE void store_parent(const Lane<Pose, R>& lane, float* parts, int part, int r, int p,
                                  const Patch<Pose>& from) {
  if (!parts || !lane.alive(r, p)) return;
  float* to = parts + lane.part(part) * lane.C() * lane.E() + parent_offset(lane, r, p);
  each_vector<Pose>([&](int i, int j) {
    if (lane.inside(i, j)) store_vector<Pose::kWeightVector>(to + lane.number(i, j), &from[i][j]);
  });
}
template <class Pose, int R>
FASTCAPS_DEVICE void store_parents(const Lane<Pose, R>& lane, float* parts, int part, const Patches<Pose, R>& from) {
  each_patch<Pose, R>([&](int r, int p) { store_parent(lane, parts, part, r, p, from[r][p]); });
}

// The query, times scale; its layout and type are the caller's.
template <class Pose, int R>
FASTCAPS_DEVICE void load_query(const Lane<Pose, R>& lane, int r, int p, float scale, Patch<Pose>& to) {
  const View& query = lane.args.query;
  const bool exists = query.data && lane.alive(r, p);
  const int64_t at = lane.at(r).query + lane.m(p) * query.stride[3];
  each_number<Pose>([&](int i, int j) {
    to[i][j] = exists && lane.inside(i, j)
                   ? scale * load_number(query.data, at + lane.c(i) * query.stride[4] + lane.e(j) * query.stride[5],
                                         lane.args.storage)
                   : 0.0f;
  });
}

// One value for each parent, in dense memory [positions, M]; stored to one of several parts, if they are wanted.
template <class Pose, int R>
FASTCAPS_DEVICE float load_scalar(const Lane<Pose, R>& lane, const float* from, int r, int p, float otherwise) {
  return from && lane.alive(r, p) ? from[lane.at(r).index * lane.args.M + lane.m(p)] : otherwise;
}
template <class Pose, int R>
FASTCAPS_DEVICE void store_scalar(const Lane<Pose, R>& lane, float* parts, int part, int r, int p, float x) {
  if (parts && lane.alive(r, p) && lane.speaks_for_pose())
    parts[lane.part(part) + lane.at(r).index * lane.args.M + lane.m(p)] = x;
}
template <class Pose, int R>
FASTCAPS_DEVICE void store_scalars(const Lane<Pose, R>& lane, float* parts, int part, const Numbers<Pose, R>& from) {
  each_patch<Pose, R>([&](int r, int p) { store_scalar(lane, parts, part, r, p, from[r][p]); });
}

}  // namespace fastcaps::gpu
