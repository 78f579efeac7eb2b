// The backward that all passes share. It makes the votes again and adds the gradient dV of each vote to those of its
// child (dP = dV W^T), its matrix (dW = P^T dV) and its bias. A call may have several iterations over the same votes:
// dV is then the sum over the iterations.
//
// An item owns a group of samples and a range of child types n (with all their places in the window), so no other item
// writes the same children's gradients. It walks over its children block by block, and with each block over all rows of
// its group, so the gradient of the block's matrices stays on chip.
//
// A policy (attention.h, folded.h, pooling.h, gaussian.h) defines the pass; X is the type of a row's values:
//   load     reads the parents of a row and the gradients of its results, once for all items
//   enter    runs before the children that share a matrix (folded.h only)
//   leave    runs after them (folded.h only)
//   score    computes the logit of a vote for a parent, and the products of the vote with the gradients
//   dscore   computes shares and the gradients of logits from logits; returns the gradient of the gate
//   dvote    computes values of a vote's gradient
//   add      adds votes to the gradient of their parent
//   finish   writes the gradients of the parents
//   shares_known, known_share   whether shares depend on no vote and no gradient of a gate is wanted; such a share
//   needs_vote                  whether dvote or add reads votes
//   evidence_gain, ignored_evidence, add_betas   the terms of the betas (gaussian.h only)
#pragma once

#include <vector>

#include "weight_gradients.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

template <class Item>
void find_rest(Item& item, int64_t k, typename Item::X* state);  // rest.h
template <class Item>
void walk_folded(Item& item, int64_t row_count);  // folded.h

template <class T, class Pose, Lanes kLane, template <class, class> class Policy>
using BackwardBlock =
    WeightGradients<T, Pose, kLane, BackwardCall<typename Policy<T, typename Block<T, Pose, kLane, int>::X>::Operands>>;

template <class T, class Pose, Lanes kLane, template <class, class> class Policy>
struct BackwardItem : BackwardBlock<T, Pose, kLane, Policy> {
  using Base = BackwardBlock<T, Pose, kLane, Policy>;
  using Base::call, Base::in, Base::schedule, Base::pose, Base::weights, Base::slots, Base::CE, Base::CD, Base::tiles;
  using Base::kAtOnce, Base::dV, Base::dW, Base::dB, Base::block;
  using Base::kChildLanes, Base::n, Base::P, Base::gates, Base::votes_kept, Base::range, Base::child_of, Base::votes_of;
  using typename Base::V, typename Base::X, typename Base::Weight, typename Base::Units;
  using Number = T;
  using Pass = Policy<T, X>;
  using Call = BackwardCall<typename Pass::Operands>;
  static constexpr bool kSharing = kLane == Lanes::kSharing;
  static constexpr int64_t kJoined = Pass::kJoined;
  static constexpr int64_t kAddedAtOnce = 64, kNumbersAtOnce = 256;  // parents, and values: longer sums lose digits

  std::vector<Pass> passes;  // of every iteration
  const int64_t iterations, state_size, result_size, parents_at_once;
  // `scores` has kScores planes [slot][parent] for each iteration. score() fills them, dscore() replaces most of them:
  //
  //   plane   attention, folded     gaussian           pooling
  //   0       a, then w = g r       a, then w = g r    e = exp(a - logsumexp), then r = g e
  //   1       <dS, V>, then s da    t, then da         t, then c = s da / |V|
  //   2                                                1 / |V|
  //   3                                                <Q, V> / |V|^2, then d = c <Q, V> / |V|^2
  //
  // with a the logit (its plane holds it to base 2), and t = dL/dw (gaussian) or <dS, V> - <dS, S> + dlogsumexp
  // (pooling). dvote() reads: dV = w dS + s da Q (attention), r dS + c Q - d V (pooling), or that of
  // algebra/gaussian.h.
  V *dP, *dP_sums, *scores, *highest, *local;
  X *scratch, *inner_states, *inner_results, *seen_state;
  const X* states = nullptr;  // of the item's group, made by prepare()
  X* results = nullptr;
  bool needs_vote = false;  // whether any iteration needs votes
  bool kept = false;        // whether the block's votes are kept
  bool unsafe = false;      // windows leave the grid and parents are not finite: 0 times such a parent is NaN
  int64_t item = 0;

