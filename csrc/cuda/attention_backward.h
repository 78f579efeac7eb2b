// The attention pass, backward. Votes are made again; with h_im = <dS_m, V_im>:
//   da_im = g_i r_im (h_im - sum_m' r_im' h_im')      dV_im = g_i r_im dS_m + scale da_im Q_m
//   dQ_m = scale sum_i da_im V_im    dg_i = sum_m r_im h_im    dP_i = sum_m dV_im W_m^T    dW_m = sum P_i^T dV_im
#pragma once

#include "attention_forward.h"

namespace fastcaps::gpu {

FASTCAPS_DEVICE void add(float* at, float x, bool alone) {
  if (alone)
    *at += x;
  else
    atomic_add(at, x);
}

template <int N>
FASTCAPS_DEVICE void add_vector(float* at, const float (&x)[N], bool alone) {
  if constexpr (N == 4) {
    if (alone) {
      float4* to = reinterpret_cast<float4*>(at);
      const float4 old = *to;
      *to = make_float4(old.x + x[0], old.y + x[1], old.z + x[2], old.w + x[3]);
    } else {
      atomic_add4(at, make_float4(x[0], x[1], x[2], x[3]));
    }
  } else {
    FASTCAPS_UNROLL
    for (int k = 0; k < N; ++k) add(at + k, x[k], alone);
  }
}

// Where the warps of a block put what they found for the children of a stage, before the block adds it all up.
template <class Pose>
struct Found {
  float* children;  // [stage, tile, warps that share parents, C, D]
  float* weight;    // [stage, warps that take other positions, parents of the block, stride]

  FASTCAPS_DEVICE Found(const AttentionArgs& a, char* shared)
      : children(reinterpret_cast<float*>(shared + a.shared_dchildren)),
        weight(reinterpret_cast<float*>(shared + a.shared_dweight)) {}

