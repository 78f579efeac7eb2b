// The weights and biases of the children that a thread works on, and the softmax over its parents.
#pragma once

#include "lanes.h"
#include "pass.h"
#include "scratch.h"
#include "votes.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

// What lanes are (see lanes.h): positions; children with own weights; children that share weights.
enum class Lanes { kPositions, kChildren, kSharing };

// For each value of a matrix [E, D] its place in [D, E].
inline const int* transposed_places(Arena& arena, int64_t D, int64_t E) {
  int* places = arena.take<int>(D * E);
  for (int64_t k = 0; arena.base && k < D * E; ++k) places[k] = int(k % D * E + k / D);
  return places;
}

// The weights and biases of a block's units: in the user's memory, or, if lanes are children with their own weights,
// transposed to lanes in scratch memory, where the next matrix replaces the last. The same holds for widened weights.
template <class T, Lanes kLane, bool kLarge>
struct WeightsOf {
  static constexpr bool kTransposed = kLane == Lanes::kChildren;
  using Weight = std::conditional_t<kTransposed, Vec<T>, T>;
  const T* weight;
  const T* bias;
  const bool narrow;  // weight points to bfloat16; only for large matrices
  const int64_t G, E, size, pose, bias_i, bias_m;
  const MatrixLayout layout;
  Vec<T>*weight_lanes = nullptr, *bias_lanes = nullptr;
  const int* places = nullptr;  // of transposed matrices' values, where lanes are children
  T* wide = nullptr;
  const T **matrices, **biases;  // for parent 0, of each lane, or of each unit if its lanes share them

  WeightsOf(const Votes& in, Arena& arena, int64_t units)
      : weight(static_cast<const T*>(in.weight)),
        bias(static_cast<const T*>(in.bias)),
        narrow(kLarge && in.narrow_weight),
        G(in.G),
        E(in.E),
        size(in.D * in.E),
        pose(in.parent_size()),
        bias_i(in.bias_stride_i),
        bias_m(in.bias_stride_m),
        layout(in.matrices),
        matrices(arena.take<const T*>(units * kLanesEach)),
        biases(arena.take<const T*>(units * kLanesEach)) {
    if (kTransposed && weight) weight_lanes = arena.take<Vec<T>>(size);
    if (kTransposed && bias) bias_lanes = arena.take<Vec<T>>(pose);
    if (kTransposed && weight && layout.transposed()) places = transposed_places(arena, in.D, in.E);
    if (!kTransposed && narrow) wide = arena.take<T>(size);
  }

  // Sets the matrices and biases of units [0, count), of which the first begins with child `first` of the range. All
  // divisions are here, once for all parents.
  void enter(const Range& range, int64_t first, int64_t count) {
    for (int64_t k = 0; k < count * kLanesEach; ++k) {
      const int64_t q = first + k * kStep;
      const bool here = q < range.count;
      const int64_t i = here ? range.child(q) : 0;
      matrices[k] = here && weight ? at(weight, layout.at(i % G, 0)) : nullptr;
      biases[k] = here && bias ? bias + i * bias_i : nullptr;
    }
  }
  FASTCAPS_INLINE const Weight* matrix(int64_t j, int64_t m) const {
    if (kLarge && narrow) return widened(matrices + j * kLanesEach, m * layout.parent);
    if (!weight) return nullptr;
    const T* const* first = matrices + j * kLanesEach;
    if constexpr (kTransposed) {
      if (places) return taken(first, m * layout.parent, size, layout.parent, weight_lanes, Transposed{places});
      for (int64_t d = 0; layout.row != E && d * E < size; ++d)
        taken(first, m * layout.parent + d * layout.row, E, layout.parent, weight_lanes + d * E);
      if (layout.row != E) return weight_lanes;
    }
    return taken(first, m * layout.parent, size, layout.parent, weight_lanes);
  }
  // The matrix after that of unit j and parent m.
  FASTCAPS_INLINE Next after(int64_t j, int64_t m) const {
    const int64_t number = narrow ? sizeof(BFloat16) : sizeof(T);
    return {reinterpret_cast<const char*>(matrices[j * kLanesEach]) + (m + 1) * layout.parent * number, number,
            layout.row};
  }
  FASTCAPS_INLINE const Weight* bias_of(int64_t j, int64_t m) const {
    return bias ? taken(biases + j * kLanesEach, m * bias_m, pose, pose, bias_lanes) : nullptr;
  }

  // Calls f(W) with the untransposed matrix of parent m and lane r of unit j; returns false for an empty lane.
  template <class F>
  FASTCAPS_INLINE bool as_it_lies(int64_t j, int r, int64_t m, F&& f) const {
    const T* first = matrices[j * kLanesEach + r];
    if (!first) return false;
    if (narrow)
      f(reinterpret_cast<const BFloat16*>(first) + m * layout.parent);
    else
      f(first + m * layout.parent);
    return true;
  }

