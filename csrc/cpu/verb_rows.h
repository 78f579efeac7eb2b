// The inner loops of the verbs: make rows of votes, compute scores and sums from them, and pull gradients back.
#pragma once

#include "scratch.h"
#include "verbs.h"
#include "votes.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

using Kind = VerbCall::Kind;
constexpr int kRows = 4;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// to[row * flat + e * tile + m] = from[m, row, e] of `count` parents, with zeros after them. Dense matrices are read n
// values at once, in the order of memory.
template <class T, class X>
FASTCAPS_NOINLINE void pack(const X* from, int64_t step_m, int64_t step_row, int64_t step_e, int64_t count,
                            int64_t rows, int64_t E, int64_t tile, int64_t flat, T* to) {
  constexpr int n = kLanes<T>;
  int64_t row = 0, e = 0, done = 0;
  const bool transposed = step_row == 1 && step_e == rows && rows > 1;
  T* end = nullptr;  // what exceeds the tile may be written up to here: later values overwrite it
  const auto next = [&] {
    T* at = to + row * flat + e * tile;
    end = to + (transposed ? row + 1 : rows) * flat;
    ++done;
    if (transposed)
      row + 1 < rows ? ++row : (++e, row = 0);
    else
      e + 1 < E ? ++e : (++row, e = 0);
    return at;
  };
  if constexpr (std::is_same_v<T, X>)
    if ((transposed || (step_e == 1 && step_row == E)) && count == tile)
      for (int64_t k = 0; k + n <= rows * E; k += n) {  // n values of n parents, transposed
        T *at[n], *ends[n];
        for (int r = 0; r < n; ++r) at[r] = next(), ends[r] = end;
        for (int64_t m = 0; m < tile; m = m + n < tile && m + 2 * n > tile ? tile - n : m + n) {
          Vec<T> lanes[n];
          for (int r = 0; r < n; ++r) lanes[r] = m + r < tile ? load<T>(from + (m + r) * step_m + k) : Vec<T>{};
          transpose<T>(lanes);
          for (int r = 0; r < n; ++r)
            if (at[r] + m + n <= ends[r])
              store<T>(at[r] + m, lanes[r]);
            else
              for (int64_t l = 0; m + l < tile; ++l) at[r][m + l] = lanes[r][l];
        }
      }
  while (done < rows * E) {
    const X* x = from + row * step_row + e * step_e;
    T* at = next();
    for (int64_t m = 0; m < count; ++m) at[m] = widen<T>(x[m * step_m]);
    for (int64_t m = count; m < tile; ++m) at[m] = 0;
  }
  for (int64_t k = 0; k < rows; ++k)
    for (int64_t pad = E * tile; pad < flat; ++pad) to[k * flat + pad] = 0;
}

// One row: its operands (the child's row x, or the votes; coefficients r; `about`: targets or means), and its results,
// as flat rows: scores, the votes' gradient, sums and square sums; and dx, the gradient of x.
template <class T>
struct Row {
  const T *x, *bias, *r, *about, *precisions;
  T *scores, *dvotes, *sums, *squares, *dx;
};

// A block of children, and what all rows have in common.
template <class T>
struct Meeting {
  const T* weight;  // [children, D, flat]; null: x are the votes themselves
  int64_t weight_step, bias_step, x_step, r_step, dvotes_step, dx_step;  // from child to child (of scores: `flat`)
  int64_t D, flat, begin, end;                                           // children begin to end
  const int64_t* starts;  // of each vector of a flat row: its first parent
  bool together;          // rows belong to one pose
  bool once;              // dx is stored, not added to
};

