// LayerNorm over a parent's C * E numbers, one parent of every lane's position at a time.
#pragma once

#include "vec.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

template <class T>
FASTCAPS_INLINE Vec<T> reciprocal_sqrt(Vec<T> v) {
  T lanes[kLanes<T>];
  store<T>(lanes, v);
  for (int k = 0; k < kLanes<T>; ++k)
    lanes[k] = T(1) / (sizeof(T) == 4 ? __builtin_sqrtf(lanes[k]) : __builtin_sqrt(lanes[k]));
  return load<T>(lanes);
}

template <class T>
struct Moments {
  // The mean is kept with what its own rounding leaves over: the backward formula wants differences that sum to 0 in
  // their own last place, and poses of two numbers would show it if they did not.
  Vec<T> mean, rest, rstd;

  FASTCAPS_INLINE Moments(const Vec<T>* S, int64_t count, T eps) {
    Vec<T> sum{}, square{};
    for (int64_t k = 0; k < count; ++k) sum += S[k];
    mean = sum / T(count);
    rest = Vec<T>{};
    for (int64_t k = 0; k < count; ++k) rest += S[k] - mean;
    rest /= T(count);
    for (int64_t k = 0; k < count; ++k) square += centred(S[k]) * centred(S[k]);
    rstd = reciprocal_sqrt<T>(square / T(count) + eps);
  }

  FASTCAPS_INLINE Vec<T> centred(Vec<T> s) const { return (s - mean) - rest; }
};

// out = (S - mean) / std * weight + bias
template <class T>
FASTCAPS_INLINE void layer_norm(const Vec<T>* S, int64_t count, T eps, const T* weight, const T* bias, Vec<T>* out) {
  const Moments<T> moments(S, count, eps);
  for (int64_t k = 0; k < count; ++k) {
    Vec<T> y = moments.centred(S[k]) * moments.rstd;
    if (weight) y *= weight[k];
    if (bias) y += bias[k];
    out[k] = y;
  }
}

// dS in place of dY; adds to dweight, dbias (vectors over the lanes).
template <class T>
FASTCAPS_INLINE void layer_norm_backward(const Vec<T>* S, int64_t count, T eps, const T* weight, Vec<T>* dY,
                                         Vec<T>* dweight, Vec<T>* dbias) {
  const Moments<T> moments(S, count, eps);
  Vec<T> sum{}, product{};
  for (int64_t k = 0; k < count; ++k) {
    const Vec<T> x = moments.centred(S[k]) * moments.rstd;
    if (dweight) dweight[k] += dY[k] * x;
    if (dbias) dbias[k] += dY[k];
    if (weight) dY[k] *= weight[k];
    sum += dY[k];
    product += dY[k] * x;
  }
  sum /= T(count);
  product /= T(count);
  for (int64_t k = 0; k < count; ++k) {
    const Vec<T> x = moments.centred(S[k]) * moments.rstd;
    dY[k] = moments.rstd * (dY[k] - sum - x * product);
  }
}

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