  static FASTCAPS_DEVICE int child_numbers(const AttentionArgs& a) {
    return Pose::padded_rows(a) * Pose::padded_depth(a);
  }
  FASTCAPS_DEVICE float* child(const AttentionArgs& a, int k, int seat, int warp_parent) const {
    return children + ((k * a.tile + seat) * a.warps_parents + warp_parent) * child_numbers(a);
  }
  FASTCAPS_DEVICE float* weights(const AttentionArgs& a, int k, int warp_position, int m) const {
    const int groups = block_threads() / kWarp / a.warps_parents, parents = a.warps_parents * Pose::parents(a);
    return weight + ((k * groups + warp_position) * parents + m) * Pose::kWeightStride;
  }
};

// Rows d .. d + V of dP, summed over the parents and columns of the warp, for RB of the lane's positions from r on.
template <class Pose, int R, int RB>
FASTCAPS_DEVICE void differentiate_children(const AttentionArgs& a, const Lane<Pose>& lane, const Found<Pose>& found,
                                            int k, int d, int r, const float (&w)[Pose::kVector][Pose::kTileColumns],
                                            const Tile<Pose> (&dvotes)[R]) {
  constexpr int V = Pose::kVector, TC = Pose::kTileRows, TE = Pose::kTileColumns;
  float x[RB * TC * V];
  FASTCAPS_UNROLL
  for (int b = 0; b < RB; ++b) FASTCAPS_UNROLL
  for (int i = 0; i < TC; ++i) FASTCAPS_UNROLL
  for (int v = 0; v < V; ++v) {
    float sum = 0.0f;
    FASTCAPS_UNROLL
    for (int j = 0; j < TE; ++j) sum += dvotes[r + b][i][j] * w[v][j];
    x[(b * TC + i) * V + v] = sum;
  }
  const int depth = Pose::padded_depth(a);
  const auto put = [&](int which, float value) {
    const int v = which % V, i = which / V % TC, b = which / (V * TC);
    found.child(a, k, lane.template seat<R>(r + b), lane.warp_parent)[lane.c(i) * depth + d + v] = value;
  };
  if constexpr (Pose::kFixed) {
    int begin, count;
    scatter_sums<RB * TC * V, Pose::kColumns * Pose::kParents>(x, lane.lane, begin, count);
    constexpr int kLeft = (RB * TC * V - 1) / (Pose::kColumns * Pose::kParents) + 1;
    FASTCAPS_UNROLL
    for (int n = 0; n < kLeft; ++n)
      if (n < count) put(begin + n, x[n]);
  } else {
    FASTCAPS_UNROLL
    for (int n = 0; n < RB * TC * V; ++n) {
      const float sum = sum_lanes(x[n], 1, Pose::columns(a) * Pose::parents(a));
      if (lane.column == 0 && lane.parent == 0) put(n, sum);
    }
  }
}

// Rows d .. d + V of dW, summed over the rows and positions of the warp.
template <class Pose, int R>
FASTCAPS_DEVICE void differentiate_weights(const AttentionArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage,
                                           const Found<Pose>& found, float* dweight, int k, const Child& child, int d,
                                           const Tile<Pose> (&dvotes)[R]) {
  constexpr int V = Pose::kVector, TC = Pose::kTileRows, TE = Pose::kTileColumns, WV = Pose::kWeightVector;
  float sum[V][TE] = {};
  FASTCAPS_UNROLL
  for (int r = 0; r < R; ++r) FASTCAPS_UNROLL
  for (int i = 0; i < TC; ++i) {
    float p[V];
    load_vector<V>(child_row(a, lane, stage, k, lane.template seat<R>(r), i) + d, p);
    FASTCAPS_UNROLL
    for (int v = 0; v < V; ++v) FASTCAPS_UNROLL
    for (int j = 0; j < TE; ++j) sum[v][j] += p[v] * dvotes[r][i][j];
  }
  const int inner = Pose::columns(a) * Pose::parents(a);
  const bool speaks = lane.row == 0 && lane.position == 0;
  FASTCAPS_UNROLL
  for (int v = 0; v < V; ++v) FASTCAPS_UNROLL
  for (int j = 0; j < TE; j += WV) {
    float part[WV];
    FASTCAPS_UNROLL
    for (int x = 0; x < WV; ++x) part[x] = sum_lanes(sum[v][j + x], inner, kWarp / inner);
    if (!speaks) continue;
    if constexpr (Pose::kWeightStride > 0) {
      float* to = found.weights(a, k, lane.warp_position, lane.m_block) + (d + v) * Pose::kE + lane.e(a, j);
      FASTCAPS_UNROLL
      for (int x = 0; x < WV; ++x) to[x] = part[x];
    } else if (lane.alive && (Pose::kFixed || (d + v < a.D && lane.e(a, j) < a.E))) {
      float* to = dweight + ((int64_t(child.g) * a.M + lane.m) * Pose::D_(a) + d + v) * Pose::E_(a) + lane.e(a, j);
      add_vector<WV>(to, part, a.alone_with_weights);
    }
  }
}

template <class Pose, int R>
FASTCAPS_DEVICE void differentiate_bias(const AttentionArgs& a, const Lane<Pose>& lane, float* dbias,
                                        const Child& child, const Tile<Pose> (&dvotes)[R]) {
  const int inner = Pose::columns(a) * Pose::parents(a) * Pose::rows(a);
  FASTCAPS_UNROLL
  for (int i = 0; i < Pose::kTileRows; ++i) FASTCAPS_UNROLL
  for (int j = 0; j < Pose::kTileColumns; ++j) {
    float sum = 0.0f;
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) sum += dvotes[r][i][j];
    sum = sum_lanes(sum, inner, kWarp / inner);
    if (lane.position == 0 && lane.alive && lane.inside(a, i, j)) {
      const int64_t first = a.bias_stride_i ? int64_t(child.i) * a.M : 0;
      add(dbias + ((first + lane.m) * Pose::C_(a) + lane.c(i)) * Pose::E_(a) + lane.e(a, j), sum, a.alone_with_weights);
    }
  }
}