// R rows and U vectors from v on, for all children of the block. `first`: scores are stored, not added to.
template <class T, Kind kind, int R, int U>
FASTCAPS_INLINE void meet(const Meeting<T>& with, const Row<T>* rows, int64_t v, bool first) {
  using V = Vec<T>;
  constexpr int n = kLanes<T>;
  constexpr bool kPulls = kind >= Kind::kPull, kSquared = kind == Kind::kDistances || kind == Kind::kPullSquared;
  constexpr bool kSums = kPulls || (kind >= Kind::kAdd && kind <= Kind::kAddSquares);
  constexpr bool kScores = kPulls || kind == Kind::kDots || kind == Kind::kDistances;
  constexpr bool kCentred = kind != Kind::kDots && kind != Kind::kAdd && kind != Kind::kPull;
  V held[R][U], sum[R][U], square[R][U];
  int64_t at[U];
  unroll<U>([&](auto u) FASTCAPS_LAMBDA {
    at[u] = with.starts[v + u];
    unroll<R>([&](auto i) FASTCAPS_LAMBDA {
      if constexpr (kind != Kind::kAdd) held[i][u] = load<T>(rows[i].about + (v + u) * n);
      if constexpr (kSums) sum[i][u] = square[i][u] = V{};
    });
  });
  for (int64_t j = with.begin; j < with.end; ++j) {
    V vote[R][U];
    unroll<R>([&](auto i) FASTCAPS_LAMBDA {
      unroll<U>([&](auto u) FASTCAPS_LAMBDA {
        vote[i][u] = with.weight ? V{} : load<T>(rows[i].x + j * with.x_step + (v + u) * n);
      });
    });
    if (rows[0].bias)
      unroll<R * U>([&](auto k) FASTCAPS_LAMBDA {
        vote[k / U][k % U] += load<T>(rows[k / U].bias + j * with.bias_step + (v + k % U) * n);
      });
    if (with.weight) {
      const T* w = with.weight + j * with.weight_step + v * n;
      const T* x[R];
      unroll<R>([&](auto i) FASTCAPS_LAMBDA { x[i] = rows[i].x + j * with.x_step; });
#pragma GCC unroll 4
      for (int64_t d = 0; d < with.D; ++d, w += with.flat) {
        V right[U];
        unroll<U>([&](auto u) FASTCAPS_LAMBDA { right[u] = load<T>(w + u * n); });
        unroll<R>([&](auto i) FASTCAPS_LAMBDA {
          const V left = broadcast<T>(x[i][d]);
          unroll<U>([&](auto u) FASTCAPS_LAMBDA { vote[i][u] += left * right[u]; });
        });
      }
    }
    unroll<U>([&](auto u) FASTCAPS_LAMBDA {
      V dot{};
      unroll<R>([&](auto i) FASTCAPS_LAMBDA {
        V x = vote[i][u];
        if constexpr (kCentred) x -= held[i][u];
        V r{}, p{};
        if constexpr (kSums) r = load<T>(rows[i].r + j * with.r_step + at[u]);
        if constexpr (kSquared) p = load<T>(rows[i].precisions + (v + u) * n);
        if constexpr (kSums) {
          const V term = r * (kind == Kind::kAddSquares ? x * x : x);
          sum[i][u] += term;
          if constexpr (kind == Kind::kPullSquared) square[i][u] += term * x;
          if constexpr (kPulls)
            store<T>(rows[i].dvotes + j * with.dvotes_step + (v + u) * n, kSquared ? 2 * p * term : r * held[i][u]);
        }
        if constexpr (kScores) {
          if (kPulls && !rows[0].scores) return;
          const V term = kSquared ? p * x * x : x * held[i][u];
          dot = with.together && i > 0 ? dot + term : term;
          T* out = rows[i].scores + j * with.flat + (v + u) * n;
          if (!with.together || i == R - 1) store<T>(out, first ? dot : load<T>(out) + dot);
        }
      });
    });
  }
  if constexpr (kSums)
    unroll<R * U>([&](auto k) FASTCAPS_LAMBDA {
      const int64_t at = (v + k % U) * n;
      if (T* out = rows[k / U].sums) store<T>(out + at, load<T>(out + at) + sum[k / U][k % U]);
      if constexpr (kind == Kind::kPullSquared)
        if (T* out = rows[k / U].squares) store<T>(out + at, load<T>(out + at) + square[k / U][k % U]);
    });
}

template <class T, Kind kind>
FASTCAPS_NOINLINE void meet_all(const Meeting<T>& with, const Row<T>* rows, int64_t count) {
  each_group<kRows>(count, [&](int64_t row, auto many) {
    const bool first = !with.together || row == 0;
    constexpr int kMost = kManyRegisters ? 8 / many : 4 / many;
    int64_t v = 0;
    if constexpr (kMost == 2)
      if (with.flat / kLanes<T> % 2 == 1 && with.flat > kLanes<T>)
        meet<T, kind, many, 3>(with, rows + row, 0, first), v = 3;
    each_group<kMost>(
        with.flat / kLanes<T>,
        [&](int64_t at, auto vectors) { meet<T, kind, many, vectors>(with, rows + row, at, first); }, v);
  });
}

