// How a call is cut into blocks: which kernel, how many warps on parents and on positions, how many children at a time.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "pass.h"

namespace fastcaps::gpu {

struct Machine {
  int64_t multiprocessors, shared_limit;
};

// The gradient of a bias (and of betas), if it is wanted: its size, and whether all children share the bias.
struct Bias {
  int64_t numbers = 0;
  bool shared = false;

  static Bias of(const Votes& v, bool shared) {
    return {(shared ? std::min<int64_t>(kSharedSums, v.I) : v.I) * v.parents_size(), shared};
  }
};

struct Schedule : Cut {
  const PassKernel* kernel;
  int warps_positions;
  int64_t tiles, groups;
  int parent_blocks;  // more than one: the softmax takes separate launches
  double cost;        // estimated time; a warp takes 1 for one child
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
  int products = 0;  // tf32 products that make one product (tensor.h); 0: nothing may be rounded
  // Backward: gradients are summed in a fixed order, at the price of fewer blocks.
  bool ordered = false;
  bool identity = false;  // votes are the children: there are no weights
  bool whole = false;     // children must not be split over blocks

  // By the bits of `options`. Half-precision values lose nothing by rounding; the backward also rounds the gradients of
  // votes, to as many digits as float16 has.
  static Task of(const Pass* pass, bool backward, int64_t options, Storage storage, bool identity) {
    const int products = storage != Storage::kFloat32 ? 1 : !(options & kTf32) ? 0 : options & kTf32x3 ? 3 : 1;
    return {pass, backward, products, (options & kDeterministic) != 0, identity};
  }
};

// What an experiment prescribes; an empty name and 0 leave the choice to the schedule.
struct Choice {
  std::string_view kernel{};  // see name_of_instance
  int warps_parents = 0, warps_positions = 0, stage = 0, chunks = 0, groups = 0;
};

// What a kernel is compiled for, beside the pose: lanes that take other parents x parents of a lane x its positions -
// threads of a block x blocks of a multiprocessor, as "8x4x1-256x1". A free pose has "any" and its patch in front; and
// kernels with tensor cores end with "-tf32" or "-3xtf32".
std::string name_of_instance(const PassKernel& kernel);

// Whether a kernel can take a call, with whatever schedule.
bool takes(const PassKernel& kernel, const Votes& v, const Task& task);

// Whether the kernel of a call's forward rounds float32 to tf32. The backward must make the same votes.
bool forward_rounds(Task task, const Votes& v);

// Without a kernel if the poses do not fit (see refusal), or if `fits_30_bits` is false; or, in builds for experiments,
// if it cannot be as the environment wants it, of which `why_not` then tells. `bias`: the bias gradient; empty if it is
// not wanted. A thread keeps up to 256 schedules, then begins anew.
Schedule make_schedule(const Task& task, const Votes& v, const Bias& bias, const Machine& machine,
                       std::string* why_not = nullptr);

// Why not all iterations of a routing should run in one launch; empty if they should. A block then holds all parents of
// its positions (where they compete) and sees all their children.
std::string routing_refusal(Task task, const Votes& v, const Machine& machine);

}  // namespace fastcaps::gpu
