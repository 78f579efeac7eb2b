// One pass, or all turns of a routing, forward. What is common to the passes is here: a row of positions walks through
// its children in blocks; votes of a block exist in registers and, where they fit, in cache until it is known what they
// weigh; otherwise they are made again. Either way none reaches memory. Rows need nobody else, so where children are
// not cut into ranges all turns of a row follow one another here.
//
// What a pass is, its policy says (attention.h, pooling.h, gaussian.h), with X the type of a row's numbers:
//   load        the parents before the first turn
//   meet        a vote against a parent: its logit, and what is kept of the vote
//   compete     the parents' competition for a child
//   weigh, take what a block's votes for a parent weigh, and their way into its results
//   fold        the results of a block whose lanes are children, into the row's
//   merge       results of two ranges of children
//   finish      results are written, and become the parents of the next turn
#pragma once

#include "votes.h"
#include "weights.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

template <class T, class Pose, Lanes kLane, template <class, class> class Policy>
struct ForwardItem {
  using V = Vec<T>;
  static constexpr bool kChildLanes = kLane != Lanes::kPositions;
  using X = std::conditional_t<kChildLanes, T, V>;
  using Rule = Policy<T, X>;
  using Call = ForwardCall<typename Rule::Operands>;
  using Weight = typename WeightsOf<T, kLane>::Weight;
  using Sits = Seats<T, kChildLanes>;
  static constexpr int n = kLanes<T>;
  const Call& call;
  const Geometry& g;
  const Cut& cut;
  const Pose pose;
  const WeightsOf<T, kLane> weights;
  const Rule rule;
  const int64_t slots, CE, CD, state_size;
  const int64_t before, result_size;  // of a row's results: numbers that no vote is added to, and all of them
  X *states, *results;                // of the rows at hand
  V *P, *gates, *a, *highest, *votes_kept, *shares, *local;
  Tile<T>* tiles;
  Range range{};  // of children of this item
  int64_t turn = 0;

  ForwardItem(const Call& call_, const Pose& pose_, Arena& arena)
      : call(call_),
        g(call.in.geometry),
        cut(call.cut),
        pose(pose_),
        weights(call.in, arena),
        rule(call),
        slots(cut.block_rows * cut.block_children),
        CE(int64_t(pose.C) * pose.E),
        CD(g.child_pose()),
        state_size(Rule::state_numbers(call)),
        before(Rule::numbers_before(g)),
        result_size(before + Rule::result_numbers(g, g.M)) {
    tiles = arena.take<Tile<T>>(cut.block_rows);
    states = arena.take<X>(cut.block_rows * state_size);
    results = arena.take<X>(cut.block_rows * result_size);
    P = arena.take<V>(slots * CD);
    gates = arena.take<V>(slots);
    a = arena.take<V>(slots * g.M);
    highest = arena.take<V>(slots);
    shares = arena.take<V>(slots * Rule::kShares);
    votes_kept = cut.keep_votes ? arena.take<V>(slots * g.M * CE) : nullptr;
    local = kChildLanes ? arena.take<V>(cut.block_rows * Rule::result_numbers(g, 1)) : nullptr;
  }

  X* state(int64_t t) const { return states + t * state_size; }
  X* result(int64_t t) const { return results + t * result_size; }

  // The results that parent m of row t takes its votes into: the row's, or, where lanes are children, the block's own.
  Planes<V> target(int64_t t) const {
    if constexpr (kChildLanes)
      return Rule::planes(local + t * Rule::result_numbers(g, 1), g, 1);
    else
      return Rule::planes(result(t) + before, g, g.M);
  }

  void run(int64_t item) {
    const int64_t chunk = item % cut.chunks, group = item / cut.chunks, I = g.children();
    const int64_t begin = chunk * I / cut.chunks, count = (chunk + 1) * I / cut.chunks - begin;
    const int64_t all = kChildLanes ? g.positions() : (g.positions() + n - 1) / n;
    const int64_t last = min((group + 1) * cut.rows_per_group, all);
    for (int64_t first = group * cut.rows_per_group; first < last; first += cut.block_rows) {
      const int64_t nt = min(cut.block_rows, last - first);
      for (int64_t t = 0; t < nt; ++t) place(first + t, t);
      for (turn = call.turn; turn < call.turn + call.turns; ++turn) {
        for (int64_t t = 0; t < nt; ++t) {
          zero(result(t), before);
          Rule::clear(result(t) + before, g, g.M);
        }
        const int64_t block_size = cut.block_children * Sits::kUnit;
        each_range(begin, count, [&] {
          if constexpr (Rule::kFolds)
            for (int64_t t = 0; t < nt; ++t) rule.enter(turn, weights.matrix(range, 0, 0), state(t));
          for (int64_t q = 0; q < range.count; q += block_size)
            block(q, (min(block_size, range.count - q) + Sits::kUnit - 1) / Sits::kUnit, nt);
          if constexpr (Rule::kFolds)
            for (int64_t t = 0; t < nt; ++t) rule.leave(turn, weights.matrix(range, 0, 0), result(t));
          return true;
        });
        for (int64_t t = 0; t < nt; ++t) {
          if (cut.chunks == 1)
            rule.finish(tiles[t], turn, result(t), state(t));
          else
            std::memcpy(static_cast<X*>(call.partial) + (chunk * cut.rows() + first + t) * result_size, result(t),
                        size_t(result_size) * sizeof(X));
        }
      }
    }
  }

