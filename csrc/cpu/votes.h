// The vote transform and its two gradients: small matrix products whose elements are vectors over the lanes.
#pragma once

#include "pass.h"
#include "vec.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

// Poses known at compile time are unrolled into registers, which hold kRows x kCols votes at once.
template <int C_, int D_, int E_>
struct StaticPose {
  static constexpr bool kIdentity = false, kDynamic = false;
  static constexpr bool kGeneral = false;                         // whether it serves whatever has no kernel of its own
  static constexpr int C = C_, D = D_, E = E_, kNumbers = C * E;  // values of a vote; 0: known at run time
  static constexpr int at(int d, int e) { return d * E + e; }     // the place of a matrix' value in memory
  static constexpr int kLimit = kManyRegisters ? 18 : 12;         // votes in registers,
  static constexpr int kGradientLimit = kManyRegisters ? 18 : 8;  // and their gradients, beside the operands
  static constexpr int largest_divisor(int of, int limit) {
    int best = 1;
    for (int k = 1; k <= limit && k <= of; ++k)
      if (of % k == 0) best = k;
    return best;
  }
  // Votes and children's gradients: vectors by broadcast scalars, which are cheap to load, so wide rather than tall.
  static constexpr int kRows = largest_divisor(C, kManyRegisters ? 4 : 2);
  static constexpr int kCols = largest_divisor(E, kLimit / kRows);
  static constexpr int kChildCols = largest_divisor(D, kLimit / kRows);
  // Weights' gradients: vectors by vectors.
  static constexpr int kWeightRows = largest_divisor(D, kManyRegisters ? 6 : 4);
  static constexpr int kWeightCols = largest_divisor(E, kLimit / kWeightRows);
  // Rows of a vote's gradient that multiply matrix and child from registers; 0: the gradient is stored first.
  static constexpr int kGradientRows = C == 1 ? 0 : largest_divisor(C, kGradientLimit / E);
  // What is made together: parents whose votes have few values; units that share matrices; tiles, if matrices are
  // large.
  static constexpr int kTogether = C == 1 && E < 8 ? 8 / E : 1;
  static constexpr int kUnits = C > 1 ? 1 : 4;
  static constexpr int kTiles = C > 1 || D* E < kLargeMatrix ? 1 : kManyRegisters ? 4 : 2;
  // Vector poses with whole vectors of E: their weight gradient is a matmul over the lanes (weight_gradients.h).
  static constexpr bool kWeightGradientByRows = C == 1 && E % 16 == 0;
};

// The same for matrices that are [E, D] in memory, or whose rows lie apart.
template <int C, int D, int E>
struct TransposedPose : StaticPose<C, D, E> {
  static constexpr int at(int d, int e) { return e * D + d; }
};
template <int C, int D, int E>
struct RowsApartPose : StaticPose<C, D, E> {
  int64_t row;
  int64_t at(int d, int e) const { return d * row + e; }
};

struct DynamicPose {
  int C, D, E;
  int64_t row;  // the stride of a matrix' rows
  int64_t at(int d, int e) const { return d * row + e; }
  static constexpr bool kIdentity = false, kDynamic = true, kGeneral = true;
  static constexpr int kNumbers = 0;
  static constexpr int kRows = 1, kCols = 4, kChildCols = 4, kWeightRows = 1, kWeightCols = 4, kGradientRows = 0;
  static constexpr int kTogether = 1, kTiles = 1, kUnits = 1;
  static constexpr bool kWeightGradientByRows = false;
};

struct TransposedDynamicPose : DynamicPose {
  int64_t at(int d, int e) const { return int64_t(e) * D + d; }
};

// Votes that are the children's own poses, or count as them (folded.h): E = D.
struct SamePose : DynamicPose {
  static constexpr bool kIdentity = true, kGeneral = false;
};

template <int C_, int D_>
struct SameStaticPose : StaticPose<C_, D_, D_> {
  static constexpr bool kIdentity = true, kWeightGradientByRows = false;
  static constexpr int kTogether = 1, kTiles = 1, kUnits = 1, kGradientRows = 0;
};

struct FromZero {};

