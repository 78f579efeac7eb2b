// The attention pass for many children that share each matrix. Agreement and weighted sum are linear in the votes, so
// the matrix may act on the parents instead: with U_m = Q_m W^T, of the shape of a child's pose,
//   <Q, P W> = <U, P>,  S = sum_i r_i P_i W = (sum_i r_i P_i) W
// All children of a type are walked together; a vote then costs 2 C D multiplications and no matrix. Votes that are the
// children's poses (and a bias) need no matrix: U = Q.
#pragma once

#include "attention.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

// Products of a row's poses (vectors over the lanes, or scalars) with a matrix of scalars [D, E].
template <class T, class X>
struct PullBack {
  static constexpr bool kSingle = kOnePosition<T, X>;

  static constexpr int n = kLanes<T>, kAhead = 2048;  // values

  // Calls f(row, m) for each row of all parents m, without divisions.
  template <class F>
  static FASTCAPS_INLINE void each_row(const Votes& in, F&& f) {
    int64_t row = 0;
    for (int64_t m = 0; m < in.M; ++m)
      for (int64_t c = 0; c < in.C; ++c) f(row++, m);
  }

  // U[m] = Q[m] W[m]^T for all m.
  static void to_children(const Votes& in, const X* Q, const T* W, X* U) {
    const int64_t D = in.D, E = in.E, rows = in.M * in.C;
    if (!W) {
      std::memcpy(U, Q, size_t(rows * D) * sizeof(X));
      return;
    }
    if constexpr (kSingle) {
      if (E % n == 0 && (rows * D) % n == 0) {  // dot products along E, n of them added up at once
        Vec<T> part[n];
        int filled = 0;
        each_row(in, [&](int64_t row, int64_t m) {
          const T *q = Q + row * E, *w = W + m * D * E;
          for (int64_t d = 0; d < D; ++d, w += E) {
            part[filled] = load<T>(q) * load<T>(w);
            __builtin_prefetch(w + kAhead);  // all groups' matrices do not fit the cache
            for (int64_t e = n; e < E; e += n) part[filled] += load<T>(q + e) * load<T>(w + e);
            if (++filled < n) continue;
            fold_lanes<T>(part);
            store<T>(U, part[0]);
            U += n;
            filled = 0;
          }
        });
        return;
      }
    }
    each_row(in, [&](int64_t row, int64_t m) {
      const T* w = W + m * D * E;
      for (int64_t d = 0; d < D; ++d, ++U, w += E) {
        X sum{};
        for (int64_t e = 0; e < E; ++e) sum += Q[row * E + e] * w[e];
        *U = sum;
      }
    });
  }

  // S[m] += P[m] W[m] for all m; `one`: all parents share the first one's P.
  static void add_to_parents(const Votes& in, const X* P, bool one, const T* W, X* S) {
    const int64_t D = in.D, E = in.E;
    each_row(in, [&](int64_t row, int64_t m) {
      const X* p = P + (one ? row - m * in.C : row) * D;
      const T* w = W + m * D * E;
      for (int64_t e = 0; !W && e < E; ++e) S[row * E + e] += p[e];
      int64_t first = 0;
      if constexpr (kSingle)
        for (; W && first + n <= E; first += n) {
          Vec<T> sum = load<T>(S + row * E + first);
          for (int64_t d = 0; d < D; ++d) sum += p[d] * load<T>(w + d * E + first);
          store<T>(S + row * E + first, sum);
        }
      for (int64_t d = 0; W && d < D; ++d)
        for (int64_t e = first; e < E; ++e) S[row * E + e] += p[d] * w[d * E + e];
    });
  }

