// The formulas of the routings, for the CPU and for a GPU. A number X is a float or a double, or a vector of lanes
// (csrc/cpu/vec.h): the formulas use operators, comparisons that select, and the functions of Number<X>.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define FASTCAPS_FORMULA __device__ __forceinline__
#else
#define FASTCAPS_FORMULA inline __attribute__((always_inline))
#endif

namespace fastcaps {

template <class X>
struct Number;

template <>
struct Number<float> {
  using Scalar = float;
  static FASTCAPS_FORMULA float sqrt(float x) { return ::sqrtf(x); }
  static FASTCAPS_FORMULA float log(float x) { return ::logf(x); }
  // log(1 / (1 + exp(-x))), without overflow
  static FASTCAPS_FORMULA float log_sigmoid(float x) { return (x < 0 ? x : 0.0f) - ::log1pf(::expf(x < 0 ? x : -x)); }
};

template <>
struct Number<double> {
  using Scalar = double;
  static FASTCAPS_FORMULA double sqrt(double x) { return ::sqrt(x); }
  static FASTCAPS_FORMULA double log(double x) { return ::log(x); }
  static FASTCAPS_FORMULA double log_sigmoid(double x) { return (x < 0 ? x : 0.0) - ::log1p(::exp(x < 0 ? x : -x)); }
};

// The type of one lane of X.
template <class X>
using Scalar = typename Number<X>::Scalar;

// 1 / x, or 0 if x is 0: a parent without children has no mean.
template <class X>
FASTCAPS_FORMULA X inverse_or_zero(X x) {
  return x == 0 ? X{} : (X{} + 1) / x;
}

}  // namespace fastcaps
