// The verbs on the CPU: scores of pairs, weighted sums of votes, and the pull: gradients of children, weight and bias.
//
// A child's pose has C rows. A *flat* row holds the values of a tile of parents, [e][m] with m fastest, padded at the
// end to whole vectors. A row of votes is a row of the child times its matrices, packed as [D, flat].
#pragma once

#include "pass.h"

namespace fastcaps {

struct VerbCall {
  enum Kind { kDots, kDistances, kAdd, kAddCentred, kAddSquares, kPull, kPullSquared };

  Votes votes;
  Kind kind = kDots;
  int64_t tile = 1, tiles = 1;                 // parents of a tile, and how many tiles
  int64_t flat = 0, block = 1;                 // values of a flat row; children whose matrices are packed at once
  int64_t place_ranges = 1, child_ranges = 1;  // an item has one of each; of a pull, ranges of samples and child types
  View coefficients;                           // [B, Ho, Wo, I, M]
  const void *about = nullptr, *precisions = nullptr;  // targets or means: flat poses, or a single row (step 0)
  int64_t about_step = 0, precisions_step = 0;         // from row to row
  void* scores = nullptr;                              // [positions, I, M]
  void *sums = nullptr, *squares = nullptr;            // of every range of children, flat poses
  void* dchildren = nullptr;                           // [B, H, W, N, C, D], zeroed unless `once`
  Parts dweight, dbias;                                // zeroed

  int64_t pose_numbers() const { return votes.C * flat; }
  int64_t numbers() const {
    return tiles * votes.positions() * pose_numbers();
  }  // of flat poses, [tiles, positions, C, flat]
  int64_t items() const { return (kind < kPull ? tiles : 1) * place_ranges * child_ranges; }
  // Whether a pull makes votes.
  bool makes_votes() const { return kind == kPullSquared || scores || sums || squares; }
  // Whether a pull reaches each child once, and so stores its gradient instead of adding to it.
  bool once() const {
    const Window& w = votes.window;
    return tiles == 1 && w.kh * w.kw * w.sh * w.sw == 1 && w.ph == 0 && w.pw == 0;
  }
  // Whether items with different child types also have different matrices, and entries of the bias.
  bool own_weights() const { return votes.weight && votes.G % votes.N == 0; }
  bool own_bias() const { return votes.bias_stride_i != 0 || votes.I == 1; }
};

// Poses [B, Ho, Wo, M, C, E] made flat, or flat sums added up and written as such poses.
struct FlatPoses {
  const VerbCall& call;
  View from;
  void *to, *sums = nullptr;
};

struct VerbKernels {
  int lanes_float, lanes_double;
  void (*flatten)(const FlatPoses&, int64_t begin, int64_t end, void*);  // positions
  void (*gather)(const FlatPoses&, int64_t begin, int64_t end, void*);
  void (*walk)(const VerbCall&, int64_t begin, int64_t end, void* scratch);  // items
  int64_t (*scratch)(const VerbCall&);                                       // bytes
};

}  // namespace fastcaps
