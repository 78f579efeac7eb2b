// The steps of one parent's pose between two iterations: squash, LayerNorm, unit length. A pose is a struct with
//   each(f)            calls f(value, k) for all values that it holds; k is the index in the pose
//   sum(f), mean(f)    of f(value, k) over the whole pose; largest(): the largest magnitude
#pragma once

#include "number.h"

namespace fastcaps {

// A pose in memory.
template <class X_>
struct PoseInMemory {
  using X = X_;
  X* numbers;
  int64_t count;

  template <class F>
  FASTCAPS_FORMULA void each(F&& f) const {
    for (int64_t k = 0; k < count; ++k) f(numbers[k], k);
  }
  template <class F>
  FASTCAPS_FORMULA X sum(F&& f) const {
    X sum{};
    for (int64_t k = 0; k < count; ++k) sum += f(numbers[k], k);
    return sum;
  }
  template <class F>
  FASTCAPS_FORMULA X mean(F&& f) const {
    return sum(f) / Scalar<X>(count);
  }
  FASTCAPS_FORMULA X largest() const {
    X largest{};
    for (int64_t k = 0; k < count; ++k) {
      const X size = numbers[k] < 0 ? -numbers[k] : numbers[k];
      largest = size > largest ? size : largest;
    }
    return largest;
  }
};

// Safe from overflow, and 0 at the zero vector.
template <class Pose>
FASTCAPS_FORMULA auto length(const Pose& pose) {
  using X = typename Pose::X;
  const X largest = pose.largest(), one = X{} + 1;
  const X by = largest == 0 ? one : (largest - largest) == 0 ? largest : one;
  return Number<X>::sqrt(pose.sum([&](X x, int64_t) { return (x / by) * (x / by); })) * by;
}

// |S| / (1 + |S|^2), safe from overflow
template <class X>
FASTCAPS_FORMULA X squash_factor(X size) {
  return size < 1 ? size / (1 + size * size) : 1 / (1 / size + size);
}

// S |S| / (1 + |S|^2)
template <class Pose>
FASTCAPS_FORMULA void squash(const Pose& pose) {
  using X = typename Pose::X;
  const X factor = squash_factor(length(pose));
  pose.each([&](X& x, int64_t) { x *= factor; });
}

// Replaces the gradient of the squashed S by that of S, with u = S / |S| and f = |S| / (1 + |S|^2):
// dS = f (dy + (2 / (1 + |S|^2) - 1) u <u, dy>); 0 at the zero vector. `pose` holds S, and u afterwards. units: that of
// u instead, dS = (dy - u <u, dy>) / |S|.
template <class Pose, class X = typename Pose::X>
FASTCAPS_FORMULA void squash_backward(const Pose& grad, const Pose& pose, X tiny, bool units = false) {
  const X found = pose.largest(), largest = found > tiny ? found : tiny;
  pose.each([&](X& x, int64_t) { x /= largest; });  // squares neither overflow nor underflow
  const X ratio = Number<X>::sqrt(pose.sum([](X x, int64_t) { return x * x; })), size = ratio * largest;
  pose.each([&](X& x, int64_t) { x /= ratio > tiny ? ratio : tiny; });
  const X inverse = 1 / size, bend = units ? X{-1} : 1 - 2 / (1 + inverse * inverse);
  const X divisor = units && size > 0 ? size : size + inverse;
  const X along = grad.sum([&](X dy, int64_t k) { return dy * pose.at(k); });
  grad.each([&](X& dy, int64_t k) { dy = (dy + bend * pose.at(k) * along) / divisor; });
}

// S / |S|; the zero vector stays.
template <class Pose>
FASTCAPS_FORMULA void unit(const Pose& pose) {
  using X = typename Pose::X;
  const X size = length(pose), by = size == 0 ? X{} + 1 : size;
  pose.each([&](X& x, int64_t) { x /= by; });
}

// LayerNorm without its affine, to mean 0 and variance 1; returns 1 / sqrt(variance + eps), or 0 if that is 0. It
// centres twice: the backward needs differences that sum to 0 in their own precision, which matters for poses of two
// values.
template <class Pose, class X = typename Pose::X>
FASTCAPS_FORMULA X standardise(const Pose& pose, X eps) {
  for (int repeat = 0; repeat < 2; ++repeat) {
    const X mean = pose.mean([](X x, int64_t) { return x; });
    pose.each([&](X& x, int64_t) { x -= mean; });
  }
  const X rstd = inverse_or_zero(Number<X>::sqrt(pose.mean([](X x, int64_t) { return x * x; }) + eps));
  pose.each([&](X& x, int64_t) { x *= rstd; });
  return rstd;
}

// Replaces the gradient of the standardised pose by that of the pose. standard(k): the standardised value at k.
template <class Pose, class X, class Standard>
FASTCAPS_FORMULA void standardise_backward(const Pose& grad, X rstd, Standard&& standard) {
  const X mean = grad.mean([](X dy, int64_t) { return dy; });
  const X slope = grad.mean([&](X dy, int64_t k) { return dy * standard(k); });
  grad.each([&](X& dy, int64_t k) { dy = rstd * (dy - mean - standard(k) * slope); });
}

}  // namespace fastcaps
