// The forward that all passes share: of one iteration, or of all of a routing. A row walks through its children
// in blocks. Votes of a block stay in registers, or in cache if they fit, until their coefficients are known; else they
// are made again. No vote reaches memory. Rows are independent, so if children are not cut into ranges, a row makes all
// its iterations here.
//
// A policy (attention.h, folded.h, pooling.h, gaussian.h) defines the pass; X is the type of a row's values:
//   load         reads the parents before the first iteration
//   base         returns the pose that the sums of a parent without a mean are centred on (gaussian.h only)
//   begin        sets the results before the first vote, if they are not 0 (pooling.h only)
//   enter        runs before the children that share a matrix (folded.h only)
//   leave        runs after them (folded.h only)
//   score        returns the logit of a vote for a parent
//   compete      lets the parents compete for a child; returns a factor that all of the child's shares still need
//   equal_share  returns the share if all logits are equal (kEvenSums: it is the same for all parents)
//   equal        returns whether all logits are equal in an iteration
//   weigh, add   compute the coefficients of a block's votes for a parent, and add the votes to its results
//   add_again    does the same for votes that were not kept: makes them again
//   join_lanes   adds the results of a block whose lanes are children to the row's, for at most kJoined parents
//   join         adds the results of another range of children
//   finish       writes the results, and makes the parents of the next iteration from them
#pragma once

#include "block.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

template <class T, class Pose, Lanes kLane, template <class, class> class Policy>
using ForwardBlock =
    Block<T, Pose, kLane, ForwardCall<typename Policy<T, typename Block<T, Pose, kLane, int>::X>::Operands>>;

template <class T, class Pose, Lanes kLane, template <class, class> class Policy>
struct ForwardItem : ForwardBlock<T, Pose, kLane, Policy> {
  using Base = ForwardBlock<T, Pose, kLane, Policy>;
  using Base::call, Base::in, Base::schedule, Base::pose, Base::weights, Base::slots, Base::CE, Base::CD, Base::tiles;
  using Base::kChildLanes, Base::n, Base::P, Base::gates, Base::votes_kept, Base::range;
  using typename Base::V, typename Base::X, typename Base::Weight, typename Base::Units;
  using Pass = Policy<T, X>;
  using Call = ForwardCall<typename Pass::Operands>;
  static constexpr int64_t kJoined = Pass::kJoined;
  static constexpr bool kEvenSums =
      Pass::kEvenSums && kLane == Lanes::kPositions && !Pose::kDynamic && !Pose::kIdentity;
  const Pass pass;
  const int64_t state_size;
  const int64_t before, result_size;     // of a row's results: values that no vote is added to, and all of them
  X *states, *results;                   // of the current rows
  V *logits, *highest, *shares, *local;  // highest: a unit's highest logit, later the factor from compete()
  int64_t iteration = 0;

  FASTCAPS_NOINLINE ForwardItem(const Call& call_, const Pose& pose_, Arena& arena)
      : Base(call_, pose_, arena, call_.schedule.block_rows),
        pass(call),
        state_size(Pass::state_numbers(call)),
        before(Pass::numbers_before(in)),
        result_size(before + summed_numbers<Pass>(in, in.M)) {
    states = arena.take<X>(schedule.block_rows * state_size);
    results = arena.take<X>(schedule.block_rows * result_size);
    logits = arena.take<V>(slots * in.M);
    highest = arena.take<V>(slots);
    shares = arena.take<V>(slots * Pass::kShares);
    local = kChildLanes ? arena.take<V>(schedule.block_rows * summed_numbers<Pass>(in, kJoined)) : nullptr;
  }

  X* state(int64_t t) const { return states + t * state_size; }
  X* result(int64_t t) const { return results + t * result_size; }

  // The results to which the votes of row t are added: the row's, or, if lanes are children, the block's, for kJoined
  // parents, whose lanes are added up together. in_target(m) is parent m's index in them.
  Planes<V> target(int64_t t) const {
    if constexpr (kChildLanes)
      return planes_of<Pass>(local + t * summed_numbers<Pass>(in, kJoined), in, kJoined);
    else
      return planes_of<Pass>(result(t) + before, in, in.M);
  }
  template <class Y>
  static FASTCAPS_INLINE void clear(Planes<Y> sums) {
    zero(sums.base, sums.numbers(Pass::kSumNumbers));
    if constexpr (requires { Pass::begin(sums); }) Pass::begin(sums);
  }
  static FASTCAPS_INLINE int64_t in_target(int64_t m) { return kChildLanes ? m % kJoined : m; }

