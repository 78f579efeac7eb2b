// The Gaussian pass: parents explain the children's votes, each by a diagonal Gaussian (../algebra/gaussian.h). Sums
// are kept as the running mean and the squares about it (West 1979), both relative to a base near the votes: the
// previous iteration's mean, or a child's votes. So neither an offset that all votes share nor their distance from the
// base costs digits.
//
// Backward (docs/algebra.md): without rounding, rest = sum_i w (V - means) would be eps means, and n the given count.
// But rounded means shift every d = V - means, and weights computed again differ slightly from those that were counted:
// small variances make large logits, whose last digits the state does not keep. If a variance is tiny beside its
// squared mean, rest.h therefore sums rest and n from the same d and w as the gradients, so that the errors cancel.
#pragma once

#include "../algebra/gaussian.h"
#include "attention.h"
#include "rest.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

// Values of a pose that are added at once: there are registers for two sums of each.
inline constexpr int kNumbersAtOnce = kManyRegisters ? 8 : 4;

// The betas of a unit of children for one parent.
template <class T, class X>
struct Betas {
  static constexpr bool kChildLanes = kOnePosition<T, X>;
  const T *use, *ignore;
  int64_t use_i, use_m, ignore_i, ignore_m;

  explicit Betas(const BetaTables& with)
      : use(static_cast<const T*>(with.use)),
        ignore(static_cast<const T*>(with.ignore)),
        use_i(with.use_stride_i),
        use_m(with.use_stride_m),
        ignore_i(with.ignore_stride_i),
        ignore_m(with.ignore_stride_m) {}

  static FASTCAPS_INLINE Vec<T> at(const T* beta, int64_t stride_i, int64_t stride_m, const Range& range, int64_t q,
                                   int64_t m) {
    if (stride_i == 0) return broadcast(beta[m * stride_m]);  // without the divisions of Range::child
    if (!kChildLanes) return broadcast(beta[range.child(q) * stride_i + m * stride_m]);
    T lane[kLanes<T>];
    for (int r = 0; r < kLanes<T>; ++r)
      lane[r] = q + r < range.count ? beta[range.child(q + r) * stride_i + m * stride_m] : T(0);
    return load<T>(lane);
  }
  FASTCAPS_INLINE Vec<T> use_at(const Range& range, int64_t q, int64_t m) const {
    return at(use, use_i, use_m, range, q, m);
  }
  FASTCAPS_INLINE Vec<T> ignore_at(const Range& range, int64_t q, int64_t m) const {
    return at(ignore, ignore_i, ignore_m, range, q, m);
  }
};

// Subtracts the largest log-weight of a row from all, which no coefficient depends on: each holds -sum ln sigma, beside
// which a distance would lose digits. Infinities stay.
template <class X>
FASTCAPS_INLINE void subtract_largest(X* alpha, int64_t many) {
  X largest = alpha[0];
  for (int64_t m = 1; m < many; ++m) largest = alpha[m] > largest ? alpha[m] : largest;
  for (int64_t m = 0; m < many; ++m) alpha[m] -= (largest - largest) == 0 ? largest : X{};
}

template <class T, class X>
struct GaussianForward {
  using Operands = Gaussian;
  using V = Vec<T>;
  static constexpr int kShares = 2, kSumPoses = 2, kSumNumbers = 2;
  static constexpr bool kHasBase = true, kFolds = false, kEvenSums = false;
  static constexpr int kJoined = 1;
  const ForwardCall<Gaussian>& call;
  const Votes& in;
  const Gaussian& with;
  const Betas<T, X> betas;
  const int64_t CE;

  explicit GaussianForward(const ForwardCall<Gaussian>& call_)
      : call(call_), in(call.votes), with(call.with), betas(with.betas), CE(in.parent_size()) {}

