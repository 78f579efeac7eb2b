// The walk of every pass, forward. A block goes through tiles of positions and, in each, through a range of children;
// what becomes of a vote is the policy's, a struct template Policy<Pose, R, PLAIN> of what a lane keeps for its R x
// kEach parents, with
//   kSilences                                           whether broken children behind a gate of 0 are zeroed where
//   they are staged kIdentity                                           whether there may be no weights load(a, lane,
//   seats)                                before the first child score(a, lane, stage, seats, shared, votes, share) one
//   child's shares; false where only statistics are collected add(a, lane, stage, votes, share)                   what
//   its votes add to the sums store(a, lane, seats, chunk)                        behind the last finish(a, lane,
//   seats, turn)                        instead, where turns are in this launch: keep one's results
#pragma once

#include "make_votes.h"

namespace fastcaps::gpu {

constexpr float kLog2E = 1.4426950408889634f;

// A block's range of children, and its share of the tiles.
struct ChildRange {
  int group, chunk, first, last;

  FASTCAPS_DEVICE explicit ChildRange(const PassArgs& a) {
    group = a.by_chunk.quotient(int(block_x())), chunk = a.by_chunk.remainder(int(block_x()), group);
    first = chunk * a.chunk_children, last = first + a.chunk_children < a.I ? first + a.chunk_children : a.I;
  }
};

// The children of a tile of positions, a stage after the other: body(which, t, count) has `count` of them, from the
// t-th on, in one of the two stages of shared memory. It ends with a barrier. The seats and the first offsets must be
// there, behind a barrier.
template <class State, class Pose, class Body>
FASTCAPS_DEVICE void walk(const PassArgs& a, char* shared, const ChildRange& range, Body&& body) {
  // One turn before the first child only brings it in.
  for (int t = range.first - a.stage, which = 1; t < range.last; t += a.stage, which ^= 1) {
    Stage<Pose>::bring(a, shared, which ^ 1, t + a.stage, range.last);
    copy_commit();
    if (t < range.first) {
      barrier();  // before the next offsets are read
      continue;
    }
    copy_wait<1>();
    barrier();
    const int count = range.last - t < a.stage ? range.last - t : a.stage;
    if constexpr (!Pose::kStored) {
      if (a.storage != Storage::kFloat32) {
        Stage<Pose>::widen(a, shared, which, count);
        barrier();
      }
    }
    if constexpr (State::kSilences) {
      if (a.gate.data) {
        Stage<Pose>::silence(a, shared, which, count);
        barrier();
      }
    }
    body(which, t, count);
  }
}

template <template <class, int, bool> class Policy, class Pose, int R, bool PLAIN, int THREADS, int BLOCKS>
FASTCAPS_KERNEL(THREADS, BLOCKS)
forward_kernel(const FASTCAPS_CONSTANT PassArgs a) {
  char* shared = shared_memory();
  const Seat* seats = reinterpret_cast<const Seat*>(shared + a.shared_seat);
  const Lane<Pose> lane(a);
  const ChildRange range(a);
  for (int tile = range.group; tile < a.tiles; tile += a.groups) {
    make_seats(a, tile, shared);
    make_offsets(a, shared, 0, range.first, range.last);
    barrier();
    Policy<Pose, R, PLAIN> state;
    state.load(a, lane, seats);
    for (int turn = 0;; ++turn) {
      walk<Policy<Pose, R, PLAIN>, Pose>(a, shared, range, [&](int which, int t, int count) {
        Stage<Pose> stage(a, shared, which, t);
        FASTCAPS_NO_UNROLL
        for (int k = 0; k < count; ++k) {
          Patches<Pose, R> votes;
          make_votes<Pose, R, PLAIN, Policy<Pose, R, PLAIN>::kIdentity>(a, lane, stage, votes);
          float share[R][Pose::kEach];
          if (state.score(a, lane, stage, seats, shared, votes, share)) state.add(a, lane, stage, votes, share);
          stage.next(a);
        }
        barrier();
      });
      if (PLAIN || a.turns == 0) break;
      if constexpr (!PLAIN) state.finish(a, lane, seats, turn);
      if (turn + 1 == a.turns) break;
      make_offsets(a, shared, 0, range.first, range.last);
      barrier();
    }
    if (!PLAIN && a.collect) continue;
    if (PLAIN || a.turns == 0) state.store(a, lane, seats, range.chunk);
    barrier();  // the seats are read to the end
  }
}

// What a kernel is compiled for: a pose, positions of a lane, threads of a block and blocks of a multiprocessor.
template <class Pose_, int R = 1, int THREADS = 256, int BLOCKS = 1>
struct Built {
  using Pose = Pose_;
  static constexpr int kPositions = R, kThreads = THREADS, kBlocks = BLOCKS;

  // As the host sees it, with a kernel for all calls and one for plain ones.
  static PassKernel kernel(void (*run)(const PassArgs), void (*run_plain)(const PassArgs)) {
    PassKernel k{};
    k.C = Pose::kC, k.D = Pose::kD, k.E = Pose::kE, k.patch_rows = Pose::kPatchRows,
    k.patch_columns = Pose::kPatchColumns;
    k.columns = Pose::kColumns, k.parents = Pose::kParents, k.each = Pose::kEach, k.products = Pose::kProducts,
    k.stored = Pose::kStored;
    k.vector = Pose::kVector, k.weight_copy = Pose::kWeightCopy;
    k.child_stride = Pose::kC * Pose::kRowStride + Pose::kChildPad;
    k.weight_stride = Pose::kWeightStride, k.positions = R, k.threads = THREADS, k.blocks = BLOCKS;
    k.run = run, k.run_plain = run_plain;
    return k;
  }
};

// HAS_PLAIN: there are kernels for plain calls.
template <template <class, int, bool> class Policy, bool HAS_PLAIN, class... B>
PassKernels forward_kernels() {
  static const PassKernel all[] = {
      B::kernel(&forward_kernel<Policy, typename B::Pose, B::kPositions, false, B::kThreads, B::kBlocks>,
                &forward_kernel<Policy, typename B::Pose, B::kPositions, HAS_PLAIN, B::kThreads, B::kBlocks>)...};
  return {all, sizeof...(B)};
}

}  // namespace fastcaps::gpu
