// The kernels of squash_sum of one instruction set. A lane is a position: neighbouring pixels of a channel are
// neighbours in memory, so that number k of a capsule is one vector over kLanes pixels, and lengths never leave a lane.
#include "squash_sum.h"

#include "../algebra/turns.h"
#include "vec.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

// `count` pixels, all kLanes of them or what is left at the end of a channel; lanes without a pixel hold 0.
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

// The lengths of kLanes capsules of `dim` numbers.
template <class T>
FASTCAPS_INLINE Vec<T> lengths(const Vec<T>* x, int64_t dim) {
  using V = Vec<T>;
  V largest{}, squares{};
  for (int64_t k = 0; k < dim; ++k) {
    const V size = x[k] < 0 ? -x[k] : x[k];
    largest = size > largest ? size : largest;
    squares += x[k] * x[k];
  }
  const T most = sizeof(T) == 4 ? T(1e15) : T(1e150);  // whose square is far from the ends of the type
  if (all((largest == 0) | ((largest > 1 / most) & (largest < most)))) return Number<V>::sqrt(squares);
  return length(x, dim);
}

// Number k of the capsules at `count` pixels, after the ReLU.
template <class T, class S>
FASTCAPS_INLINE void load_capsules(const SquashSum& call, const S* from, int64_t count, Vec<T>* x) {
  for (int64_t k = 0; k < call.dim; ++k) {
    const Vec<T> value = load_pixels<T>(from + k * call.positions, count);
    x[k] = call.relu ? (value <= 0 ? Vec<T>{} : value) : value;
  }
}

template <class T>
struct Room {
  explicit Room(int64_t vectors) : memory(new char[size_t(vectors + 1) * kVecBytes]) {
    const auto at = reinterpret_cast<uintptr_t>(memory);
    first = reinterpret_cast<Vec<T>*>((at + kVecBytes - 1) / kVecBytes * kVecBytes);
  }
  ~Room() { delete[] memory; }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  char* memory;
  Vec<T>* first;
};

template <class T, class S>
void squash_sum_forward(const SquashSum& call, int64_t begin, int64_t end) {
  using V = Vec<T>;
  const int64_t dim = call.dim, P = call.positions;
  const Room<T> room(2 * dim);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t p = 0; p < P; p += kLanes<T>) {
      const int64_t count = P - p < kLanes<T> ? P - p : kLanes<T>, at = row * dim * P + p;
      V share[2] = {};
      for (int which = 0; which < call.count; ++which) {
        const Squashed& part = call.parts[which];
        V* x = room.first + which * dim;
        load_capsules<T>(call, static_cast<const S*>(part.capsules) + at, count, x);
        share[which] = squash_share(lengths<T>(x, dim));
        if (part.coefficient)
          share[which] *= load_pixels<T>(static_cast<const S*>(part.coefficient) + row * P + p, count);
      }
      S* out = static_cast<S*>(call.out) + at;
      for (int64_t k = 0; k < dim; ++k) {
        V sum = share[0] * room.first[k];
        if (call.count == 2) sum += share[1] * room.first[dim + k];
        store_pixels<S, T>(out + k * P, count, sum);
      }
    }
  }
}

// Of a summand c f(n) x with n = |x|, u = x / n and the gradient g of the sum: h = <u, g>, dc = f n h, and
// dx = c f (g + (2 / (1 + n^2) - 1) h u).
template <class T, class S>
void squash_sum_backward(const SquashSum& call, int64_t begin, int64_t end) {
  using V = Vec<T>;
  const int64_t dim = call.dim, P = call.positions;
  const Room<T> room(2 * dim);
  V *x = room.first, *g = room.first + dim;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t p = 0; p < P; p += kLanes<T>) {
      const int64_t count = P - p < kLanes<T> ? P - p : kLanes<T>, at = row * dim * P + p;
      const S* grad = static_cast<const S*>(call.grad) + at;
      for (int64_t k = 0; k < dim; ++k) g[k] = load_pixels<T>(grad + k * P, count);
      for (int which = 0; which < call.count; ++which) {
        const Squashed& part = call.parts[which];
        if (!part.dcapsules && !part.dcoefficient) continue;
        load_capsules<T>(call, static_cast<const S*>(part.capsules) + at, count, x);
        const V size = lengths<T>(x, dim), share = squash_share(size);
        const V inverse = size > T(1e-30) ? (V{} + 1) / size : V{};  // shorter capsules have no gradient to speak of
        V along{};
        for (int64_t k = 0; k < dim; ++k) along += x[k] * inverse * g[k];
        if (part.dcoefficient)
          store_pixels<S, T>(static_cast<S*>(part.dcoefficient) + row * P + p, count, share * size * along);
        if (!part.dcapsules) continue;
        V factor = share;
        if (part.coefficient) factor *= load_pixels<T>(static_cast<const S*>(part.coefficient) + row * P + p, count);
        const V bend = (2 / (1 + size * size) - 1) * along * inverse;
        S* dx = static_cast<S*>(part.dcapsules) + at;
        for (int64_t k = 0; k < dim; ++k) {
          const V found = factor * (g[k] + bend * x[k]);
          store_pixels<S, T>(dx + k * P, count, call.relu ? (x[k] == 0 ? V{} : found) : found);
        }
      }
    }
  }
}

// f<T, S>: the type of sums, the type in memory.
template <bool kBackward>
void squash_sum_rows(const SquashSum& call, int64_t begin, int64_t end) {
  const auto run = [&]<class T, class S>() {
    if constexpr (kBackward)
      squash_sum_backward<T, S>(call, begin, end);
    else
      squash_sum_forward<T, S>(call, begin, end);
  };
  if (call.storage == Storage::kFloat64) return run.template operator()<double, double>();
  if (call.storage == Storage::kBFloat16) return run.template operator()<float, BFloat16>();
  run.template operator()<float, float>();
}

}  // namespace FASTCAPS_NAMESPACE

extern const SquashSumKernels FASTCAPS_CONCAT(squash_sum_kernels, FASTCAPS_ISA);
const SquashSumKernels FASTCAPS_CONCAT(squash_sum_kernels, FASTCAPS_ISA) = {FASTCAPS_NAMESPACE::squash_sum_rows<false>,
                                                                            FASTCAPS_NAMESPACE::squash_sum_rows<true>};

}  // namespace fastcaps