  // Results: the mean and the squares about it, both relative to the base; n and the evidence.
  static int64_t summed_size(const Votes& in) { return in.parent_size(); }
  static int64_t numbers_before(const Votes&) { return 0; }
  // State: the base and p; alpha.
  template <class Y>
  FASTCAPS_INLINE Planes<Y> parents(Y* base) const {
    return {base, in.M, CE, 2};
  }
  static int64_t state_numbers(const ForwardCall<Gaussian>& call) {
    const Votes& in = call.votes;
    return in.M * (2 * in.parent_size() + 1);
  }

  // A routing's later iterations have a mean, a variance (or not) and a log-weight.
  bool has_mean(int64_t iteration) const { return iteration > 0 || with.mean.data; }
  bool equal(int64_t iteration) const { return !has_mean(iteration) && !with.log_weight.data; }
  bool wants_base() const { return !with.mean.data; }
  X* base(X* state, int64_t m) const { return parents(state).pose(0, m); }

  void load(const Tile<T>& tile, X* state) const {
    const Planes<X> to = parents(state);
    zero(state, state_numbers(call));
    if (with.mean.data) {
      gather_parents<T>(in, tile, compute_storage<T>, with.mean, in.M, in.C, in.E, to.pose(0, 0));
      X* p = to.pose(1, 0);
      if (with.variance.data) gather_parents<T>(in, tile, compute_storage<T>, with.variance, in.M, in.C, in.E, p);
      for (int64_t k = 0; k < in.parents_size(); ++k) p[k] = with.variance.data ? gaussian::precision(p[k]) : X{} + 1;
    }
    if (!with.log_weight.data) return;
    gather_parents<T>(in, tile, compute_storage<T>, with.log_weight, in.M, 1, 1, to.number(0, 0));
    subtract_largest(to.number(0, 0), in.M);
  }

  template <class Each>
  FASTCAPS_INLINE V score(const X* state, int64_t m, V, Each&& each_vote) const {
    const Planes<const X> from = parents(state);
    const X *base = from.pose(0, m), *p = from.pose(1, m);
    V distance[2] = {};
    each_vote([&](int k, V v) FASTCAPS_LAMBDA { distance[k & 1] += gaussian::distance(v - base[k], p[k]); });
    return (*from.number(0, m) - (distance[0] + distance[1])) * T(kLog2E);
  }

  FASTCAPS_INLINE V compete(V* row, V highest, V gate) const {
    softmax<T>(row, in.M, highest, gate);
    if (in.gate.data)
      for (int64_t m = 0; m < in.M; ++m) row[m] = gate == 0 ? V{} : row[m];
    return V{};
  }

  FASTCAPS_INLINE V equal_share(V gate) const { return gate / T(in.M); }