// X[i, j] = init(i, j) + sum_k a(i, k) b(k, j), given to sink(i, j, X), in register blocks of I x J.
template <int I, int J, class V, class A, class B, class Init, class Sink>
FASTCAPS_INLINE void product_block(int i0, int j0, int depth, A&& a, B&& b, Init&& init, Sink&& sink) {
  constexpr bool kFromZero = std::is_same_v<std::remove_cvref_t<Init>, FromZero>;
  V x[I * J];
  if constexpr (kFromZero) {
    V left[I];
    unroll<I>([&](auto i) FASTCAPS_LAMBDA { left[i] = a(i0 + i, 0); });
    unroll<J>([&](auto j) FASTCAPS_LAMBDA {
      const auto right = b(0, j0 + j);
      // opaque, so that it is the later products that are fused, whatever the pose: the same votes have the same bits
      unroll<I>([&](auto i) FASTCAPS_LAMBDA { x[i * J + j] = in_register(V(left[i] * right)); });
    });
  } else {
    unroll<I * J>([&](auto k) FASTCAPS_LAMBDA { x[k] = init(i0 + k / J, j0 + k % J); });
  }
#pragma GCC unroll 8
  for (int k = kFromZero; k < depth; ++k) {
    std::remove_cvref_t<decltype(a(0, 0))> left[I];
    unroll<I>([&](auto i) FASTCAPS_LAMBDA { left[i] = a(i0 + i, k); });
    unroll<J>([&](auto j) FASTCAPS_LAMBDA {
      const auto right = b(k, j0 + j);
      unroll<I>([&](auto i) FASTCAPS_LAMBDA { x[i * J + j] += left[i] * right; });
    });
  }
  unroll<I * J>([&](auto k) FASTCAPS_LAMBDA { sink(i0 + k / J, j0 + k % J, x[k]); });
}

template <int I, int J, class V, class A, class B, class Init, class Sink>
FASTCAPS_INLINE void product(int rows, int cols, int depth, A&& a, B&& b, Init&& init, Sink&& sink) {
  for (int i = 0; i + I <= rows; i += I) {  // every pose's I divides its rows
    int j = 0;
    for (; j + J <= cols; j += J) product_block<I, J, V>(i, j, depth, a, b, init, sink);
    if (cols % J != 0)  // never, where the pose is known at compile time
      for (; j < cols; ++j) product_block<I, 1, V>(i, j, depth, a, b, init, sink);
  }
}

// Whether votes are the children's own poses: known at compile time (kIdentity) or at run time (no weights).
template <class Pose, class Weight>
FASTCAPS_INLINE bool are_poses(const Weight* W) {
  return Pose::kIdentity || (Pose::kDynamic && W == nullptr);
}

// `Weight`, the type of W and bias: a scalar for all lanes, or a vector over them.

// V = P W + bias, vote by vote: sink(index in C x E, vote).
template <class T, class Pose, class Weight, class Sink>
FASTCAPS_INLINE void votes(const Pose& pose, const Vec<T>* P, const Weight* W, const Weight* bias, Sink&& sink) {
  if (are_poses<Pose>(W)) {
    for (int k = 0; k < pose.C * pose.E; ++k) sink(k, bias ? P[k] + bias[k] : P[k]);
    return;
  }
  product<Pose::kRows, Pose::kCols, Vec<T>>(
      pose.C, pose.E, pose.D, [&](int c, int d) FASTCAPS_LAMBDA { return P[c * pose.D + d]; },
      [&](int d, int e) FASTCAPS_LAMBDA { return W[pose.at(d, e)]; }, FromZero{},
      [&](int c, int e, Vec<T> v) FASTCAPS_LAMBDA { sink(c * pose.E + e, bias ? v + bias[c * pose.E + e] : v); });
}

// Calls f(first, many) for [0, count) in groups of kMost, and the remainder in groups of half the size, and so on.
template <int kMost, class F>
FASTCAPS_INLINE void each_group(int64_t count, F&& f, int64_t first = 0) {
  for (; first + kMost <= count; first += kMost) f(first, std::integral_constant<int, kMost>{});
  if constexpr (kMost > 1) each_group<kMost / 2>(count, f, first);
}

// S[k] += sum over `count` votes of weight[j * stride] * vote j's value k, `size` values each.
template <class V>
FASTCAPS_INLINE void add_votes(const V* votes, const V* weight, int64_t stride, int64_t count, int64_t size, V* S) {
  each_group<8>(size, [&](int64_t k, auto many) FASTCAPS_LAMBDA {
    V sum[many];
    unroll<many>([&](auto u) FASTCAPS_LAMBDA { sum[u] = S[k + u]; });
    for (int64_t j = 0; j < count; ++j)
      unroll<many>([&](auto u) FASTCAPS_LAMBDA { sum[u] += weight[j * stride] * votes[j * size + k + u]; });
    unroll<many>([&](auto u) FASTCAPS_LAMBDA { S[k + u] = sum[u]; });
  });
}

// Calls f(index, k) for the values [first, first + count) of a pose; unrolled if kCount is `count`, not 0.
template <int kCount, class F>
FASTCAPS_INLINE void each_number(int first, int count, F&& f) {
  if constexpr (kCount > 0)
    unroll<kCount>([&](auto k) FASTCAPS_LAMBDA { f(first + k, k); });
  else
    for (int k = 0; k < count; ++k) f(first + k, k);
}