  FASTCAPS_NOINLINE BackwardItem(const Call& call_, const Pose& pose_, Arena& arena)
      : Base(call_, pose_, arena),
        iterations(int64_t(call.with.size())),
        state_size(Pass::state_numbers(call)),
        result_size(Pass::kFolds ? in.parents_size() : target_numbers(in.M)),
        parents_at_once(max(int64_t(4), min(kAddedAtOnce, kNumbersAtOnce / in.E))) {
    for (const auto& with : call.with) needs_vote = passes.emplace_back(call, with).needs_vote() || needs_vote;
    dP = arena.take<V>(slots * CD);
    dP_sums = in.M > parents_at_once ? arena.take<V>(slots * CD) : nullptr;
    scores = arena.take<V>(iterations * Pass::kScores * slots * in.M);
    highest = arena.take<V>(iterations * slots);
    local = kChildLanes
                ? arena.take<V>(results_at_once(schedule.block_rows) * Pose::kTogether * target_numbers(kJoined))
                : nullptr;
    scratch = arena.take<X>(Pass::prepare_scratch(in));
    inner_states = Pass::kFolds ? arena.take<X>(iterations * target_numbers(in.M)) : nullptr;
    inner_results = Pass::kFolds ? arena.take<X>(iterations * target_numbers(in.M)) : nullptr;
    seen_state = Pass::kFolds ? arena.take<X>(iterations * state_size) : nullptr;
  }

  // Values in the sums of votes for `many` parents; for folded votes, of one group of children.
  int64_t target_numbers(int64_t many) const { return summed_numbers<Pass>(in, many); }
  // The state of row t of a walk in iteration k.
  const X* state(int64_t t, int64_t k) const {
    return Pass::kFolds ? inner_states + k * target_numbers(in.M) : states + (t * iterations + k) * state_size;
  }
  V* scores_of(int64_t k) const { return scores + k * Pass::kScores * slots * in.M; }

  // Sets the tile of a row; returns false if its group ends before it.
  bool place(int64_t row, Tile<T>& tile) const {
    if (kChildLanes) {
      tile.place(in, row, row + 1);
      return true;
    }
    const int64_t size = schedule.samples * in.Ho * in.Wo, group = row / schedule.rows_per_group;
    const int64_t end = min((group + 1) * size, in.positions());
    const int64_t first = group * size + row % schedule.rows_per_group * n;
    if (first < end) tile.place(in, first, end);
    return first < end;
  }

  void prepare(int64_t row) {
    if (!place(row, tiles[0])) return;
    states = static_cast<const X*>(call.state) + row * iterations * state_size;
    for (int64_t k = 0; k < iterations; ++k) {
      X* state = static_cast<X*>(call.state) + (row * iterations + k) * state_size;
      if constexpr (!Pass::kRest)
        passes[k].load(tiles[0], row, state, scratch);
      else if (passes[k].load(tiles[0], row, state, scratch))
        find_rest(*this, k, state);
    }
  }

  // Adds up the gradients of one row's parents, the ranges in their order.
  void finish_row(int64_t row) {
    if (!place(row, tiles[0])) return;
    X* partial = static_cast<X*>(call.partial);
    X* sum = partial + row * result_size;
    for (int64_t at = 1; at < schedule.ranges; ++at)
      for (int64_t k = 0; k < result_size; ++k) sum[k] += partial[(at * schedule.rows() + row) * result_size + k];
    passes[0].finish(tiles[0], static_cast<const X*>(call.state) + row * state_size, sum);
  }

  void run(int64_t which) {
    item = which;
    const int64_t at = item % schedule.ranges, group = item / schedule.ranges,
                  first_row = group * schedule.rows_per_group;
    states = static_cast<const X*>(call.state) + first_row * iterations * state_size;
    results = call.partial ? static_cast<X*>(call.partial) + (at * schedule.rows() + first_row) * result_size : nullptr;
    int64_t count = 0;
    while (count < schedule.rows_per_group && place(first_row + count, tiles[count])) ++count;
    if (results) zero(results, count * result_size);
    unsafe = (in.window.ph > 0 || in.window.pw > 0) && !are_finite<T>(states, count * iterations * state_size);
    dW = call.dweight ? call.dweight.template part<T>(schedule.weight_parts == schedule.row_groups ? group : item)
                      : nullptr;
    dB = call.dbias ? call.dbias.template part<T>(item) : nullptr;
    if ((kSharing || Pass::kFolds) && in.G > 1) {  // one group of children that share weights at a time
      for (int64_t c = at * in.G / schedule.ranges; c < (at + 1) * in.G / schedule.ranges; ++c) {
        range = {c, 1, in.G, in.I / in.G};
        walk(count);
      }
    } else {
      const int64_t type = Base::edge(at, in.N), types = Base::edge(at + 1, in.N) - type;
      range = {type, types, in.N, types * in.window.kh * in.window.kw};
      walk(count);
    }
  }