  // Computes from a block's weights w how far each child moves the mean, and how much its square counts.
  FASTCAPS_INLINE void weigh(const V* row, const V*, const V* gates, const Range& range, int64_t first, int64_t count,
                             int64_t m, Planes<V> to, int64_t to_m, V* share) const {
    V &n = *to.number(0, to_m), &evidence = *to.number(1, to_m);
    V some{};  // the evidence of a few children: hundreds, added one by one, lose digits
    for (int64_t j = 0; j < count; ++j) {
      const V w = row[j * in.M], sum = n + w, moved = sum == 0 ? V{} : w / sum;
      share[2 * j] = moved;
      share[2 * j + 1] = n * moved;
      n = sum;
      if (betas.use) {
        const int64_t q = first + j * UnitsOf<T, kOnePosition<T, X>>::kUnit;
        const V ignore = betas.ignore_at(range, q, m);
        some += (betas.use_at(range, q, m) + ignore) * w - ignore * gates[j];
        if (j % 16 == 15 || j + 1 == count) evidence += some, some = V{};
      }
    }
  }
  FASTCAPS_INLINE void add(const X* state, int64_t m, const V* kept, const V* share, int64_t count, Planes<V> to,
                           int64_t to_m) const {
    const X* base = parents(state).pose(0, m);
    V *mean = to.pose(0, to_m), *square = to.pose(1, to_m);
    each_group<kNumbersAtOnce>(CE, [&](int64_t k, auto many) FASTCAPS_LAMBDA {
      V at[many], sum[many];
      unroll<many>([&](auto u) FASTCAPS_LAMBDA { at[u] = mean[k + u], sum[u] = square[k + u]; });
      for (int64_t j = 0; j < count; ++j)
        unroll<many>([&](auto u) FASTCAPS_LAMBDA {
          gaussian::add(kept[j * CE + k + u] - base[k + u], share[2 * j], share[2 * j + 1], at[u], sum[u]);
        });
      unroll<many>([&](auto u) FASTCAPS_LAMBDA { mean[k + u] = at[u], square[k + u] = sum[u]; });
    });
  }
  template <class Pose, class Weight>
  FASTCAPS_INLINE void add_again(const Pose& pose, const X* state, int64_t m, const V* P, const Weight* W,
                                 const Weight* bias, const V* share, Planes<V> to, int64_t to_m) const {
    const X* base = parents(state).pose(0, m);
    V *mean = to.pose(0, to_m), *square = to.pose(1, to_m);
    votes<T>(pose, P, W, bias,
             [&](int k, V v) FASTCAPS_LAMBDA { gaussian::add(v - base[k], share[0], share[1], mean[k], square[k]); });
  }
  // Joins the lanes' moments (their common mean first, then the squares about it), and adds them to the row's.
  void join_lanes(Planes<V> block, X* result, int64_t m) const {
    if constexpr (kOnePosition<T, X>) {
      const Planes<X> to = planes_of<GaussianForward>(result, in, in.M);
      const V n = *block.number(0, 0);
      const T sum = sum_lanes<T>(n);
      *to.number(1, m) += sum_lanes<T>(*block.number(1, 0));
      if (sum == 0) return;
      const V *mean = block.pose(0, 0), *square = block.pose(1, 0);
      const T before = *to.number(0, m), share = sum / (before + sum), apart = before * share;
      *to.number(0, m) = before + sum;
      constexpr int kMany = kLanes<T>;
      for (int64_t first = 0; first < CE; first += kMany) {
        const int many = int(min(kMany, CE - first));
        T centre[kMany] = {}, squares[kMany] = {};
        V part[kMany];
        for (int k = 0; k < many; ++k) part[k] = n * mean[first + k];
        add_lane_sums<T>(part, many, centre);
        for (int k = 0; k < many; ++k) {
          centre[k] /= sum;
          const V off = mean[first + k] - centre[k];
          part[k] = square[first + k] + n * off * off;
        }
        add_lane_sums<T>(part, many, squares);
        T *all = to.pose(0, m) + first, *all_squares = to.pose(1, m) + first;
        for (int k = 0; k < many; ++k) {
          gaussian::join(centre[k], squares[k], share, apart, all[k], all_squares[k]);
        }
      }
    }
  }
  // Joins the moments of two ranges (Chan et al. 1979).
  void join(X* result, const X* other) const {
    const Planes<X> to = planes_of<GaussianForward>(result, in, in.M);
    const Planes<const X> from{other, in.M, CE, 2};
    for (int64_t m = 0; m < in.M; ++m) {
      const X before = *to.number(0, m), n = *from.number(0, m), sum = before + n;
      const X share = sum == 0 ? X{} : n / sum;  // 1 / sum would overflow for a denormal sum
      for (int64_t k = 0; k < CE; ++k)
        gaussian::join(X(from.pose(0, m)[k]), X(from.pose(1, m)[k]), share, before * share, to.pose(0, m)[k],
                       to.pose(1, m)[k]);
      *to.number(0, m) = sum;
      *to.number(1, m) += *from.number(1, m);
    }
  }

