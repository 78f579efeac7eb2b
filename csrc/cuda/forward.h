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

// A lean walk (see LeanCall) has no branch in its loop: totals that are out of range are only noted, and then the
// tile is walked over again, with all options, and so are all later tiles of the block. It takes absent children for
// zeros; if these make a NaN, with weights that are not finite, the total is lost, too. What a lean policy has, for one
// of the lane's positions:
//   Round   a child's votes and their weights
//   begin   what votes begin with, if that is not 0 (kBegins)
//   score   the weights, powers of two; seen: the child's gate
//   add     adds them to the sums; total: that of the weights of all parents
//   flush   after every stage
// kCompetes: there are totals; kRounds: whether a lane has registers for two rounds and for a child's matrices; kGates:
// it asks for gates. And then lost() and store.
//
// Rounds: a lane goes through its positions, child after child, and while the parents compete for one position's votes,
// it makes the next one's. So it always has something to do, though a competition is one long chain of an exponential,
// exchanges between lanes and a reciprocal.
//
// Large matrices (kLargeWeights) stay in registers for the whole walk, which is for calls where all children share
// them.
template <class Pose, int R>
constexpr bool kMayRound = Pose::kFixed && Pose::kProducts == 0 && (R == 1 || R % 2 == 0);

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

// MEETS: the parents compete between several warps.
template <bool MEETS, class Pose, int R, class State>
FASTCAPS_DEVICE void walk_in_rounds(const Lane<Pose, R>& lane, const ChildRange& range, State& state) {
  constexpr int kEach = Pose::kEach;
  constexpr bool kLoads = !kLargeWeights<Pose>;
  typename State::Round rounds[2];  // this one, and the one before
  Matrices<Pose> matrices;
  const auto total_over_lanes = [&](const auto& one) {
    if constexpr (State::kCompetes)
      return total_of(lane, one.weight);
    else
      return 1.0f;
  };
  const auto add = [&](int r, int parity, float one_total) {
    float total[1] = {one_total};
    if constexpr (MEETS) meet(lane, parity, total);
    state.add(r, rounds[parity], total[0]);
  };
  const float* matrix = nullptr;
  const auto round = [&](int now, int r, const float* child, const Seen* seen, auto&& meanwhile) {
    if constexpr (kLoads && !State::kLoadsAhead) load_matrices(lane, matrix, matrices);
    float total = total_over_lanes(rounds[1 - now]);
    Rows<Pose> rows;
    load_rows(lane, child, rows);
    if constexpr (State::kBegins) state.begin(r, rounds[now].votes);
    multiply<Pose, State::kBegins>(rows, matrices, rounds[now].votes);
    meanwhile();
    state.score(r, seen, rounds[now]);
    if constexpr (State::kCompetes) {
      FASTCAPS_UNROLL
      for (int p = 0; p < kEach; ++p) total = tied(total, rounds[now].weight[p], unknown_zero(lane.args));
    }
    add((r + R - 1) % R, 1 - now, total);
  };
  rounds[1].clear();  // a round before that adds nothing
  if constexpr (!kLoads)
    with_weights<Pose>(lane.args, [&](auto stored) {
      const Stage<Pose> first(lane.args, lane.shared, 0, range.first);
      FASTCAPS_UNROLL
      for (int p = 0; p < kEach; ++p) {
        FASTCAPS_UNROLL
        for (int d = 0; d < Pose::kD; ++d) Weights<Pose, R, stored()>(lane, first, p).row(d, matrices[p][d]);
      }
    });
  walk<false, !State::kGates>(lane, range, [&](int slot, int t, int count) {
    const Stage<Pose> stage(lane.args, lane.shared, slot, t);
    const float* child = child_row(lane, stage, 0, 0);  // these advance: anew, they would take instructions
    matrix = stage.weight + lane.in_block(0) * Pose::kWeightStride;
    const Seen* seen = stage.seen + lane.in_tile(0);
    const auto advance = [&](bool more) {
      child += lane.args.tile_size * lane.child_stride();
      seen += lane.args.tile_size;
      if (more || !State::kLoadsAhead) matrix += lane.matrices();
      if constexpr (kLoads && State::kLoadsAhead) load_matrices(lane, matrix, matrices);
    };
    if constexpr (kLoads && State::kLoadsAhead) load_matrices(lane, matrix, matrices);
    FASTCAPS_NO_UNROLL
    for (int left = count; left > 0; left -= R == 1 ? 2 : 1) {
      if constexpr (R == 1) {  // two children
        round(0, 0, child, seen, [&] { advance(left > 1); });
        if (left == 1) {
          add(0, 0, total_over_lanes(rounds[0]));
          rounds[1].clear();
          break;
        }
        round(1, 0, child, seen, [&] { advance(left > 2); });
      } else {
        FASTCAPS_UNROLL
        for (int r = 0; r < R; ++r)
          round(r % 2, r, child + r * Pose::kPositions * lane.child_stride(), seen + r * Pose::kPositions, [&] {
            if (r + 1 == R) advance(left > 1);
          });
      }
    }
    state.flush();
  });
  add(R - 1, 1, total_over_lanes(rounds[1]));
  state.flush();
}

