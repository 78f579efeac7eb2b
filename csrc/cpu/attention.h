// The attention pass on the CPU: what the op bodies (ops.cpp) ask of the kernels, and the table through which they
// reach the build for this machine's instruction set.
#pragma once

#include "../geometry.h"

namespace fastcaps {

// How a call is cut into items. An item is a group of tiles (of `lanes` positions each) times a range of children;
// the cut depends on shapes alone, never on the number of threads, so the same input gives the same bits.
struct Cut {
  int64_t groups = 1, samples = 0;              // groups of samples (0: groups of positions, wherever samples end)
  int64_t chunks = 1;                           // ranges of children (forward) or of child types n (backward)
  int64_t tiles_per_group = 1;                  // tiles
  int64_t block_children = 1, block_tiles = 1;  // children and tiles whose votes are on chip at once
  bool child_lanes = false;  // a lane is a child, not a position; block_children counts vectors of them
  bool keep_votes = true;    // votes stay in cache between the two halves of a pass, or are made again

  int64_t items() const { return groups * chunks; }
  int64_t tiles() const { return groups * tiles_per_group; }
};

struct AttentionInputs {
  Geometry geometry;
  Storage storage = Storage::kFloat32;  // of children, query, gate, gradient of parents
  double scale = 1, eps = 1e-5;
  bool normalize = true;
  View children, query, gate;  // query, gate: data may be null
  // In the compute type (float or double), contiguous:
  const void* weight = nullptr;  // [G, M, D, E]
  const void* bias = nullptr;    // [I or 1, M or 1, C, E], or null
  int64_t bias_stride_i = 0, bias_stride_m = 0;
  const void* norm_weight = nullptr;  // [C * E] or null
  const void* norm_bias = nullptr;
};

struct AttentionForward {
  AttentionInputs in;
  Cut cut;
  void* partial = nullptr;  // [chunks, tiles, M * C * E, lanes] if chunks > 1
  void* parents = nullptr;  // [positions, M * C * E], storage type
  void* sums = nullptr;     // the same in the compute type, or null
};

struct AttentionBackward {
  AttentionInputs in;
  Cut cut;
  View grad_parents, grad_sums;  // either may be null; grad_sums in the compute type
  const void* sums = nullptr;    // [positions, M * C * E] if normalize
  // Gradients in the compute type; null where not wanted.
  void* dchildren = nullptr;    // [B, H, W, N, C, D], zeroed
  void* dgate = nullptr;        // [B, H, W, N], zeroed
  void* dweight = nullptr;      // [weight_parts, G, M, D, E], zeroed unless G = I
  void* dbias = nullptr;        // [items, bias], zeroed
  void* dnorm = nullptr;        // [tiles, 2, C * E], zeroed
  void* partial = nullptr;      // [chunks, tiles, M * C * E, lanes]: dquery of each item
  void* query_lanes = nullptr;  // [tiles, M * C * E, lanes]: query and dL/dS, made by backward_prepare
  void* dsums_lanes = nullptr;
  void* dquery = nullptr;    // [positions, M * C * E]
  int64_t weight_parts = 1;  // one a group where chunks own their weights, else one an item
  int64_t bias_numbers = 0;
};

// One table per instruction set. Items (tiles for prepare and finish) may run in any order and on any thread; `scratch`
// is the thread's own.
struct AttentionKernels {
  int lanes_float, lanes_double;
  void (*forward)(const AttentionForward&, bool is_double, int64_t begin, int64_t end, void* scratch);
  void (*forward_finish)(const AttentionForward&, bool is_double, int64_t begin, int64_t end, void* scratch);
  void (*backward_prepare)(const AttentionBackward&, bool is_double, int64_t begin, int64_t end, void* scratch);
  void (*backward)(const AttentionBackward&, bool is_double, int64_t begin, int64_t end, void* scratch);
  void (*backward_finish)(const AttentionBackward&, bool is_double, int64_t begin, int64_t end, void* scratch);
  int64_t (*forward_scratch)(const AttentionForward&, bool is_double);  // bytes
  int64_t (*backward_scratch)(const AttentionBackward&, bool is_double);
  bool (*own_pose)(const AttentionForward&, bool is_double);  // whether the call's pose has kernels of its own
};

const AttentionKernels& attention_kernels();  // for this machine (capability.cpp)

}  // namespace fastcaps
