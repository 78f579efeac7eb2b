// Capsules that are squashed whatever their length: of the longest, squares and the length itself would overflow.
#pragma once

#include "turns.h"

namespace fastcaps {

// A number whose square is far from the end of the type.
template <class T>
inline constexpr T kLong = sizeof(T) == 4 ? T(1e15) : T(1e150);

// What a capsule of that largest number is multiplied by before it is squashed. Beyond kLong a squashed capsule is its
// direction to the last bit, so that one with a number of kLong has the same. What is not finite stays.
template <class X>
FASTCAPS_FORMULA X shrink(X largest) {
  const Scalar<X> most = kLong<Scalar<X>>;
  return (largest > most) & ((largest - largest) == 0) ? most / largest : X{} + 1;
}

}  // namespace fastcaps
