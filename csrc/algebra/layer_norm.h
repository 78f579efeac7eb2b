// LayerNorm over a parent's C * E values in memory; equal values become 0, with gradient 0, even if eps is 0;
// standardise in pose.h is for values in several lanes of a GPU.
#pragma once

#include "number.h"

namespace fastcaps {

template <class X>
struct LayerNorm {
  // `remainder` is what rounding the mean lost: the backward needs differences that sum to 0 in their own precision,
  // which matters for poses of two values.
  X mean, remainder, rstd;

  FASTCAPS_FORMULA LayerNorm(const X* S, int64_t count, X eps) {
    const Scalar<X> size = Scalar<X>(count);
    X sum{}, square{};
    for (int64_t k = 0; k < count; ++k) sum += S[k];
    mean = sum / size;
    remainder = X{};
    for (int64_t k = 0; k < count; ++k) remainder += S[k] - mean;
    remainder /= size;
    for (int64_t k = 0; k < count; ++k) square += centred(S[k]) * centred(S[k]);
    rstd = inverse_or_zero(Number<X>::sqrt(square / size + eps));
  }
  FASTCAPS_FORMULA X centred(X s) const { return (s - mean) - remainder; }
  FASTCAPS_FORMULA X normal(X s) const { return centred(s) * rstd; }
};

// S to (S - mean) / std * weight + bias
template <class X>
FASTCAPS_FORMULA void layer_norm(X* S, int64_t count, X eps, const Scalar<X>* weight, const Scalar<X>* bias) {
  const LayerNorm<X> norm(S, count, eps);
  for (int64_t k = 0; k < count; ++k) {
    X y = norm.normal(S[k]);
    if (weight) y *= weight[k];
    if (bias) y += bias[k];
    S[k] = y;
  }
}

// Replaces dY by dS; adds to dweight and dbias unless they are null.
template <class X>
FASTCAPS_FORMULA void layer_norm_backward(const X* S, int64_t count, X eps, const Scalar<X>* weight, X* dY, X* dweight,
                                          X* dbias) {
  const LayerNorm<X> norm(S, count, eps);
  X sum{}, product{};
  for (int64_t k = 0; k < count; ++k) {
    const X x = norm.normal(S[k]);
    if (dweight) dweight[k] += dY[k] * x;
    if (dbias) dbias[k] += dY[k];
    if (weight) dY[k] *= weight[k];
    sum += dY[k];
    product += dY[k] * x;
  }
  sum /= Scalar<X>(count);
  product /= Scalar<X>(count);
  for (int64_t k = 0; k < count; ++k) dY[k] = norm.rstd * (dY[k] - sum - norm.normal(S[k]) * product);
}

}  // namespace fastcaps
