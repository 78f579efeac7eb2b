// The parents' competition for a child: a softmax over lanes, over the warps that share a position's parents, and over
// launches where the parents do not fit into one block. Logits are in units of log2.
#pragma once

#include <bit>
#include <cfloat>

#include "stage.h"

namespace fastcaps::gpu {

constexpr float kMostTotal = 0x1p80f;  // totals from 1 / kMostTotal on have lost no digits

// Lean walks note the worst of all totals. The bits of positive floats order them as unsigned numbers: a total is lost
// if its bits less kLeast are above kRange, as those of NaN are.
constexpr uint32_t kLeast = std::bit_cast<uint32_t>(1.0f / kMostTotal),
                   kRange = std::bit_cast<uint32_t>(kMostTotal) - kLeast;
FASTCAPS_DEVICE void note_total(uint32_t& worst, float total) {
  const uint32_t from_least = float_bits(total) - kLeast;
  worst = worst > from_least ? worst : from_least;
}
FASTCAPS_DEVICE bool is_lost(uint32_t worst) { return worst > kRange; }

// The softmax over some of the parents: sums of exponentials relative to `base`, which is 0, or their largest logit
// where 0 would lose digits. N: further sums, none in a forward, that of exp * gain in a backward.
template <int N>
struct alignas(N == 0 ? 8 : 4) SoftmaxPart {  // a pair is read and written at once
  float base, total[N + 1];

  // The base, finite even if all logits are -inf, which must not make NaN yet.
  FASTCAPS_DEVICE float shift() const { return fmaxf(base, -FLT_MAX); }

  FASTCAPS_DEVICE void join(const SoftmaxPart& other) {
    const float before = base;
    base = fmaxf(base, other.base);
    const float mine = exp2_fast(before - shift()), theirs = exp2_fast(other.base - shift());
    FASTCAPS_UNROLL
    for (int k = 0; k <= N; ++k) total[k] = total[k] * mine + other.total[k] * theirs;
  }
};

// Exchanges parts of N of the lane's positions between all warps of a position, and returns where the first ones lie:
// positions are lane.positions apart, warps N times as far. Two places alternate, so that no warp overwrites what
// another still reads: before it returns to a place, it has passed the other one's barrier.
template <class T, class Pose, int R, int N>
FASTCAPS_DEVICE const T* exchange(const Lane<Pose, R>& lane, int parity, const T (&part)[N]) {
  const PassArgs& args = lane.args;
  T* all = reinterpret_cast<T*>(lane.shared + args.shared_exchange) +
           (lane.warp_position * 2 + parity) * args.warps_parents * lane.positions * N + lane.position;
  if (lane.speaks_for_position()) {
    FASTCAPS_UNROLL
    for (int r = 0; r < N; ++r) all[(lane.warp_parent * N + r) * lane.positions] = part[r];
  }
  barrier_part(1 + lane.warp_position, args.warps_parents * kWarp);
  return all;
}

// Totals over the parents of all warps, all of them relative to 0 (lean walks).
template <class Pose, int R, int N>
FASTCAPS_DEVICE void meet(const Lane<Pose, R>& lane, int parity, float (&total)[N]) {
  const float* all = exchange(lane, parity, total);
  FASTCAPS_UNROLL
  for (int r = 0; r < N; ++r) {
    total[r] = all[r * lane.positions];
    for (int w = 1; w < lane.args.warps_parents; ++w) total[r] += all[(w * N + r) * lane.positions];
  }
}

// Joins the parts of all warps of a position.
template <class Pose, int R, int N>
FASTCAPS_DEVICE void meet(const Lane<Pose, R>& lane, int parity, SoftmaxPart<N> (&part)[R]) {
  const PassArgs& args = lane.args;
  const int in_tile = lane.positions * R;
  const SoftmaxPart<N>* all = exchange(lane, parity, part);
  FASTCAPS_UNROLL
  for (int r = 0; r < R; ++r) {
    const SoftmaxPart<N>* of_warps = all + r * lane.positions;
    bool alike = true;
    part[r] = *of_warps;
    for (int w = 1; w < args.warps_parents; ++w) {
      const SoftmaxPart<N> other = of_warps[w * in_tile];
      alike = alike && other.base == part[r].base;
      FASTCAPS_UNROLL
      for (int k = 0; k <= N; ++k) part[r].total[k] += other.total[k];
    }
    if (alike) continue;  // mostly all are relative to 0: see add_up
    part[r] = *of_warps;
    for (int w = 1; w < args.warps_parents; ++w) part[r].join(of_warps[w * in_tile]);
  }
}

// Joins the softmax parts of all blocks of parents, in their order.
template <int N>
FASTCAPS_KERNEL(256, 1)
join_kernel(const FASTCAPS_CONSTANT PassArgs args) {
  SoftmaxPart<N>* parts = reinterpret_cast<SoftmaxPart<N>*>(args.statistics);
  const int64_t count = args.positions * args.I;
  for (int64_t k = block_x() * block_threads() + thread_index(); k < count; k += blocks_x() * block_threads()) {
    SoftmaxPart<N> all = parts[k];
    for (int place = 1; place < args.collect; ++place) {
      SoftmaxPart<N> more = parts[place * count + k];
      more.join(all);
      all = more;
    }
    parts[k] = all;
  }
}

// Exponentials of a lane's logits and their totals over the warp's parents, relative to a logit of 0: so no exchange
// has to find the largest one. Where a total is out of range, again, relative to the largest.
template <int N, class Pose, int R>
FASTCAPS_DEVICE void add_up(const Lane<Pose, R>& lane, const Numbers<Pose, R>& logit, const Numbers<Pose, R>& gain,
                            Numbers<Pose, R>& coefficient, SoftmaxPart<N> (&part)[R]) {
  constexpr float kMost = N > 0 ? 0x1p40f : kMostTotal;  // times gains, they must neither overflow nor vanish
  const auto add = [&](int r, float shift) {
    float total = 0.0f, product = 0.0f;
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) {
      coefficient[r][p] = lane.alive(p) ? exp2_fast(logit[r][p] - shift) : 0.0f;
      total += coefficient[r][p];
      if constexpr (N > 0) product += coefficient[r][p] * gain[r][p];
    }
    part[r].total[0] = lane.sum_parents(total);
    if constexpr (N > 0) part[r].total[1] = lane.sum_parents(product);
  };
  bool lost[R], any = false;
  FASTCAPS_UNROLL
  for (int r = 0; r < R; ++r) {
    part[r].base = 0.0f;
    add(r, 0.0f);
    lost[r] = !(part[r].total[0] > 1.0f / kMost && part[r].total[0] < kMost);
    if constexpr (N > 0) {
      const float size = fabsf(part[r].total[1]);
      lost[r] = lost[r] || !(size < kMostTotal) || (size < 1.0f / kMostTotal && size != 0.0f);
    }
    any = any || lost[r];
  }
  if (!any_lane(any)) return;
  FASTCAPS_UNROLL
  for (int r = 0; r < R; ++r) {
    float largest = -INFINITY;
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) largest = fmaxf(largest, lane.alive(p) ? logit[r][p] : -INFINITY);
    largest = lane.max_parents(largest);
    if (lost[r]) part[r].base = largest;  // the same in all lanes of a position, whatever the others need
    add(r, part[r].shift());
  }
}