// One child, at the lane's R positions. `query` carries the scale.
template <class Pose, int R>
FASTCAPS_DEVICE void differentiate(const AttentionArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage,
                                   const Found<Pose>& found, float* dweight, float* dbias, int k, int t,
                                   const Seat* seats, char* shared, const Tile<Pose> (&query)[R],
                                   const Tile<Pose> (&dsums)[R], Tile<Pose> (&dquery)[R]) {
  constexpr int TC = Pose::kTileRows, TE = Pose::kTileColumns, V = Pose::kVector;
  const Child child(a, t);
  Tile<Pose> votes[R];
  make_votes<Pose, R>(a, lane, stage, k, child, votes);
  float logit[R], h[R], share[R], heard[R];
  FASTCAPS_UNROLL
  for (int r = 0; r < R; ++r) {
    logit[r] = kLog2E * sum_pose<Pose>(a, dot<Pose>(query[r], votes[r]));
    h[r] = sum_pose<Pose>(a, dot<Pose>(dsums[r], votes[r]));
  }
  if (!compete<Pose, R, 1>(a, lane, seats, child.i, shared, t & 1, logit, h, share, heard)) return;
  FASTCAPS_UNROLL
  for (int r = 0; r < R; ++r) {
    const int at = lane.template seat<R>(r);
    const Seen seen = stage.seen[k * a.tile + at];
    const bool exists = seen.exists != 0.0f;
    if (a.dgate && exists && lane.m == 0 && lane.speaks_for_parent())
      add(a.dgate + child.cell(a, seats[at]), heard[r], a.alone_with_children);
    const float weight = share[r] * seen.gate, dlogit = weight * (h[r] - heard[r]);
    FASTCAPS_UNROLL
    for (int i = 0; i < TC; ++i) FASTCAPS_UNROLL
    for (int j = 0; j < TE; ++j) {
      if (exists) dquery[r][i][j] += dlogit * votes[r][i][j];
      votes[r][i][j] = exists && lane.alive ? weight * dsums[r][i][j] + dlogit * query[r][i][j] : 0.0f;  // dL/dV
    }
  }
  const Weights<Pose> weights(a, lane, stage, k, child.g);
  const int depth = Pose::padded_depth(a);
  _Pragma("unroll Pose::kDepthUnroll") for (int d = 0; d < depth; d += V) {
    if (a.dchildren) {
      float w[V][TE];
      weights.rows(a, lane, d, w);
      constexpr int RB = TC == 1 ? R : 1;
      FASTCAPS_UNROLL
      for (int r = 0; r < R; r += RB) differentiate_children<Pose, R, RB>(a, lane, found, k, d, r, w, votes);
    }
    if (a.dweight) differentiate_weights<Pose, R>(a, lane, stage, found, dweight, k, child, d, votes);
  }
  if (a.dbias) differentiate_bias<Pose, R>(a, lane, dbias, child, votes);
}

// All warps' dP of a stage, added up and brought to the children.
template <class Pose>
FASTCAPS_DEVICE void flush_children(const AttentionArgs& a, const Found<Pose>& found, int first, int count,
                                    const Seat* seats) {
  constexpr int V = Pose::kVector;
  const int rows = Pose::padded_rows(a), depth = Pose::padded_depth(a), vectors = depth / V;
  const int units = count * a.tile * rows * vectors;
  for (int unit = thread_index(); unit < units; unit += block_threads()) {
    const int rest = unit / (rows * vectors), c = unit / vectors % rows, d = unit % vectors * V;
    const int k = a.by_unit_tile.quotient(rest), at = a.by_unit_tile.remainder(rest, k);
    const Child child(a, first + k);
    if (!child.exists(a, seats[at]) || c >= Pose::C_(a)) continue;
    const float* from = found.child(a, k, at, 0) + c * depth + d;
    float sum[V] = {};
    for (int w = 0; w < a.warps_parents; ++w) {
      float x[V];
      load_vector<V>(from + w * Found<Pose>::child_numbers(a), x);
      FASTCAPS_UNROLL
      for (int v = 0; v < V; ++v) sum[v] += x[v];
    }
    float* to = a.dchildren + (child.cell(a, seats[at]) * Pose::C_(a) + c) * Pose::D_(a) + d;
    if constexpr (Pose::kFixed) {
      add_vector<V>(to, sum, a.alone_with_children);
    } else {
      FASTCAPS_UNROLL
      for (int v = 0; v < V; ++v)
        if (d + v < a.D) add(to + v, sum[v], a.alone_with_children);
    }
  }
}

