// Parents compete for every child:  a = s <Q, V>, r = softmax over parents, S = sum_i g r V.
#pragma once

#include "number.h"

namespace fastcaps::attention {

// gain = <dS, V>:  da = s g r (gain - average), with `weight` = g r and `average` = sum_m r gain
template <class X>
FASTCAPS_FORMULA X dlogit(X weight, X gain, X average, Scalar<X> scale) {
  return weight * scale * (gain - average);
}

// One value of dV = g r dS + da Q. Y, a parent's value, may be a scalar that all lanes of X share.
template <class X, class Y>
FASTCAPS_FORMULA X dvote(X weight, Y ds, X da, Y q) {
  return weight * ds + da * q;
}

}  // namespace fastcaps::attention
