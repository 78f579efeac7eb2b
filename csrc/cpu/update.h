// What lies between one turn of a routing and the next, for the parents of a row. X: a vector over the lanes, or a
// single number.
#pragma once

#include "vec.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

// The length of a pose, safe from overflow, and 0 at the zero vector.
template <class T, class X>
FASTCAPS_INLINE X length(const X* v, int64_t count) {
  X largest{}, sum{};
  for (int64_t k = 0; k < count; ++k) {
    const X size = v[k] < 0 ? -v[k] : v[k];
    largest = size > largest ? size : largest;
  }
  const X one = X{} + 1, by = largest == 0 ? one : (largest - largest) == 0 ? largest : one;
  for (int64_t k = 0; k < count; ++k) sum += (v[k] / by) * (v[k] / by);
  return square_root<T>(sum) * by;
}

// s |s| / (1 + |s|^2) for each of `many` poses.
template <class T, class X>
void squash(X* s, int64_t many, int64_t count) {
  for (int64_t m = 0; m < many; ++m) {
    const X size = length<T>(s + m * count, count), share = size / (1 + size * size);
    for (int64_t k = 0; k < count; ++k) s[m * count + k] *= share;
  }
}

// s / |s|; the zero vector stays.
template <class T, class X>
void normalise(X* s, int64_t many, int64_t count) {
  for (int64_t m = 0; m < many; ++m) {
    const X size = length<T>(s + m * count, count), by = size == 0 ? X{} + 1 : size;
    for (int64_t k = 0; k < count; ++k) s[m * count + k] /= by;
  }
}

// log(1 / (1 + exp(-x))), without overflow.
template <class T, class X>
FASTCAPS_INLINE X log_sigmoid(X x) {
  return each_lane<T>(x, [](T v) {
    if (sizeof(T) == 4) return T((v < 0 ? float(v) : 0.0f) - __builtin_log1pf(__builtin_expf(v < 0 ? v : -v)));
    return T((v < 0 ? v : T(0)) - __builtin_log1p(__builtin_exp(v < 0 ? v : -v)));
  });
}

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
