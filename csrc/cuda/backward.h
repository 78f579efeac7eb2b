// The walk of every pass, backward: votes are made again, the policy turns them into their gradients, and those become
// the gradients of children, weights and bias. Instead of score and add a policy (see forward.h) has dvote(stage,
// gradients, votes): it replaces votes by dL/dV, or by 0 if they take no part, and returns false if the launch only
// collects statistics or measures. kMeasures: there are measuring launches. kGates: the block adds up the gates'
// gradients.
#pragma once

#include "forward.h"

namespace fastcaps::gpu {

FASTCAPS_DEVICE void add(float* at, float x, bool alone) {
  if (alone)
    *at += x;
  else
    atomic_add(at, x);
}

template <int N>
FASTCAPS_DEVICE void add_vector(float* at, const float (&x)[N], bool alone) {
  if constexpr (N == 4) {
    if (alone) {
      const float4 old = load4(at);
      store4(at, make_float4(old.x + x[0], old.y + x[1], old.z + x[2], old.w + x[3]));
    } else {
      atomic_add4(at, make_float4(x[0], x[1], x[2], x[3]));
    }
  } else {
    FASTCAPS_UNROLL
    for (int k = 0; k < N; ++k) add(at + k, x[k], alone);
  }
}

// The block's own part of a gradient that is made in parts.
FASTCAPS_DEVICE float* part_of(const PassArgs& args, float* parts, int64_t numbers) {
  return parts + (args.parts_by_chunk ? block_x() : int64_t(args.by_chunk.quotient(int(block_x())))) * numbers;
}

// Where the weights' gradient of the t-th child towards parent m is added up, [D, E].
template <class Pose, int R>
FASTCAPS_DEVICE float* gradient_of_weights(const Lane<Pose, R>& lane, int t, int m) {
  const PassArgs& args = lane.args;
  const int64_t pair = int64_t(args.by_group.quotient(t)) * args.M + m;
  return part_of(args, args.dweight, args.dweight_part) + pair * lane.D() * lane.E();
}

// What attention and pooling keep: parents' queries, the gradients of their sums, and the queries' gradients.
template <class Pose, int R>
struct QueryGradients {
  const Lane<Pose, R>& lane;
  const PassArgs& args = lane.args;
  Patches<Pose, R> query, dsums, dquery;

  FASTCAPS_DEVICE explicit QueryGradients(const Lane<Pose, R>& lane_) : lane(lane_) {
    each_patch<Pose, R>([&](int r, int p) {
      load_query(lane, r, p, 1.0f, query[r][p]);
      load_parent(lane, args.dsums, r, p, dsums[r][p]);
      each_number<Pose>([&](int i, int j) { dquery[r][p][i][j] = 0.0f; });
    });
  }
  FASTCAPS_DEVICE void store(int chunk) const { store_parents(lane, args.dquery, chunk, dquery); }
};

// Where the warps of a block put the gradients that they make for the children of a stage, one child after another,
// before the block adds it all up.
template <class Pose, int R>
struct StageGradients {
  const Lane<Pose, R>& lane;
  const PassArgs& args;
  float* children;  // [warps that share parents, tile_size, C, D], child_stride apart
  float* weight;    // [warps that take other positions, parents of the block, stride]; or, where weights are large,
                    // dL/dV: [parents of the block, tile_size, E]
  float* gates;     // [tile_size, warps that share parents]

  FASTCAPS_DEVICE explicit StageGradients(const Lane<Pose, R>& lane_)
      : lane(lane_),
        args(lane.args),
        children(reinterpret_cast<float*>(lane.shared + args.shared_dchildren)),
        weight(reinterpret_cast<float*>(lane.shared + args.shared_dweight)),
        gates(reinterpret_cast<float*>(lane.shared + args.shared_dgate)) {}
  FASTCAPS_DEVICE void next() {
    children += args.tile_size * args.warps_parents * lane.child_stride();
    gates += args.tile_size * args.warps_parents;
    weight += lane.block_parents() *
              (kLargeWeights<Pose> ? args.tile_size * Pose::kE : lane.warps_positions() * Pose::kWeightStride);
  }

  FASTCAPS_DEVICE float* child(int in_tile, int warp_parent) const {
    return children + (warp_parent * args.tile_size + in_tile) * lane.child_stride();
  }
  FASTCAPS_DEVICE float* weights(int warp_position, int parent) const {
    return weight + (warp_position * lane.block_parents() + place(parent)) * Pose::kWeightStride;
  }
  // Some lanes store dW of their first parent while others store dW of their second, which would use the same banks
  // (4x4 poses: kParents * 20 floats on). So among second parents each four swap places with the next four.
  static FASTCAPS_DEVICE int place(int parent) {
    constexpr bool kMeet = Pose::kEach == 2 && Pose::kWeightStride == 20 && Pose::kParents % 8 == 0;
    return kMeet ? parent ^ parent / (kMeet ? Pose::kParents : 1) % 2 * 4 : parent;
  }