  // f() for each `range` of children among [begin, begin + count): one, or, where children of a type are met together
  // for the sake of their weights, one a type, children being counted type by type. Until f is false.
  template <class F>
  void each_range(int64_t begin, int64_t count, F&& f) {
    if ((kLane != Lanes::kSharing && !Rule::kFolds) || g.G == 1) {
      range = {begin, count, 0, count};
      f();
      return;
    }
    const int64_t places = g.children() / g.G, end = begin + count;
    for (int64_t at = begin, size; at < end; at += size) {
      size = min(places - at % places, end - at);
      range = {at / places + at % places * g.G, 1, g.G, size};
      if (!f()) return;
    }
  }

  // Where row t is, and its parents before the turn.
  void place(int64_t row, int64_t t) {
    if constexpr (kChildLanes)
      tiles[t].place(g, row, row + 1);
    else
      tiles[t].place(g, row * n, g.positions());
    if (call.turn > 0) {
      std::memcpy(state(t), static_cast<const X*>(call.state) + row * state_size, size_t(state_size) * sizeof(X));
      return;
    }
    rule.load(tiles[t], state(t));
    if constexpr (Rule::kBase)
      if (rule.wants_base()) find_base(t);
  }

  // Add up the ranges of children of one row in their order, and finish.
  void finish_row(int64_t row) {
    turn = call.turn;
    place(row, 0);
    const X* partial = static_cast<const X*>(call.partial);
    std::memcpy(result(0), partial + row * result_size, size_t(result_size) * sizeof(X));
    for (int64_t chunk = 1; chunk < cut.chunks; ++chunk)
      rule.merge(result(0), partial + (chunk * cut.rows() + row) * result_size);
    rule.finish(tiles[0], turn, result(0), state(0));
    if (turn + 1 < call.total)
      std::memcpy(static_cast<X*>(call.state) + row * state_size, state(0), size_t(state_size) * sizeof(X));
  }

  // Units [0, count) of children from number `first` of the range on, for rows [0, nt): unit j of row t has slot t *
  // block_children + j.
  void block(int64_t first, int64_t count, int64_t nt) {
    const int64_t stride = cut.block_children;
    const bool equal = rule.equal(turn);
    if (cut.stay && turn > call.turn) {  // poses, and votes if kept, are as the turn before left them
      if (cut.keep_votes)
        meet<Votes::kKept>(first, count, nt);
      else
        meet<Votes::kMade>(first, count, nt);
    } else {
      for (int64_t t = 0; t < nt; ++t) {
        Sits::gather(g, tiles[t], call.in.storage, call.in.children, call.in.gate, range, first, count,
                     P + t * stride * CD, gates + t * stride);
        if constexpr (Rule::kSilent)
          if (call.in.gate.data) silence<T>(P + t * stride * CD, gates + t * stride, count, CD);
      }
      if (cut.keep_votes && (cut.stay || !equal))
        make(first, count, nt);
      else if (!equal)
        meet<Votes::kMade>(first, count, nt);
    }
    for (int64_t t = 0; t < nt; ++t)
      for (int64_t slot = t * stride; slot < t * stride + count; ++slot) {
        V* row = a + slot * g.M;
        if (equal)
          for (int64_t m = 0; m < g.M; ++m) row[m] = gates[slot] / T(g.M);
        else
          rule.compete(row, highest[slot], gates[slot]);
      }
    if (cut.keep_votes && (cut.stay || !equal))
      add_kept(first, count, nt);
    else
      add_again(first, count, nt);
  }

  // Votes to be kept. Where a parent's are few, those of several parents at once: each number of a pose that is read
  // then serves many products.
  void make(int64_t first, int64_t count, int64_t nt) {
    if constexpr (Pose::kTogether == 1 || kLane == Lanes::kChildren) {
      meet<Votes::kMadeAndKept>(first, count, nt);
    } else {
      int64_t m = 0;
      for (; m + Pose::kTogether <= g.M; m += Pose::kTogether) make<Pose::kTogether>(first, count, nt, m);
      for (; m < g.M; ++m) make<1>(first, count, nt, m);
      meet<Votes::kKept>(first, count, nt);
    }
  }
  template <int kMany>
  void make(int64_t first, int64_t count, int64_t nt, int64_t m) {
    for (int64_t j = 0; j < count; ++j) {
      const Weight* W = weights.matrix(range, first + j * Sits::kUnit, m);
      const Weight* bias = weights.bias_of(range, first + j * Sits::kUnit, m);
      for (int64_t t = 0; t < nt; ++t) {
        const int64_t slot = t * cut.block_children + j;
        votes_of_many<kMany, T>(pose, P + slot * CD, W, bias, weights.bias_m,
                                [&](int which, int k, V v)
                                    FASTCAPS_LAMBDA { votes_kept[((m + which) * slots + slot) * CE + k] = v; });
      }
    }
  }

