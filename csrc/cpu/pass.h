// The passes on the CPU: the calls that op bodies make, and the tables of kernels, one for each instruction set.
#pragma once

#include <vector>

#include "../votes.h"

namespace fastcaps {

// A matrix with at least this many values is read from memory, not cache.
inline constexpr int64_t kLargeMatrix = 1024;

// How a call is cut into items. An item is a group of rows times a range of children; a row is a tile of `lanes`
// positions, or, where lanes are children, a single position. The cut depends on shapes alone, never on the number of
// threads, so the same input gives the same bits.
struct Schedule {
  int64_t row_groups = 1, samples = 0;  // groups of rows; samples of a group (0: it may end within a sample)
  int64_t ranges = 1;  // ranges of children (forward), of child types n or groups of them that share weights (backward)
  int64_t rows_per_group = 1;
  int64_t block_children = 1, block_rows = 1;  // children and rows whose votes are on chip at once
  int64_t weight_parts = 1;                    // parts of dW: one a group if ranges own their weights, else one an item
  bool child_lanes = false;     // a lane is a child, not a position; block_children counts vectors of children
  bool shared_weights = false;  // lanes are children that share weights and bias, which stay scalars
  bool keep_votes = true;       // votes stay in cache between the two halves of a pass; else they are made again
  // poses (and votes, if kept) stay in scratch between iterations; a block then holds all children
  bool stay = false;
  bool folded = false;  // matrices act on the parents, and no votes are made (folded.h)

  int64_t items() const { return row_groups * ranges; }
  int64_t rows() const { return row_groups * rows_per_group; }
};

// A gradient in parts, one for each item that adds to it; the first part becomes the sum.
struct Parts {
  void *first = nullptr, *others = nullptr;
  int64_t numbers = 0;

  explicit operator bool() const { return first; }
  template <class T>
  T* part(int64_t which) const {
    return which == 0 ? static_cast<T*>(first) : static_cast<T*>(others) + (which - 1) * numbers;
  }
};

// The operands and results of one pass, forward and backward: null if there are none or they are not wanted. Results
// and sums have the compute type, unless a comment names another.
struct Attention {
  static constexpr bool kReadsTransposed = true;  // whether lanes of positions have kernels for matrices [E, D]
  double scale = 1, eps = 1e-5;
  Rule rule = Rule::kLayerNorm;
  View query;                                               // [B, Ho, Wo, M, C, E], storage type
  const void *norm_weight = nullptr, *norm_bias = nullptr;  // [C * E]
  void* parents = nullptr;  // of the last iteration, [positions, M * C * E], storage type
  void* sums = nullptr;     // [iterations, positions, M * C * E]
  // backward
  View grad, given_sums;  // [B, Ho, Wo, M, C, E]; the sums only for LayerNorm
  bool detach = false;
  void* dquery = nullptr;  // [positions, M * C * E]
  Parts dnorm;             // of every row, [2, C * E], zeroed
};

struct Pooling {
  static constexpr bool kReadsTransposed = false;
  double scale = 1;
  bool normalize = false;
  Rule rule = Rule::kUnit;
  View query;
  void* parents = nullptr;    // of the last iteration, [positions, M * C * E], storage type
  void* sums = nullptr;       // [iterations, positions, M * C * E], storage type
  void* logsumexp = nullptr;  // [iterations, positions, M]
  // backward
  View grad, given_sums;  // [B, Ho, Wo, M, C, E], compute type and storage type
  View given_logsumexp;   // [B, Ho, Wo, M], compute type
  bool detach = false;
  void* dquery = nullptr;
};

struct Gaussian {
  static constexpr bool kReadsTransposed = false;
  double eps = 0;
  Rule rule = Rule::kHeinsen;
  const double* temperatures = nullptr;             // [iterations], inverse, of EM
  const void *beta_u = nullptr, *beta_a = nullptr;  // [M], of EM
  View mean, variance, log_weight;                  // [B, Ho, Wo, M, C, E], [B, Ho, Wo, M]; compute type
  BetaTables betas;
  void *counts = nullptr, *scores = nullptr;    // [iterations, positions, M]
  void *means = nullptr, *variances = nullptr;  // [iterations, positions, M * C * E]
  // backward
  View grad_counts, grad_evidence, grad_means, grad_variances;
  View given_counts, given_means, given_variances;
  void *dmean = nullptr, *dvariance = nullptr, *dlog_weight = nullptr;
  Parts duse, dignore;  // of every item, zeroed
};

template <class Operands>
struct ForwardCall {
  Votes votes;
  Operands with{};
  Schedule schedule{};
  int64_t iteration = 0, iterations = 1, total = 1;  // a launch's first; how many it has; how many the call has
  void* partial = nullptr;                           // [ranges, rows, values of a row's results] if ranges > 1
  void* state = nullptr;  // [rows, values of a row's parents], kept between iterations if ranges > 1
};

template <class Operands>
struct BackwardCall {
  Votes votes;
  std::vector<Operands> with{};  // of every iteration
  Schedule schedule{};
  void* dchildren = nullptr;  // [B, H, W, N, C, D], zeroed
  void* dgate = nullptr;      // [B, H, W, N], zeroed
  Parts dweight{};            // schedule.weight_parts of [G, M, D, E], zeroed unless G = I
  MatrixLayout dmatrices{};   // strides of each
  Parts dbias{};              // of every item, zeroed
  void* state = nullptr;      // [rows, iterations, values]: parents and their gradients, made by backward_prepare
  void* partial = nullptr;    // [ranges, rows, values]: the parents' gradients, of a single iteration

  bool wants_votes() const { return dchildren || dweight || dbias; }  // whether a gradient needs dV
};

// Values of a row: its parents and results in a forward, its parents and their gradients in a backward.
struct RowNumbers {
  int64_t state, results;
};

// One table per pass and instruction set. Items (rows for prepare and finish) may run in any order and on any thread;
// `scratch` is the thread's own.
template <class Operands>
struct Kernels {
  using Forward = ForwardCall<Operands>;
  using Backward = BackwardCall<Operands>;
  int lanes_float, lanes_double;
  int64_t lanes(const Votes& in) const { return in.is_double() ? lanes_double : lanes_float; }
  void (*forward)(const Forward&, int64_t begin, int64_t end, void* scratch);
  void (*forward_finish)(const Forward&, int64_t begin, int64_t end, void* scratch);
  void (*backward_prepare)(const Backward&, int64_t begin, int64_t end, void* scratch);
  void (*backward)(const Backward&, int64_t begin, int64_t end, void* scratch);
  void (*backward_finish)(const Backward&, int64_t begin, int64_t end, void* scratch);
  int64_t (*forward_scratch)(const Forward&);  // bytes
  int64_t (*backward_scratch)(const Backward&);
  RowNumbers (*forward_row)(const Forward&);
  RowNumbers (*backward_row)(const Backward&);
#ifdef FASTCAPS_GUARDS
  bool (*own_pose)(const Forward&);  // for tests: whether a kernel is specialised for the call's pose
#endif
  // whether kernels that read matrices as they lie are missing, or so much slower that a dense copy is worth it
  bool (*forward_wants_dense)(const Forward&);
  bool (*backward_wants_dense)(const Backward&);
};

}  // namespace fastcaps
