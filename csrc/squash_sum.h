// A call of the kernels, on the CPU and on a GPU: out = a squash(x) [+ b squash(y)] over capsules in channels,
// [B, types * dim, H * W], and its gradients. A row is one type of one sample: dim channels of x, one of a.
#pragma once

#include "votes.h"

namespace fastcaps {

// One summand: capsules and their coefficients (null: 1), and their gradients (null: not needed).
struct Squashed {
  const void *capsules = nullptr, *coefficient = nullptr;
  void *dcapsules = nullptr, *dcoefficient = nullptr;
};

struct SquashSum {
  int64_t rows, dim, positions;
  bool relu;
  Storage storage;
  Squashed parts[2];
  int count;         // of parts
  void* out;         // forward
  const void* grad;  // backward
};

}  // namespace fastcaps