  template <Votes kVotes>
  void meet(int64_t first, int64_t count, int64_t nt) {
    for (int64_t m = 0; m < g.M; ++m)
      for (int64_t j = 0; j < count; ++j) {
        const bool made = kVotes != Votes::kKept;
        const Weight* W = made ? weights.matrix(range, first + j * Sits::kUnit, m) : nullptr;
        const Weight* bias = made ? weights.bias_of(range, first + j * Sits::kUnit, m) : nullptr;
        for (int64_t t = 0; t < nt; ++t) {
          const int64_t slot = t * cut.block_children + j;
          V* kept = votes_kept + (m * slots + slot) * CE;
          const V logit = rule.meet(state(t), m, [&](auto&& sink) FASTCAPS_LAMBDA {
            each_vote<kVotes, T>(pose, P + slot * CD, W, bias, kept, sink);
          });
          a[slot * g.M + m] = logit;
          highest[slot] = m ? max(highest[slot], logit) : logit;
        }
      }
  }

  V* weigh(int64_t first, int64_t count, int64_t t, int64_t m) {
    const int64_t slot = t * cut.block_children;
    V* share = shares + slot * Rule::kShares;
    const Planes<V> to = target(t);
    if (kChildLanes) Rule::clear(to.base, g, 1);
    rule.weigh(a + slot * g.M + m, gates + slot, Sits{}, range, first, count, m, to, kChildLanes ? 0 : m, share);
    return share;
  }

  void fold(int64_t t, int64_t m) {
    if constexpr (kChildLanes) rule.fold(target(t), result(t), m);
  }

  void add_kept(int64_t first, int64_t count, int64_t nt) {
    for (int64_t t = 0; t < nt; ++t)
      for (int64_t m = 0; m < g.M; ++m) {
        const V* share = weigh(first, count, t, m);
        rule.take(state(t), m, votes_kept + (m * slots + t * cut.block_children) * CE, share, count, target(t),
                  kChildLanes ? 0 : m);
        fold(t, m);
      }
  }

  void add_again(int64_t first, int64_t count, int64_t nt) {
    const int64_t many = Rule::kFolds && rule.equal(turn) ? 1 : g.M;  // equal shares of poses: one sum for all parents
    for (int64_t m = 0; m < many; ++m) {
      for (int64_t t = 0; t < nt; ++t) weigh(first, count, t, m);
      for (int64_t j = 0; j < count; ++j) {
        const Weight* W = weights.matrix(range, first + j * Sits::kUnit, m);
        const Weight* bias = weights.bias_of(range, first + j * Sits::kUnit, m);
        for (int64_t t = 0; t < nt; ++t) {
          const int64_t slot = t * cut.block_children;
          rule.take_again(pose, state(t), m, P + (slot + j) * CD, W, bias, shares + (slot + j) * Rule::kShares,
                          target(t), kChildLanes ? 0 : m);
        }
      }
      for (int64_t t = 0; t < nt; ++t) fold(t, m);
    }
  }

  // Parents of row t without a mean yet: the votes of a child that is there stand in as what sums are taken about.
  void find_base(int64_t t) {
    bool found[n];
    for (int r = 0; r < n; ++r) found[r] = kChildLanes ? r > 0 : r >= tiles[t].count;
    each_range(0, g.children(), [&] {
      for (int64_t q = 0; q < range.count; q += Sits::kUnit)
        if (offer_base(t, q, found)) return false;
      return true;
    });
  }

  // The votes of the unit that begins with child q, for the lanes that have none yet; true once all have.
  bool offer_base(int64_t t, int64_t q, bool* found) {
    Sits::gather(g, tiles[t], call.in.storage, call.in.children, call.in.gate, range, q, 1, P, gates);
    if (call.in.gate.data) silence<T>(P, gates, 1, CD);
    T gate[n], take[n];
    store<T>(gate, gates[0]);
    bool any = false, all = true;
    int seat = -1;  // where lanes are children: the one that stands in
    for (int r = 0; r < n; ++r) {
      const bool now = gate[r] != 0 && !found[kChildLanes ? 0 : r];
      if (now && kChildLanes) found[0] = true, seat = r;
      take[r] = now ? T(1) : T(0);
      found[r] = found[r] || (now && !kChildLanes);
      any = any || now;
    }
    for (int r = 0; r < n; ++r) all = all && found[r];
    const V mask = load<T>(take);
    for (int64_t m = 0; any && m < g.M; ++m) {
      X* base = rule.base(state(t), m);
      votes<T>(pose, P, weights.matrix(range, q, m), weights.bias_of(range, q, m), [&](int k, V v) FASTCAPS_LAMBDA {
        if constexpr (kChildLanes) {
          T lane[n];
          store<T>(lane, v);
          base[k] = lane[seat];
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