  // All children of the range, block by block, each over all rows.
  void walk(int64_t row_count) {
    if constexpr (Pass::kFolds) return walk_folded(*this, row_count);
    const int64_t size = Base::children_at_once();
    for (int64_t first = 0; first < range.count; first += size) {
      const int64_t children = min(size, range.count - first);
      Base::begin_children(first, children);
      for (int64_t t = 0; t < row_count; t += schedule.block_rows)
        walk_block(first, Base::units_from(first), t, min(schedule.block_rows, row_count - t));
      Base::end_children(first, children);
    }
  }

  // Unit j of row t0 + t of the block has slot t * block_children + j.
  void walk_block(int64_t first, int64_t count, int64_t t0, int64_t nt) {
    block = {first, count, t0, nt};
    weights.enter(range, first, count);
    for (int64_t t = 0; t < nt; ++t) Base::load(tiles[t0 + t], t, first, count);
    if (call.dchildren || kAtOnce) zero(dP, slots * CD);
    kept = false;
    for (int64_t k = 0; k < iterations; ++k)
      if (passes[k].shares_known())
        take_known_shares(k);
      else
        score_votes(k);
    for (int64_t k = 0; k < iterations; ++k)
      if (!passes[k].shares_known())
        for (int64_t t = 0; t < nt; ++t)
          for (int64_t j = 0; j < count; ++j) dscore(k, child_of(first, j), t0 + t, t * schedule.block_children + j);
    Base::transpose_poses();
    if (dP_sums) zero(dP_sums, slots * CD);
    for (int64_t m = 0; m < in.M; m += parents_at_once) {
      gradients(m, min(m + parents_at_once, in.M));
      if (!dP_sums || !call.dchildren) continue;
      for (int64_t k = 0; k < slots * CD; ++k) dP_sums[k] += dP[k];
      zero(dP, slots * CD);
    }
    if (call.dchildren) write_child_gradients();
  }

  void score_votes(int64_t k) {
    if constexpr (!Pose::kIdentity) {
      if (kept) return score<Source::kKept>(k);
      if (schedule.keep_votes) {
        kept = true;
        if (Base::made_one_by_one(block.nt)) return score<Source::kMadeAndKept>(k);
        Base::make_votes(block.count, block.nt);
        return score<Source::kKept>(k);
      }
    }
    score<Source::kMade>(k);
  }

  // Stores shares that depend on no vote, if no gradient of a gate is wanted.
  void take_known_shares(int64_t k) {
    for (int64_t t = 0; t < block.nt; ++t) {
      const int64_t first = t * schedule.block_children;
      if (in.gate.data) silence<T>(P + first * CD, gates + first, block.count, CD);
      for (int64_t slot = first; slot < first + block.count; ++slot)
        for (int64_t m = 0; m < in.M; ++m) {
          V* row = scores_of(k) + slot * in.M + m;
          for (int r = 1; r < Pass::kScores; ++r) row[r * slots * in.M] = V{};
          row[0] = gates[slot] * passes[k].known_share(state(block.t0 + t, k), m);
        }
    }
  }

  void write_child_gradients() {
    const int64_t stride[6] = {in.H * in.W * in.N * CD, in.W * in.N * CD, in.N * CD, CD, in.D, 1};
    for (int64_t t = 0; t < block.nt; ++t)
      for (int64_t j = 0; j < block.count;) {
        const int64_t q = child_of(block.first, j), run = Units::neighbours(in, range, q, block.count - j);
        T* lane[n];
        Units::find(in, tiles[block.t0 + t], static_cast<T*>(call.dchildren), stride, range, q, lane);
        scatter_rows<true, T>(lane, run * CD, (dP_sums ? dP_sums : dP) + (t * schedule.block_children + j) * CD);
        j += run;
      }
  }

