// The attention pass, forward: S_m = sum_i g_i r_im V_im with r_im = softmax over m of scale <Q_m, V_im>.
#pragma once

#include "softmax.h"
#include "votes.h"

namespace fastcaps::gpu {

constexpr float kLog2E = 1.4426950408889634f;

// One child, at the lane's R positions.
template <class Pose, int R>
FASTCAPS_DEVICE void hear(const AttentionArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, int k, int t,
                          const Seat* seats, char* shared, const Tile<Pose> (&query)[R], Tile<Pose> (&sums)[R]) {
  const Child child(a, t);
  Tile<Pose> votes[R];
  make_votes<Pose, R>(a, lane, stage, k, child, votes);
  float share[R];
  if (a.query.data) {
    float logit[R], none[R] = {};
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) logit[r] = sum_pose<Pose>(a, dot<Pose>(query[r], votes[r]));
    if (!compete<Pose, R, 0>(a, lane, seats, child.i, shared, t & 1, logit, none, share, none)) return;
  } else {
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) share[r] = 1.0f / float(a.M);
  }
  FASTCAPS_UNROLL
  for (int r = 0; r < R; ++r) {
    const Seen seen = stage.seen[k * a.tile + lane.template seat<R>(r)];
    const float weight = share[r] * seen.gate;
    if (seen.exists != 0.0f) {
      FASTCAPS_UNROLL
      for (int i = 0; i < Pose::kTileRows; ++i) FASTCAPS_UNROLL
      for (int j = 0; j < Pose::kTileColumns; ++j) sums[r][i][j] += weight * votes[r][i][j];
    }
  }
}

template <class Pose, int R, int THREADS, int BLOCKS>
FASTCAPS_KERNEL(THREADS, BLOCKS)
attention_forward_kernel(const FASTCAPS_CONSTANT AttentionArgs a) {
  char* shared = shared_memory();
  const Seat* seats = reinterpret_cast<const Seat*>(shared + a.shared_seat);
  const Lane<Pose> lane(a);
  const int group = a.by_chunk.quotient(int(block_x())), chunk = a.by_chunk.remainder(int(block_x()), group);
  const int first = chunk * a.chunk_children, last = first + a.chunk_children < a.I ? first + a.chunk_children : a.I;
  for (int64_t tile = group; tile < a.tiles; tile += a.groups) {
    make_seats(a, tile, shared);
    barrier();
    Tile<Pose> query[R], sums[R];
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      load_query<Pose>(a, lane, seats[lane.template seat<R>(r)], a.scale * kLog2E, query[r]);
      FASTCAPS_UNROLL
      for (int i = 0; i < Pose::kTileRows; ++i) FASTCAPS_UNROLL
      for (int j = 0; j < Pose::kTileColumns; ++j) sums[r][i][j] = 0.0f;
    }
    Stage<Pose>::bring(a, shared, 0, first, last);
    copy_commit();
    for (int t = first, which = 0; t < last; t += a.stage, which ^= 1) {
      Stage<Pose>::bring(a, shared, which ^ 1, t + a.stage, last);
      copy_commit();
      copy_wait<1>();
      barrier();
      const Stage<Pose> stage(a, shared, which);
      const int count = last - t < a.stage ? last - t : a.stage;
      FASTCAPS_NO_UNROLL
      for (int k = 0; k < count; ++k) hear<Pose, R>(a, lane, stage, k, t + k, seats, shared, query, sums);
      barrier();
    }
    if (a.collect) continue;
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r)
      store_parents<Pose>(a, lane, a.sums + chunk * a.positions * a.M * Pose::C_(a) * Pose::E_(a),
                          seats[lane.template seat<R>(r)], sums[r], 1.0f);
    barrier();  // the seats are read to the end
  }
}

}  // namespace fastcaps::gpu