  // Rows d .. d + V of dP, summed over the parents and columns of the warp, for B of the lane's positions from r on.
  template <int B, Storage S>
  FASTCAPS_DEVICE void put_children(const Stage<Pose>& stage, int d, int r, const Patches<Pose, R>& dvotes) const {
    constexpr int V = Pose::kVector, TC = Pose::kPatchRows, TE = Pose::kPatchColumns, N = B * TC * V;
    float x[N] = {};
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) {
      float w[V][TE];
      Weights<Pose, R, S>(lane, stage, p).rows(d, w);
      FASTCAPS_UNROLL
      for (int b = 0; b < B; ++b) {
        FASTCAPS_UNROLL
        for (int v = 0; v < V; ++v)
          each_number<Pose>([&](int i, int j) { x[(b * TC + i) * V + v] += dvotes[r + b][p][i][j] * w[v][j]; });
      }
    }
    const auto put = [&](int n, float sum) {
      const int v = n % V, i = n / V % TC, b = n / (V * TC);
      child(lane.in_tile(r + b), lane.warp_parent)[lane.c(i) * lane.row_stride() + d + v] = sum;
    };
    if constexpr (Pose::kFixed) {
      static_assert(Pose::kColumns == 1 || Pose::kParents == 1 || Pose::kPositions == 1,
                    "the lanes of a sum over columns and parents must be neighbours");
      constexpr int kLanes = Pose::kColumns * Pose::kParents, kFirst = Pose::kColumns == 1 ? Pose::kPositions : 1;
      int begin, count;
      scatter_sums<N, kFirst, kLanes>(x, lane.lane, begin, count);
      constexpr int kSame = lanes_with_the_same(N, kLanes);
      const bool speaks = lane.lane / kFirst % kSame == 0;
      FASTCAPS_UNROLL
      for (int n = 0; n < (N - 1) / kLanes + 1; ++n)
        if (speaks && n < count) put(begin + n, x[n]);
    } else {
      FASTCAPS_UNROLL
      for (int n = 0; n < N; ++n) {
        const float sum = lane.sum_parents(lane.sum_columns(x[n]));
        if (lane.column == 0 && lane.parent == 0) put(n, sum);
      }
    }
  }

