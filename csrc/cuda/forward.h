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

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Begins a walk over the children of a tile of positions: makes their offsets, and starts copying the first stages. The
// tile must be there, after a barrier, and nobody may still read the ring.
template <bool LEAN, class Pose, int R>
FASTCAPS_DEVICE void begin_walk(const Lane<Pose, R>& lane, const ChildRange& range) {
  const PassArgs& args = lane.args;
  make_offsets(args, lane.shared, range, range.first, args.stages * args.stage);
  barrier();
  for (int slot = 0; slot + 1 < args.stages; ++slot) {
    bring<LEAN>(lane, range, slot, range.first + slot * args.stage);
    copy_commit();
  }
}

// Walks over the children stage by stage: calls body(slot, t, count) when `count` of them, from the t-th on, are in the
// slot-th stage of the ring, and all threads have left the stage before. One barrier a stage; none after the last.
template <bool SILENCES, bool LEAN, class Pose, int R, class Body>
FASTCAPS_DEVICE void walk(const Lane<Pose, R>& lane, const ChildRange& range, Body&& body) {
  const PassArgs& args = lane.args;
  int slot = 0, before = args.stages - 1;
  for (int t = range.first; t < range.last; t += args.stage) {
    if (args.stages == kMostStages)
      copy_wait<kMostStages - 2>();
    else
      copy_wait<0>();
    barrier();
    const int next = t + (args.stages - 1) * args.stage;
    bring<LEAN>(lane, range, before, next);
    copy_commit();
    make_offsets(args, lane.shared, range, next + args.stage, args.stage);
    const int count = range.last - t < args.stage ? range.last - t : args.stage;
    if constexpr (!Pose::kStored) {
      if (args.storage != Storage::kFloat32) {
        widen(lane, slot, count);
        barrier();
      }
    }
    if constexpr (SILENCES && !LEAN) {
      if (args.gate.data) {
        silence(lane, slot, count);
        barrier();
      }
    }
    body(slot, t, count);
    before = slot;
    slot = slot + 1 == args.stages ? 0 : slot + 1;
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
    barrier();
    begin_walk<LEAN>(lane, range);
    State state(lane);
    for (int iteration = 0;; ++iteration) {
      walk<State::kSilences, LEAN>(lane, range, [&](int slot, int t, int count) {
        Stage<Pose> stage(args, lane.shared, slot, t);
        constexpr bool kHeld = LEAN && kHolds<Pose>;
        [[maybe_unused]] float matrices[kHeld ? Pose::kEach : 1][kHeld ? Pose::kD : 1][Pose::kPatchColumns];
        if constexpr (kHeld) load_matrices(lane, stage, matrices);
        FASTCAPS_NO_UNROLL
        for (int k = 0; k < count; ++k) {
          const Stage<Pose> now = stage;
          Patches<Pose, R> votes;
          if constexpr (kHeld) {
            FASTCAPS_UNROLL
            for (int r = 0; r < R; ++r) {
              Rows<Pose> rows;
              load_rows(lane, now, r, rows);
              multiply<Pose>(rows, matrices, votes[r]);
            }
          } else {
            make_votes<LEAN, State::kIdentity>(lane, now, votes);
          }
          if (!kHeld || k + 1 < count) stage.next(lane);
          if constexpr (kHeld) load_matrices(lane, stage, matrices);
          Numbers<Pose, R> coefficient;
          if (state.score(now, votes, coefficient)) state.add(now, votes, coefficient);
        }
      });
      barrier();  // the ring is read to the end
      if (LEAN || args.iterations == 0) break;
      state.finish(iteration);
      if (iteration + 1 == args.iterations) break;
      begin_walk<LEAN>(lane, range);
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
    k.weight_stride = Pose::kWeightStride, k.group_stride = Pose::kGroupStride, k.slot_stride = Pose::kSlotStride,
    k.positions = R, k.threads = THREADS, k.blocks = BLOCKS;
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
