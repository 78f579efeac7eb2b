// The inputs of a call's votes, in every backend: plain data, for host and device.
#pragma once

#include <cstdint>

namespace fastcaps {

// Bits of an op's `options`. kTf32x3 only matters in calls with kTf32.
inline constexpr int64_t kDeterministic = 1, kTf32 = 2, kTf32x3 = 4;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A window over the grid of children, as in a convolution. A set is a 1 x 1 grid under a 1 x 1 window.
struct Window {
  int64_t kh, kw, sh, sw, ph, pw, dh, dw;

  bool is_of_set() const {
    return kh == 1 && kw == 1 && sh == 1 && sw == 1 && ph == 0 && pw == 0 && dh == 1 && dw == 1;
  }
};

// A tensor of at most six dimensions, read in place with any strides (int64, in elements).
struct View {
  const void* data = nullptr;
  int64_t stride[6] = {0, 0, 0, 0, 0, 0};
};

// Tables over children and parents: the benefit of using a child for a parent, and the cost of ignoring it. Dense, in a
// backend's compute type; null if there are none.
struct BetaTables {
  const void *use = nullptr, *ignore = nullptr;
  int64_t use_stride_i = 0, use_stride_m = 0, ignore_stride_i = 0, ignore_stride_m = 0;
};

// The strides of matrices [G, M, D, E]. Kernels read rows of adjacent values, or dense matrices that are [E, D] in
// memory.
struct MatrixLayout {
  int64_t group = 0, parent = 0, row = 0, column = 1;

  int64_t at(int64_t g, int64_t m) const { return g * group + m * parent; }
  bool transposed() const { return column != 1; }
};

enum class Storage : int { kFloat32, kFloat64, kBFloat16, kFloat16 };

inline int64_t bytes_of(Storage storage) {
  return storage == Storage::kFloat64 ? 8 : storage == Storage::kFloat32 ? 4 : 2;
}

// The step between one iteration of a routing and the next, with the values of fastcaps.rules.Rule.
enum class Rule : int {
  kLayerNorm,  // the sums under LayerNorm are the next query
  kPlain,      // the sums are the next query
  kSquash,     // the squashed sums are added to the query
  kUnit,       // the sums' directions are added to the query
  kEM,         // parents' activations by description length (Hinton et al. 2018)
  kHeinsen,    // parents' scores by evidence (Heinsen 2019)
  kKMeans,     // as kHeinsen, without variances
};

// Children [B, H, W, N, C, D] vote for M parents [B, Ho, Wo, M, C, E]. A position's window holds I = kh kw N of them,
// child i = (ky kw + kx) N + n:  V = P W[i mod G, m] + bias[i, m]. A set and its parents do not have the two dimensions
// of a grid: [B, I, C, D], [B, M, C, E].
struct Votes {
  int64_t B, H, W, N, C, D;
  int64_t Ho, Wo, I, M, E, G;
  Window window;
  bool is_set = false;
  Storage storage = Storage::kFloat32;  // of children and gate, and of parents unless they are sums
  View children{}, gate{};              // gate: data may be null
  // In the type that a backend computes in:
  const void* weight = nullptr;  // [G, M, D, E]; null: votes are the children's poses, and E = D
  MatrixLayout matrices{};       // of the weight: dense, but where the CPU reads each child's own matrices in place
  bool narrow_weight = false;    // CPU: whether it is bfloat16, widened when it is read
  const void* bias = nullptr;    // [I or 1, M or 1, C, E], dense, or null
  int64_t bias_stride_i = 0, bias_stride_m = 0;

  // Whether schedules can count in 64 bits: the multiply-adds of a pass, and the bytes of the votes for one position in
  // all lanes. Larger calls would never finish.
  bool is_countable() const {
    const double position =
        double(window.kh) * double(window.kw) * double(N) * double(M) * double(C) * double(D + 2) * double(E);
    return position < 0x1p50 && position * double(B > 1 ? B : 1) * double(Ho) * double(Wo) < 0x1p60;
  }
  bool is_double() const { return storage == Storage::kFloat64; }
  int64_t positions() const { return B * Ho * Wo; }
  int64_t child_size() const { return C * D; }        // values in a child's pose
  int64_t parent_size() const { return C * E; }       // values in a parent's pose
  int64_t parents_size() const { return M * C * E; }  // values in all parents at one position
  MatrixLayout dense_matrices() const { return {M * D * E, D * E, E, 1}; }
  // Whether each matrix is dense; groups and parents may lie apart.
  bool has_dense_matrices() const { return !matrices.transposed() && matrices.row == E; }
};

// A call's sizes as Python passes them: B H W N C D Ho Wo M E G (0: no weights) and the window's 8.
inline Votes votes_of(const int64_t* n, Storage storage) {
  Votes in{};
  in.B = n[0], in.H = n[1], in.W = n[2], in.N = n[3], in.C = n[4], in.D = n[5], in.Ho = n[6], in.Wo = n[7];
  in.M = n[8], in.E = n[9], in.G = n[10] > 0 ? n[10] : 1;
  in.window = {n[11], n[12], n[13], n[14], n[15], n[16], n[17], n[18]};
  in.I = in.window.kh * in.window.kw * in.N;
  in.matrices = in.dense_matrices();
  in.storage = storage;
  return in;
}

}  // namespace fastcaps
