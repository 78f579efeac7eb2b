// The walk of every pass, backward: votes are made again, the policy turns them into their gradients, and those become
// the gradients of children, weights and bias. Instead of score and add a policy (see forward.h) has dvote(stage,
// gradients, votes): it replaces votes by dL/dV, or by 0 if they take no part, and returns false if the launch only
// collects statistics or measures. kMeasures: there are measuring launches. kGates: the block adds up the gates'
// gradients. A lean policy says with kSees whether children may be absent or have gates, whose gradients it then adds
// up itself, stage by stage (put_gates). Where lanes hold a child (kHolds), adds() says whether it gets a gradient;
// with kStarts, start(votes) sets what the products of children and matrices are added to, and First is another policy,
// for launches without a mean.
#pragma once

#include "forward.h"
#include "tensor_gradients.h"

namespace fastcaps::gpu {

// What attention and pooling keep: parents' queries (times `scale`), the gradients of their sums, and the queries'
// gradients.
template <class Pose, int R>
struct QueryGradients {
  static constexpr bool kSees = false, kStarts = false, kMeasures = false;
  const Lane<Pose, R>& lane;
  const PassArgs& args = lane.args;
  Patches<Pose, R> query, dsums, dquery;

  FASTCAPS_DEVICE explicit QueryGradients(const Lane<Pose, R>& lane_, float scale = 1.0f) : lane(lane_) {
    each_patch<Pose, R>([&](int r, int p) {
      load_query(lane, r, p, scale, query[r][p]);
      load_parent(lane, args.dsums, r, p, dsums[r][p]);
      each_number<Pose>([&](int i, int j) { dquery[r][p][i][j] = 0.0f; });
    });
  }
  FASTCAPS_DEVICE void store(int chunk) const { store_parents(lane, args.dquery, chunk, dquery); }
};

// Adds a number of a bias's gradient towards the lane's p-th parent, summed over positions. speaks: for other lanes.
template <class Pose, int R>
FASTCAPS_DEVICE void add_to_bias(const Lane<Pose, R>& lane, const Stage<Pose>& stage, int p, int i, int j, float sum,
                                 bool speaks) {
  const PassArgs& args = lane.args;
  const int64_t first = int64_t(args.bias_stride_i ? Child(args, stage.t).i : stage.t % kSharedSums) * args.M;
  if (speaks && lane.alive(p) && lane.inside(i, j))
    add(part_of(args, args.dbias, args.dbias_part) + (first + lane.m(p)) * lane.C() * lane.E() + lane.number(i, j), sum,
        args.alone_with_weights);
}

template <class Pose, int R>
FASTCAPS_DEVICE void differentiate_bias(const Lane<Pose, R>& lane, const Stage<Pose>& stage,
                                        const Patches<Pose, R>& dvotes) {
  each_number<Pose>([&](int i, int j) {
    float x[Pose::kEach] = {};
    each_patch<Pose, R>([&](int r, int p) { x[p] += dvotes[r][p][i][j]; });
    if constexpr (Pose::kSwaps) {
      scatter_sums<Pose::kEach, Pose::kColumns, Pose::kPositions, 1>(x, lane.lane);
      add_to_bias(lane, stage, 0, i, j, x[0], lane.position % (Pose::kPositions / 2) == 0);
    } else {
      FASTCAPS_UNROLL
      for (int p = 0; p < Pose::kEach; ++p)
        add_to_bias(lane, stage, p, i, j, lane.sum_positions(x[p]), lane.position == 0);
    }
  });
}

// The children of a stage, by parent.
template <bool LEAN, class Pose, class State>
FASTCAPS_DEVICE void differentiate_by_parent(const Lane<Pose, 1>& lane, Stage<Pose> stage, int count,
                                             StageGradients<Pose, 1>& gradients, State& state) {
  TensorGradients<Pose> made(lane, stage);
  FASTCAPS_NO_UNROLL
  for (int k = 0; k < count; ++k) {
    made.take();
    using Made = TensorGradients<Pose>;
    const auto each_part = [&](auto&& body) {
      FASTCAPS_UNROLL
      for (int part = 0; part < Pose::kEach * (Made::N / Made::W); ++part) {
        const int p = part / (Made::N / Made::W), e = part % (Made::N / Made::W) * Made::W;
        typename Made::Part vote;
        made.vote(p, e, vote);
        if constexpr (!LEAN)
          if (lane.args.bias) add_bias<Made::W>(lane, stage, p, e, [&](int) -> typename Made::Part& { return vote; });
        body(p, e, vote);
      }
    };
    each_part([&](int p, int e, auto& vote) { state.score(0, p, e, vote); });
    if (state.settle(stage, gradients)) {
      made.begin();
      each_part([&](int p, int e, auto& vote) {
        state.dvote(0, p, e, vote, kLift);
        made.put(p, e, vote, gradients);
        if constexpr (!LEAN)
          if (lane.args.dbias)
            each_number<Pose, Made::W>([&](int i, int j) {
              add_to_bias(lane, stage, p, i, e + j, lane.sum_positions(vote[i][j]) / kLift, lane.position == 0);
            });
      });
      made.template finish<LEAN>(stage, gradients);
    }
    made.next();
    gradients.next();
    stage.next(lane);
  }
}

// Whether the tile has a tight position. All threads find the same.
FASTCAPS_DEVICE bool any_tight(const PassArgs& args, const Position* tile) {
  bool any = false;
  for (int k = 0; k < args.tile_size; ++k) any = any || (tile[k].exists() && args.tight[tile[k].index] != 0.0f);
  return any;
}

// Whether a lane keeps a child in registers, beside all else: its pose is read once for votes and dW, and that of the
// next child while sums over lanes are exchanged.
template <class Pose, int R>
constexpr bool kHolds = Pose::kFixed && Pose::kProducts == 0 && Pose::kWeightStride > 0 && R == 1 &&
                        Pose::kEach* Pose::kD* Pose::kPatchColumns <= 32;

// What a lane holds (see kHolds): matrices, and, where all children share them, sums of their gradient.
template <class Pose>
struct Held {
  Matrices<Pose> matrices;
  float sums[StageGradients<Pose, 1>::kWeightSums] = {};
};

// The children of a stage, one after another, in registers.
template <bool SHARED, class Pose, class State>
FASTCAPS_DEVICE void differentiate_held(const Lane<Pose, 1>& lane, Stage<Pose> stage, int count, bool is_first,
                                        StageGradients<Pose, 1>& gradients, State& state, Held<Pose>& held) {
  Rows<Pose> rows;
  const auto read_matrices = [&] { load_matrices(lane, Weights<Pose, 1>(lane, stage, 0).from, held.matrices); };
  const auto read = [&] {
    load_rows(lane, stage.children + lane.in_tile(0) * lane.child_stride(), rows);
    if constexpr (!SHARED) read_matrices();
  };
  read();
  if (SHARED && is_first) read_matrices();
  FASTCAPS_NO_UNROLL
  for (int k = 0; k < count; ++k) {
    const Stage<Pose> now = stage;
    if (k + 1 < count) stage.next(lane);
    Patches<Pose, 1> votes;
    if constexpr (State::kStarts) state.start(votes);
    multiply<Pose, State::kStarts>(rows, held.matrices, votes[0]);
    state.dvote(now, gradients, votes);
    gradients.template put_held<SHARED>(
        now, rows, held.matrices, votes, held.sums, [&](int) { return state.adds(); }, read);
    gradients.next();
  }
}

template <bool LEAN, class Pose, int R, class State>
FASTCAPS_DEVICE void differentiate(const Lane<Pose, R>& lane, Stage<Pose> stage, int count,
                                   StageGradients<Pose, R>& gradients, State& state) {
  const PassArgs& args = lane.args;
  FASTCAPS_NO_UNROLL
  for (int k = 0; k < count; ++k) {
    Patches<Pose, R> votes;
    make_votes<LEAN>(lane, stage, votes);
    if (state.dvote(stage, gradients, votes)) {
      const auto row_of = [&](int r, int i, int d, float (&row)[Pose::kVector]) {
        load_vector<Pose::kVector>(child_row(lane, stage, r, i) + d, row);
      };
      const auto exists = [&](int in_tile) { return LEAN || stage.seen[in_tile].exists != 0.0f; };
      if (LEAN || args.weight)
        gradients.put(stage, votes, row_of, exists);
      else if (args.dchildren)
        gradients.put_identity(stage, votes);
      if (!LEAN && args.dbias) differentiate_bias(lane, stage, votes);
    }
    gradients.next();
    stage.next(lane);
  }
}

// The children of a tile. SHARED: see put_held.
template <class State, bool LEAN, bool SHARED = false, class Pose, int R>
FASTCAPS_DEVICE void walk_backward(const Lane<Pose, R>& lane, ChildRange range, StageGradients<Pose, R>& gradients) {
  const PassArgs& args = lane.args;
  constexpr bool kAll = LEAN && !State::kSees;  // children are there and count
  constexpr bool kHeld = LEAN && kHolds<Pose, R>;
  const bool counts = LEAN || !(args.collect || args.measured), late = !SHARED && args.late_weights;
  begin_walk<kAll>(lane, range);
  range.matrices = !SHARED;  // the first stage has them
  State state(lane);
  std::conditional_t<kHeld, Held<Pose>, char> held{};
  gradients.begin_tile();
  int before = -1, count_before = 0;  // the stage whose dW is late
  walk<true, kAll>(lane, range, [&](int slot, int t, int count) {
    const bool ends = t + args.stage >= range.last;
    const Stage<Pose> stage(args, lane.shared, slot, t);
    gradients.begin_stage(range, t);
    if constexpr (kByParent<Pose>)
      differentiate_by_parent<LEAN>(lane, stage, count, gradients, state);
    else if constexpr (kHeld)
      differentiate_held<SHARED>(lane, stage, count, t == range.first, gradients, state, held);
    else
      differentiate<LEAN>(lane, stage, count, gradients, state);
    if constexpr (LEAN && State::kSees) state.put_gates(stage, gradients, count);
    if (!counts) return;
    if constexpr (SHARED)
      if (ends) gradients.put_shared(held.sums);
    if (!gradients.adds_directly() || kLargeWeights<Pose> || (SHARED ? ends : !late)) barrier();
    gradients.flush(stage, count, State::kGates && !LEAN && args.dgate);
    if constexpr (Pose::kSlotStride > 0) {
      // dW of the stage, or of the one before it, where that is late; at the end of both
      const int flushed = SHARED ? 1 : count;
      for (bool now = !late; args.dweight && (!SHARED || ends); now = true) {
        if (now || before >= 0)
          gradients.flush_weights(gradients.parity ^ int(!now), now ? t : before, now ? flushed : count_before);
        if (now || !ends) break;
        barrier();
      }
      before = t, count_before = count;
    }
  });
  barrier();  // the ring and the tile are read to the end
  if (LEAN || !args.collect) state.store(range.chunk);
  barrier();
}

// LEAN: a lean walk. A policy that measures has both in one kernel: tight tiles take all options.
template <template <class, int, bool> class Policy, class Pose, int R, bool LEAN, int THREADS, int BLOCKS>
FASTCAPS_KERNEL(THREADS, BLOCKS)
backward_kernel(const FASTCAPS_CONSTANT PassArgs args) {
  using Lean = Policy<Pose, R, LEAN>;
  constexpr bool kBoth = LEAN && Lean::kMeasures;
  const Lane<Pose, R> lane(args);
  StageGradients<Pose, R> gradients(lane);
  const ChildRange range(args);
  for (int tile = range.group; tile < args.tiles; tile += args.groups) {
    make_tile(args, tile, lane.shared);
    barrier();
    const bool tight = Lean::kMeasures && args.tight && any_tight(args, lane.tile);
    if (Lean::kMeasures && args.tight && !tight && (args.measured || args.collect)) {
      barrier();  // the tile is read to the end
      continue;
    }
    if constexpr (kBoth) {
      if (args.lean && !tight) {
        if (!args.mean)
          walk_backward<typename Lean::First, true>(lane, range, gradients);
        else if (args.G == 1)
          walk_backward<Lean, true, true>(lane, range, gradients);
        else
          walk_backward<Lean, true>(lane, range, gradients);
        continue;
      }
    }
    walk_backward<Policy<Pose, R, LEAN && !kBoth>, LEAN && !kBoth>(lane, range, gradients);
  }
}

template <template <class, int, bool> class Policy, class B>
PassKernel backward_kernel_of() {
  using Pose = typename B::Pose;
  using Lean = Policy<Pose, B::kPositions, true>;
  constexpr bool kBoth = Lean::kLean && Lean::kMeasures;
  PassKernel kernel = B::kernel(&backward_kernel<Policy, Pose, B::kPositions, kBoth, B::kThreads, B::kBlocks>,
                                &backward_kernel<Policy, Pose, B::kPositions, Lean::kLean, B::kThreads, B::kBlocks>);
  kernel.lean = Lean::kLean;
  kernel.lean_takes_padding = kernel.lean_gaussian = kernel.lean && Lean::kSees;
  return kernel;
}
template <template <class, int, bool> class Policy, class... B>
PassKernels backward_kernels() {
  static const PassKernel all[] = {backward_kernel_of<Policy, B>()...};
  return {all, sizeof...(B)};
}

}  // namespace fastcaps::gpu