  template <Source kSource>
  void score(int64_t k) {
    constexpr bool kMade = kSource != Source::kKept;
    const int64_t M = in.M, pose_size = CD, vote_size = pose.C * pose.E, plane = slots * M, count = block.count;
    for (int64_t m = 0; m < M; ++m)
      for (int64_t t = 0; t < block.nt; ++t) {
        const int64_t slot = t * schedule.block_children;
        const X* parents = state(block.t0 + t, k);
        const V* poses = P + slot * CD;
        V *kept = votes_of(m, slot), *row = scores_of(k) + slot * M + m, *high = highest + k * slots + slot;
        for (int64_t j = 0; j < count; ++j) {
          const Weight* W = kMade ? weights.matrix(j, m) : nullptr;
          const Weight* bias = kMade ? weights.bias_of(j, m) : nullptr;
          passes[k].score(
              parents, m, gates[slot + j],
              [&](auto&& sink) FASTCAPS_LAMBDA {
                each_vote<kSource, T>(pose, poses + j * pose_size, W, bias, kept + j * vote_size, sink);
              },
              row + j * M, plane, high[j]);
          if constexpr (Pass::kBetas)
            row[j * M + plane] += passes[k].evidence_gain(parents, m, range, child_of(block.first, j));
        }
      }
  }

  void dscore(int64_t k, int64_t q, int64_t row, int64_t slot) {
    const V gate = gates[slot];
    V dgate = passes[k].dscore(scores_of(k) + slot * in.M, slots * in.M, highest[k * slots + slot], gate);
    if constexpr (Pass::kBetas) dgate += passes[k].ignored_evidence(state(row, k), range, q);
    const auto whole = (gate != 0) | ((dgate - dgate) == 0);
    if (in.gate.data && !all(whole)) {  // a broken child with a gate of 0 has no gradient and no effect
      const auto keep_whole = [&](V& number) { number = whole ? number : V{}; };
      keep_whole(dgate);
      for (int64_t d = 0; d < CD; ++d) keep_whole(P[slot * CD + d]);
      for (int64_t m = 0; m < in.M; ++m) {
        for (int r = 0; r < Pass::kScores; ++r) keep_whole(scores_of(k)[(r * slots + slot) * in.M + m]);
        for (int64_t e = 0; schedule.keep_votes && e < CE; ++e) keep_whole(votes_of(m, slot)[e]);
      }
    }
    if (call.dgate) {
      const int64_t stride[4] = {in.H * in.W * in.N, in.W * in.N, in.N, 1};
      T* lane[n];
      Units::find(in, tiles[row], static_cast<T*>(call.dgate), stride, range, q, lane);
      scatter_rows<true, T>(lane, 1, &dgate);
    }
  }

  // The gradients of row t's parents; null if they are not wanted, as in an unfolded call of several iterations.
  // target(): the sums to which votes are added: the block's if lanes are children, else the row's.
  X* result(int64_t t, int64_t k) const {
    if constexpr (Pass::kFolds) return inner_results + k * target_numbers(in.M);
    return results ? results + t * result_size : nullptr;
  }
  Planes<V> target(int64_t t, int64_t k, int64_t which) const {
    if constexpr (kChildLanes)
      return planes_of<Pass>(local + ((Pass::kFolds ? k : t) * Pose::kTogether + which) * target_numbers(kJoined), in,
                             kJoined);
    else
      return planes_of<Pass>(result(block.t0 + t, k), in, in.M);
  }
  bool has_results() const { return Pass::kFolds || results; }
  int64_t results_at_once(int64_t nt) const { return Pass::kFolds ? iterations : nt; }

  // For parents [m, end).
  void gradients(int64_t m, int64_t end) {
    if constexpr (Pose::kTogether > 1 && kLane != Lanes::kChildren)
      for (; m + Pose::kTogether <= end; m += Pose::kTogether) gradients_of<Pose::kTogether>(m);
    for (; m < end; ++m) gradients_of<1>(m);
  }