  // dW[m] += P[m]^T S[m], the lanes added up.
  static void add_outer(const Votes& in, int64_t m, const X* P, const X* S, T* dW) {
    const int64_t C = in.C, D = in.D, E = in.E;
    dW += m * D * E;
    for (int64_t d = 0; d < D; ++d, dW += E) {
      const X *p = P + m * C * D + d, *s = S + m * C * E;
      int64_t first = 0;
      if constexpr (kSingle) {
        for (; first + n <= E; first += n) {
          Vec<T> sum = load<T>(dW + first);
          for (int64_t c = 0; c < C; ++c) sum += p[c * D] * load<T>(s + c * E + first);
          store<T>(dW + first, sum);
        }
        for (int64_t c = 0; c < C; ++c)
          for (int64_t e = first; e < E; ++e) dW[e] += p[c * D] * s[c * E + e];
      } else {
        for (; first < E; first += n) {
          const int many = int(min(n, E - first));
          X part[n];
          for (int e = 0; e < many; ++e) {
            part[e] = p[0] * s[first + e];
            for (int64_t c = 1; c < C; ++c) part[e] += p[c * D] * s[c * E + first + e];
          }
          add_lane_sums<T>(part, many, dW + first);
        }
      }
    }
  }
};

template <class T, class X>
struct FoldedForward : AttentionForward<T, X> {
  using Base = AttentionForward<T, X>;
  using V = Vec<T>;
  static constexpr bool kFolds = true;
  using Base::in;
  const int64_t CD;
  explicit FoldedForward(const ForwardCall<Attention>& call_) : Base(call_), CD(in.child_size()) {}

  // State: Q, then U. Results: S, then sums of poses.
  static int64_t state_numbers(const ForwardCall<Attention>& call) {
    const Votes& in = call.votes;
    return in.parents_size() + in.M * in.child_size();
  }
  static int64_t numbers_before(const Votes& in) { return in.parents_size(); }
  static int64_t summed_size(const Votes& in) { return in.child_size(); }

  // With equal shares all parents have the same sum of poses, unless each has its own bias.
  bool one_sum(int64_t iteration) const { return Base::equal(iteration) && in.bias_stride_m == 0; }
  void enter(int64_t iteration, const T* W, X* state) const {
    if (!Base::equal(iteration)) PullBack<T, X>::to_children(in, state, W, state + in.parents_size());
  }
  void leave(int64_t iteration, const T* W, X* result) const {
    X* poses = result + in.parents_size();
    PullBack<T, X>::add_to_parents(in, poses, one_sum(iteration), W, result);
    zero(poses, in.M * CD);
  }

  template <class Each>
  FASTCAPS_INLINE V score(const X* state, int64_t m, V, Each&& each_pose) const {
    return Base::agreement(state + in.parents_size() + m * CD, each_pose);
  }
  void join_lanes(Planes<V> block, X* result, int64_t m) const {
    if constexpr (kOnePosition<T, X>)
      add_lane_sums<T>(block.base, block.numbers(0), result + in.parents_size() + m * CD);
  }
};

// With Y_m = dS_m W^T and X, Z the sums over children of r P and of s da P:
//   h = <Y, P>, dP = sum_m r Y + s da U, dQ = Z W, dW = X^T dS + Z^T Q
template <class T, class X>
struct FoldedBackward : AttentionBackward<T, X> {
  using Base = AttentionBackward<T, X>;
  using V = Vec<T>;
  static constexpr bool kFolds = true;
  static constexpr int kJoined = 4, kSumPoses = 2;
  using Base::call, Base::in, Base::with, Base::MCE;
  const int64_t CD, MCD;
  FoldedBackward(const BackwardCall<Attention>& call_, const Attention& with_)
      : Base(call_, with_), CD(in.child_size()), MCD(in.M * CD) {}

  // Of a row and a group of children: Y and U as the inner state, Z and X as inner results. Result of a row: dQ.
  static int64_t summed_size(const Votes& in) { return in.child_size(); }
  bool needs_vote() const { return true; }

