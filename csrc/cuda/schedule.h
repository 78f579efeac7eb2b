// How a call is cut into blocks: which kernel, how many warps on parents and on positions, how many children at a time.
#pragma once

#include <string>

#include "pass.h"

namespace fastcaps::gpu {

struct Machine {
  int64_t multiprocessors, shared_limit;
};

// The gradient of a bias (and of betas), if it is wanted: its numbers, and whether all children have the same.
struct Bias {
  int64_t numbers = 0;
  bool shared = false;

  static Bias of(const Votes& v, bool shared) { return {(shared ? kSharedSums : v.I) * v.parents_size(), shared}; }
};

struct Schedule : Cut {
  const PassKernel* kernel;
  int warps_positions;
  int64_t tiles, groups;
  int parent_blocks;  // more than one: the softmax takes launches of its own
  double cost;        // how long it takes, about: a warp's trip through one child is 1
  int64_t shared_bytes;
  int carveout;  // percent of a multiprocessor's memory that the blocks there share

  int threads() const { return 32 * warps_parents * warps_positions; }
};

// Why no kernel takes these poses; empty if one does.
std::string refusal(const Pass& pass, int64_t C, int64_t D, int64_t E, bool identity);

// Whether the kernels can count a call's children, parents and places: in 30 bits each.
bool fits_30_bits(const Votes& v);

// What a call is, beside its votes.
struct Task {
  const Pass* pass;
  bool backward = false;
  int products = 0;  // of tf32 that one product may be made of (see tensor.h); 0: no number may be rounded
  // Backward: gradients must not be added to by many blocks at once, at the price of fewer blocks.
  bool ordered = false;
  bool identity = false;  // votes are the children: there are no weights
  bool whole = false;     // children must not be split over blocks
};

// No kernel if the poses do not fit (see refusal), or `fits_30_bits` says no. `bias`: its gradient is wanted too, if it
// has numbers.
Schedule make_schedule(const Task& task, const Votes& v, const Bias& bias, const Machine& machine);

// Why not all iterations of a routing should run in one launch; empty if they should. A block then holds all parents of
// its positions (where they compete) and sees all their children.
std::string routing_refusal(Task task, const Votes& v, const Machine& machine);

}  // namespace fastcaps::gpu