  // For parents [m0, m0 + kMany).
  template <int kMany>
  void gradients_of(int64_t m0) {
    begin_parents<kMany>(m0);
    for (int64_t j = 0; j < block.count; ++j) {
      const Weight* W = weights.matrix(j, m0);
      const Weight* bias = weights.bias_of(j, m0);
      for (int64_t t = 0; t < block.nt; ++t) {
        const int64_t slot = t * schedule.block_children + j;
        gradients_of_votes<kMany>(m0, j, t, slot, W, bias);
        Base::transpose_gradients(t, slot);
      }
      add_child_gradients<kMany>(j, m0, W);
      Base::template add_unit<kMany>(j, m0);
    }
    for (int which = 0; which < kMany; ++which) {
      Base::add_block(m0 + which, which);
      Base::end_bias(m0 + which, which);
      if constexpr (Pass::kBetas)
        for (auto& pass : passes) pass.end_betas(m0 + which, which, item);
    }
    if constexpr (kChildLanes)
      if (has_results()) join_lanes<kMany>(m0);
  }

  // Starts the gradients of the parents: clears the block's if lanes are children, and adds the votes that exist
  // already.
  template <int kMany>
  FASTCAPS_INLINE void begin_parents(int64_t m0) {
    for (int which = 0; which < kMany; ++which)
      for (int64_t t = 0; t < block.nt; ++t) {
        if (kChildLanes && has_results() && m0 % kJoined == 0)
          for (int64_t k = 0; k < iterations; ++k) zero(target(t, k, which).base, target_numbers(kJoined));
        const int64_t slot = t * schedule.block_children;
        if (const V* votes = votes_at_hand(m0 + which))
          add_to_parent(m0 + which, which, t, slot, votes + slot * CE, block.count);
      }
  }

  // The votes for parent m from slot 0 on, if they exist already: the poses themselves, or kept votes. Else null.
  FASTCAPS_INLINE const V* votes_at_hand(int64_t m) const {
    if (are_poses<Pose>(weights.weight) && !weights.bias) return P;
    return kept ? votes_of(m, 0) : nullptr;
  }

  // For unit j of the block's row t: computes dV (with kAtOnce dP and dW too), and adds to the gradients of parents,
  // betas and bias.
  template <int kMany>
  FASTCAPS_INLINE void gradients_of_votes(int64_t m0, int64_t j, int64_t t, int64_t slot, const Weight* W,
                                          const Weight* bias) {
    const int64_t q = child_of(block.first, j), row = block.t0 + t;
    const V here = unsafe ? are_here(q, tiles[row]) : V{};
    for (int which = 0; which < kMany; ++which) {
      const int64_t m = m0 + which;
      const V* at_hand = votes_at_hand(m);
      const V* vote = at_hand ? at_hand + slot * CE : votes_kept;
      if (!at_hand && needs_vote) {
        const Weight* mine = bias ? bias + which * weights.bias_m : bias;
        votes<T>(pose, P + slot * CD, W + which * weights.layout.parent, mine,
                 [&](int k, V v) FASTCAPS_LAMBDA { votes_kept[k] = v; });
        add_to_parent(m, which, t, slot, vote, 1);
      }
      if constexpr (Pass::kBetas)
        for (int64_t k = 0; k < iterations; ++k)
          passes[k].add_betas(state(row, k), m, which, scores_of(k)[slot * in.M + m], gates[slot], range, q, item);
      if (!call.wants_votes()) continue;
      V* sum = dV + (which * slots + slot) * CE;
      if constexpr (kAtOnce) {
        V* sums = Base::sums_of(j, m);
        if (Base::sums_begin(j, t)) zero(sums, Base::DE);
        add_both_gradients<T>(
            pose,
            [&](int first, V* g) FASTCAPS_LAMBDA {
              constexpr int kCount = Pose::kGradientRows * Pose::E;
              vote_gradient<kCount>(m, row, slot, vote, first, 0, g);
              if (unsafe) unroll<kCount>([&](auto k) FASTCAPS_LAMBDA { g[k] = here != 0 ? g[k] : V{}; });
              if (dB) unroll<kCount>([&](auto k) FASTCAPS_LAMBDA { sum[first + k] = g[k]; });
            },
            P + slot * CD, W, dP + slot * CD, sums);
      } else {
        if constexpr (Pose::kIdentity)
          if (gradient_is_childs()) {
            if (call.dchildren) add_vote_gradient(m, row, slot, vote, dP + slot * CD);
            continue;
          }
        vote_gradient<0>(m, row, slot, vote, 0, int(CE), sum);
        for (int64_t k = 0; unsafe && k < CE; ++k) sum[k] = here != 0 ? sum[k] : V{};
      }
      if (dB) Base::add_bias_gradient(q, m, which, sum);
    }
  }

