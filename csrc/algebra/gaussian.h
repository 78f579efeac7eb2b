// Parents explain the children's votes, each by a diagonal Gaussian:
//   a = alpha - sum (V - mu)^2 p, p = 1 / (2 variance), r = softmax over parents, w = g r,
//   n = sum_i w, means = sum_i w V / (n + eps), variances = sum_i w (V - means)^2 / (n + eps).
// Y, a parent's value, may be a scalar that all lanes of X share.
#pragma once

#include "number.h"

namespace fastcaps::gaussian {

// One value's part of the distance.
template <class X, class Y>
FASTCAPS_FORMULA X distance(X from_mean, Y p) {
  return p * from_mean * from_mean;
}

// ---- moments: the running mean, and the squares around it (West 1979) ----

// Adds a vote: `moved` is w / n with the new n, `counts` is `moved` times the old n. The mean may have another, more
// precise type.
template <class X, class Mean>
FASTCAPS_FORMULA void add(X from_base, X moved, X counts, Mean& mean, X& square) {
  const X d = from_base - mean;
  mean += moved * d;
  square += counts * d * d;
}

// Adds the moments of other votes (Chan et al. 1979): `fraction` is their n divided by the joint n, `counts` is
// `fraction` times this n.
template <class X>
FASTCAPS_FORMULA void join(X other_mean, X other_square, X fraction, X counts, X& mean, X& square) {
  const X d = other_mean - mean;
  mean += fraction * d;
  square += other_square + counts * d * d;
}

// Converts to means and variances over n + eps; `one` is 1 / (n + eps), or 0.
template <class X>
FASTCAPS_FORMULA void finish(X base, X n, X eps, X one, X& mean, X& square) {
  const X whole = base + mean, short_of = whole * (eps * one);
  mean = n == 0 ? X{} : whole - short_of;
  square = n == 0 ? X{} : (square + n * short_of * short_of) * one;
}

// ---- between iterations ----

// p = 1 / (2 variance), and ln sigma. With eps = 0 a parent without children has variance 0; its p and ln sigma are 0.
template <class X>
FASTCAPS_FORMULA X precision(X variance) {
  return Scalar<X>(0.5) * inverse_or_zero(variance);
}
template <class X>
FASTCAPS_FORMULA X log_sigma(X variance) {
  return variance == 0 ? X{} : Scalar<X>(0.5) * Number<X>::log(variance);
}

// EM (Hinton et al. 2018): the benefit of activating a parent minus its cost, before the sigmoid.
template <class X>
FASTCAPS_FORMULA X em_score(Scalar<X> heat, Scalar<X> beta_a, Scalar<X> cost, X log_sigma, X n) {
  return heat * (beta_a - (cost + log_sigma) * n);
}

// ---- backward ----
// d = V - means, u = (dmeans - 2 rest s) / N, s = dvariances / N, N = n + eps

// One value's part of  t = dL/dw.
template <class X, class Y>
FASTCAPS_FORMULA X gain(Y u, Y s, X d) {
  return (u + s * d) * d;
}

// One value of dV = w (u + 2 s d) - 2 da p (V - mu).
template <class X, class Y>
FASTCAPS_FORMULA X dvote(X w, Y u, Y s, X d, X da, Y p, X from_mean) {
  return w * u + (w + w) * s * d - (da + da) * p * from_mean;
}

}  // namespace fastcaps::gaussian
