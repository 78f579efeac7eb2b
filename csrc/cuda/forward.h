// The walk of every pass, forward. A block goes through tiles of positions and, in each, through a range of children. A
// policy says what happens to a vote: a struct template Policy<Pose, R, LEAN> of what a lane keeps for its R x kEach
// parents, with
//   kSilences      whether broken children behind a gate of 0 are zeroed where they are staged
//   kIdentity      whether there may be no weights
//   a constructor  before the first child
//   score          one child's coefficients; false where only statistics are collected
//   add            what its votes add to the sums
//   store          after the last child
//   finish         instead of store, if the launch makes all iterations: keeps the results of one
#pragma once

#include "make_votes.h"

namespace fastcaps::gpu {

constexpr float kLog2E = 1.4426950408889634f;

// A block's range of children, and its share of the tiles.
struct ChildRange {
  int group, chunk, first, last;

  FASTCAPS_DEVICE explicit ChildRange(const PassArgs& args) {
    group = args.by_chunk.quotient(int(block_x())), chunk = args.by_chunk.remainder(int(block_x()), group);
    first = chunk * args.chunk_children,
    last = first + args.chunk_children < args.I ? first + args.chunk_children : args.I;
  }
};

// Walks over the children of a tile of positions, stage by stage: calls body(parity, t, count) when `count` of them,
// from the t-th on, are in stage `parity` of shared memory. body ends with a barrier. Another must lie between making
// the tile and the first offsets and this call.
template <bool SILENCES, class Pose, int R, class Body>
FASTCAPS_DEVICE void walk(const Lane<Pose, R>& lane, const ChildRange& range, Body&& body) {
  const PassArgs& args = lane.args;
  // The first round only loads the first stage.
  for (int t = range.first - args.stage, parity = 1; t < range.last; t += args.stage, parity ^= 1) {
    bring(lane, parity ^ 1, t + args.stage, range.last);
    copy_commit();
    if (t < range.first) {
      barrier();  // before the next offsets are read
      continue;
    }
    copy_wait<1>();
    barrier();
    const int count = range.last - t < args.stage ? range.last - t : args.stage;
    if constexpr (!Pose::kStored) {
      if (args.storage != Storage::kFloat32) {
        widen(lane, parity, count);
        barrier();
      }
    }
    if constexpr (SILENCES) {
      if (args.gate.data) {
        silence(lane, parity, count);
        barrier();
      }
    }
    body(parity, t, count);
  }
}

template <template <class, int, bool> class Policy, class Pose, int R, bool LEAN, int THREADS, int BLOCKS>
FASTCAPS_KERNEL(THREADS, BLOCKS)
forward_kernel(const FASTCAPS_CONSTANT PassArgs args) {
  using State = Policy<Pose, R, LEAN>;
  const Lane<Pose, R> lane(args);
  const ChildRange range(args);
  for (int tile = range.group; tile < args.tiles; tile += args.groups) {
    make_tile(args, tile, lane.shared);
    make_offsets(args, lane.shared, 0, range.first, range.last);
    barrier();
    State state(lane);
    for (int iteration = 0;; ++iteration) {
      walk<State::kSilences>(lane, range, [&](int parity, int t, int count) {
        Stage<Pose> stage(args, lane.shared, parity, t);
        FASTCAPS_NO_UNROLL
        for (int k = 0; k < count; ++k) {
          Patches<Pose, R> votes;
          make_votes<LEAN, State::kIdentity>(lane, stage, votes);
          Numbers<Pose, R> coefficient;
          if (state.score(stage, votes, coefficient)) state.add(stage, votes, coefficient);
          stage.next(lane);
        }
        barrier();
      });
      if (LEAN || args.iterations == 0) break;
      state.finish(iteration);
      if (iteration + 1 == args.iterations) break;
      make_offsets(args, lane.shared, 0, range.first, range.last);
      barrier();
    }
    if (!LEAN && args.collect) continue;
    if (LEAN || args.iterations == 0) state.store(range.chunk);
    barrier();  // the tile is read to the end
  }
}

// What a kernel is compiled for: a pose, positions of a lane, threads of a block and blocks of a multiprocessor.
template <class Pose_, int R = 1, int THREADS = 256, int BLOCKS = 1>
struct Built {
  using Pose = Pose_;
  static constexpr int kPositions = R, kThreads = THREADS, kBlocks = BLOCKS;

  // As the host sees it, with a kernel for all calls and a lean one.
  static PassKernel kernel(void (*run)(const PassArgs), void (*run_lean)(const PassArgs)) {
    PassKernel k{};
    k.C = Pose::kC, k.D = Pose::kD, k.E = Pose::kE, k.patch_rows = Pose::kPatchRows,
    k.patch_columns = Pose::kPatchColumns;
    k.columns = Pose::kColumns, k.parents = Pose::kParents, k.each = Pose::kEach, k.products = Pose::kProducts,
    k.stored = Pose::kStored;
    k.vector = Pose::kVector, k.child_stride = Pose::kC * Pose::kRowStride + Pose::kChildPad;
    k.weight_stride = Pose::kWeightStride, k.positions = R, k.threads = THREADS, k.blocks = BLOCKS;
    k.run = run, k.run_lean = run_lean;
    return k;
  }
};

// One that a schedule takes only where it is named (see PassKernel).
template <class Pose, int R = 1, int THREADS = 256, int BLOCKS = 1>
struct Named : Built<Pose, R, THREADS, BLOCKS> {
  static PassKernel kernel(void (*run)(const PassArgs), void (*run_lean)(const PassArgs)) {
    PassKernel k = Built<Pose, R, THREADS, BLOCKS>::kernel(run, run_lean);
    k.by_name = true;
    return k;
  }
};

// HAS_LEAN: there are lean kernels.
template <template <class, int, bool> class Policy, bool HAS_LEAN, class... B>
PassKernels forward_kernels() {
  static const PassKernel all[] = {
      B::kernel(&forward_kernel<Policy, typename B::Pose, B::kPositions, false, B::kThreads, B::kBlocks>,
                &forward_kernel<Policy, typename B::Pose, B::kPositions, HAS_LEAN, B::kThreads, B::kBlocks>)...};
  return {all, sizeof...(B)};
}

}  // namespace fastcaps::gpu
