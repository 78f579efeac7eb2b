// out = a squash(x) [+ b squash(y)] over capsules that lie in channels, [B, types * dim, H * W], and its gradients.
// A row is one type of one sample: dim channels of x, one of a. Rows share nothing, so that the bits do not depend on
// the number of threads.
#pragma once

#include "../votes.h"

namespace fastcaps {

// One summand: capsules and their coefficients (null: 1), and where their gradients go (null: not wanted).
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

// The kernels of one instruction set: rows begin to end.
struct SquashSumKernels {
  void (*forward)(const SquashSum&, int64_t begin, int64_t end);
  void (*backward)(const SquashSum&, int64_t begin, int64_t end);
};

}  // namespace fastcaps