// The next matrix. Large ones come from memory: it is prefetched part by part while the current one is used.
struct Next {
  const char* data;
  int64_t number, row;  // bytes of a value; values from row to row

  template <int kNumbers, int E>
  FASTCAPS_INLINE void prefetch(int part) const {
    for (int k = 0; k < kNumbers; k += 16) {
      const int at = part * kNumbers + k;
      __builtin_prefetch(data + (at / E * row + at % E) * number);
    }
  }
};

// Votes of kUnits single-row poses, which lie `apart`, for kParents parents, whose matrices lie weight_m
// and whose biases bias_m apart: sink(unit, parent, index in E, vote). Each value read serves many products.
template <int kUnits, int kParents, class T, class Pose, class Weight, class Sink>
FASTCAPS_INLINE void votes_of_rows(const Pose& pose, const Vec<T>* P, int64_t apart, const Weight* W, int64_t weight_m,
                                   const Weight* bias, int64_t bias_m, Next next, Sink&& sink) {
  constexpr int E = Pose::E, kCols = Pose::largest_divisor(kParents * E, Pose::kLimit / kUnits);
  product<kUnits, kCols, Vec<T>>(
      kUnits, kParents * E, pose.D, [&](int unit, int d) FASTCAPS_LAMBDA { return P[unit * apart + d]; },
      [&](int d, int e) FASTCAPS_LAMBDA { return W[e / E * weight_m + pose.at(d, e % E)]; }, FromZero{},
      [&](int unit, int e, Vec<T> v) FASTCAPS_LAMBDA {
        if constexpr (Pose::kTiles > 1) next.template prefetch<Pose::D / kUnits, E>(e * kUnits + unit);
        sink(unit, e / E, e % E, bias ? v + bias[e / E * bias_m + e % E] : v);
      });
}

// Their backward: dP += dV W^T of kMany tiles.
template <int kMany, class T, class Pose, class Weight>
FASTCAPS_INLINE void add_child_gradient_of_tiles(const Pose& pose, const Vec<T>* dV, const Weight* W, int64_t apart,
                                                 Next next, Vec<T>* dP) {
  product<kMany, Pose::largest_divisor(Pose::D, Pose::kLimit / kMany), Vec<T>>(
      kMany, pose.D, pose.E, [&](int t, int e) FASTCAPS_LAMBDA { return dV[t * apart * pose.E + e]; },
      [&](int e, int d) FASTCAPS_LAMBDA { return W[pose.at(d, e)]; },
      [&](int t, int d) FASTCAPS_LAMBDA { return dP[t * apart * pose.D + d]; },
      [&](int t, int d, Vec<T> v) FASTCAPS_LAMBDA {
        next.template prefetch<Pose::E / kMany, Pose::E>(d * kMany + t);
        dP[t * apart * pose.D + d] = v;
      });
}

// Where the votes of a unit for a parent come from.
enum class Source { kMade, kMadeAndKept, kKept };

template <Source kSource, class T, class Pose, class Weight, class Sink>
FASTCAPS_INLINE void each_vote(const Pose& pose, const Vec<T>* P, const Weight* W, const Weight* bias, Vec<T>* kept,
                               Sink&& sink) {
  if constexpr (kSource == Source::kKept) {
    for (int k = 0; k < pose.C * pose.E; ++k) sink(k, kept[k]);
  } else {
    votes<T>(pose, P, W, bias, [&](int k, Vec<T> v) FASTCAPS_LAMBDA {
      if constexpr (kSource == Source::kMadeAndKept) kept[k] = v;
      sink(k, v);
    });
  }
}

// X += (weight * P) W + weight * bias: the votes' weighted sum without the votes.
template <class T, class Pose, class Weight>
FASTCAPS_INLINE void add_weighted_votes(const Pose& pose, const Vec<T>* P, Vec<T> weight, const Weight* W,
                                        const Weight* bias, Vec<T>* X) {
  if (are_poses<Pose>(W)) {
    for (int k = 0; k < pose.C * pose.E; ++k) X[k] += weight * (bias ? P[k] + bias[k] : P[k]);
    return;
  }
  product<Pose::kRows, Pose::kCols, Vec<T>>(
      pose.C, pose.E, pose.D, [&](int c, int d) FASTCAPS_LAMBDA { return weight * P[c * pose.D + d]; },
      [&](int d, int e) FASTCAPS_LAMBDA { return W[pose.at(d, e)]; },
      [&](int c, int e) FASTCAPS_LAMBDA { return X[c * pose.E + e]; },
      [&](int c, int e, Vec<T> v) FASTCAPS_LAMBDA { X[c * pose.E + e] = v; });
  if (bias)
    for (int k = 0; k < pose.C * pose.E; ++k) X[k] += weight * bias[k];
}

