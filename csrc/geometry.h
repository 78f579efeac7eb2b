// The sizes of a call, as the CUDA kernels take them.
#pragma once

#include "votes.h"

namespace fastcaps {

struct Geometry {
  int64_t B, H, W, N, C, D;
  int64_t Ho, Wo, M, E, G;
  Window window;

  int64_t children() const { return window.kh * window.kw * N; }
  int64_t positions() const { return B * Ho * Wo; }
  int64_t child_pose() const { return C * D; }
  int64_t parent_pose() const { return C * E; }
  int64_t parents() const { return M * C * E; }
};

}  // namespace fastcaps
