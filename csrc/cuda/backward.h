// The walk of every pass, backward: votes are made again, the policy turns them into their gradients, and those become
// the gradients of children, weights and bias. Instead of score and add a policy (see forward.h) has dvote(stage,
// gradients, votes): it replaces votes by dL/dV, or by 0 if they take no part, and returns false if the launch only
// collects statistics or measures. kMeasures: there are measuring launches. kGates: the block adds up the gates'
// gradients.
#pragma once

#include "forward.h"
#include "tensor_gradients.h"

namespace fastcaps::gpu {

// What attention and pooling keep: parents' queries (times `scale`), the gradients of their sums, and the queries'
// gradients.
template <class Pose, int R>
struct QueryGradients {
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

// The children of a stage, one after another.
template <bool LEAN, class Pose, int R, class State>
FASTCAPS_DEVICE void differentiate(const Lane<Pose, R>& lane, Stage<Pose> stage, int count,
                                   StageGradients<Pose, R>& gradients, State& state) {
  const PassArgs& args = lane.args;
  constexpr bool kHeld = LEAN && kHolds<Pose, R>;
  [[maybe_unused]] float matrices[kHeld ? Pose::kEach : 1][kHeld ? Pose::kD : 1][Pose::kPatchColumns];
  [[maybe_unused]] float rows[Pose::kPatchRows][kHeld ? Pose::kD : 1];
  const auto read = [&] {
    if constexpr (kHeld) {
      load_rows<Pose>(child_row(lane, stage, 0, 0), rows);
      load_matrices(lane, Weights<Pose, R>(lane, stage, 0).from, matrices);
    }
  };
  read();
  FASTCAPS_NO_UNROLL
  for (int k = 0; k < count; ++k) {
    const Stage<Pose> now = stage;
    if (!kHeld || k + 1 < count) stage.next(lane);
    const auto row_of = [&](int r, int i, int d, float (&row)[Pose::kVector]) {
      if constexpr (kHeld) {
        FASTCAPS_UNROLL
        for (int v = 0; v < Pose::kVector; ++v) row[v] = rows[i][d + v];
      } else {
        load_vector<Pose::kVector>(child_row(lane, now, r, i) + d, row);
      }
    };
    Patches<Pose, R> votes;
    if constexpr (kHeld)
      multiply<Pose>(rows, matrices, votes[0]);
    else
      make_votes<LEAN>(lane, now, votes);
    if (state.dvote(now, gradients, votes)) {
      if (!LEAN && !args.weight) {
        if (args.dchildren) gradients.put_identity(now, votes);
      } else {
        gradients.template put<LEAN>(now, votes, row_of, read);
      }
      if (!LEAN && args.dbias) differentiate_bias(lane, now, votes);
    }
    gradients.next();
  }
}

template <template <class, int, bool> class Policy, class Pose, int R, bool LEAN, int THREADS, int BLOCKS>
FASTCAPS_KERNEL(THREADS, BLOCKS)
backward_kernel(const FASTCAPS_CONSTANT PassArgs args) {
  using State = Policy<Pose, R, LEAN>;
  const Lane<Pose, R> lane(args);
  StageGradients<Pose, R> gradients(lane);
  const ChildRange range(args);
  const bool counts = LEAN || !(args.collect || args.measured);
  for (int tile = range.group; tile < args.tiles; tile += args.groups) {
    make_tile(args, tile, lane.shared);
    barrier();
    if constexpr (State::kMeasures) {
      if (args.tight && !any_tight(args, lane.tile)) {
        barrier();  // the tile is read to the end
        continue;
      }
    }
    begin_walk<LEAN>(lane, range);
    State state(lane);
    gradients.begin_tile();
    int before = range.first, last_count = 0;  // the stage whose dW lies in shared memory
    const auto flush_weights = [&] {
      if constexpr (Pose::kSlotStride > 0)
        if (counts && args.dweight) gradients.flush_weights(gradients.parity, before, last_count);
    };
    walk<true, LEAN>(lane, range, [&](int slot, int t, int count) {
      if (args.late_weights) flush_weights();
      before = t, last_count = count;
      const Stage<Pose> stage(args, lane.shared, slot, t);
      gradients.begin_stage(range, t);
      if constexpr (kByParent<Pose>)
        differentiate_by_parent<LEAN>(lane, stage, count, gradients, state);
      else
        differentiate<LEAN>(lane, stage, count, gradients, state);
      if (!counts) return;
      if (!gradients.adds_directly() || kLargeWeights<Pose> || !args.late_weights) barrier();
      if (!args.late_weights) flush_weights();
      gradients.flush(stage, count, State::kGates && args.dgate);
    });
    barrier();  // the ring and the tile are read to the end, and the last dW is there
    if (args.late_weights) flush_weights();
    if (LEAN || !args.collect) state.store(range.chunk);
    barrier();
  }
}

template <template <class, int, bool> class Policy, bool HAS_LEAN, class... B>
PassKernels backward_kernels() {
  static const PassKernel all[] = {
      B::kernel(&backward_kernel<Policy, typename B::Pose, B::kPositions, false, B::kThreads, B::kBlocks>,
                &backward_kernel<Policy, typename B::Pose, B::kPositions, (HAS_LEAN && B::Pose::kFixed), B::kThreads,
                                 B::kBlocks>)...};
  return {all, sizeof...(B)};
}

}  // namespace fastcaps::gpu