  void enter(const T* W, const X* state, X* inner) const {
    PullBack<T, X>::to_children(in, state, W, inner);
    if (with.query.data)
      PullBack<T, X>::to_children(in, state + MCE, W, inner + MCD);
    else
      zero(inner + MCD, MCD);
  }
  void leave(const T* W, const X* inner, X* dquery) const {
    if (with.dquery) PullBack<T, X>::add_to_parents(in, inner, false, W, dquery);
  }
  void add_weight_gradient(int64_t m, const X* state, const X* inner, T* dW) const {
    PullBack<T, X>::add_outer(in, m, inner + MCD, state, dW);
    if (with.query.data) PullBack<T, X>::add_outer(in, m, inner, state + MCE, dW);
  }

  template <class Each>
  FASTCAPS_INLINE void score(const X* inner, int64_t m, V, Each&& each_pose, V* row, int64_t stride, V& highest) const {
    Base::score_with(inner + m * CD, inner + MCD + m * CD, m, each_pose, row, stride, highest);
  }
  template <int kCount>
  FASTCAPS_INLINE void dvote(const X* inner, int64_t m, const V* row, int64_t stride, const V*, int first, int count,
                             auto&& put) const {
    const X* y = inner + m * CD;
    Base::template put_gradient<kCount>(row[0], y, row[stride], y + MCD, first, count, put);
  }
  FASTCAPS_INLINE void add(const X*, int64_t, const V* rows, int64_t stride, const V* children, int64_t count,
                           Planes<V> to, int64_t to_m) const {
    if (with.query.data) add_votes(children, rows + stride, in.M, count, CD, to.pose(0, to_m));
    if (call.dweight) add_votes(children, rows, in.M, count, CD, to.pose(1, to_m));
  }
};

// The walk of a backward item (see BackwardItem::walk), row by row: first maps the row's parents to the children's
// poses, and in the end their gradients back to the parents.
template <class Item>
void walk_folded(Item& item, int64_t row_count) {
  item.weights.enter(item.range, 0, 1);
  const auto* W = item.weights.matrix(0, 0);
  auto* dW = item.dW ? item.gradient_of(0, 0) : nullptr;
  const int64_t iterations = item.iterations, inner_size = item.target_numbers(item.in.M);
  for (int64_t t = 0; t < row_count; ++t) {
    const auto* state = item.unsafe ? seen(item, t) : item.states + t * iterations * item.state_size;
    for (int64_t k = 0; k < iterations; ++k)
      item.passes[k].enter(W, state + k * item.state_size, item.inner_states + k * inner_size);
    zero(item.inner_results, iterations * inner_size);
    for (int64_t first = 0; first < item.range.count; first += item.children_at_once())
      item.walk_block(first, item.units_from(first), t, 1);
    for (int64_t k = 0; k < iterations; ++k)
      item.passes[k].leave(W, item.inner_results + k * inner_size,
                           item.results ? item.results + t * item.result_size : nullptr);
    for (int64_t m = 0; dW && m < item.in.M; ++m)  // all iterations add to a matrix' gradient while it is in cache
      for (int64_t k = 0; k < iterations; ++k)
        item.passes[k].add_weight_gradient(m, state + k * item.state_size, item.inner_results + k * inner_size, dW);
  }
}

// Returns the state of row t, with 0 in lanes whose windows hold no child of the range: there NaN times 0 is not 0.
template <class Item>
const typename Item::X* seen(Item& item, int64_t t) {
  using T = typename Item::Number;
  using X = typename Item::X;
  typename Item::V children{};
  for (int64_t q = 0; q < item.range.count; q += Item::Units::kUnit) children += item.are_here(q, item.tiles[t]);
  X many{};
  if constexpr (kOnePosition<T, X>)
    add_lane_sums<T>(&children, 1, &many);
  else
    many = children;
  const int64_t numbers = item.iterations * item.state_size;
  const X* state = item.states + t * numbers;
  for (int64_t k = 0; k < numbers; ++k) item.seen_state[k] = many != 0 ? state[k] : X{};
  return item.seen_state;
}

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