// From a lane's logits (and gains, if N = 1) to its coefficients r, and average = sum_m r_m gain_m at each of its R
// positions. Returns false where this launch only collects statistics: there are no coefficients yet.
template <int N, bool LEAN, class Pose, int R>
FASTCAPS_DEVICE bool compete(const Lane<Pose, R>& lane, const Stage<Pose>& stage, const Numbers<Pose, R>& logit,
                             const Numbers<Pose, R>& gain, Numbers<Pose, R>& coefficient, float (&average)[R]) {
  const PassArgs& args = lane.args;
  SoftmaxPart<N> part[R];
  float relative[R];                                             // what coefficients are relative to so far
  const bool known = !LEAN && args.statistics && !args.collect;  // the softmax over all parents is known
  const auto kept = [&](int r) {
    const Position& at = lane.at(r);
    return reinterpret_cast<SoftmaxPart<N>*>(args.statistics) + (at.exists() ? at.index : 0) * args.I + stage.t;
  };
  if (known) {
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) part[r] = *kept(r), relative[r] = NAN;
  } else {
    add_up<N>(lane, logit, gain, coefficient, part);
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) relative[r] = part[r].shift();
    if (args.warps_parents > 1) meet(lane, stage.t & 1, part);
  }
  if (!LEAN && args.collect) {
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      if (!lane.at(r).exists() || lane.warp_parent != 0 || !lane.speaks_for_position()) continue;
      SoftmaxPart<N>& place = kept(r)[block_y() * args.positions * args.I];
      if (args.first_parent > 0) part[r].join(place);  // earlier blocks are in it
      place = part[r];
    }
    return false;
  }
  if (known || args.warps_parents > 1) {
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      if (part[r].shift() == relative[r]) continue;
      FASTCAPS_UNROLL
      for (int p = 0; p < Pose::kEach; ++p)
        coefficient[r][p] = lane.alive(p) ? exp2_fast(logit[r][p] - part[r].shift()) : 0.0f;
    }
  }
  FASTCAPS_UNROLL
  for (int r = 0; r < R; ++r) {
    const float one = reciprocal(part[r].total[0]);
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) coefficient[r][p] *= one;
    if constexpr (N > 0) average[r] = part[r].total[1] * one;
  }
  return true;
}

}  // namespace fastcaps::gpu