  FASTCAPS_NOINLINE void finish(const Tile<T>& tile, int64_t iteration, X* result, X* state) const {
    const Planes<X> to = planes_of<GaussianForward>(result, in, in.M), from = parents(state);
    const int64_t MCE = in.parents_size(), at = iteration * in.positions();
    const T eps = T(with.eps);
    for (int64_t m = 0; m < in.M; ++m) {
      const X n = *to.number(0, m), one = inverse_or_zero(n + eps);
      for (int64_t k = 0; k < CE; ++k)
        gaussian::finish(from.pose(0, m)[k], n, X{} + eps, one, to.pose(0, m)[k], to.pose(1, m)[k]);
    }
    write_row<T>(tile, static_cast<T*>(with.counts) + at * in.M, in.M, to.number(0, 0));
    write_row<T>(tile, static_cast<T*>(with.means) + at * MCE, MCE, to.pose(0, 0));
    write_row<T>(tile, static_cast<T*>(with.variances) + at * MCE, MCE, to.pose(1, 0));
    update(iteration, to, from);
    write_row<T>(tile, static_cast<T*>(with.scores) + at * in.M, in.M, to.number(1, 0));
  }

  // The parents' scores, and their Gaussians for the next iteration.
  void update(int64_t iteration, Planes<X> result, Planes<X> state) const {
    const T eps = T(with.eps);
    const bool kmeans = with.rule == Rule::kKMeans;
    for (int64_t m = 0; m < in.M; ++m) {
      X log_sigma{};
      for (int64_t k = 0; k < CE; ++k) {
        const X variance = result.pose(1, m)[k] + eps;
        state.pose(0, m)[k] = result.pose(0, m)[k];
        state.pose(1, m)[k] = kmeans ? X{} + 1 : gaussian::precision(variance);
        if (!kmeans) log_sigma += gaussian::log_sigma(variance);
      }
      X& score = *result.number(1, m);  // the evidence
      if (with.rule == Rule::kEM)
        score = gaussian::em_score(T(with.temperatures[iteration]), static_cast<const T*>(with.beta_a)[m],
                                   T(CE) * static_cast<const T*>(with.beta_u)[m], log_sigma, *result.number(0, m));
      *state.number(0, m) = Number<X>::log_sigmoid(score) - log_sigma;
    }
    subtract_largest(state.number(0, 0), in.M);
  }
};

template <class T, class X>
struct GaussianBackward {
  using Operands = Gaussian;
  using V = Vec<T>;
  static constexpr int kScores = 2;  // see BackwardItem::scores
  static constexpr int kSumPoses = 2, kSumNumbers = 1;
  static constexpr bool kBetas = true, kRest = true, kFolds = false;
  static constexpr int kJoined = 1;
  const BackwardCall<Gaussian>& call;
  const Votes& in;
  const Gaussian& with;
  const Betas<T, X> betas;
  const int64_t CE;
  V shared[2][8] = {};  // duse and dignore of betas that children share: a block's part, for the current parents

  GaussianBackward(const BackwardCall<Gaussian>& call_, const Gaussian& with_)
      : call(call_), in(call.votes), with(with_), betas(with.betas), CE(in.parent_size()) {}

  // State: the base, p, means minus the base, u, s; alpha, the terms of t that no vote changes, devidence.
  enum PosePlane { kBase, kPrecision, kMeans, kU, kS, kPoses };
  enum NumberPlane { kAlpha, kAlways, kEvidence, kNumbers };
  template <class Y>
  FASTCAPS_INLINE Planes<Y> parents(Y* base) const {
    return {base, in.M, CE, kPoses};
  }
  static int64_t state_numbers(const BackwardCall<Gaussian>& call) {
    const Votes& in = call.votes;
    return in.M * (kPoses * in.parent_size() + kNumbers);
  }
  // Results: sums of da (V - mu) and da (V - mu)^2; of da.
  static int64_t summed_size(const Votes& in) { return in.parent_size(); }
  bool wants_results() const { return with.dmean || with.dvariance || with.dlog_weight; }
  bool needs_vote() const { return true; }
  static int64_t prepare_scratch(const Votes& in) { return in.parents_size() + 2 * in.M + 1; }
  bool shares_known() const { return !with.mean.data && !with.log_weight.data && !call.dgate; }
  FASTCAPS_INLINE V known_share(const X*, int64_t) const { return broadcast(T(1) / T(in.M)); }

