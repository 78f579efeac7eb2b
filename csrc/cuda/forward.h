// The walk of every pass, forward. A block goes through tiles of positions and, in each, through a range of children. A
// policy says what happens to a vote: a struct template Policy<Pose, R, LEAN> of what a lane keeps for its R x kEach
// parents, with
//   a constructor, which gives every value a beginning (others would take registers in a lean loop before it)
//   load    what the parents have, while the first children are on their way
//   score   one child's coefficients; false where only statistics are collected
//   add     what its votes add to the sums
//   store   after the last child
//   finish  instead of store, if the launch makes all iterations: keeps the results of one
#pragma once

#include "make_votes.h"
#include "softmax.h"

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
// BACKWARD: children are rounded as a forward on tensor cores rounds them, and broken ones behind a gate of 0 are
// zeroed.
template <bool BACKWARD, bool LEAN, class Pose, int R, class Body>
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
    if constexpr (BACKWARD && Pose::kProducts == 0) {
      if (args.rounds) {
        round_children(lane, slot, count);
        barrier();
      }
    }
    if constexpr (BACKWARD && !LEAN) {
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

// A lean walk (see PassKernel) has no branch in its loop: totals that are out of range are only noted, and then the
// tile is walked over again, with all options, and so are all later tiles of the block. It takes absent children for
// zeros; if these make a NaN, with weights that are not finite, the total is lost, too. A lean policy has a constructor
// before the first child; score(r, votes, weight), an exponential, and add(r, votes, weight, total), for one of the
// lane's positions; lost(); and store.
//
// Rounds: a lane goes through its positions, child after child, and while the parents compete for one position's votes,
// it makes the next one's. So it always has something to do, though a competition is one long chain of an exponential,
// exchanges between lanes and a reciprocal. For poses whose lanes have registers for the votes of two rounds, and for a
// child's matrices.
template <class Pose, int R>
constexpr bool kRounds = Pose::kFixed && Pose::kProducts == 0 && Pose::kWeightStride > 0 && (R == 1 || R % 2 == 0) &&
                         Pose::kEach* Pose::kPatchColumns*(Pose::kPatchRows * (2 * R + 2) + Pose::kD) <= 224;

// x, but not before y is known: a compiler would put off what makes y. zero: an argument that is 0.
FASTCAPS_DEVICE float tied(float x, float y, int zero) {
  return bits_float(float_bits(x) | (float_bits(y) & uint32_t(zero)));
}

template <class Pose, int R>
FASTCAPS_DEVICE float total_of(const Lane<Pose, R>& lane, const float (&weights)[Pose::kEach]) {
  float total = weights[0];
  FASTCAPS_UNROLL
  for (int p = 1; p < Pose::kEach; ++p) total += weights[p];
  return lane.sum_parents(total);
}

template <class Pose, int R, class State>
FASTCAPS_DEVICE void walk_in_rounds(const Lane<Pose, R>& lane, const ChildRange& range, State& state) {
  constexpr int kEach = Pose::kEach;
  Patch<Pose> votes[2][kEach];  // of this round, and of the round before
  float weight[2][kEach];
  Matrices<Pose> matrices;
  const auto nothing = [&] {  // a round before that adds nothing
    FASTCAPS_UNROLL
    for (int p = 0; p < kEach; ++p) {
      weight[1][p] = 1.0f;
      each_number<Pose>([&](int i, int j) { votes[1][p][i][j] = 0.0f; });
    }
  };
  const auto round = [&](int now, int r, const float* child, auto&& meanwhile) {
    const int before = 1 - now;
    float total = total_of(lane, weight[before]);
    Rows<Pose> rows;
    load_rows(lane, child, rows);
    multiply<Pose>(rows, matrices, votes[now]);
    meanwhile();
    state.score(r, votes[now], weight[now]);
    FASTCAPS_UNROLL
    for (int p = 0; p < kEach; ++p) total = tied(total, weight[now][p], unknown_zero(lane.args));
    state.add((r + R - 1) % R, votes[before], weight[before], total);
  };
  nothing();
  walk<false, true>(lane, range, [&](int slot, int t, int count) {
    const Stage<Pose> stage(lane.args, lane.shared, slot, t);
    const float* child = child_row(lane, stage, 0, 0);  // these advance: anew, they would take instructions
    const float* matrix = stage.weight + lane.in_block(0) * Pose::kWeightStride;
    const auto advance = [&](bool more) {
      child += lane.args.tile_size * lane.child_stride();
      if (more) matrix += lane.block_parents() * Pose::kWeightStride;
      load_matrices(lane, matrix, matrices);
    };
    load_matrices(lane, matrix, matrices);
    FASTCAPS_NO_UNROLL
    for (int left = count; left > 0; left -= R == 1 ? 2 : 1) {
      if constexpr (R == 1) {  // two children
        round(0, 0, child, [&] { advance(left > 1); });
        if (left == 1) {
          state.add(0, votes[0], weight[0], total_of(lane, weight[0]));
          nothing();
          break;
        }
        round(1, 0, child, [&] { advance(left > 2); });
      } else {
        FASTCAPS_UNROLL
        for (int r = 0; r < R; ++r)
          round(r % 2, r, child + r * Pose::kPositions * lane.child_stride(), [&] {
            if (r + 1 == R) advance(left > 1);
          });
      }
    }
  });
  state.add(R - 1, votes[1], weight[1], total_of(lane, weight[1]));
}

// Without rounds: the votes of a child at all positions, then their competition. MEETS: between several warps.
template <bool MEETS, class Pose, int R, class State>
FASTCAPS_DEVICE void walk_by_child(const Lane<Pose, R>& lane, const ChildRange& range, State& state) {
  walk<false, true>(lane, range, [&](int slot, int t, int count) {
    Stage<Pose> stage(lane.args, lane.shared, slot, t);
    FASTCAPS_NO_UNROLL
    for (int left = count; left > 0; --left) {
      Patches<Pose, R> votes;
      Numbers<Pose, R> weight;
      float total[R];
      make_votes<true>(lane, stage, votes);
      FASTCAPS_UNROLL
      for (int r = 0; r < R; ++r) state.score(r, votes[r], weight[r]);
      FASTCAPS_UNROLL
      for (int r = 0; r < R; ++r) total[r] = total_of(lane, weight[r]);
      if constexpr (MEETS) meet(lane, stage.t & 1, total);
      FASTCAPS_UNROLL
      for (int r = 0; r < R; ++r) state.add(r, votes[r], weight[r], total[r]);
      stage.next(lane);
    }
  });
}

// Whether x is true in any thread of the block: a barrier. Another must lie between this and the next call.
FASTCAPS_DEVICE bool any_thread(const PassArgs& args, char* shared, bool x) {
  int* warps = reinterpret_cast<int*>(shared + args.shared_exchange);
  const bool any_of_warp = any_lane(x);
  if (thread_index() % kWarp == 0) warps[thread_index() / kWarp] = any_of_warp;
  barrier();
  bool any = false;
  for (int w = 0; w < block_threads() / kWarp; ++w) any = any || warps[w] != 0;
  return any;
}

// Returns false if a total was lost; else the sums are stored.
template <class State, class Pose, int R>
FASTCAPS_DEVICE bool walk_lean(const Lane<Pose, R>& lane, const ChildRange& range, int tile) {
  make_tile(lane.args, tile, lane.shared);
  barrier();
  begin_walk<true>(lane, range);
  State state(lane);
  if (lane.args.warps_parents > 1) {
    walk_by_child<true>(lane, range, state);
    barrier();  // what warps exchange is read to the end
  } else if constexpr (kRounds<Pose, R>) {
    walk_in_rounds(lane, range, state);
  } else {
    walk_by_child<false>(lane, range, state);
  }
  if (any_thread(lane.args, lane.shared, state.lost())) return false;
  state.store(range.chunk);
  barrier();  // the tile is read to the end
  return true;
}

// All iterations of a tile, with all options.
template <class State, class Pose, int R>
FASTCAPS_DEVICE void walk_forward(const Lane<Pose, R>& lane, const ChildRange& range, int tile) {
  const PassArgs& args = lane.args;
  make_tile(args, tile, lane.shared);
  barrier();
  State state(lane);
  for (int iteration = 0; iteration == 0 || iteration < args.iterations; ++iteration) {
    begin_walk<false>(lane, range);
    if (iteration == 0) state.load();
    walk<false, false>(lane, range, [&](int slot, int t, int count) {
      Stage<Pose> stage(args, lane.shared, slot, t);
      FASTCAPS_NO_UNROLL
      for (int k = 0; k < count; ++k) {
        Patches<Pose, R> votes;
        make_votes<false>(lane, stage, votes);
        Numbers<Pose, R> coefficient;
        if (state.score(stage, votes, coefficient)) state.add(stage, votes, coefficient);
        stage.next(lane);
      }
    });
    barrier();  // the ring is read to the end
    if (args.iterations > 0) state.finish(iteration);
  }
  if (!args.collect && args.iterations == 0) state.store(range.chunk);
  barrier();  // the tile is read to the end
}

// LEAN: the policy has a lean walk, too. From the first tile on where a total is lost, a block goes on with all
// options.
template <template <class, int, bool> class Policy, class Pose, int R, bool LEAN, int THREADS, int BLOCKS>
FASTCAPS_KERNEL(THREADS, BLOCKS)
forward_kernel(const FASTCAPS_CONSTANT PassArgs args) {
  const Lane<Pose, R> lane(args);
  const ChildRange range(args);
  int tile = range.group;
  if constexpr (LEAN)
    for (; args.lean && tile < args.tiles; tile += args.groups)
      if (!walk_lean<Policy<Pose, R, true>>(lane, range, tile)) break;
  for (; tile < args.tiles; tile += args.groups) walk_forward<Policy<Pose, R, false>>(lane, range, tile);
}

// What a kernel is compiled for: a pose, positions of a lane, threads of a block and blocks of a multiprocessor.
// BY_NAME: see PassKernel.
template <class Pose_, int R = 1, int THREADS = 256, int BLOCKS = 1, bool BY_NAME = false>
struct Built {
  using Pose = Pose_;
  static constexpr int kPositions = R, kThreads = THREADS, kBlocks = BLOCKS;

  // As the host sees it, with a kernel for all calls and one that can walk lean: of a forward the same.
  static PassKernel kernel(void (*run)(const PassArgs), void (*run_lean)(const PassArgs)) {
    PassKernel k{};
    k.C = Pose::kC, k.D = Pose::kD, k.E = Pose::kE, k.patch_rows = Pose::kPatchRows,
    k.patch_columns = Pose::kPatchColumns;
    k.columns = Pose::kColumns, k.parents = Pose::kParents, k.each = Pose::kEach, k.products = Pose::kProducts,
    k.stored = Pose::kStored, k.rounded = Pose::kRounded;
    k.vector = Pose::kVector, k.child_stride = Pose::kC * Pose::kRowStride + Pose::kChildPad;
    k.weight_stride = Pose::kWeightStride, k.group_stride = Pose::kGroupStride, k.slot_stride = Pose::kSlotStride,
    k.positions = R, k.threads = THREADS, k.blocks = BLOCKS, k.by_name = BY_NAME;
    k.run = run, k.run_lean = run_lean, k.lean = run != run_lean;
    return k;
  }
};
template <class Pose, int R = 1, int THREADS = 256, int BLOCKS = 1>
using Named = Built<Pose, R, THREADS, BLOCKS, true>;

// HAS_LEAN: poses of known size have a lean walk, too.
template <template <class, int, bool> class Policy, class B, bool LEAN>
PassKernel forward_kernel_of() {
  const auto run = &forward_kernel<Policy, typename B::Pose, B::kPositions, LEAN, B::kThreads, B::kBlocks>;
  PassKernel kernel = B::kernel(run, run);
  kernel.lean = kernel.lean_takes_padding = LEAN;
  return kernel;
}
template <template <class, int, bool> class Policy, bool HAS_LEAN, class... B>
PassKernels forward_kernels() {
  static const PassKernel all[] = {forward_kernel_of<Policy, B, (HAS_LEAN && B::Pose::kFixed)>()...};
  return {all, sizeof...(B)};
}

}  // namespace fastcaps::gpu
