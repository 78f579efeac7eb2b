// The passes on a GPU: the one argument of their kernels, and the tables of their instantiations.
//
// A warp's 32 lanes are cut into  columns x positions x parents x rows  (each a power of two, columns fastest). A lane
// holds, for R positions, a patch of TC x TE values of one parent's pose: of its query, of its sums, and of the current
// vote. So a vote lives in registers, from the multiplication that makes it to the sum that takes it in. Several warps
// share the parents of a position, several more take other positions; a block walks over a range of children, of which
// a few at a time (a stage) lie in shared memory, while the next few are being copied there: a ring of two or three
// stages.
#pragma once

#include <string>

#include "../votes.h"
#include "device.h"

namespace fastcaps::gpu {

// Unsigned division of integers below 2^31 by one known at the launch: a multiplication and a shift.
struct Divider {
  uint32_t divisor = 1, multiplier = 0, shift = 0;

  Divider() = default;
  explicit Divider(int64_t d) : divisor(uint32_t(d)) {
    while ((int64_t(1) << shift) < d) ++shift;
    multiplier = uint32_t((uint64_t(1) << 32) * ((uint64_t(1) << shift) - uint64_t(d)) / uint64_t(d) + 1);
  }
  FASTCAPS_DEVICE int quotient(int n) const {
    return int((uint32_t((uint64_t(uint32_t(n)) * multiplier) >> 32) + uint32_t(n)) >> shift);
  }
  FASTCAPS_DEVICE int remainder(int n, int quotient) const { return n - quotient * int(divisor); }
};

constexpr int kMostChildren = 8;                             // of a stage
constexpr int kMostStages = 3;                               // in shared memory
constexpr int kOffsets = (kMostStages + 1) * kMostChildren;  // places for those of a ring of stages and the next one
constexpr int kTurn = 8 * 4 * 16;                            // floats of a warp's own place: see tensor_gradients.h
constexpr int kVoteRow = 72;                                 // floats of dV of a 1 x 64 parent: see tensor_large.h
constexpr int kMostIterations = 16;                          // of a routing in one launch
// The gradient of a bias that all children share is made in this many sums, which are added up at the end: a single sum
// would lose more digits than torch's, and all blocks would wait for each other.
constexpr int kSharedSums = 32;

// How a call is cut: what the schedule decides and kernels read.
struct Cut {
  int columns, rows, parents;  // lanes (the rest of the 32 are positions); parents: of a warp
  int warps_parents;           // warps that share a position's parents; the others take other positions
  int tile_size;               // positions of a block at a time: its tile
  int stage, stages;           // children of a stage, and stages in shared memory
  int chunks, chunk_children;  // ranges of children, and the children of one
  bool late_weights;           // dW of a stage is added up during the next one: shared memory has the parts of both
  bool parts_by_chunk;         // parts of dW: one for each group and chunk, not for each group
  // Byte offsets in shared memory. shared_stage: from one stage to the next; shared_seen: within a stage. shared_float,
  // float_stage: the first stage's values in float, and from there to the next one's: the stages themselves, or one
  // place for all (float_stage = 0) if half precision is widened. shared_weight: within the values.
  int shared_seen, shared_stage, shared_float, float_stage, shared_weight, shared_tile, shared_offset, shared_exchange,
      shared_turn, shared_dchildren, shared_dweight, shared_dgate;
};

// A call's parents, and the step between iterations, for all its kernels.
struct ParentArgs {
  int M, C, E, Ho, Wo;
  Storage storage;  // of what is in the children's type
  Rule rule;
  float eps;
  const void *norm_weight, *norm_bias;  // [C * E], in the children's type; or null
};

struct PassArgs : Cut, ParentArgs {
  // who sees whom
  int D, N, I, G, H, W;
  Window window;
  int64_t positions;         // B * Ho * Wo
  int64_t launched;          // those of this launch: all, or those of one colour (see Position)
  int colours_y, colours_x;  // positions (y, x) with y mod colours_y = colour_y, ...
  int colour_y, colour_x;
  Divider by_sample, by_row;                    // launched positions of a sample, and of one of its rows
  Divider by_types, by_kernel_width, by_group;  // N, kw, I / G
  bool padded;

  // tensors; strides in elements
  View children, query, gate;  // query, gate: data may be null
  bool children_copy;          // children can be copied in vectors of the pose's kVector values
  const void* weight;          // [G, M, D, E], in the children's type; null: votes are the children themselves
  const float* bias;           // [I or 1, M or 1, C, E] or null
  int64_t bias_stride_i, bias_stride_m;
  float scale;

  // this launch
  int tiles, groups;                             // block (group, chunk) takes tiles group, group + groups, ...
  int first_parent;                              // of the first block along y
  Divider by_chunk, by_tile, by_rows, by_depth;  // chunks; tile; padded rows; vectors of a row

  // If parents do not fit into a block: the statistics of the softmax over all of them, [positions, I, 2 or 3] in the
  // order of the walk. collect: how many places for blocks along y a launch has that computes them; 0: the launch reads
  // them.
  float* statistics;
  int collect;

  // Pointers from here on are null if not wanted. [..] stands for [chunks, positions, M], [.., C, E] for poses; inputs
  // have no chunks. All values are float.
  float* sums;  // attention and pooling, forward: [.., C, E]; attention, all iterations: those instead of chunks