  void run(int64_t item) {
    const int64_t at = item % schedule.ranges, group = item / schedule.ranges;
    const int64_t begin = edge(at), count = edge(at + 1) - begin;
    const int64_t all = kChildLanes ? in.positions() : (in.positions() + n - 1) / n;
    const int64_t last = min((group + 1) * schedule.rows_per_group, all);
    for (int64_t first = group * schedule.rows_per_group; first < last; first += schedule.block_rows) {
      const int64_t nt = min(schedule.block_rows, last - first);
      for (int64_t t = 0; t < nt; ++t) place(first + t, t);
      for (iteration = call.iteration; iteration < call.iteration + call.iterations; ++iteration) {
        for (int64_t t = 0; t < nt; ++t) {
          zero(result(t), before);
          clear(planes_of<Pass>(result(t) + before, in, in.M));
        }
        each_range(begin, count, [&] {
          weights.enter(range, 0, min(range.count, 1));
          if constexpr (Pass::kFolds)
            for (int64_t t = 0; t < nt; ++t) pass.enter(iteration, weights.matrix(0, 0), state(t));
          for (int64_t q = 0; q < range.count; q += Base::children_at_once()) block(q, Base::units_from(q), nt);
          if constexpr (Pass::kFolds)
            for (int64_t t = 0; t < nt; ++t) pass.leave(iteration, weights.matrix(0, 0), result(t));
          return true;
        });
        for (int64_t t = 0; t < nt; ++t) {
          if (schedule.ranges == 1)
            pass.finish(tiles[t], iteration, result(t), state(t));
          else
            std::memcpy(static_cast<X*>(call.partial) + (at * schedule.rows() + first + t) * result_size, result(t),
                        size_t(result_size) * sizeof(X));
        }
      }
    }
  }

  static constexpr bool kByGroup = kLane == Lanes::kSharing || Pass::kFolds;

  // Where a range of children begins: at a group that shares its weights, if there are enough groups for the ranges.
  int64_t edge(int64_t at) const {
    if (kByGroup && schedule.ranges <= in.G) return at * in.G / schedule.ranges * (in.I / in.G);
    return Base::edge(at, in.I);
  }

  // Calls f() for each range of children, one type at a time if they share weights; stops if f returns false.
  template <class F>
  void each_range(int64_t begin, int64_t count, F&& f) {
    if (!kByGroup || in.G == 1) {
      range = {begin, count, 0, count};
      f();
      return;
    }
    const int64_t places = in.I / in.G, end = begin + count;
    for (int64_t at = begin, size; at < end; at += size) {
      size = min(places - at % places, end - at);
      range = {at / places + at % places * in.G, 1, in.G, size};
      if (!f()) return;
    }
  }

  // Sets the tile of row t, and its parents before the iteration.
  void place(int64_t row, int64_t t) {
    if constexpr (kChildLanes)
      tiles[t].place(in, row, row + 1);
    else
      tiles[t].place(in, row * n, in.positions());
    if (call.iteration > 0) {
      std::memcpy(state(t), static_cast<const X*>(call.state) + row * state_size, size_t(state_size) * sizeof(X));
      return;
    }
    pass.load(tiles[t], state(t));
    if constexpr (Pass::kHasBase)
      if (pass.wants_base()) find_base(t);
  }

  // Adds up the ranges of children of one row in their order, and finishes.
  void finish_row(int64_t row) {
    iteration = call.iteration;
    place(row, 0);
    const X* partial = static_cast<const X*>(call.partial);
    std::memcpy(result(0), partial + row * result_size, size_t(result_size) * sizeof(X));
    for (int64_t at = 1; at < schedule.ranges; ++at)
      pass.join(result(0), partial + (at * schedule.rows() + row) * result_size);
    pass.finish(tiles[0], iteration, result(0), state(0));
    if (iteration + 1 < call.total)
      std::memcpy(static_cast<X*>(call.state) + row * state_size, state(0), size_t(state_size) * sizeof(X));
  }