  // Stores 1 / N, `tight`, and 0 for n and rest in the scratch memory; returns whether n and rest must be summed.
  FASTCAPS_NOINLINE bool load(const Tile<T>& tile, int64_t, X* state, X* scratch) const {
    constexpr Storage kSum = compute_storage<T>;
    const int64_t MCE = in.parents_size();
    const Planes<X> to = parents(state);
    const auto poses = [&](const View& view, X* out) {
      gather_parents<T>(in, tile, kSum, view, in.M, in.C, in.E, out);
    };
    const auto numbers = [&](const View& view, X* out) { gather_parents<T>(in, tile, kSum, view, in.M, 1, 1, out); };
    zero(state, state_numbers(call));
    X *counts = scratch, *variances = rest(scratch);
    numbers(with.given_counts, counts);
    poses(with.given_means, to.pose(kMeans, 0));
    poses(with.given_variances, variances);
    if (with.grad_means.data) poses(with.grad_means, to.pose(kU, 0));
    if (with.grad_variances.data) poses(with.grad_variances, to.pose(kS, 0));
    if (with.grad_counts.data) numbers(with.grad_counts, to.number(kAlways, 0));
    if (with.grad_evidence.data && betas.use) numbers(with.grad_evidence, to.number(kEvidence, 0));
    if (with.log_weight.data) numbers(with.log_weight, to.number(kAlpha, 0));
    subtract_largest(to.number(kAlpha, 0), in.M);
    poses(with.mean.data ? with.mean : with.given_means, to.pose(kBase, 0));
    X *p = to.pose(kPrecision, 0), *u = to.pose(kU, 0), *s = to.pose(kS, 0), *means = to.pose(kMeans, 0);
    if (with.variance.data) poses(with.variance, p);
    X& tight = *tight_of(scratch);
    tight = X{};
    zero(count(scratch), in.M);
    for (int64_t m = 0; m < in.M; ++m) {
      const X one = counts[m] = inverse_or_zero(counts[m] + T(with.eps));
      for (int64_t k = m * CE; k < (m + 1) * CE; ++k) {
        s[k] *= one;
        u[k] = (u[k] - T(2 * with.eps) * means[k] * s[k]) * one;
        *to.number(kAlways, m) -= s[k] * variances[k];
        tight += variances[k] < means[k] * means[k] * kTight ? u[k] * u[k] + s[k] * s[k] : X{};
        variances[k] = X{};
      }
    }
    for (int64_t k = 0; k < MCE; ++k) {
      means[k] -= to.base[k];
      if (with.mean.data) p[k] = with.variance.data ? gaussian::precision(p[k]) : X{} + 1;
    }
    T sum{};
    add_lanes<T>(&tight, 1, &sum);
    return sum != 0;  // true for NaN too: beside a NaN position another may be tight
  }

  // A variance is tight if it is below this share of its squared mean.
  static constexpr T kTight = T(1) / 64;