  // dP where votes are the children themselves.
  FASTCAPS_DEVICE void put_identity(const Patches<Pose, R>& dvotes) const {
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      float* to = child(lane.in_tile(r), lane.warp_parent);
      each_number<Pose>([&](int i, int j) {
        float sum = 0.0f;
        FASTCAPS_UNROLL
        for (int p = 0; p < Pose::kEach; ++p) sum += dvotes[r][p][i][j];
        sum = lane.sum_parents(sum);
        if (lane.parent == 0 && lane.inside(i, j)) to[lane.c(i) * lane.row_stride() + lane.e(j)] = sum;
      });
    }
  }

  // Stores the part of a gate's gradient at the lane's r-th position, summed over the warp's parents.
  FASTCAPS_DEVICE void put_gate(int r, float gain) const {
    gain = lane.sum_parents(gain);
    if (lane.speaks_for_position()) gates[lane.in_tile(r) * args.warps_parents + lane.warp_parent] = gain;
  }

  // Rows d .. d + V of dW, summed over the rows and positions of the warp.
  FASTCAPS_DEVICE void put_weights(const Stage<Pose>& stage, int d, const Patches<Pose, R>& dvotes) const {
    constexpr int V = Pose::kVector, TC = Pose::kPatchRows, TE = Pose::kPatchColumns, WV = Pose::kWeightVector;
    constexpr int N = Pose::kEach * V * TE;
    float x[N] = {};
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      FASTCAPS_UNROLL
      for (int i = 0; i < TC; ++i) {
        float row[V];
        load_vector<V>(child_row(lane, stage, r, i) + d, row);
        FASTCAPS_UNROLL
        for (int n = 0; n < N; ++n) x[n] += row[n / TE % V] * dvotes[r][n / (TE * V)][i][n % TE];
      }
    }
    // WV neighbours at n: to shared memory, where the other warps' will be added, or to the gradient itself.
    const auto put = [&](int n, const float* sum) {
      const int v = n / TE % V, p = n / (TE * V), e = lane.e(n % TE);
      if constexpr (Pose::kWeightStride > 0) {
        float* to = weights(lane.warp_position, lane.in_block(p)) + (d + v) * Pose::kE + e;
        store_vector<WV>(to, sum);
      } else if (lane.alive(p) && (Pose::kFixed || (d + v < args.D && e < args.E))) {
        float part[WV];
        FASTCAPS_UNROLL
        for (int w = 0; w < WV; ++w) part[w] = sum[w];
        float* to = gradient_of_weights(lane, stage.t, lane.m(p)) + (d + v) * lane.E() + e;
        add_vector<WV>(to, part, args.alone_with_weights);
      }
    };
    if constexpr (Pose::kFixed) {
      constexpr int kLanes = Pose::kPositions, kLeft = N / kLanes;
      static_assert(kLeft % WV == 0, "lanes part their sums between vectors");
      int begin, count;
      scatter_sums<N, Pose::kColumns, kLanes>(x, lane.lane, begin, count);
      FASTCAPS_UNROLL
      for (int n = 0; n < kLeft; n += WV) put(begin + n, x + n);
    } else {
      FASTCAPS_UNROLL
      for (int n = 0; n < N; ++n) {
        const float sum = lane.sum_rows(lane.sum_positions(x[n]));
        if (lane.row == 0 && lane.position == 0) put(n, &sum);
      }
    }
  }

  FASTCAPS_DEVICE void put_weights_of_tensor_cores(const Stage<Pose>& stage, const Patches<Pose, R>& dvotes) const {
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) {
      float rows[2][4];
      outer_on_tensor_cores(lane, stage, dvotes[0][p], rows);
      float* to = weights(lane.warp_position, lane.in_block(p)) + lane.position * 2 * Pose::kE;
      if (lane.position < 2) {
        store_vector<4>(to, rows[0]);
        store_vector<4>(to + Pose::kE, rows[1]);
      }
    }
  }

  // If weights are large: stores dL/dV itself, from which the block makes dW (flush_large_weights).
  FASTCAPS_DEVICE void put_votes(const Patches<Pose, R>& dvotes) const {
    static_assert(Pose::kPatchRows == 1, "large weights belong to vectors");
    each_patch<Pose, R>([&](int r, int p) {
      float* to = weight + (lane.in_block(p) * args.tile_size + lane.in_tile(r)) * Pose::kE;
      FASTCAPS_UNROLL
      for (int j = 0; j < Pose::kPatchColumns; j += Pose::kWeightVector)
        store_vector<Pose::kWeightVector>(to + lane.e(j), &dvotes[r][p][0][j]);
    });
  }

  // From dL/dV to dP and dW.
  FASTCAPS_DEVICE void put(const Stage<Pose>& stage, const Patches<Pose, R>& votes) const {
    const int depth = lane.padded_depth();
    with_weights<Pose>(args, [&](auto stored) {
      _Pragma("unroll Pose::kDepthUnroll") for (int d = 0; d < depth; d += Pose::kVector) {
        if (args.dchildren) {
          constexpr int B = Pose::kPatchRows == 1 ? R : 1;
          FASTCAPS_UNROLL
          for (int r = 0; r < R; r += B) put_children<B, stored()>(stage, d, r, votes);
        }
        if constexpr (!kLargeWeights<Pose> && Pose::kProducts == 0)
          if (args.dweight) put_weights(stage, d, votes);
      }
    });
    if (args.dweight) {
      if constexpr (kLargeWeights<Pose>)
        put_votes(votes);
      else if constexpr (Pose::kProducts > 0)
        put_weights_of_tensor_cores(stage, votes);
    }
  }

  // Adds all warps' dP of a stage to the gradients of the children.
  FASTCAPS_DEVICE void flush_children(int first, int count) const {
    constexpr int V = Pose::kVector;
    const int units = count * args.tile_size * lane.padded_rows() * (lane.padded_depth() / V);
    for (int unit = thread_index(); unit < units; unit += block_threads()) {
      const auto [child_of_stage, c, d] = lane.vector_of_child(unit);
      const int k = args.by_tile.quotient(child_of_stage), at = args.by_tile.remainder(child_of_stage, k);
      const Child one(args, first + k);
      if (!one.exists(args, lane.tile[at]) || c >= lane.C()) continue;
      const float* from = child(at, k * args.warps_parents) + c * lane.row_stride() + d;
      float sum[V] = {};
      for (int w = 0; w < args.warps_parents; ++w) {
        float x[V];
        load_vector<V>(from + w * args.tile_size * lane.child_stride(), x);
        FASTCAPS_UNROLL
        for (int v = 0; v < V; ++v) sum[v] += x[v];
      }
      float* to = args.dchildren + (one.cell(args, lane.tile[at]) * lane.C() + c) * lane.D() + d;
      if constexpr (Pose::kFixed) {
        add_vector<V>(to, sum, args.alone_with_children);
      } else {
        FASTCAPS_UNROLL
        for (int v = 0; v < V; ++v)
          if (d + v < args.D) add(to + v, sum[v], args.alone_with_children);
      }
    }
  }

  // All warps' part of the gates' gradient. Behind a gate of 0 it may be NaN or infinite, and is then 0.
  FASTCAPS_DEVICE void flush_gates(const Seen* seen, int first, int count) const {
    for (int unit = thread_index(); unit < count * args.tile_size; unit += block_threads()) {
      if (seen[unit].exists == 0.0f) continue;
      const int k = args.by_tile.quotient(unit);
      float sum = 0.0f;
      for (int w = 0; w < args.warps_parents; ++w) sum += gates[unit * args.warps_parents + w];
      if (seen[unit].gate == 0.0f && !(fabsf(sum) < INFINITY)) continue;
      add(args.dgate + Child(args, first + k).cell(args, lane.tile[args.by_tile.remainder(unit, k)]), sum,
          args.alone_with_children);
    }
  }

  // All warps' dW of a stage; children that share their weights are added up first.
  FASTCAPS_DEVICE void flush_weights(int first, int count) const {
    constexpr int V = Pose::kWeightCopy, kVectors = Pose::kD * Pose::kE / V;
    const int block_parents = lane.block_parents(), warps = lane.warps_positions();
    for (int unit = thread_index(); unit < block_parents * kVectors; unit += block_threads()) {
      const int m = unit / kVectors, number = unit % kVectors * V;
      if (lane.first_parent + m >= args.M) continue;
      float sum[V] = {};
      for (int k = 0; k < count; ++k) {
        for (int w = 0; w < warps; ++w) {
          float x[V];
          load_vector<V>(weights(k * warps + w, m) + number, x);
          FASTCAPS_UNROLL
          for (int v = 0; v < V; ++v) sum[v] += x[v];
        }
        const int g = args.by_group.quotient(first + k);
        if (k + 1 < count && args.by_group.quotient(first + k + 1) == g) continue;
        add_vector<V>(gradient_of_weights(lane, first + k, lane.first_parent + m) + number, sum,
                      args.alone_with_weights);
        FASTCAPS_UNROLL
        for (int v = 0; v < V; ++v) sum[v] = 0.0f;
      }
    }
  }

  // dW = sum over the tile's positions of P^T dV, four by four values a thread; children that share their weights are
  // added up first.
  template <Storage S>
  FASTCAPS_DEVICE void flush_large_weights(const Stage<Pose>& stage, int first, int count) const {
    constexpr int kColumns = Pose::kE / 4, kSquares = Pose::kD / 4 * kColumns;
    const int block_parents = lane.block_parents();
    const auto* children = stage.template children_as<S>();
    for (int unit = thread_index(); unit < block_parents * kSquares; unit += block_threads()) {
      const int parent = unit / kSquares, d = unit % kSquares / kColumns * 4, e = unit % kColumns * 4;
      if (lane.first_parent + parent >= args.M) continue;
      float sum[4][4] = {};
      for (int k = 0; k < count; ++k) {
        const auto* rows = children + k * args.tile_size * Pose::kRowStride + d;
        const float* columns = weight + (k * block_parents + parent) * args.tile_size * Pose::kE + e;
        for (int at = 0; at < args.tile_size; ++at) {
          float p[4], v[4];
          load_vector<S>(rows + at * Pose::kRowStride, p);
          load_vector<4>(columns + at * Pose::kE, v);
          FASTCAPS_UNROLL
          for (int x = 0; x < 4; ++x) {
            FASTCAPS_UNROLL
            for (int y = 0; y < 4; ++y) sum[x][y] += p[x] * v[y];
          }
        }
        if (k + 1 < count && args.by_group.quotient(first + k + 1) == args.by_group.quotient(first + k)) continue;
        float* to = gradient_of_weights(lane, first + k, lane.first_parent + parent) + d * Pose::kE + e;
        FASTCAPS_UNROLL
        for (int x = 0; x < 4; ++x) {
          add_vector<4>(to + x * Pose::kE, sum[x], args.alone_with_weights);
          FASTCAPS_UNROLL
          for (int y = 0; y < 4; ++y) sum[x][y] = 0.0f;
        }
      }
    }
  }
};