// All warps' dW of a stage; children that share their weights are added up first.
template <class Pose>
FASTCAPS_DEVICE void flush_weights(const AttentionArgs& a, const Found<Pose>& found, float* dweight, int first,
                                   int count) {
  constexpr int V = Pose::kWeightCopy, kVectors = Pose::kD * Pose::kE / V;
  const int block_parents = a.warps_parents * Pose::kParents, warps = block_threads() / kWarp / a.warps_parents;
  const int first_parent = a.first_parent + int(block_y()) * block_parents;
  for (int unit = thread_index(); unit < block_parents * kVectors; unit += block_threads()) {
    const int m = unit / kVectors, number = unit % kVectors * V;
    if (first_parent + m >= a.M) continue;
    float sum[V] = {};
    for (int k = 0; k < count; ++k) {
      for (int w = 0; w < warps; ++w) {
        float x[V];
        load_vector<V>(found.weights(a, k, w, m) + number, x);
        FASTCAPS_UNROLL
        for (int v = 0; v < V; ++v) sum[v] += x[v];
      }
      const int g = a.by_group.quotient(first + k);
      if (k + 1 < count && a.by_group.quotient(first + k + 1) == g) continue;
      add_vector<V>(dweight + (int64_t(g) * a.M + first_parent + m) * (Pose::kD * Pose::kE) + number, sum,
                    a.alone_with_weights);
      FASTCAPS_UNROLL
      for (int v = 0; v < V; ++v) sum[v] = 0.0f;
    }
  }
}

template <class Pose, int R, int THREADS, int BLOCKS>
FASTCAPS_KERNEL(THREADS, BLOCKS)
attention_backward_kernel(const FASTCAPS_CONSTANT AttentionArgs a) {
  char* shared = shared_memory();
  const Seat* seats = reinterpret_cast<const Seat*>(shared + a.shared_seat);
  const Lane<Pose> lane(a);
  const Found<Pose> found(a, shared);
  const int group = a.by_chunk.quotient(int(block_x())), chunk = a.by_chunk.remainder(int(block_x()), group);
  const int first = chunk * a.chunk_children, last = first + a.chunk_children < a.I ? first + a.chunk_children : a.I;
  const int64_t part = a.parts_by_chunk ? block_x() : group;
  float* dweight = a.dweight + part * a.dweight_part;
  float* dbias = a.dbias + part * a.dbias_part;
  for (int64_t tile = group; tile < a.tiles; tile += a.groups) {
    make_seats(a, tile, shared);
    barrier();
    Tile<Pose> query[R], dsums[R], dquery[R];
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      const Seat& seat = seats[lane.template seat<R>(r)];
      load_query<Pose>(a, lane, seat, a.scale, query[r]);
      load_parents<Pose>(a, lane, a.dsums, seat, dsums[r]);
      FASTCAPS_UNROLL
      for (int i = 0; i < Pose::kTileRows; ++i) FASTCAPS_UNROLL
      for (int j = 0; j < Pose::kTileColumns; ++j) dquery[r][i][j] = 0.0f;
    }
    // One turn before the first child only brings it in.
    for (int t = first - a.stage, which = 1; t < last; t += a.stage, which ^= 1) {
      Stage<Pose>::bring(a, shared, which ^ 1, t + a.stage, last);
      copy_commit();
      if (t < first) continue;
      copy_wait<1>();
      barrier();
      const Stage<Pose> stage(a, shared, which);
      const int count = last - t < a.stage ? last - t : a.stage;
      FASTCAPS_NO_UNROLL
      for (int k = 0; k < count; ++k)
        differentiate<Pose, R>(a, lane, stage, found, dweight, dbias, k, t + k, seats, shared, query, dsums, dquery);
      barrier();
      if (a.collect) continue;
      if (a.dchildren) flush_children<Pose>(a, found, t, count, seats);
      if constexpr (Pose::kWeightStride > 0)
        if (a.dweight) flush_weights<Pose>(a, found, dweight, t, count);
    }
    if (!a.collect && a.dquery) {
      FASTCAPS_UNROLL
      for (int r = 0; r < R; ++r)
        store_parents<Pose>(a, lane, a.dquery + chunk * a.positions * a.M * Pose::C_(a) * Pose::E_(a),
                            seats[lane.template seat<R>(r)], dquery[r], a.scale);
    }
    barrier();  // the seats are read to the end
  }
}

}  // namespace fastcaps::gpu
