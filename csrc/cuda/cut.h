// How a call is cut into blocks: which kernel, how many warps on parents and on positions, how many children at a time.
#pragma once

#include <string>

#include "pass.h"

namespace fastcaps::gpu {

struct Machine {
  int64_t multiprocessors, shared_limit;
};

// A bias's gradient, if it is wanted: its numbers, and whether all children have the same.
struct Bias {
  int64_t numbers = 0;
  bool shared = false;
};

struct Cut {
  const PassKernel* kernel = nullptr;
  int columns, rows;  // lanes
  int parents;        // of a warp
  int warps_parents, warps_positions;
  int tile;  // positions of a block at a time
  int64_t tiles, groups;
  int parent_blocks;  // more than one: the softmax takes launches of its own
  int stage, chunks, chunk_children;
  bool parts_by_chunk = false;  // parts of dW: one for each group and chunk, not for each group
  int64_t shared_bytes;
  int shared_weight, shared_seen, shared_stage, shared_seat, shared_offset, shared_exchange, shared_dchildren,
      shared_dweight;

  int threads() const { return 32 * warps_parents * warps_positions; }
};

// Why no kernel takes these poses; empty if one does.
std::string refusal(int64_t C, int64_t D, int64_t E);

// No kernel if the poses do not fit (see refusal). The backward kernel adds to gradients from many blocks at once;
// `ordered` forbids that, at the price of fewer blocks. `tensor`: products may be rounded to tf32; `bias`: its gradient
// is wanted too; `bias_shared`: and all children have the same.
Cut cut(const Geometry& g, bool backward, bool tensor, bool ordered, const Bias& bias, const Machine& machine);

// One line for people: kernel, tile, blocks.
std::string describe(const Cut& cut);

}  // namespace fastcaps::gpu
