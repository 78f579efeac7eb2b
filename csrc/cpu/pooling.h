// The pooling pass: children compete for every parent, in an online softmax. Backward is local once the log-sum-exp is
// known: e = exp(a - logsumexp), t = <dS, V> - <dS, S> + dlogsumexp, da = g e t, dg = sum_m e t (docs/algebra.md).
#pragma once

#include <cfloat>

#include "../algebra/pooling.h"
#include "attention.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

// 2^64: times this, a denormal length has an inverse.
template <class T>
inline constexpr T kLift = T(18446744073709551616.0);

// <Q, V> / |V| and 1 / |V| from <Q, V> and |V|^2. If a lane's square leaves the range of T, votes are measured again,
// in units of their largest value, unless the lane's `counts` is 0. Where 1 / |V| would overflow, `inverse` is
// -1 / (kLift |V|), and `lifted` is true.
template <class T>
struct UnitKey {
  using V = Vec<T>;
  V cosine, inverse;
  bool lifted = false;

  template <class X, class Each>
  FASTCAPS_INLINE UnitKey(V dot, V square, V counts, const X* q, Each&& each_vote) {
    constexpr bool kDouble = sizeof(T) == 8;
    constexpr T kLeast = T(kDouble ? 1e-280 : 1e-28), kMost = T(kDouble ? 1e300 : 1e36);
    constexpr T kLeastUnit = T(kDouble ? 4 * DBL_MIN : 4 * FLT_MIN);
    V unit = broadcast(T(1));
    bool rescaled = false;
    const auto within = ((square > kLeast) & (square < kMost)) | (counts == 0);
    if (__builtin_expect(!all(within), false)) {
      V largest{};
      each_vote([&](int, V v) FASTCAPS_LAMBDA {
        const V size = v < 0 ? -v : v;
        largest = size > largest ? size : largest;
      });
      const auto good = within | (largest == 0) | ((largest - largest) != 0);  // and lanes with NaN or infinity
      if (!all(good)) {  // a lane's values depend on no other lane
        rescaled = true;
        unit = good ? unit : largest;
        V dots{}, squares{};
        each_vote([&](int k, V v) FASTCAPS_LAMBDA {
          const V scaled = v / unit;
          dots += q[k] * scaled;
          squares += scaled * scaled;
        });
        dot = good ? dot : dots;
        square = good ? square : squares;
      }
    }
    inverse = pooling::inverse_length(square);
    cosine = dot * inverse;
    if (__builtin_expect(rescaled, false)) {
      const auto normal = unit >= kLeastUnit;
      lifted = !all(normal);
      inverse = normal ? inverse / unit : -inverse / (unit * kLift<T>);
    }
  }
  static FASTCAPS_INLINE V lift(V inverse) { return inverse < 0 ? broadcast(kLift<T>) : broadcast(T(1)); }
  static FASTCAPS_INLINE V magnitude(V inverse) { return inverse < 0 ? -inverse : inverse; }
};

// Below every logit, and finite: a difference of two such is 0, not NaN.
template <class T>
inline constexpr T kLowest = sizeof(T) == 4 ? T(-FLT_MAX) : T(-DBL_MAX);

template <class T, class X>
struct PoolingForward : QueryForward<T, X, Pooling> {
  using Base = QueryForward<T, X, Pooling>;
  using Base::Base, Base::call, Base::in, Base::with, Base::CE;
  using V = Vec<T>;
  static constexpr int kSumNumbers = 2;

  // Results, with e = g 2^(a - top): sums of e V; top, the largest logit (to base 2); sums of e.
  template <class Y>
  static FASTCAPS_INLINE void begin(Planes<Y> result) {
    for (int64_t m = 0; m < result.many; ++m) *result.number(0, m) += kLowest<T>;
  }

  template <class Each>
  FASTCAPS_INLINE V score(const X* Q, int64_t m, V gate, Each&& each_vote) const {
    const X* q = Q + m * CE;
    V dot[2] = {}, square[2] = {};
    each_vote([&](int k, V v) FASTCAPS_LAMBDA {
      dot[k & 1] += q[k] * v;
      square[k & 1] += v * v;
    });
    const T scale = T(with.scale * kLog2E);
    if (!with.normalize) return (dot[0] + dot[1]) * scale;
    const UnitKey<T> key(dot[0] + dot[1], square[0] + square[1], gate, q, each_vote);
    return key.cosine * scale;
  }

  FASTCAPS_INLINE V compete(V*, V, V) const { return V{}; }
  FASTCAPS_INLINE V equal_share(V) const { return V{}; }  // the logit that all share

