// The attention pass: parents compete for every child; formulas: ../algebra/attention.h, docs/algebra.md.
#pragma once

#include "../algebra/attention.h"
#include "../algebra/layer_norm.h"
#include "../algebra/pose.h"
#include "backward.h"
#include "forward.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

// What attention and pooling share: a query Q for each parent, and results that are weighted sums of votes.
template <class T, class X, class Operands_>
struct QueryForward {
  using Operands = Operands_;
  using V = Vec<T>;
  static constexpr int kShares = 1, kSumPoses = 1, kSumNumbers = 0;
  static constexpr bool kHasBase = false, kFolds = false, kEvenSums = false;
  static constexpr int kJoined = 1;
  const ForwardCall<Operands>& call;
  const Votes& in;
  const Operands& with;
  const int64_t CE;

  explicit QueryForward(const ForwardCall<Operands>& call_)
      : call(call_), in(call.votes), with(call.with), CE(in.parent_size()) {}

  // State: Q. Results: the sums S.
  static int64_t state_numbers(const ForwardCall<Operands>& call) {
    return call.with.query.data || call.total > 1 ? call.votes.parents_size() : 0;
  }
  static int64_t numbers_before(const Votes&) { return 0; }
  static int64_t summed_size(const Votes& in) { return in.parent_size(); }

  bool equal(int64_t iteration) const { return iteration == 0 && !with.query.data; }
  void load(const Tile<T>& tile, X* Q) const {
    if (with.query.data)
      gather_parents<T>(in, tile, in.storage, with.query, in.M, in.C, in.E, Q);
    else
      zero(Q, state_numbers(call));
  }

  FASTCAPS_INLINE void add(const X*, int64_t, const V* kept, const V* share, int64_t count, Planes<V> to,
                           int64_t to_m) const {
    add_votes(kept, share, 1, count, to.size, to.pose(0, to_m));
  }
  template <class Pose, class Weight>
  FASTCAPS_INLINE void add_again(const Pose& pose, const X*, int64_t, const V* P, const Weight* W, const Weight* bias,
                                 const V* share, Planes<V> to, int64_t m) const {
    add_weighted_votes<T>(pose, P, *share, W, bias, to.pose(0, m));
  }
};

template <class T, class X, class Operands_>
struct QueryBackward {
  using Operands = Operands_;
  using V = Vec<T>;
  static constexpr int kSumPoses = 1, kSumNumbers = 0;
  static constexpr bool kBetas = false, kRest = false, kFolds = false;
  static constexpr int kJoined = 1;
  const BackwardCall<Operands>& call;
  const Votes& in;
  const Operands& with;
  const int64_t CE, MCE;

  QueryBackward(const BackwardCall<Operands>& call_, const Operands& with_)
      : call(call_), in(call.votes), with(with_), CE(in.parent_size()), MCE(in.parents_size()) {}

  // Results: dQ.
  static int64_t summed_size(const Votes& in) { return in.parent_size(); }
  bool shares_known() const { return !with.query.data && !call.dgate; }

  void finish(const Tile<T>& tile, const X*, X* dq) const {
    write_row<T>(tile, static_cast<T*>(with.dquery), in.parents_size(), dq);
  }
};

template <class T, class X>
struct AttentionForward : QueryForward<T, X, Attention> {
  using Base = QueryForward<T, X, Attention>;
  using Base::Base, Base::call, Base::in, Base::with, Base::CE;
  using V = Vec<T>;
  static constexpr bool kEvenSums = true;
  static constexpr int kJoined = 4;

  template <class Each>
  FASTCAPS_INLINE V score(const X* Q, int64_t m, V, Each&& each_vote) const {
    return agreement(Q + m * CE, each_vote);
  }
  template <class Each>
  FASTCAPS_INLINE V agreement(const X* q, Each&& each_vote) const {
    V dot[2] = {};
    each_vote([&](int k, V v) FASTCAPS_LAMBDA { dot[k & 1] += q[k] * v; });
    return (dot[0] + dot[1]) * T(with.scale * kLog2E);
  }

  FASTCAPS_INLINE V compete(V* row, V highest, V gate) const { return exponentials<T>(row, in.M, highest, gate); }
  FASTCAPS_INLINE V equal_share(V gate) const { return gate / T(in.M); }

  FASTCAPS_INLINE void weigh(const V* row, const V* factors, const V*, const Range&, int64_t, int64_t count, int64_t,
                             Planes<V>, int64_t, V* share) const {
    for (int64_t j = 0; j < count; ++j) share[j] = row[j * in.M] * factors[j];
  }
  void join_lanes(Planes<V> block, X* result, int64_t m) const {
    if constexpr (kOnePosition<T, X>) add_lane_sums<T>(block.base, block.numbers(0), result + m * CE);
  }
  void join(X* S, const X* other) const {
    for (int64_t k = 0; k < in.parents_size(); ++k) S[k] += other[k];
  }

  FASTCAPS_NOINLINE void finish(const Tile<T>& tile, int64_t iteration, X* S, X* Q) const {
    const int64_t MCE = in.parents_size();
    const bool last = iteration + 1 == call.total;
    if (with.sums) write_row<T>(tile, static_cast<T*>(with.sums) + iteration * in.positions() * MCE, MCE, S);
    for (int64_t m = 0; m < in.M; ++m)
      if (with.rule == Rule::kSquash)
        squash(PoseInMemory<X>{S + m * CE, CE});
      else if (with.rule == Rule::kLayerNorm)
        layer_norm(S + m * CE, CE, X{} + T(with.eps), static_cast<const T*>(with.norm_weight),
                   static_cast<const T*>(with.norm_bias));
    if (last) return write_parents<T>(tile, in.storage, with.parents, 0, MCE, S);
    for (int64_t k = 0; k < MCE; ++k) {
      const X parent = rounded<T>(in.storage, S[k]);
      Q[k] = with.rule == Rule::kSquash ? rounded<T>(in.storage, Q[k] + parent) : parent;
    }
  }
};