  // One block: units [0, count), of which the first begins with child `first` of the range, for rows [0, nt). Unit j of
  // row t has slot t * block_children + j.
  void block(int64_t first, int64_t count, int64_t nt) {
    const int64_t stride = schedule.block_children;
    const bool equal = pass.equal(iteration);
    const bool keeps = schedule.keep_votes && (schedule.stay || !equal || !Pass::kEvenSums);
    weights.enter(range, first, count);
    if (schedule.stay && iteration > call.iteration) {  // poses and kept votes are still there
      score_again(count, nt);
    } else {
      for (int64_t t = 0; t < nt; ++t) Base::load_silenced(tiles[t], t, first, count);
      if (keeps)
        make(equal, count, nt);
      else if (!equal)
        score<Source::kMade>(count, nt);
    }
    for (int64_t t = 0; t < nt; ++t)
      for (int64_t slot = t * stride; slot < t * stride + count; ++slot) {
        V* row = logits + slot * in.M;
        if (equal)
          for (int64_t m = 0; m < in.M; ++m) row[m] = pass.equal_share(gates[slot]);
        highest[slot] = equal ? broadcast(T(1)) : pass.compete(row, highest[slot], gates[slot]);
      }
    if (keeps) return add_kept(first, count, nt);
    if constexpr (kEvenSums)
      if (equal && !weights.bias && !weights.narrow) return add_even(count, nt);
    add_again(first, count, nt);
  }

  void score_again(int64_t count, int64_t nt) {
    if constexpr (!Pose::kIdentity)
      if (schedule.keep_votes) return score<Source::kKept>(count, nt);
    score<Source::kMade>(count, nt);
  }

  // Makes the votes and keeps them; computes their logits unless all are equal.
  void make(bool equal, int64_t count, int64_t nt) {
    if constexpr (!Pose::kIdentity) {  // else there is nothing to keep
      if (!equal && Base::made_one_by_one(nt)) return score<Source::kMadeAndKept>(count, nt);
      Base::make_votes(count, nt);
      if (!equal) score<Source::kKept>(count, nt);
    } else if (!equal) {
      score<Source::kMade>(count, nt);
    }
  }

  template <Source kSource>
  void score(int64_t count, int64_t nt) {
    constexpr bool kMade = kSource != Source::kKept;
    const int64_t M = in.M, pose_size = CD, vote_size = pose.C * pose.E;
    for (int64_t m = 0; m < M; ++m)
      for (int64_t t = 0; t < nt; ++t) {
        const int64_t slot = t * schedule.block_children;
        const X* parents = state(t);
        const V* poses = P + slot * CD;
        V *kept = Base::votes_of(m, slot), *row = logits + slot * M + m, *high = highest + slot;
        for (int64_t j = 0; j < count; ++j) {
          const Weight* W = kMade ? weights.matrix(j, m) : nullptr;
          const Weight* bias = kMade ? weights.bias_of(j, m) : nullptr;
          const V logit = pass.score(parents, m, gates[slot + j], [&](auto&& sink) FASTCAPS_LAMBDA {
            each_vote<kSource, T>(pose, poses + j * pose_size, W, bias, kept + j * vote_size, sink);
          });
          row[j * M] = logit;
          high[j] = m ? max(high[j], logit) : logit;
        }
      }
  }

  V* weigh(int64_t first, int64_t count, int64_t t, int64_t m) {
    const int64_t slot = t * schedule.block_children;
    V* share = shares + slot * Pass::kShares;
    const Planes<V> to = target(t);
    if (kChildLanes && m % kJoined == 0) clear(to);
    pass.weigh(logits + slot * in.M + m, highest + slot, gates + slot, range, first, count, m, to, in_target(m), share);
    return share;
  }

  // Adds up the lanes of the last parents once there are kJoined of them, or m is the last of `all`.
  void join_lanes(int64_t t, int64_t m, int64_t all) {
    if constexpr (kChildLanes) {
      const int64_t last = m % kJoined;
      if (last + 1 == kJoined || m + 1 == all)
        pass.join_lanes(planes_of<Pass>(target(t).base, in, last + 1), result(t), m - last);
    }
  }

