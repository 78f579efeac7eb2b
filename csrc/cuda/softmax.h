// The parents' competition for a child: a softmax over lanes, over the warps that share a position's parents, and over
// launches where the parents do not fit into one block. Logits are in units of log2.
#pragma once

#include <cfloat>

#include "stage.h"

namespace fastcaps::gpu {

// What some of the parents know of a softmax: their largest logit, and sums of exponentials below it. N counts the sums
// beside that of the exponentials themselves: none forward, that of exp * h backward.
template <int N>
struct SoftmaxPart {
  float top, total[N + 1];

  // Exponentials are taken below this: the largest logit, unless all are -inf, which alone must not make a NaN yet.
  FASTCAPS_DEVICE float shift() const { return fmaxf(top, -FLT_MAX); }

  FASTCAPS_DEVICE void join(const SoftmaxPart& other) {
    const float before = top;
    top = fmaxf(top, other.top);
    const float mine = exp2_fast(before - shift()), theirs = exp2_fast(other.top - shift());
    FASTCAPS_UNROLL
    for (int k = 0; k <= N; ++k) total[k] = total[k] * mine + other.total[k] * theirs;
  }
};

// The warps of a position put down what they have and take up what all have. Two places take turns, so that nobody
// overwrites what another still reads: whoever comes back to a place has passed the other one's barrier.
template <class Pose, int R, int N>
FASTCAPS_DEVICE void meet(const PassArgs& a, const Lane<Pose>& lane, char* shared, int turn,
                          SoftmaxPart<N> (&part)[R]) {
  const int groups = block_threads() / kWarp / a.warps_parents, seats = lane.positions * R;
  SoftmaxPart<N>* all = reinterpret_cast<SoftmaxPart<N>*>(shared + a.shared_exchange) +
                        (turn * groups + lane.warp_position) * a.warps_parents * seats;
  if (lane.speaks_for_position()) {
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) all[lane.warp_parent * seats + r * lane.positions + lane.position] = part[r];
  }
  barrier_part(1 + lane.warp_position, a.warps_parents * kWarp);
  FASTCAPS_UNROLL
  for (int r = 0; r < R; ++r) {
    part[r] = all[r * lane.positions + lane.position];
    for (int w = 1; w < a.warps_parents; ++w) part[r].join(all[w * seats + r * lane.positions + lane.position]);
  }
}

// What blocks of parents know of their softmax, joined in their order.
template <int N>
FASTCAPS_KERNEL(256, 1)
join_kernel(const FASTCAPS_CONSTANT PassArgs a) {
  SoftmaxPart<N>* parts = reinterpret_cast<SoftmaxPart<N>*>(a.statistics);
  const int64_t count = a.positions * a.I;
  for (int64_t k = block_x() * block_threads() + thread_index(); k < count; k += blocks_x() * block_threads()) {
    SoftmaxPart<N> all = parts[k];
    for (int place = 1; place < a.collect; ++place) {
      SoftmaxPart<N> more = parts[place * count + k];
      more.join(all);
      all = more;
    }
    parts[k] = all;
  }
}

// From a lane's logits (and h, if N = 1) to its shares r, and mean = sum_m r_m h_m at each of its R positions. Returns
// false where this launch only collects statistics: there are no shares yet.
template <class Pose, int R, int N, bool PLAIN>
FASTCAPS_DEVICE bool compete(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, const Seat* seats,
                             char* shared, const float (&logit)[R][Pose::kEach], const float (&h)[R][Pose::kEach],
                             float (&share)[R][Pose::kEach], float (&mean)[R]) {
  SoftmaxPart<N> part[R];
  const bool known = !PLAIN && a.statistics && !a.collect;  // what all parents come to
  const auto kept = [&](int r) {
    const int64_t position = seats[lane.template seat<R>(r)].position;
    return reinterpret_cast<SoftmaxPart<N>*>(a.statistics) + (position < 0 ? 0 : position) * a.I + stage.t;
  };
  if (known) {
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) part[r] = *kept(r);
  } else {
    float x[R][Pose::kEach];  // logits; those of parents that there are not take no part
    each_tile<Pose, R>([&](int r, int p) { x[r][p] = lane.alive(a, p) ? logit[r][p] : -INFINITY; });
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      float top = x[r][0];
      FASTCAPS_UNROLL
      for (int p = 1; p < Pose::kEach; ++p) top = fmaxf(top, x[r][p]);
      part[r].top = max_parents<Pose>(a, top);
    }
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      const float shift = part[r].shift();
      float total = 0.0f, product = 0.0f;
      FASTCAPS_UNROLL
      for (int p = 0; p < Pose::kEach; ++p) {
        share[r][p] = exp2_fast(x[r][p] - shift);
        total += share[r][p];
        if constexpr (N > 0) product += share[r][p] * h[r][p];
      }
      part[r].total[0] = sum_parents<Pose>(a, total);
      if constexpr (N > 0) part[r].total[1] = sum_parents<Pose>(a, product);
    }
    if (a.warps_parents > 1) meet<Pose, R, N>(a, lane, shared, stage.t & 1, part);
  }
  if (!PLAIN && a.collect) {
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      const bool exists = seats[lane.template seat<R>(r)].position >= 0;
      if (!exists || lane.warp_parent != 0 || !lane.speaks_for_position()) continue;
      SoftmaxPart<N>& place = kept(r)[block_y() * a.positions * a.I];
      if (a.first_parent > 0) part[r].join(place);  // it is not new
      place = part[r];
    }
    return false;
  }
  if (known || a.warps_parents > 1)  // what was below the lanes' own top is now below that of all
    each_tile<Pose, R>(
        [&](int r, int p) { share[r][p] = lane.alive(a, p) ? exp2_fast(logit[r][p] - part[r].shift()) : 0.0f; });
  FASTCAPS_UNROLL
  for (int r = 0; r < R; ++r) {
    const float one = reciprocal(part[r].total[0]);
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) share[r][p] *= one;
    if constexpr (N > 0) mean[r] = part[r].total[1] * one;
  }
  return true;
}

}  // namespace fastcaps::gpu