template <class Pose, int R>
FASTCAPS_DEVICE void differentiate_bias(const Lane<Pose, R>& lane, const Stage<Pose>& stage,
                                        const Patches<Pose, R>& dvotes) {
  const PassArgs& args = lane.args;
  const int64_t first = int64_t(args.bias_stride_i ? Child(args, stage.t).i : stage.t % kSharedSums) * args.M;
  FASTCAPS_UNROLL
  for (int p = 0; p < Pose::kEach; ++p)
    each_number<Pose>([&](int i, int j) {
      float sum = 0.0f;
      FASTCAPS_UNROLL
      for (int r = 0; r < R; ++r) sum += dvotes[r][p][i][j];
      sum = lane.sum_positions(sum);
      if (lane.position == 0 && lane.alive(p) && lane.inside(i, j))
        add(part_of(args, args.dbias, args.dbias_part) + (first + lane.m(p)) * lane.C() * lane.E() + lane.number(i, j),
            sum, args.alone_with_weights);
    });
}

// One child, at the lane's R positions.
template <bool LEAN, class Pose, int R, class State>
FASTCAPS_DEVICE void differentiate(const Lane<Pose, R>& lane, const Stage<Pose>& stage,
                                   const StageGradients<Pose, R>& gradients, State& state) {
  const PassArgs& args = lane.args;
  Patches<Pose, R> votes;
  make_votes<LEAN, State::kIdentity>(lane, stage, votes);
  if (!state.dvote(stage, gradients, votes)) return;
  if (State::kIdentity && !args.weight) {
    if (args.dchildren) gradients.put_identity(votes);
  } else {
    gradients.put(stage, votes);
  }
  if (!LEAN && args.dbias) differentiate_bias(lane, stage, votes);
}