  void add_kept(int64_t first, int64_t count, int64_t nt) {
    for (int64_t t = 0; t < nt; ++t)
      for (int64_t m = 0; m < in.M; ++m) {
        const V* share = weigh(first, count, t, m);
        pass.add(state(t), m, votes_kept + (m * slots + t * schedule.block_children) * CE, share, count, target(t),
                 in_target(m));
        join_lanes(t, m, in.M);
      }
  }

  // With one share for all parents, children are weighted once, and a parent's sum stays in registers over a block.
  void add_even(int64_t count, int64_t nt) {
    for (int64_t t = 0; t < nt; ++t) {
      V* poses = P + t * schedule.block_children * CD;
      for (int64_t j = 0; j < count; ++j)
        for (int64_t k = 0; k < CD; ++k) poses[j * CD + k] *= logits[(t * schedule.block_children + j) * in.M];
      for (int64_t m = 0; m < in.M; ++m)
        add_sum_of_votes<T>(pose, count, poses, weights.matrices, m * weights.layout.parent, target(t).pose(0, m));
    }
  }

  void add_again(int64_t first, int64_t count, int64_t nt) {
    int64_t many = in.M;
    if constexpr (Pass::kFolds)
      if (pass.one_sum(iteration)) many = 1;
    for (int64_t m = 0; m < many; ++m) {
      for (int64_t t = 0; t < nt; ++t) weigh(first, count, t, m);
      if (Pass::kFolds && !weights.bias)  // the votes are the poses: a sum stays in registers for all of them
        for (int64_t t = 0; t < nt; ++t) {
          const int64_t slot = t * schedule.block_children;
          pass.add(state(t), m, P + slot * CD, shares + slot * Pass::kShares, count, target(t), in_target(m));
        }
      for (int64_t j = 0; j < count && !(Pass::kFolds && !weights.bias); ++j) {
        const Weight* W = weights.matrix(j, m);
        const Weight* bias = weights.bias_of(j, m);
        for (int64_t t = 0; t < nt; ++t) {
          const int64_t slot = t * schedule.block_children;
          pass.add_again(pose, state(t), m, P + (slot + j) * CD, W, bias, shares + (slot + j) * Pass::kShares,
                         target(t), in_target(m));
        }
      }
      for (int64_t t = 0; t < nt; ++t) join_lanes(t, m, many);
    }
  }

  // Row t's parents have no mean: centres their sums on the votes of the first child that exists.
  void find_base(int64_t t) {
    bool found[n];
    for (int r = 0; r < n; ++r) found[r] = kChildLanes ? r > 0 : r >= tiles[t].count;
    each_range(0, in.I, [&] {
      for (int64_t q = 0; q < range.count; q += Units::kUnit)
        if (offer_base(t, q, found)) return false;
      return true;
    });
  }

  // Takes the votes of the unit that begins with child q for lanes without a base; returns whether all lanes have one.
  bool offer_base(int64_t t, int64_t q, bool* found) {
    Base::load_silenced(tiles[t], 0, q, 1);
    T gate[n], take[n];
    store<T>(gate, gates[0]);
    bool any = false, all = true;
    int first_lane = -1;  // if lanes are children: that of the first child that exists
    for (int r = 0; r < n; ++r) {
      const bool now = gate[r] != 0 && !found[kChildLanes ? 0 : r];
      if (now && kChildLanes) found[0] = true, first_lane = r;
      take[r] = now ? T(1) : T(0);
      found[r] = found[r] || (now && !kChildLanes);
      any = any || now;
    }
    for (int r = 0; r < n; ++r) all = all && found[r];
    const V mask = load<T>(take);
    weights.enter(range, q, 1);
    for (int64_t m = 0; any && m < in.M; ++m) {
      X* base = pass.base(state(t), m);
      votes<T>(pose, P, weights.matrix(0, m), weights.bias_of(0, m), [&](int k, V v) FASTCAPS_LAMBDA {
        if constexpr (kChildLanes) {
          T lane[n];
          store<T>(lane, v);
          base[k] = lane[first_lane];
        } else {
          base[k] = mask != 0 ? v : base[k];
        }
      });
    }
    return all;
  }
};

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