  // dP += dV W^T of unit j in all rows, for parents [m0, m0 + kMany), unless gradients_of_votes added it.
  template <int kMany>
  FASTCAPS_INLINE void add_child_gradients(int64_t j, int64_t m0, const Weight* W) {
    if constexpr (!kAtOnce) {
      if (gradient_is_childs()) return;
      each_group<Pose::kTiles>(call.dchildren ? block.nt : 0, [&](int64_t t, auto many) {
        const int64_t stride = schedule.block_children, slot = t * stride + j;
        if constexpr (Pose::kTiles > 1)
          add_child_gradient_of_tiles<many, T>(pose, dV + slot * CE, W, stride, weights.after(j, m0), dP + slot * CD);
        else
          add_child_gradient<kMany, T>(pose, dV + slot * CE, slots * CE, W, weights.layout.parent, dP + slot * CD);
      });
    }
  }

  // Adds the block's gradients of parents [m0, m0 + kMany), whose lanes are children, to those of the rows.
  template <int kMany>
  FASTCAPS_INLINE void join_lanes(int64_t m0) {
    const int64_t last = m0 % kJoined;  // of the kJoined parents whose lanes are added up together
    if (last + 1 < kJoined && m0 + 1 < in.M) return;
    for (int64_t t = 0; t < results_at_once(block.nt); ++t)
      for (int which = 0; which < kMany; ++which) {
        const Planes<V> from = target(t, t, which);
        const Planes<X> to = planes_of<Pass>(result(block.t0 + t, t), in, in.M);
        for (int plane = 0; plane < from.poses; ++plane)
          add_lane_sums<T>(from.pose(plane, 0), (last + 1) * CE, to.pose(plane, m0 - last + which));
        for (int plane = 0; plane < Pass::kSumNumbers; ++plane)
          add_lane_sums<T>(from.number(plane, 0), 1, to.number(plane, m0 + which));
      }
  }

  // Values [first, first + count) of dV of one unit and parent, over all iterations. kCount: `count`, or 0 if it is not
  // a constant.
  template <int kCount>
  FASTCAPS_INLINE void vote_gradient(int64_t m, int64_t row, int64_t slot, const V* vote, int first, int count,
                                     V* sum) const {
    const auto dvote = [&](int64_t k, auto&& put) FASTCAPS_LAMBDA {
      passes[k].template dvote<kCount>(state(row, k), m, scores_of(k) + slot * in.M + m, slots * in.M, vote, first,
                                       count, put);
    };
    dvote(0, [&](int at, V number) FASTCAPS_LAMBDA { sum[at] = number; });
    for (int64_t k = 1; k < iterations; ++k) dvote(k, [&](int at, V number) FASTCAPS_LAMBDA { sum[at] += number; });
  }

  // Whether votes are the poses, so that dV is added to dP directly.
  bool gradient_is_childs() const { return Pose::kIdentity && !unsafe && !dB; }
  FASTCAPS_INLINE void add_vote_gradient(int64_t m, int64_t row, int64_t slot, const V* vote, V* sum) const {
    for (int64_t k = 0; k < iterations; ++k)
      passes[k].template dvote<Pose::kNumbers>(state(row, k), m, scores_of(k) + slot * in.M + m, slots * in.M, vote, 0,
                                               int(CE), [&](int at, V number) FASTCAPS_LAMBDA { sum[at] += number; });
  }

  // Adds `count` votes, of units from `slot` on, to the gradient of parent m of the block's row t.
  FASTCAPS_INLINE void add_to_parent(int64_t m, int which, int64_t t, int64_t slot, const V* votes, int64_t count) {
    for (int64_t k = 0; k < iterations; ++k)
      passes[k].add(state(block.t0 + t, k), m, scores_of(k) + slot * in.M + m, slots * in.M, votes, count,
                    target(t, k, which), kChildLanes ? m % kJoined : m);
  }

  // 1 for the lanes whose window holds the child, else 0.
  FASTCAPS_NOINLINE V are_here(int64_t q, const Tile<T>& tile) const {
    const char* lane[n];
    T found[n];
    Units::find(in, tile, static_cast<const char*>(in.children.data), in.children.stride, range, q, lane);
    for (int r = 0; r < n; ++r) found[r] = lane[r] ? T(1) : T(0);
    return load<T>(found);
  }
};

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
