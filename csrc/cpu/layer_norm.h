// LayerNorm over a parent's C * E numbers, one parent of every lane's position at a time.
#pragma once

#include "vec.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

template <class T, class X>
FASTCAPS_INLINE X reciprocal_sqrt(X x) {
  return (X{} + 1) / square_root<T>(x);
}

// X: a vector over the lanes, or a single number.
template <class T, class X>
struct Moments {
  // The mean is kept with what its own rounding leaves over: the backward formula wants differences that sum to 0 in
  // their own last place, and poses of two numbers would show it if they did not.
  X mean, rest, rstd;

  FASTCAPS_INLINE Moments(const X* S, int64_t count, X eps) {
    X sum{}, square{};
    for (int64_t k = 0; k < count; ++k) sum += S[k];
    mean = sum / T(count);
    rest = X{};
    for (int64_t k = 0; k < count; ++k) rest += S[k] - mean;
    rest /= T(count);
    for (int64_t k = 0; k < count; ++k) square += centred(S[k]) * centred(S[k]);
    rstd = reciprocal_sqrt<T>(square / T(count) + eps);
  }

  FASTCAPS_INLINE X centred(X s) const { return (s - mean) - rest; }
};

// out = (S - mean) / std * weight + bias
template <class T, class X>
FASTCAPS_INLINE void layer_norm(const X* S, int64_t count, X eps, const T* weight, const T* bias, X* out) {
  const Moments<T, X> moments(S, count, eps);
  for (int64_t k = 0; k < count; ++k) {
    X y = moments.centred(S[k]) * moments.rstd;
    if (weight) y *= weight[k];
    if (bias) y += bias[k];
    out[k] = y;
  }
}

// dS in place of dY; adds to dweight, dbias (vectors over the lanes).
template <class T, class X>
FASTCAPS_INLINE void layer_norm_backward(const X* S, int64_t count, X eps, const T* weight, X* dY, X* dweight,
                                         X* dbias) {
  const Moments<T, X> moments(S, count, eps);
  X sum{}, product{};
  for (int64_t k = 0; k < count; ++k) {
    const X x = moments.centred(S[k]) * moments.rstd;
    if (dweight) dweight[k] += dY[k] * x;
    if (dbias) dbias[k] += dY[k];
    if (weight) dY[k] *= weight[k];
    sum += dY[k];
    product += dY[k] * x;
  }
  sum /= T(count);
  product /= T(count);
  for (int64_t k = 0; k < count; ++k) {
    const X x = moments.centred(S[k]) * moments.rstd;
    dY[k] = moments.rstd * (dY[k] - sum - x * product);
  }
}

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
