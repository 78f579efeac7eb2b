// Parents compete for every child:  a = s <Q, V>, r = softmax over parents, S = sum_i g r V.
#pragma once

#include "number.h"

namespace fastcaps::attention {

// h = <dS, V>:  da = s g r (h - sum_m r h), with `share` = g r and `mean` = sum_m r h
template <class X>
FASTCAPS_FORMULA X dlogit(X share, X gain, X mean, Scalar<X> scale) {
  return share * scale * (gain - mean);
}

// dV = g r dS + da Q: a number of it. What belongs to a parent may be a single number for all lanes.
template <class X, class Y>
FASTCAPS_FORMULA X dvote(X share, Y ds, X da, Y q) {
  return share * ds + da * q;
}

}  // namespace fastcaps::attention