// Lane k of the result is the sum over lanes of x[k]: a transpose that adds halves at every step.
template <class T, int kBlock = 1>
FASTCAPS_INLINE Vec<T> lane_sums(Vec<T>* x) {
  constexpr int n = kLanes<T>;
  if constexpr (kBlock == n) {
    return x[0];
  } else {
    unroll<n / kBlock / 2>([&](auto k) FASTCAPS_LAMBDA {
      const Vec<T> a = x[2 * k], b = x[2 * k + 1];
      [&]<int... K>(std::integer_sequence<int, K...>) FASTCAPS_LAMBDA {
        x[k] = __builtin_shufflevector(a, b, ((K & kBlock) ? n + K - kBlock : K)...) +
               __builtin_shufflevector(a, b, ((K & kBlock) ? n + K : K + kBlock)...);
      }(std::make_integer_sequence<int, n>{});
    });
    return lane_sums<T, 2 * kBlock>(x);
  }
}

// From the gradients `dv` of R rows of child j's votes: dx += dv W^T and dW += x^T dv, columns d to d + K of x.
template <class T, bool kChild, bool kWeight, int R, int K>
FASTCAPS_INLINE void pull_rows(const Meeting<T>& with, const Row<T>* rows, int64_t j, T* dweight, int64_t d) {
  using V = Vec<T>;
  constexpr int n = kLanes<T>, kSums = (R * K + n - 1) / n * n;
  V dx[kSums] = {}, x[kWeight ? R * K : 1];
  if constexpr (kWeight)
    unroll<R * K>([&](auto k) FASTCAPS_LAMBDA { x[k] = broadcast<T>(rows[k / K].x[j * with.x_step + d + k % K]); });
  const T* weight = with.weight + j * with.weight_step;
  for (int64_t v = 0; v < with.flat; v += n) {
    V dv[R];
    unroll<R>([&](auto i) FASTCAPS_LAMBDA { dv[i] = load<T>(rows[i].dvotes + j * with.dvotes_step + v); });
    unroll<K>([&](auto k) FASTCAPS_LAMBDA {
      const int64_t at = (d + k) * with.flat + v;
      if constexpr (kChild) {
        const V w = load<T>(weight + at);
        unroll<R>([&](auto i) FASTCAPS_LAMBDA { dx[i * K + k] += dv[i] * w; });
      }
      if constexpr (kWeight) {
        V sum = load<T>(dweight + at);
        unroll<R>([&](auto i) FASTCAPS_LAMBDA { sum += x[i * K + k] * dv[i]; });
        store<T>(dweight + at, sum);
      }
    });
  }
  if constexpr (kChild) {
    T sums[kSums];
    unroll<kSums / n>([&](auto k) FASTCAPS_LAMBDA { store<T>(sums + k * n, lane_sums<T>(dx + k * n)); });
    unroll<R>([&](auto i) FASTCAPS_LAMBDA {  // all are read before any is written: a row's values are one vector
      T *to = rows[i].dx + j * with.dx_step + d, found[K];
      unroll<K>([&](auto k) FASTCAPS_LAMBDA { found[k] = with.once ? sums[i * K + k] : to[k] + sums[i * K + k]; });
      unroll<K>([&](auto k) FASTCAPS_LAMBDA { to[k] = found[k]; });
    });
  }
}

template <class T, bool kChild, bool kWeight>
FASTCAPS_NOINLINE void pull_all(const Meeting<T>& with, const Row<T>* rows, int64_t count, int64_t j, T* dweight) {
  each_group<kRows>(count, [&](int64_t row, auto many) {
    each_group<4>(with.D, [&](int64_t d, auto columns) {
      pull_rows<T, kChild, kWeight, many, columns>(with, rows + row, j, dweight, d);
    });
  });
}

template <class T>
FASTCAPS_INLINE T sum_of(const T* x, int64_t count) {
  constexpr int n = kLanes<T>;
  Vec<T> sum{};
  int64_t k = 0;
  for (; k + n <= count; k += n) sum += load<T>(x + k);
  T total = sum_lanes<T>(sum);
  for (; k < count; ++k) total += x[k];
  return total;
}

// Sums of many terms: `near` is added to `far` before it has more than `most` terms.
template <class T>
struct LongSum {
  T* near = nullptr;
  double* far = nullptr;
  int64_t size, most, terms = 0;
  bool joined = false;  // whether far has values

  LongSum(bool wanted, int64_t size, int64_t most, Arena& arena) : size(size), most(most) {
    if (wanted) near = arena.take<T>(size), far = arena.take<double>(size);
  }
  void clear() {
    for (int64_t k = 0; near && k < size; ++k) near[k] = 0;
    terms = 0, joined = false;
  }
  void count(int64_t more) {
    terms += more;
    if (!near || terms + more <= most) return;
    for (int64_t k = 0; k < size; ++k) far[k] = (joined ? far[k] : 0) + near[k], near[k] = 0;
    terms = 0, joined = true;
  }
  double at(int64_t k) const { return joined ? far[k] + near[k] : near[k]; }
};

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