  X* count(X* scratch) const { return scratch + in.M; }
  X* rest(X* scratch) const { return scratch + 2 * in.M; }
  X* tight_of(X* scratch) const { return rest(scratch) + in.parents_size(); }
  // rest += w (V - means), for one unit of children
  template <class Pose>
  FASTCAPS_INLINE void add_rest(const Pose& pose, const X* state, int64_t m, V w, const V* vote, V* rest) const {
    const X *base = parents(state).pose(kBase, m), *means = parents(state).pose(kMeans, m);
    for (int k = 0; k < pose.C * pose.E; ++k) rest[k] += w * (vote[k] - base[k] - means[k]);
  }
  void take_rest(X* state, X* scratch) const {
    const Planes<X> to = parents(state);
    const auto loose = *tight_of(scratch) == 0;  // a lane's values depend on no other lane
    const X *base = to.pose(kBase, 0), *means = to.pose(kMeans, 0);
    X *u = to.pose(kU, 0), *s = to.pose(kS, 0);
    for (int64_t m = 0; m < in.M; ++m) {
      const X one = scratch[m], n = count(scratch)[m] + T(with.eps), change = one == 0 ? X{} : 1 / (n * one);
      for (int64_t k = m * CE; k < (m + 1) * CE; ++k) {
        const X more = T(with.eps) * (base[k] + means[k]) - change * rest(scratch)[k];
        u[k] = loose ? u[k] : change * (u[k] + 2 * s[k] * one * more);
        s[k] = loose ? s[k] : s[k] * change;
      }
    }
  }

  template <class Each>
  FASTCAPS_INLINE void score(const X* state, int64_t m, V, Each&& each_vote, V* row, int64_t stride, V& highest) const {
    const Planes<const X> from = parents(state);
    const X *base = from.pose(kBase, m), *p = from.pose(kPrecision, m), *means = from.pose(kMeans, m);
    const X *u = from.pose(kU, m), *s = from.pose(kS, m);
    V distance[2] = {}, gain[2] = {};
    each_vote([&](int k, V v) FASTCAPS_LAMBDA {
      const V off = v - base[k], d = off - means[k];
      distance[k & 1] += gaussian::distance(off, p[k]);
      gain[k & 1] += gaussian::gain(u[k], s[k], d);
    });
    const V alpha = V{} + *from.number(kAlpha, m);
    const V logit = (with.mean.data ? alpha - (distance[0] + distance[1]) : alpha) * T(kLog2E);
    row[0] = logit;
    highest = m ? max(highest, logit) : logit;
    row[stride] = gain[0] + gain[1] + *from.number(kAlways, m);
  }

  FASTCAPS_INLINE V evidence_gain(const X* state, int64_t m, const Range& range, int64_t q) const {
    if (!betas.use) return V{};
    return (betas.use_at(range, q, m) + betas.ignore_at(range, q, m)) * *parents(state).number(kEvidence, m);
  }
  FASTCAPS_INLINE V ignored_evidence(const X* state, const Range& range, int64_t q) const {
    V sum{};
    if (betas.use)
      for (int64_t m = 0; m < in.M; ++m) sum -= betas.ignore_at(range, q, m) * *parents(state).number(kEvidence, m);
    return sum;
  }

  FASTCAPS_INLINE V dscore(V* row, int64_t stride, V highest, V gate) const {
    V* gain = row + stride;
    softmax<T>(row, in.M, highest, broadcast(T(1)));
    V mean{};
    for (int64_t m = 0; m < in.M; ++m) mean += row[m] * gain[m];
    for (int64_t m = 0; m < in.M; ++m) {
      row[m] *= gate;
      gain[m] = row[m] * (gain[m] - mean);
    }
    return mean;
  }

