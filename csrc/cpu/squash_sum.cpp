// The kernels of squash_sum of one instruction set. A lane is a position: neighbouring pixels of a channel are
// neighbours in memory. So value k of kLanes capsules is one vector, and a capsule's length is summed up in its lane.
#include "../algebra/squash_sum.h"

#include "pass.h"
#include "vec.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

// Loads `count` pixels: kLanes, or fewer at the end of a channel. Lanes without a pixel hold 0.
template <class T, class S>
FASTCAPS_INLINE Vec<T> load_pixels(const S* p, int64_t count) {
  if (count == kLanes<T>) return load_as<T>(p);
  T wide[kLanes<T>] = {};
  for (int64_t k = 0; k < count; ++k) wide[k] = widen<T>(p[k]);
  return load<T>(wide);
}

template <class S, class T>
FASTCAPS_INLINE void store_pixels(S* p, int64_t count, Vec<T> v) {
  if (count == kLanes<T>) return store_as<S, T>(p, v);
  T wide[kLanes<T>];
  store<T>(wide, v);
  for (int64_t k = 0; k < count; ++k) p[k] = narrow<S>(wide[k]);
}

// Of kLanes capsules x: size = |x|, share = |x| / (1 + |x|^2), falloff = 1 / (1 + |x|^2), after very long capsules are
// shrunk. slope is the share before that, which scales the capsule's gradient.
template <class T>
struct Sizes {
  Vec<T> size, share, falloff, slope;
};

// Measures kLanes capsules; shrinks very long ones in place.
template <class T>
FASTCAPS_INLINE Sizes<T> sizes(Vec<T>* x, int64_t dim) {
  using V = Vec<T>;
  V largest{}, squares{};
  for (int64_t k = 0; k < dim; ++k) {
    const V size = x[k] < 0 ? -x[k] : x[k];
    largest = size > largest ? size : largest;
    squares += x[k] * x[k];
  }
  const T most = kLong<T>;
  // usually all capsules are zero or have squares that neither overflow nor vanish
  if (all((largest == 0) | ((largest > 1 / most) & (largest < most)))) {
    const V size = Number<V>::sqrt(squares), falloff = 1 / (1 + squares), share = size * falloff;
    return {size, share, falloff, share};
  }
  const V by = shrink(largest);
  for (int64_t k = 0; k < dim; ++k) x[k] *= by;
  const V size = length(PoseInMemory<V>{x, dim}), share = squash_factor(size);
  return {size, share, 1 / (1 + size * size), share * by};
}

// Loads the capsules at `count` pixels: x[k] is value k of each, after the ReLU.
template <class T, class S>
FASTCAPS_INLINE void load_capsules(const SquashSum& call, int64_t dim, const S* from, int64_t count, Vec<T>* x) {
  for (int64_t k = 0; k < dim; ++k) {
    const Vec<T> value = load_pixels<T>(from + k * call.positions, count);
    x[k] = call.relu ? (value <= 0 ? Vec<T>{} : value) : value;
  }
}

// Room for two capsules in every lane: in registers if kDim is their dimension, in memory if it is 0.
template <class T, int kDim>
struct Room {
  explicit Room(int64_t) {}
  Vec<T> first[kDim], second[kDim];
};
template <class T>
struct Room<T, 0> {
  explicit Room(int64_t dim) : memory(new char[size_t(2 * dim + 1) * kVecBytes]) {
    const auto at = reinterpret_cast<uintptr_t>(memory);
    first = reinterpret_cast<Vec<T>*>((at + kVecBytes - 1) / kVecBytes * kVecBytes);
    second = first + dim;
  }
  ~Room() { delete[] memory; }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  char* memory;
  Vec<T>*first, *second;
};

// Calls block(row, first pixel, number of pixels) for all rows. The number is a constant, except at a channel's end.
template <class T, class F>
FASTCAPS_INLINE void each_block(const SquashSum& call, int64_t begin, int64_t end, F&& block) {
  for (int64_t row = begin; row < end; ++row) {
    int64_t p = 0;
    for (; p + kLanes<T> <= call.positions; p += kLanes<T>) block(row, p, std::integral_constant<int, kLanes<T>>{});
    if (p < call.positions) block(row, p, call.positions - p);
  }
}

