// squash_sum on a GPU, whole: both kernels and the op. A thread has a capsule of each summand, at one position. Its
// neighbours have the next positions, so value k of all of them is contiguous. Every value is read and written once;
// those of capsules of more than 16 values are read again, from cache.
#include "../squash_sum_op.h"

#include "../algebra/squash_sum.h"
#include "launch.h"
#include "stage.h"

namespace fastcaps::gpu {

// f(k) for the values of a capsule. The compiler knows k if there are at most MOST values; MOST = 0: any number of
// them.
template <int MOST, class F>
FASTCAPS_DEVICE void each(int64_t dim, F&& f) {
  if constexpr (MOST == 0) {
    FASTCAPS_NO_UNROLL
    for (int64_t k = 0; k < dim; ++k) f(k);
  } else {
    FASTCAPS_UNROLL
    for (int k = 0; k < MOST; ++k)
      if (k < dim) f(k);
  }
}

// The values of one capsule, times its scale; in registers if there are at most MOST.
template <Storage S, int MOST>
struct Capsule {
  using X = float;
  const void* data;
  int64_t first, step, dim;
  bool relu;
  float scale = 1.0f, kept[MOST ? MOST : 1];

  FASTCAPS_DEVICE Capsule(const SquashSum& call, const void* from, int64_t begin, bool rectified)
      : data(from), first(begin), step(call.positions), dim(call.dim), relu(rectified) {
    if constexpr (MOST > 0) each<MOST>(dim, [&](int k) { kept[k] = read(k); });
  }
  FASTCAPS_DEVICE float read(int64_t k) const {
    const float x = load_number(data, first + k * step, S);
    return relu && x <= 0.0f ? 0.0f : x;  // NaN stays
  }
  FASTCAPS_DEVICE float operator[](int64_t k) const {
    if constexpr (MOST == 0)
      return scale * read(k);
    else
      return scale * kept[k];
  }
  template <class F>
  FASTCAPS_DEVICE float sum(F&& f) const {
    float sum = 0.0f;
    each<MOST>(dim, [&](int64_t k) { sum += f((*this)[k], k); });
    return sum;
  }
  FASTCAPS_DEVICE float largest() const {
    float largest = 0.0f;
    each<MOST>(dim, [&](int64_t k) { largest = fmaxf(largest, fabsf((*this)[k])); });
    return largest;
  }
  // Shrinks very long capsules; returns the length.
  FASTCAPS_DEVICE float measure() {
    scale = shrink(largest());
    return length(*this);
  }
};

// Where a thread's capsules begin, and its coefficients lie.
struct Place {
  int64_t number, capsule;
  bool exists;

  FASTCAPS_DEVICE explicit Place(const SquashSum& call)
      : number(block_x() * block_threads() + thread_index()), exists(number < call.rows * call.positions) {
    capsule = number + number / call.positions * (call.dim - 1) * call.positions;
  }
};

template <Storage S, int MOST>
FASTCAPS_KERNEL(256, 2)
squash_sum_kernel(const FASTCAPS_CONSTANT SquashSum call) {
  const Place at(call);
  if (!at.exists) return;
  const auto share_of = [&](const Squashed& part, Capsule<S, MOST>& x) {
    const float share = squash_factor(x.measure());
    return part.coefficient ? share * load_number(part.coefficient, at.number, S) : share;
  };
  Capsule<S, MOST> x(call, call.parts[0].capsules, at.capsule, call.relu);
  const float share = share_of(call.parts[0], x);
  const auto store = [&](int64_t k, float number) {
    store_number(call.out, at.capsule + k * call.positions, number, S);
  };
  if (call.count == 1) return each<MOST>(call.dim, [&](int64_t k) { store(k, share * x[k]); });
  Capsule<S, MOST> y(call, call.parts[1].capsules, at.capsule, call.relu);
  const float other = share_of(call.parts[1], y);
  each<MOST>(call.dim, [&](int64_t k) { store(k, share * x[k] + other * y[k]); });
}

// Of a summand c f(n) x with n = |x|, u = x / n and the gradient g of the sum: h = <u, g>, dc = f n h, and
// dx = c f (g + (2 / (1 + n^2) - 1) h u).
template <Storage S, int MOST>
FASTCAPS_KERNEL(256, 2)
squash_sum_backward_kernel(const FASTCAPS_CONSTANT SquashSum call) {
  const Place at(call);
  if (!at.exists) return;
  const Capsule<S, MOST> g(call, call.grad, at.capsule, false);
  FASTCAPS_UNROLL  // else addresses are kept for both summands, in 50 registers
  for (int which = 0; which < 2; ++which) {
    if (which >= call.count) break;
    const Squashed& part = call.parts[which];
    if (!part.dcapsules && !part.dcoefficient) continue;
    Capsule<S, MOST> x(call, part.capsules, at.capsule, call.relu);
    const float size = x.measure(), share = squash_factor(size);
    const float inverse = size > 1e-30f ? 1.0f / size : 0.0f;  // shorter capsules have no gradient to speak of
    float along = 0.0f;
    each<MOST>(call.dim, [&](int64_t k) { along += x[k] * inverse * g[k]; });
    if (part.dcoefficient) store_number(part.dcoefficient, at.number, share * size * along, S);
    if (!part.dcapsules) continue;
    const float slope = share * x.scale;  // of the values before they were shrunk
    const float factor = part.coefficient ? slope * load_number(part.coefficient, at.number, S) : slope;
    const float bend = (2.0f / (1.0f + size * size) - 1.0f) * along * inverse;
    each<MOST>(call.dim, [&](int64_t k) {
      const float found = factor * (g[k] + bend * x[k]);
      store_number(part.dcapsules, at.capsule + k * call.positions, call.relu && x[k] == 0.0f ? 0.0f : found, S);
    });
  }
}

namespace {

using Kernel = void (*)(const SquashSum);

template <Storage S>
Kernel kernel_of(int64_t dim, bool backward) {
  if (backward)
    return dim <= 4    ? &squash_sum_backward_kernel<S, 4>
           : dim <= 16 ? &squash_sum_backward_kernel<S, 16>
                       : &squash_sum_backward_kernel<S, 0>;
  return dim <= 4 ? &squash_sum_kernel<S, 4> : dim <= 16 ? &squash_sum_kernel<S, 16> : &squash_sum_kernel<S, 0>;
}

struct Gpu {
  using Guard = DeviceGuard;
  static Tensor make(const Tensor& beside, const Shape& shape) {
    return new_tensor(beside, shape, beside.scalar_type(), "a result");
  }
  static void run(const SquashSum& call, bool backward) {
    STD_TORCH_CHECK(call.storage != Storage::kFloat64, "fastcaps: the CUDA kernels take no float64");
    const Kernel kernel = call.storage == Storage::kBFloat16  ? kernel_of<Storage::kBFloat16>(call.dim, backward)
                          : call.storage == Storage::kFloat16 ? kernel_of<Storage::kFloat16>(call.dim, backward)
                                                              : kernel_of<Storage::kFloat32>(call.dim, backward);
    launch(kernel, Grid{ceil_div(call.rows * call.positions, 256), 1, 256}, call);
  }
};
constexpr Op squash_sum = &squash_sum_op<Gpu>, squash_sum_backward = &squash_sum_backward_op<Gpu>;

}  // namespace

FASTCAPS_REGISTER(squash_sum)

}  // namespace fastcaps::gpu