 private:
  const T* at(const T* first, int64_t offset) const {
    return narrow ? reinterpret_cast<const T*>(reinterpret_cast<const BFloat16*>(first) + offset) : first + offset;
  }

  FASTCAPS_NOINLINE const Weight* widened(const T* const* first, int64_t offset) const {
    const auto* const* narrow_first = reinterpret_cast<const BFloat16* const*>(first);
    if constexpr (kTransposed) {
      return taken(narrow_first, offset, size, size, weight_lanes);
    } else {
      for (int64_t k = 0; k < size; ++k) wide[k] = widen<T>(narrow_first[0][offset + k]);
      return wide;
    }
  }

  static constexpr int kLanesEach = kTransposed ? kLanes<T> : 1;
  static constexpr int64_t kStep = kLane == Lanes::kSharing ? kLanes<T> : 1;

  template <class S, class Place = Straight>
  FASTCAPS_INLINE const Weight* taken(const S* const* first, int64_t offset, int64_t numbers, int64_t ahead,
                                      Vec<T>* lanes, Place place = {}) const {
    if constexpr (kTransposed) {
      const S* lane[kLanes<T>];
      for (int r = 0; r < kLanes<T>; ++r) lane[r] = first[r] ? first[r] + offset : nullptr;
      gather_rows<T>(lane, numbers, lanes, place, ahead);
      return lanes;
    } else {
      return *first + offset;
    }
  }
};

// Replaces logits to base 2 by their exponentials, relative to the highest; returns the factor that makes them
// gate * softmax over m.
template <class T>
FASTCAPS_INLINE Vec<T> exponentials(Vec<T>* a, int64_t M, Vec<T> highest, Vec<T> gate) {
  Vec<T> sum[2] = {};
  int64_t m = 0;
  for (; m + 2 <= M; m += 2)
    unroll<2>([&](auto k) FASTCAPS_LAMBDA {
      a[m + k] = exp2_nonpositive(a[m + k] - highest);
      sum[k] += a[m + k];
    });
  if (m < M) sum[0] += a[m] = exp2_nonpositive(a[m] - highest);
  return gate / (sum[0] + sum[1]);
}

// Replaces logits to base 2 by gate * softmax over m.
template <class T>
FASTCAPS_INLINE void softmax(Vec<T>* a, int64_t M, Vec<T> highest, Vec<T> gate) {
  const Vec<T> factor = exponentials<T>(a, M, highest, gate);
  for (int64_t m = 0; m < M; ++m) a[m] *= factor;
}

// Sets the poses of children with a gate of 0 to 0: they have no effect, even if they are NaN.
template <class T>
void silence(Vec<T>* P, const Vec<T>* gates, int64_t units, int64_t CD) {
  for (int64_t j = 0; j < units; ++j) {
    const auto open = gates[j] != 0;
    if (all(open)) continue;
    for (int64_t k = 0; k < CD; ++k) P[j * CD + k] = open ? P[j * CD + k] : Vec<T>{};
  }
}

// Planes of a row of parents: `poses` planes of [many, C * E] values, then planes of [many] values.
template <class X>
struct Planes {
  X* base;
  int64_t many, size, poses;

  FASTCAPS_INLINE X* pose(int plane, int64_t m) const { return base + (plane * many + m) * size; }
  FASTCAPS_INLINE X* number(int plane, int64_t m) const { return base + poses * many * size + plane * many + m; }
  FASTCAPS_INLINE int64_t numbers(int64_t scalars) const { return many * (poses * size + scalars); }
};

// The planes in which a policy sums the votes for `many` parents: of poses with summed_size() values, and of scalars.
template <class Pass, class X>
FASTCAPS_INLINE Planes<X> planes_of(X* base, const Votes& in, int64_t many) {
  return {base, many, Pass::summed_size(in), Pass::kSumPoses};
}
template <class Pass>
int64_t summed_numbers(const Votes& in, int64_t many) {
  return many * (Pass::kSumPoses * Pass::summed_size(in) + Pass::kSumNumbers);
}

template <class X>
FASTCAPS_INLINE void zero(X* p, int64_t count) {
  std::memset(p, 0, size_t(count) * sizeof(X));
}

// out[k] += the sum over lanes of a row's values.
template <class T, class X>
FASTCAPS_INLINE void add_lanes(const X* v, int64_t count, T* out) {
  if constexpr (kOnePosition<T, X>)
    for (int64_t k = 0; k < count; ++k) out[k] += v[k];
  else
    add_lane_sums<T>(v, count, out);
}

template <class T, class X>
bool are_finite(const X* numbers, int64_t count) {
  X broken{};
  for (int64_t k = 0; k < count; ++k) broken += numbers[k] - numbers[k];
  T sum{};
  add_lanes<T>(&broken, 1, &sum);
  return sum == 0;
}

template <class T>
inline constexpr Storage compute_storage = sizeof(T) == 8 ? Storage::kFloat64 : Storage::kFloat32;

FASTCAPS_INLINE int64_t min(int64_t x, int64_t y) { return x < y ? x : y; }

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