template <class T, class S, int kDim>
void squash_sum_forward(const SquashSum& call, int64_t begin, int64_t end) {
  using V = Vec<T>;
  const int64_t dim = kDim ? kDim : call.dim, P = call.positions;
  Room<T, kDim> room(dim);
  each_block<T>(call, begin, end, [&](int64_t row, int64_t p, auto count) FASTCAPS_LAMBDA {
    const int64_t at = row * dim * P + p;
    const auto share_of = [&](const Squashed& part, V* x) FASTCAPS_LAMBDA {
      load_capsules<T>(call, dim, static_cast<const S*>(part.capsules) + at, count, x);
      const V share = sizes<T>(x, dim).share;
      if (!part.coefficient) return share;
      return share * load_pixels<T>(static_cast<const S*>(part.coefficient) + row * P + p, count);
    };
    S* out = static_cast<S*>(call.out) + at;
    const V share = share_of(call.parts[0], room.first);
    if (call.count == 1) {
      for (int64_t k = 0; k < dim; ++k) store_pixels<S, T>(out + k * P, count, share * room.first[k]);
      return;
    }
    const V other = share_of(call.parts[1], room.second);
    for (int64_t k = 0; k < dim; ++k)
      store_pixels<S, T>(out + k * P, count, share * room.first[k] + other * room.second[k]);
  });
}

// Of a summand c f(n) x with n = |x|, u = x / n and the gradient g of the sum: h = <u, g>, dc = f n h, and
// dx = c f (g + (2 / (1 + n^2) - 1) h u). Below, h is `along`, 1 / n `inverse`, c f `factor`, and the term of u is
// `bend` x.
template <class T, class S, int kDim>
void squash_sum_backward(const SquashSum& call, int64_t begin, int64_t end) {
  using V = Vec<T>;
  const int64_t dim = kDim ? kDim : call.dim, P = call.positions;
  Room<T, kDim> room(dim);
  auto *x = room.first, *g = room.second;
  each_block<T>(call, begin, end, [&](int64_t row, int64_t p, auto count) FASTCAPS_LAMBDA {
    const int64_t at = row * dim * P + p;
    const S* grad = static_cast<const S*>(call.grad) + at;
    for (int64_t k = 0; k < dim; ++k) g[k] = load_pixels<T>(grad + k * P, count);
    for (int which = 0; which < call.count; ++which) {
      const Squashed& part = call.parts[which];
      if (!part.dcapsules && !part.dcoefficient) continue;
      load_capsules<T>(call, dim, static_cast<const S*>(part.capsules) + at, count, x);
      const Sizes<T> of = sizes<T>(x, dim);
      const V inverse = of.size > T(1e-30) ? 1 / of.size : V{};  // shorter capsules have no gradient to speak of
      V along{};
      for (int64_t k = 0; k < dim; ++k) along += x[k] * inverse * g[k];
      if (part.dcoefficient)
        store_pixels<S, T>(static_cast<S*>(part.dcoefficient) + row * P + p, count, of.share * of.size * along);
      if (!part.dcapsules) continue;
      V factor = of.slope;
      if (part.coefficient) factor *= load_pixels<T>(static_cast<const S*>(part.coefficient) + row * P + p, count);
      const V bend = (2 * of.falloff - 1) * along * inverse;
      S* dx = static_cast<S*>(part.dcapsules) + at;
      for (int64_t k = 0; k < dim; ++k) {
        const V found = factor * (g[k] + bend * x[k]);
        store_pixels<S, T>(dx + k * P, count, call.relu ? (x[k] == 0 ? V{} : found) : found);
      }
    }
  });
}

// T is the type of sums, S the type in memory.
template <bool kBackward>
void squash_sum_rows(const SquashSum& call, int64_t begin, int64_t end) {
  const auto of_dim = [&]<class T, class S, int kDim>() {
    if constexpr (kBackward)
      squash_sum_backward<T, S, kDim>(call, begin, end);
    else
      squash_sum_forward<T, S, kDim>(call, begin, end);
  };
  const auto run = [&]<class T, class S>() {
    if (call.dim == 2) return of_dim.template operator()<T, S, 2>();
    if (call.dim == 4) return of_dim.template operator()<T, S, 4>();
    of_dim.template operator()<T, S, 0>();
  };
  if (call.storage == Storage::kFloat64) return run.template operator()<double, double>();
  if (call.storage == Storage::kBFloat16) return run.template operator()<float, BFloat16>();
  run.template operator()<float, float>();
}

template <>
const SquashSumKernels& table() {
  static constexpr SquashSumKernels kTable{&squash_sum_rows<false>, &squash_sum_rows<true>};
  return kTable;
}

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
