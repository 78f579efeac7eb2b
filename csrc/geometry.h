// The geometry of one routing call: who sees whom. Plain data, shared by every backend.
#pragma once

#include <cstdint>

namespace fastcaps {

// A window over the grid of children, as in a convolution. A set is a 1 x 1 grid under a 1 x 1 window.
struct Window {
  int64_t kh, kw, sh, sw, ph, pw, dh, dw;
};

// Children [B, H, W, N, C, D]  ->  parents [B, Ho, Wo, M, C, E]  through weights [G, M, D, E].
struct Geometry {
  int64_t B, H, W, N, C, D;
  int64_t Ho, Wo, M, E, G;
  Window window;

  int64_t children() const { return window.kh * window.kw * N; }  // I: children that one position sees
  int64_t positions() const { return B * Ho * Wo; }               // B * L
  int64_t child_pose() const { return C * D; }
  int64_t parent_pose() const { return C * E; }
  int64_t parents() const { return M * C * E; }  // numbers of all parents at one position
};

// A six-dimensional tensor read in place: no copy, any strides (in elements, int64 throughout).
struct View {
  const void* data = nullptr;
  int64_t stride[6] = {0, 0, 0, 0, 0, 0};
};

enum class Storage : int { kFloat32, kFloat64, kBFloat16, kFloat16 };

}  // namespace fastcaps