  // Converts the logits a of a block's children to 2^(a - top), and rescales earlier sums if the top rises.
  FASTCAPS_INLINE void weigh(const V* row, const V*, const V* gates, const Range&, int64_t, int64_t count, int64_t,
                             Planes<V> to, int64_t m, V* share) const {
    V &top = *to.number(0, m), &total = *to.number(1, m), *S = to.pose(0, m);
    V high = top;
    for (int64_t j = 0; j < count; ++j) {
      share[j] = gates[j] == 0 ? broadcast(kLowest<T>) : row[j * in.M];
      high = max(high, share[j]);
    }
    const V rescale = exp2_nonpositive(top - high);
    for (int64_t k = 0; k < CE; ++k) S[k] *= rescale;
    total *= rescale;
    for (int64_t j = 0; j < count; ++j) total += share[j] = exp2_nonpositive(share[j] - high) * gates[j];
    top = high;
  }

  // Adds up the lanes' sums, rescaled to the largest logit of all lanes and of the row.
  void join_lanes(Planes<V> block, X* result, int64_t m) const {
    if constexpr (kOnePosition<T, X>) {
      const Planes<X> to = planes_of<PoolingForward>(result, in, in.M);
      T lane[kLanes<T>], high = *to.number(0, m);
      store<T>(lane, *block.number(0, 0));
      for (int r = 0; r < kLanes<T>; ++r) high = lane[r] > high || lane[r] != lane[r] ? lane[r] : high;
      const V share = exp2_nonpositive(*block.number(0, 0) - high);
      rescale(to, m, high);
      V* S = block.pose(0, 0);
      for (int64_t k = 0; k < CE; ++k) S[k] *= share;
      add_lane_sums<T>(S, CE, to.pose(0, m));
      *to.number(1, m) += sum_lanes<T>(*block.number(1, 0) * share);
    }
  }
  void join(X* result, const X* other) const {
    const Planes<X> to = planes_of<PoolingForward>(result, in, in.M);
    const Planes<const X> from{other, in.M, CE, 1};
    for (int64_t m = 0; m < in.M; ++m) {
      const X mine = *to.number(0, m), theirs = *from.number(0, m), high = mine > theirs ? mine : theirs;
      rescale(to, m, high);
      const X share = each_lane<T>(theirs - high, exponential);
      for (int64_t k = 0; k < CE; ++k) to.pose(0, m)[k] += from.pose(0, m)[k] * share;
      *to.number(1, m) += *from.number(1, m) * share;
    }
  }
  void rescale(Planes<X> to, int64_t m, X high) const {
    const X share = each_lane<T>(*to.number(0, m) - high, exponential);
    for (int64_t k = 0; k < CE; ++k) to.pose(0, m)[k] *= share;
    *to.number(1, m) *= share;
    *to.number(0, m) = high;
  }
  static T exponential(T x) { return sizeof(T) == 4 ? T(__builtin_exp2f(x)) : T(__builtin_exp2(x)); }

  FASTCAPS_NOINLINE void finish(const Tile<T>& tile, int64_t iteration, X* result, X* Q) const {
    const Planes<X> from = planes_of<PoolingForward>(result, in, in.M);
    const int64_t MCE = in.parents_size(), at = iteration * in.positions();
    const bool last = iteration + 1 == call.total;
    X *S = from.pose(0, 0), *total = from.number(1, 0), *top = from.number(0, 0);
    for (int64_t m = 0; m < in.M; ++m) {
      const X one = inverse_or_zero(total[m]);
      for (int64_t k = 0; k < CE; ++k) S[m * CE + k] *= one;
      const X nobody = X{} - T(__builtin_inf());
      total[m] = total[m] == 0 ? nobody : Number<X>::log(total[m]) + top[m] / T(kLog2E);
    }
    write_parents<T>(tile, in.storage, with.sums, at, MCE, S);
    write_row<T>(tile, static_cast<T*>(with.logsumexp) + at * in.M, in.M, total);
    for (int64_t m = 0; m < in.M; ++m) {
      X* s = S + m * CE;
      if (with.rule == Rule::kSquash) {
        squash(PoseInMemory<X>{s, CE});
      } else if (!last) {  // directions are those of the stored sums
        for (int64_t k = 0; k < CE; ++k) s[k] = rounded<T>(in.storage, s[k]);
        unit(PoseInMemory<X>{s, CE});
      }
    }
    if (last) return write_parents<T>(tile, in.storage, with.parents, 0, MCE, S);
    for (int64_t k = 0; k < MCE; ++k) Q[k] = rounded<T>(in.storage, Q[k] + rounded<T>(in.storage, S[k]));
  }
};

template <class T, class X>
struct PoolingBackward : QueryBackward<T, X, Pooling> {
  using Base = QueryBackward<T, X, Pooling>;
  using Base::Base, Base::call, Base::in, Base::with, Base::CE;
  using V = Vec<T>;
  // see BackwardItem::scores
  static constexpr int kScores = 4;
  mutable bool lifts = false;  // whether a vote was so short that its plane 2 is that of UnitKey::lifted

  // State: dS and Q; log-sum-exp, and <dS, S> - dlogsumexp.
  static int64_t state_numbers(const BackwardCall<Pooling>& call) {
    const Votes& in = call.votes;
    return 2 * in.M * (in.parent_size() + 1);
  }
  template <class Y>
  FASTCAPS_INLINE Planes<Y> parents(Y* base) const {
    return {base, in.M, CE, 2};
  }
  bool needs_vote() const { return with.query.data; }
  static int64_t prepare_scratch(const Votes& in) { return in.parents_size(); }
  FASTCAPS_INLINE V known_share(const X* state, int64_t m) const {
    const V all = V{} + *parents(state).number(0, m);
    return all == T(-__builtin_inf()) ? V{} : exp2_any<T>(-all * T(kLog2E));
  }