// Whether the tile has a tight position. All threads find the same.
FASTCAPS_DEVICE bool any_tight(const PassArgs& args, const Position* tile) {
  bool any = false;
  for (int k = 0; k < args.tile_size; ++k) any = any || (tile[k].exists() && args.tight[tile[k].index] != 0.0f);
  return any;
}

template <template <class, int, bool> class Policy, class Pose, int R, bool LEAN, int THREADS, int BLOCKS>
FASTCAPS_KERNEL(THREADS, BLOCKS)
backward_kernel(const FASTCAPS_CONSTANT PassArgs args) {
  using State = Policy<Pose, R, LEAN>;
  const Lane<Pose, R> lane(args);
  const StageGradients<Pose, R> gradients(lane);
  const ChildRange range(args);
  for (int tile = range.group; tile < args.tiles; tile += args.groups) {
    make_tile(args, tile, lane.shared);
    barrier();
    if constexpr (State::kMeasures) {
      if (args.tight && !any_tight(args, lane.tile)) {
        barrier();  // the tile is read to the end
        continue;
      }
    }
    begin_walk<false>(lane, range);
    State state(lane);
    walk<State::kSilences, false>(lane, range, [&](int slot, int t, int count) {
      const Stage<Pose> first(args, lane.shared, slot, t);
      Stage<Pose> stage = first;
      StageGradients<Pose, R> child = gradients;
      FASTCAPS_NO_UNROLL
      for (int k = 0; k < count; ++k) {
        differentiate<LEAN>(lane, stage, child, state);
        stage.next(lane);
        child.next();
      }
      barrier();
      if (!LEAN && (args.collect || args.measured)) return;
      if (args.dchildren) gradients.flush_children(t, count);
      if constexpr (State::kGates)
        if (args.dgate) {
          gradients.flush_gates(first.seen, t, count);
          barrier();  // `seen` is read to the end
        }
      if constexpr (Pose::kWeightStride > 0)
        if (args.dweight) gradients.flush_weights(t, count);
      if constexpr (kLargeWeights<Pose>) {
        const auto outer = [&](auto stored) { gradients.template flush_large_weights<stored()>(first, t, count); };
        if (args.dweight) {
          if constexpr (Pose::kStored)
            with_weights<Pose>(args, outer);
          else
            outer(Stored<Storage::kFloat32>());
        }
        barrier();  // the children are read to the end
      }
    });
    if (LEAN || !args.collect) state.store(range.chunk);
    barrier();  // the tile is read to the end
  }
}

template <template <class, int, bool> class Policy, bool HAS_LEAN, class... B>
PassKernels backward_kernels() {
  static const PassKernel all[] = {
      B::kernel(&backward_kernel<Policy, typename B::Pose, B::kPositions, false, B::kThreads, B::kBlocks>,
                &backward_kernel<Policy, typename B::Pose, B::kPositions, HAS_LEAN, B::kThreads, B::kBlocks>)...};
  return {all, sizeof...(B)};
}

}  // namespace fastcaps::gpu