template <class T, class X>
struct AttentionBackward : QueryBackward<T, X, Attention> {
  using Base = QueryBackward<T, X, Attention>;
  using Base::Base, Base::call, Base::in, Base::with, Base::CE, Base::MCE;
  using V = Vec<T>;
  static constexpr int kScores = 2;  // see BackwardItem::scores

  // State: dS and Q.
  static int64_t state_numbers(const BackwardCall<Attention>& call) { return 2 * call.votes.parents_size(); }
  bool needs_vote() const { return with.dquery; }
  static int64_t prepare_scratch(const Votes& in) { return in.parents_size() + 4 * in.parent_size(); }
  FASTCAPS_INLINE V known_share(const X*, int64_t) const { return broadcast(T(1) / T(in.M)); }

  // Q, and the gradient of the sums S through LayerNorm.
  FASTCAPS_NOINLINE void load(const Tile<T>& tile, int64_t row, X* state, X* scratch) const {
    X *ds = state, *sums = scratch, *dnorm = scratch + MCE;
    zero(state, 2 * MCE);
    if (with.query.data) gather_parents<T>(in, tile, in.storage, with.query, in.M, in.C, in.E, state + MCE);
    gather_parents<T>(in, tile, compute_storage<T>, with.grad, in.M, in.C, in.E, ds);
    if (!with.given_sums.data) return;
    gather_parents<T>(in, tile, compute_storage<T>, with.given_sums, in.M, in.C, in.E, sums);
    X *dweight = with.dnorm ? dnorm : nullptr, *part = dnorm + 2 * CE;
    zero(dnorm, 4 * CE);
    const X eps = X{} + T(with.eps);
    for (int64_t m = 0; m < in.M; ++m) {
      layer_norm_backward(sums + m * CE, CE, eps, static_cast<const T*>(with.norm_weight), ds + m * CE,
                          dweight ? part : nullptr, dweight ? part + CE : nullptr);
      if (!dweight || (m % 64 < 63 && m + 1 < in.M)) continue;
      for (int64_t k = 0; k < 2 * CE; ++k) dnorm[k] += part[k];  // long sums, added one by one, lose digits
      zero(part, 2 * CE);
    }
    if (dweight) add_lanes<T>(dnorm, 2 * CE, with.dnorm.template part<T>(row));
  }

  template <class Each>
  FASTCAPS_INLINE void score(const X* state, int64_t m, V, Each&& each_vote, V* row, int64_t stride, V& highest) const {
    score_with(state + m * CE, state + (in.M + m) * CE, m, each_vote, row, stride, highest);
  }
  template <class Each>
  FASTCAPS_INLINE void score_with(const X* ds, const X* q, int64_t m, Each&& each_vote, V* row, int64_t stride,
                                  V& highest) const {
    V agreement[2] = {}, gain[2] = {};
    each_vote([&](int k, V v) FASTCAPS_LAMBDA {
      agreement[k & 1] += q[k] * v;
      gain[k & 1] += ds[k] * v;
    });
    const V logit = (agreement[0] + agreement[1]) * T(with.scale * kLog2E);
    row[0] = logit;
    highest = m ? max(highest, logit) : logit;
    row[stride] = gain[0] + gain[1];
  }

  // Returns dL/dg.
  FASTCAPS_INLINE V dscore(V* row, int64_t stride, V highest, V gate) const {
    V* gain = row + stride;
    if (with.query.data)
      softmax<T>(row, in.M, highest, broadcast(T(1)));
    else
      for (int64_t m = 0; m < in.M; ++m) row[m] = broadcast(T(1) / T(in.M));
    V mean{};
    for (int64_t m = 0; m < in.M; ++m) mean += row[m] * gain[m];
    for (int64_t m = 0; m < in.M; ++m) {
      row[m] *= gate;
      gain[m] = with.detach ? V{} : attention::dlogit(row[m], gain[m], mean, T(with.scale));
    }
    return mean;
  }

  // dV = share dS + da Q
  template <int kCount>
  FASTCAPS_INLINE void dvote(const X* state, int64_t m, const V* row, int64_t stride, const V*, int first, int count,
                             auto&& put) const {
    const X* ds = state + m * CE;
    put_gradient<kCount>(row[0], ds, row[stride], ds + MCE, first, count, put);
  }
  template <int kCount>
  FASTCAPS_INLINE void put_gradient(V share, const X* ds, V da, const X* q, int first, int count, auto&& put) const {
    if (with.query.data && !with.detach)  // da = 0 would make NaN of a query that is not finite
      each_number<kCount>(first, count,
                          [&](int k, int at) FASTCAPS_LAMBDA { put(at, attention::dvote(share, ds[k], da, q[k])); });
    else
      each_number<kCount>(first, count, [&](int k, int at) FASTCAPS_LAMBDA { put(at, share * ds[k]); });
  }
  FASTCAPS_INLINE void add(const X*, int64_t, const V* rows, int64_t stride, const V* votes, int64_t count,
                           Planes<V> to, int64_t to_m) const {
    if (with.dquery) add_votes(votes, rows + stride, in.M, count, to.size, to.pose(0, to_m));
  }
};

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
