// What lies between one turn of a routing and the next, for one parent's pose of `count` numbers.
#pragma once

#include "number.h"

namespace fastcaps {

// The length of a pose, safe from overflow, and 0 at the zero vector.
template <class X>
FASTCAPS_FORMULA X length(const X* v, int64_t count) {
  X largest{}, sum{};
  for (int64_t k = 0; k < count; ++k) {
    const X size = v[k] < 0 ? -v[k] : v[k];
    largest = size > largest ? size : largest;
  }
  const X one = X{} + 1, by = largest == 0 ? one : (largest - largest) == 0 ? largest : one;
  for (int64_t k = 0; k < count; ++k) sum += (v[k] / by) * (v[k] / by);
  return Number<X>::sqrt(sum) * by;
}

// |S| / (1 + |S|^2), safe from overflow
template <class X>
FASTCAPS_FORMULA X squash_share(X size) {
  return size < 1 ? size / (1 + size * size) : 1 / (1 / size + size);
}

// S |S| / (1 + |S|^2)
template <class X>
FASTCAPS_FORMULA void squash(X* S, int64_t count) {
  const X share = squash_share(length(S, count));
  for (int64_t k = 0; k < count; ++k) S[k] *= share;
}

// S / |S|; the zero vector stays.
template <class X>
FASTCAPS_FORMULA void unit(X* S, int64_t count) {
  const X size = length(S, count), by = size == 0 ? X{} + 1 : size;
  for (int64_t k = 0; k < count; ++k) S[k] /= by;
}

}  // namespace fastcaps