  FASTCAPS_NOINLINE void load(const Tile<T>& tile, int64_t, X* state, X* scratch) const {
    const Planes<X> to = parents(state);
    zero(state, state_numbers(call));
    if (with.query.data) gather_parents<T>(in, tile, in.storage, with.query, in.M, in.C, in.E, to.pose(1, 0));
    gather_parents<T>(in, tile, compute_storage<T>, with.given_logsumexp, in.M, 1, 1, to.number(0, 0));
    X *ds = to.pose(0, 0), *known = to.number(1, 0);
    gather_parents<T>(in, tile, compute_storage<T>, with.grad, in.M, in.C, in.E, ds);
    gather_parents<T>(in, tile, in.storage, with.given_sums, in.M, in.C, in.E, scratch);
    for (int64_t m = 0; m < in.M; ++m)
      for (int64_t k = 0; k < CE; ++k) known[m] += ds[m * CE + k] * scratch[m * CE + k];
  }

  template <class Each>
  FASTCAPS_INLINE void score(const X* state, int64_t m, V gate, Each&& each_vote, V* row, int64_t stride, V&) const {
    const Planes<const X> from = parents(state);
    const X *ds = from.pose(0, m), *q = from.pose(1, m);
    V dot[2] = {}, gain[2] = {}, square[2] = {};
    each_vote([&](int k, V v) FASTCAPS_LAMBDA {
      dot[k & 1] += q[k] * v;
      gain[k & 1] += ds[k] * v;
      square[k & 1] += v * v;
    });
    V one = broadcast(T(1)), asked = dot[0] + dot[1];
    if (with.normalize) {
      const V counts = in.gate.data ? broadcast(T(1)) : gate;  // even a gate of 0 has a gradient
      const UnitKey<T> key(asked, square[0] + square[1], counts, q, each_vote);
      one = key.inverse, asked = key.cosine;
      lifts |= key.lifted;
    }
    if (!with.query.data) asked = V{};
    const V all = V{} + *from.number(0, m);
    row[0] =
        all == T(-__builtin_inf())
            ? V{}
            : exp2_any<T>((asked * T(with.scale) - all) * T(kLog2E));  // a parent that no child reaches has no shares
    row[stride] = gain[0] + gain[1] - *from.number(1, m);
    row[2 * stride] = one;
    row[3 * stride] = with.normalize ? asked * UnitKey<T>::magnitude(one) : V{};
  }

  FASTCAPS_INLINE V dscore(V* row, int64_t stride, V, V gate) const {
    V dgate{};
    for (int64_t m = 0; m < in.M; ++m) {
      const V gain = row[m] * row[stride + m];
      dgate += gain;
      row[m] = gate == 0 ? V{} : row[m] * gate;
      const V da = with.detach || !with.query.data ? V{} : gate == 0 ? V{} : gate * gain * T(with.scale);
      const V inverse = row[2 * stride + m];
      row[stride + m] = with.detach ? V{}
                        : lifts     ? da * UnitKey<T>::lift(inverse) * UnitKey<T>::magnitude(inverse)
                                    : da * inverse;
      row[3 * stride + m] *= row[stride + m];
    }
    return with.detach ? dgate - dgate : dgate;  // 0, or NaN if not finite: so BackwardItem finds broken children
  }

  template <int kCount>
  FASTCAPS_INLINE void dvote(const X* state, int64_t m, const V* row, int64_t stride, const V* vote, int first,
                             int count, auto&& put) const {
    const Planes<const X> from = parents(state);
    const X *ds = from.pose(0, m), *q = from.pose(1, m);
    const V share = row[0], c = row[stride], d = row[3 * stride];
    if (with.query.data && !with.detach && lifts)
      each_number<kCount>(first, count, [&](int k, int at) FASTCAPS_LAMBDA {
        put(at, pooling::dvote(share, ds[k], c, q[k], d, V(vote[k] * UnitKey<T>::lift(row[2 * stride]))));
      });
    else if (with.query.data && !with.detach)
      each_number<kCount>(first, count, [&](int k, int at) FASTCAPS_LAMBDA {
        put(at, pooling::dvote(share, ds[k], c, q[k], d, vote[k]));
      });
    else
      each_number<kCount>(first, count, [&](int k, int at) FASTCAPS_LAMBDA { put(at, share * ds[k]); });
  }
  FASTCAPS_INLINE void add(const X*, int64_t, const V* rows, int64_t stride, const V* votes, int64_t count,
                           Planes<V> to, int64_t to_m) const {
    if (with.dquery && !with.detach) add_votes(votes, rows + stride, in.M, count, to.size, to.pose(0, to_m));
  }
};

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