  bool normalize;    // pooling: keys are the votes' directions
  bool rounds;       // backward: votes are of factors that this kernel must round to tf32
  bool detach;       // coefficients are constants: no gradient flows through them
  float* logsumexp;  // pooling, forward: [..]; backward: given

  // Gaussian. Betas are [I or 1, M or 1].
  const float *mean, *variance, *log_weight;
  BetaTables betas;
  float *counts, *evidence;        // forward: [..]; backward: counts are given
  float *base, *offsets, *spread;  // forward, in parts: see GaussianForward; base where there is no mean
  float *means, *variances;        // iterations in this launch: [.., C, E]; backward: given

  // All iterations in this launch: results (sums or history, log-sum-exp; counts, means, variances, evidence) lie one
  // after the other. See iterations.h and gaussian_forward.cu.
  int iterations;                             // 0: one, which other kernels finish
  bool lean;                                  // this launch may walk lean: see LeanCall
  int zero;                                   // 0: see unknown_zero
  void* history;                              // pooling: the sums, in the children's type
  void* result;                               // attention, pooling: the last parents, in the children's type
  const float *cost_of_numbers, *activation;  // EM routing: [M]
  float *score, *last_mean, *last_variance;   // Gaussian: the last parents
  float temperatures[kMostIterations];        // EM routing: inverse temperatures

  // backward
  const float* dsums;      // attention, pooling: dL/dS [.., C, E]; Gaussian: u (gaussian_backward.cu)
  const float* dsquares;   // Gaussian: s
  const float* dconstant;  // pooling, Gaussian: the terms of t that no vote changes, [..]
  const float* devidence;  // Gaussian: [..]
  // Gaussian: dsums and dsquares, in a launch that only corrects them (gaussian_backward.cu); or null
  float *measured, *measured_squares;
  // [positions], not 0 where a parent is tight: only those tiles are measured, and they are not walked lean; or null
  const float* tight;
  float* dquery;          // [.., C, E]; Gaussian: of the mean
  float* dvariance;       // [.., C, E]
  float* dlog_weight;     // [..]
  float *duse, *dignore;  // [parts, I, M], or [..] where all children have the same betas
  float* dchildren;       // [parts, B, H, W, N, C, D], where blocks along y have a part each (cells_part), or [B, ..]
  float* dgate;           // [parts, B, H, W, N] or [B, ..]
  float* dweight;         // [parts, G, M, D, E]
  float* dbias;           // [parts, I or at most kSharedSums, M, C, E]
  int64_t dweight_part, dbias_part, dbeta_part, cells_part;  // from part to part; 0 if all blocks add to one
  bool alone_with_children, alone_with_weights;  // no other block adds to the same values meanwhile: no atomics
};

// A lean walk leaves out what most calls do not have, so that its loop has no branch. What that is depends on the
// policy: attention has neither bias nor gates, and one iteration; Gaussians have gates, a bias that all children
// share, and any number of iterations. One group: all children share their matrices; own: every child has its own.
struct LeanCall {
  bool weights, one_group, bias, own_bias, own_betas, gates, padded, query;
  int iterations, parent_blocks;
};

// One instantiation of the kernels, as the host that cuts the call sees it.
struct PassKernel {
  int C, D, E;  // the pose; 0: any
  int patch_rows, patch_columns;
  int columns, parents;  // lanes; 0: chosen at the launch
  int each;              // parents of a lane
  int products;          // tensor-core products that make one product; 0: none
  bool stored;           // reads half precision as it is
  bool rounded;          // takes weights that are rounded to tf32
  int vector;            // values of a child's row that are copied together
  int child_stride;      // from child to child in shared memory, in floats; 0: any
  int weight_stride;     // from parent to parent; 0: weights are read in place
  int group_stride;      // from a lane's parent to its next one
  int slot_stride;       // backward: from parent to parent in the warps' parts of dW
  int positions;         // R
  int threads, blocks;   // of a block, at most; of a multiprocessor, at least
  bool by_name;          // only where an experiment names it
  // Lean: see LeanCall. Gaussians have it for several iterations.
  bool lean, lean_takes_padding, lean_gaussian;
  bool takes_lean(const LeanCall& c) const {
    const bool kept = weight_stride > 0 || c.one_group;  // else matrices would be read in place for every child
    const bool simple =
        lean_gaussian ? !c.own_bias && !c.own_betas && kept : !c.bias && !c.gates && c.query && c.iterations == 0;
    return lean && simple && c.weights && c.parent_blocks == 1 && (lean_takes_padding || !c.padded);
  }
  void (*run)(const PassArgs);
  void (*run_lean)(const PassArgs);  // `run`, if that has a lean walk (PassArgs::lean)
};

struct PassKernels {
  const PassKernel* begin;
  int count;
};

// A pass: its kernels in both directions, and what a schedule must know of its policies. The table is in schedule.cu.
struct Pass {
  const char* op;  // "attention", ...
  PassKernels (*forward)(), (*backward)();
  bool parents_compete;  // warps exchange their softmax; blocks too, over several launches
  bool collects_gates;   // backward: the block adds up its parents' parts of a gate's gradient

  PassKernels kernels(bool of_backward) const { return of_backward ? backward() : forward(); }
};

// By the op's name; null if there is no such pass.
const Pass* pass_of(const std::string& op);

}  // namespace fastcaps::gpu