  template <int kCount>
  FASTCAPS_INLINE void dvote(const X* state, int64_t m, const V* row, int64_t stride, const V* vote, int first,
                             int count, auto&& put) const {
    const Planes<const X> from = parents(state);
    const X *base = from.pose(kBase, m), *p = from.pose(kPrecision, m);
    const X *means = from.pose(kMeans, m), *u = from.pose(kU, m), *s = from.pose(kS, m);
    const V w = row[0], da = with.mean.data ? row[stride] : V{};  // else no vote affects it: NaN must not spread
    each_number<kCount>(first, count, [&](int k, int at) FASTCAPS_LAMBDA {
      const V off = vote[k] - base[k];
      put(at, gaussian::dvote(w, u[k], s[k], off - means[k], da, p[k], off));
    });
  }
  FASTCAPS_INLINE void add(const X* state, int64_t m, const V* rows, int64_t stride, const V* votes, int64_t count,
                           Planes<V> to, int64_t to_m) const {
    if (!wants_results()) return;
    const X* base = parents(state).pose(kBase, m);
    const V* das = rows + stride;
    V *first = to.pose(0, to_m), *second = to.pose(1, to_m);
    each_group<kNumbersAtOnce>(CE, [&](int64_t k, auto many) FASTCAPS_LAMBDA {
      V sum[many], squares[many];
      unroll<many>([&](auto u) FASTCAPS_LAMBDA { sum[u] = first[k + u], squares[u] = second[k + u]; });
      for (int64_t j = 0; j < count; ++j)
        unroll<many>([&](auto u) FASTCAPS_LAMBDA {
          const V off = votes[j * CE + k + u] - base[k + u], share = das[j * in.M] * off;
          sum[u] += share;
          squares[u] += share * off;
        });
      unroll<many>([&](auto u) FASTCAPS_LAMBDA { first[k + u] = sum[u], second[k + u] = squares[u]; });
    });
    for (int64_t j = 0; j < count; ++j) *to.number(0, to_m) += das[j * in.M];
  }

  // duse += w devidence, dignore += (w - g) devidence
  FASTCAPS_INLINE void add_betas(const X* state, int64_t m, int which, V w, V gate, const Range& range, int64_t q,
                                 int64_t item) {
    if (!with.duse && !with.dignore) return;
    const V evidence = V{} + *parents(state).number(kEvidence, m);
    if (with.duse) add_beta(with.duse, betas.use_i, betas.use_m, w * evidence, shared[0][which], range, q, m, item);
    if (with.dignore)
      add_beta(with.dignore, betas.ignore_i, betas.ignore_m, (w - gate) * evidence, shared[1][which], range, q, m,
               item);
  }
  static FASTCAPS_INLINE void add_beta(const Parts& parts, int64_t stride_i, int64_t stride_m, V number, V& shared,
                                       const Range& range, int64_t q, int64_t m, int64_t item) {
    T* to = parts.part<T>(item) + m * stride_m;
    if (stride_i == 0) {
      shared += number;
    } else if (!kOnePosition<T, X>) {
      to[range.child(q) * stride_i] += sum_lanes<T>(number);
    } else {
      T lane[kLanes<T>];
      store<T>(lane, number);
      for (int r = 0; r < kLanes<T>; ++r)
        if (q + r < range.count) to[range.child(q + r) * stride_i] += lane[r];
    }
  }
  // The sums of a block's children for parent m are complete.
  void end_betas(int64_t m, int which, int64_t item) {
    const Parts* to[] = {&with.duse, &with.dignore};
    const int64_t stride[] = {betas.use_m, betas.ignore_m};
    for (int k = 0; k < 2; ++k) {
      if (*to[k]) to[k]->part<T>(item)[m * stride[k]] += sum_lanes<T>(shared[k][which]);
      shared[k][which] = V{};
    }
  }

  void finish(const Tile<T>& tile, const X* state, X* result) const {
    const Planes<X> sums = planes_of<GaussianBackward>(result, in, in.M);
    const X* p = parents(state).pose(kPrecision, 0);
    X *first = sums.pose(0, 0), *second = sums.pose(1, 0);
    for (int64_t k = 0; k < in.parents_size(); ++k) {
      first[k] *= 2 * p[k];
      second[k] *= 2 * p[k] * p[k];
    }
    if (with.dmean) write_row<T>(tile, static_cast<T*>(with.dmean), in.parents_size(), first);
    if (with.dvariance) write_row<T>(tile, static_cast<T*>(with.dvariance), in.parents_size(), second);
    if (with.dlog_weight) write_row<T>(tile, static_cast<T*>(with.dlog_weight), in.M, sums.number(0, 0));
  }
};

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