// X += sum of P W over `units` poses, whose matrices begin at W[unit] + offset.
template <class T, class Pose>
FASTCAPS_INLINE void add_sum_of_votes(const Pose& pose, int64_t units, const Vec<T>* P, const T* const* W,
                                      int64_t offset, Vec<T>* X) {
  constexpr int C = Pose::C, D = Pose::D, E = Pose::E;
  product<Pose::kRows, Pose::kCols, Vec<T>>(
      C, E, int(units) * D, [&](int c, int k) FASTCAPS_LAMBDA { return P[(k / D * C + c) * D + k % D]; },
      [&](int k, int e) FASTCAPS_LAMBDA { return W[k / D][offset + pose.at(k % D, e)]; },
      [&](int c, int e) FASTCAPS_LAMBDA { return X[c * E + e]; },
      [&](int c, int e, Vec<T> v) FASTCAPS_LAMBDA { X[c * E + e] = v; });
}

// dP += sum of dV W^T over kMany parents, whose dV are `apart` and whose matrices weight_m.
template <int kMany, class T, class Pose, class Weight>
FASTCAPS_INLINE void add_child_gradient(const Pose& pose, const Vec<T>* dV, int64_t apart, const Weight* W,
                                        int64_t weight_m, Vec<T>* dP) {
  if (are_poses<Pose>(W)) {
    for (int k = 0; k < pose.C * pose.D; ++k) dP[k] += dV[k];
    return;
  }
  const int E = pose.E;
  product<Pose::kRows, Pose::kChildCols, Vec<T>>(
      pose.C, pose.D, kMany * E,
      [&](int c, int e) FASTCAPS_LAMBDA { return kMany == 1 ? dV[c * E + e] : dV[e / E * apart + c * E + e % E]; },
      [&](int e, int d)
          FASTCAPS_LAMBDA { return kMany == 1 ? W[pose.at(d, e)] : W[e / E * weight_m + pose.at(d, e % E)]; },
      [&](int c, int d) FASTCAPS_LAMBDA { return dP[c * pose.D + d]; },
      [&](int c, int d, Vec<T> v) FASTCAPS_LAMBDA { dP[c * pose.D + d] = v; });
}

// dP += dV W^T and dW += P^T dV of one unit; gradient(first, g) writes the values of dV from `first` on.
template <class T, class Pose, class Weight, class Gradient>
FASTCAPS_INLINE void add_both_gradients(const Pose& pose, Gradient&& gradient, const Vec<T>* P, const Weight* W,
                                        Vec<T>* dP, Vec<T>* dW) {
  constexpr int R = Pose::kGradientRows, D = Pose::D, E = Pose::E;
  for (int c = 0; c < Pose::C; c += R, P += R * D, dP += R * D) {
    Vec<T> g[R * E];
    gradient(c * E, g);
#pragma GCC unroll 8
    for (int d = 0; d < D; ++d) {
      Vec<T> sum[R], p[R];
      unroll<R>([&](auto r) FASTCAPS_LAMBDA { sum[r] = dP[r * D + d], p[r] = in_register(P[r * D + d]); });
      unroll<E>([&](auto e) FASTCAPS_LAMBDA {
        const Weight w = W[pose.at(d, e)];
        Vec<T> dw = dW[d * E + e];
        unroll<R>([&](auto r) FASTCAPS_LAMBDA {
          sum[r] += g[r * E + e] * w;
          dw += p[r] * g[r * E + e];
        });
        dW[d * E + e] = dw;
      });
      unroll<R>([&](auto r) FASTCAPS_LAMBDA { dP[r * D + d] = sum[r]; });
    }
  }
}

// dW += sum of P^T dV over `units` poses and vote gradients, `stride` units apart; each lane for itself. If `is_new`,
// dW is overwritten.
template <class T, class Pose>
FASTCAPS_INLINE void add_weight_gradient(const Pose& pose, int64_t units, int64_t stride, const Vec<T>* P,
                                         const Vec<T>* dV, bool is_new, Vec<T>* dW) {
  const int C = pose.C;
  product<Pose::kWeightRows, Pose::kWeightCols, Vec<T>>(
      pose.D, pose.E, int(units) * C,
      [&](int d, int k) FASTCAPS_LAMBDA { return P[(k / C * stride * C + k % C) * pose.D + d]; },
      [&](int k, int e) FASTCAPS_LAMBDA { return dV[(k / C * stride * C + k % C) * pose.E + e]; },
      [&](int d, int e) FASTCAPS_LAMBDA { return is_new ? Vec<T>{} : dW[d * pose.E + e]; },
      [&](int d, int e, Vec<T> v) FASTCAPS_LAMBDA { dW[d * pose.E + e] = v; });
}

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
