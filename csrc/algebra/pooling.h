// Children compete for every parent:  a = s <Q, K>, K = V or V / |V|, r = g exp(a - log sum_i g exp(a)), S = sum_i r V.
#pragma once

#include "number.h"

namespace fastcaps::pooling {

// 1 / |V| from the square, 0 at the zero vector.
template <class X>
FASTCAPS_FORMULA X inverse_length(X square) {
  return square == 0 ? X{} : (X{} + 1) / Number<X>::sqrt(square);
}

// One value of dV = r dS + c Q - d V, with c = s da / |V| and d = c <Q, V> / |V|^2 (0 unless keys are unit vectors)
template <class X, class Y>
FASTCAPS_FORMULA X dvote(X coefficient, Y ds, X c, Y q, X d, X vote) {
  return coefficient * ds + c * q - d * vote;
}

}  // namespace fastcaps::pooling
