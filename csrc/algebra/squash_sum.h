// Squashing very long capsules, whose squares, or whose length itself, would overflow.
#pragma once

#include "pose.h"

namespace fastcaps {

// A number whose square is far from the end of the type.
template <class T>
inline constexpr T kLong = sizeof(T) == 4 ? T(1e15) : T(1e150);

// The factor that brings a capsule whose largest number is `largest` down to kLong, 1 where it is not beyond that. The
// squash of so long a capsule is its direction to the last bit, before and after. What is not finite stays.
template <class X>
FASTCAPS_FORMULA X shrink(X largest) {
  const Scalar<X> most = kLong<Scalar<X>>;
  return (largest > most) & ((largest - largest) == 0) ? most / largest : X{} + 1;
}

}  // namespace fastcaps
