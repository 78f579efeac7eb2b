// The attention pass, forward: S_m = sum_i g_i r_im V_im with r_im = softmax over m of scale <Q_m, V_im>.
#pragma once

#include "softmax.h"
#include "votes.h"

namespace fastcaps::gpu {

constexpr float kLog2E = 1.4426950408889634f;

// One child, at the lane's R positions.
template <class Pose, int R, bool PLAIN>
FASTCAPS_DEVICE void hear(const AttentionArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, const Seat* seats,
                          char* shared, const Tiles<Pose, R>& query, Tiles<Pose, R>& sums) {
  Tiles<Pose, R> votes;
  make_votes<Pose, R, PLAIN>(a, lane, stage, votes);
  float share[R][Pose::kEach];
  if (PLAIN || a.query.data) {
    float logit[R][Pose::kEach], none[R];
    each_tile<Pose, R>([&](int r, int p) { logit[r][p] = dot<Pose>(a, query[r][p], votes[r][p]); });
    if (!compete<Pose, R, 0, PLAIN>(a, lane, stage, seats, shared, logit, logit, share, none)) return;
  } else {
    each_tile<Pose, R>([&](int r, int p) { share[r][p] = 1.0f / float(a.M); });
  }
  each_tile<Pose, R>([&](int r, int p) {
    const Seen seen = stage.seen[lane.template seat<R>(r)];
    const float weight = share[r][p] * seen.gate;
    if (PLAIN || seen.exists != 0.0f)
      each_number<Pose>([&](int i, int j) { sums[r][p][i][j] += weight * votes[r][p][i][j]; });
  });
}

template <class Pose, int R, bool PLAIN, int THREADS, int BLOCKS>
FASTCAPS_KERNEL(THREADS, BLOCKS)
attention_forward_kernel(const FASTCAPS_CONSTANT AttentionArgs a) {
  char* shared = shared_memory();
  const Seat* seats = reinterpret_cast<const Seat*>(shared + a.shared_seat);
  const Lane<Pose> lane(a);
  const int group = a.by_chunk.quotient(int(block_x())), chunk = a.by_chunk.remainder(int(block_x()), group);
  const int first = chunk * a.chunk_children, last = first + a.chunk_children < a.I ? first + a.chunk_children : a.I;
  for (int tile = group; tile < a.tiles; tile += a.groups) {
    make_seats(a, tile, shared);
    make_offsets(a, shared, 0, first, last);
    barrier();
    Tiles<Pose, R> query, sums;
    each_tile<Pose, R>([&](int r, int p) {
      load_query<Pose>(a, lane, seats[lane.template seat<R>(r)], p, a.scale * kLog2E, query[r][p]);
      each_number<Pose>([&](int i, int j) { sums[r][p][i][j] = 0.0f; });
    });
    // One turn before the first child only brings it in.
    for (int t = first - a.stage, which = 1; t < last; t += a.stage, which ^= 1) {
      Stage<Pose>::bring(a, shared, which ^ 1, t + a.stage, last);
      copy_commit();
      if (t < first) {
        barrier();  // before the next offsets are read
        continue;
      }
      copy_wait<1>();
      barrier();
      Stage<Pose> stage(a, shared, which, t);
      const int count = last - t < a.stage ? last - t : a.stage;
      FASTCAPS_NO_UNROLL
      for (int k = 0; k < count; ++k) {
        hear<Pose, R, PLAIN>(a, lane, stage, seats, shared, query, sums);
        stage.next(a);
      }
      barrier();
    }
    if (!PLAIN && a.collect) continue;
    float* to = a.sums + chunk * a.positions * a.M * Pose::C_(a) * Pose::E_(a);
    each_tile<Pose, R>(
        [&](int r, int p) { store_parent<Pose>(a, lane, to, seats[lane.template seat<R>(r)], p, sums[r][p], 1.0f); });
    barrier();  // the seats are read to the end
  }
}

}  // namespace fastcaps::gpu
