// Squashing very long capsules, whose squares, or whose length itself, would overflow.
#pragma once

#include "pose.h"

namespace fastcaps {

// A value whose square is far below the type's maximum.
template <class T>
inline constexpr T kLong = sizeof(T) == 4 ? T(1e15) : T(1e150);

// The factor that scales a capsule whose largest value is `largest` down to kLong, 1 if it is not longer. So long a
// capsule's squash is its direction to the last bit: scaling does not change it. Infinity and NaN stay.
template <class X>
FASTCAPS_FORMULA X shrink(X largest) {
  const Scalar<X> most = kLong<Scalar<X>>;
  return (largest > most) & ((largest - largest) == 0) ? most / largest : X{} + 1;
}

}  // namespace fastcaps