// Without rounds: the votes of a child at all positions, then their competition.
template <bool MEETS, class Pose, int R, class State>
FASTCAPS_DEVICE void walk_by_child(const Lane<Pose, R>& lane, const ChildRange& range, State& state) {
  walk<false, !State::kGates>(lane, range, [&](int slot, int t, int count) {
    Stage<Pose> stage(lane.args, lane.shared, slot, t);
    FASTCAPS_NO_UNROLL
    for (int left = count; left > 0; --left) {
      typename State::Round rounds[R];
      Patches<Pose, R> votes;
      float total[R] = {};
      if constexpr (State::kBegins) {
        FASTCAPS_UNROLL
        for (int r = 0; r < R; ++r) state.begin(r, votes[r]);
      }
      make_votes<true, State::kBegins>(lane, stage, votes);
      each_patch<Pose, R>([&](int r, int p) {
        each_number<Pose>([&](int i, int j) { rounds[r].votes[p][i][j] = votes[r][p][i][j]; });
      });
      FASTCAPS_UNROLL
      for (int r = 0; r < R; ++r) state.score(r, stage.seen + lane.in_tile(r), rounds[r]);
      if constexpr (State::kCompetes) {
        FASTCAPS_UNROLL
        for (int r = 0; r < R; ++r) total[r] = total_of(lane, rounds[r].weight);
        if constexpr (MEETS) meet(lane, stage.t & 1, total);
      }
      FASTCAPS_UNROLL
      for (int r = 0; r < R; ++r) state.add(r, rounds[r], total[r]);
      stage.next(lane);
    }
    state.flush();
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
  } else if constexpr (State::kRounds) {
    walk_in_rounds<false>(lane, range, state);
  } else {
    walk_by_child<false>(lane, range, state);
  }
  if (any_thread(lane.args, lane.shared, state.lost())) return false;
  state.store(range.chunk);
  barrier();  // the tile is read to the end
  return true;
}

// A walk with all options. loads: the parents have not been loaded yet.
template <class State, class Pose, int R>
FASTCAPS_DEVICE void walk_with_options(const Lane<Pose, R>& lane, const ChildRange& range, State& state, bool loads) {
  begin_walk<false>(lane, range);
  if (loads) state.load();
  state.begin_options();
  walk<false, false>(lane, range, [&](int slot, int t, int count) {
    Stage<Pose> stage(lane.args, lane.shared, slot, t);
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
}

template <class State, class Pose, int R>
FASTCAPS_DEVICE void begin_tile(const Lane<Pose, R>& lane, int tile, State& state) {
  make_tile(lane.args, tile, lane.shared);
  barrier();
  state.reset();
}
template <class State, class Pose, int R>
FASTCAPS_DEVICE void end_tile(const Lane<Pose, R>& lane, const ChildRange& range, State& state) {
  if (!lane.args.collect && lane.args.iterations == 0) state.store(range.chunk);
  barrier();  // the tile is read to the end
}

// All iterations of a block's tiles. A policy with kLeanIterations walks lean (walk_lean) as long as nothing is lost;
// then that iteration is made again with all options, and so are all later ones, also of later tiles: a compiler would
// take lanes that may come back from there for divergent, and guard every exchange of the lean loop.
template <class State, class Pose, int R>
FASTCAPS_DEVICE void walk_forward(const Lane<Pose, R>& lane, const ChildRange& range, int tile) {
  const PassArgs& args = lane.args;
  const int iterations = args.iterations > 0 ? args.iterations : 1;
  State state(lane);
  int iteration = 0;
  bool begun = false;  // the tile is there, and the parents are loaded
  if constexpr (State::kLeanIterations) {
    for (; args.lean && !begun && tile < args.tiles; tile += begun ? 0 : args.groups) {
      begin_tile(lane, tile, state);
      state.load();
      for (iteration = 0; iteration < iterations && !begun; iteration += !begun) {
        begun = !state.walk_lean(range);
        if (!begun && args.iterations > 0) state.finish(iteration);
      }
      if (!begun) end_tile(lane, range, state);
    }
  }
  for (; tile < args.tiles; tile += args.groups) {
    if (!begun) begin_tile(lane, tile, state);
    for (iteration = begun ? iteration : 0; iteration < iterations; ++iteration) {
      walk_with_options(lane, range, state, iteration == 0 && !begun);
      if (args.iterations > 0) state.finish(iteration);
    }
    begun = false;
    end_tile(lane, range, state);
  }
}

// LEAN: the policy has a lean walk, too. From the first tile on where a total is lost, a block goes on with all
// options.
template <template <class, int, bool> class Policy, class Pose, int R, bool LEAN, int THREADS, int BLOCKS>
FASTCAPS_KERNEL(THREADS, BLOCKS)
forward_kernel(const FASTCAPS_CONSTANT PassArgs args) {
  using Lean = Policy<Pose, R, LEAN>;
  const Lane<Pose, R> lane(args);
  const ChildRange range(args);
  int tile = range.group;
  if constexpr (LEAN && !Lean::kLeanIterations)
    for (; args.lean && tile < args.tiles; tile += args.groups)
      if (!walk_lean<Lean>(lane, range, tile)) break;
  walk_forward<Policy<Pose, R, LEAN && Lean::kLeanIterations>>(lane, range, tile);
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
  kernel.lean_gaussian = Policy<typename B::Pose, B::kPositions, LEAN>::kLeanIterations;
  return kernel;
}
template <template <class, int, bool> class Policy, bool HAS_LEAN, class... B>
PassKernels forward_kernels() {
  static const PassKernel all[] = {forward_kernel_of<Policy, B, (HAS_LEAN && B::Pose::kFixed)>()...};
  return {all, sizeof...(B)};
}

}  // namespace fastcaps::gpu
