// The kernels of squash_sum. Rows share nothing, so that the bits do not depend on the number of threads.
#pragma once

#include "../squash_sum.h"

namespace fastcaps {

// Of one instruction set: rows begin to end.
struct SquashSumKernels {
  void (*forward)(const SquashSum&, int64_t begin, int64_t end);
  void (*backward)(const SquashSum&, int64_t begin, int64_t end);
};

// Those for this machine (capability.cpp).
const SquashSumKernels& squash_sum_kernels();

}  // namespace fastcaps
