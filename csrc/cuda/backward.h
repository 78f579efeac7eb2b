// The walk of every pass, backward: votes are made again, the policy turns them into their gradients, and those become
// the gradients of children, weights and bias. In a policy (see forward.h)
//   dvote(a, lane, stage, found, seats, shared, votes)
// takes the place of score and add: votes become dL/dV, 0 for what takes no part. It returns false where the launch
// only collects statistics, or measures (kMeasures: there are such launches).
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
FASTCAPS_DEVICE float* part_of(const PassArgs& a, float* parts, int64_t numbers) {
  return parts + (a.parts_by_chunk ? block_x() : int64_t(a.by_chunk.quotient(int(block_x())))) * numbers;
}

// Where the weights' gradient of the t-th child towards parent m is added up, [D, E].
template <class Pose>
FASTCAPS_DEVICE float* gradient_of_weights(const PassArgs& a, int t, int m) {
  const int64_t pair = int64_t(a.by_group.quotient(t)) * a.M + m;
  return part_of(a, a.dweight, a.dweight_part) + pair * Pose::D_(a) * Pose::E_(a);
}

// Where the warps of a block put what they found for the children of a stage, one child after another, before the block
// adds it all up.
template <class Pose>
struct Found {
  float* children;  // [warps that share parents, tile, C, D], child_stride apart
  float* weight;    // [warps that take other positions, parents of the block, stride]; or, where weights are large,
                    // dL/dV: [parents of the block, tile, E]
  float* gates;     // [tile, warps that share parents]

  FASTCAPS_DEVICE Found(const PassArgs& a, char* shared)
      : children(reinterpret_cast<float*>(shared + a.shared_dchildren)),
        weight(reinterpret_cast<float*>(shared + a.shared_dweight)),
        gates(reinterpret_cast<float*>(shared + a.shared_dgate)) {}
  FASTCAPS_DEVICE void next(const PassArgs& a) {
    children += a.tile * a.warps_parents * child_stride<Pose>(a);
    gates += a.tile * a.warps_parents;
    weight += Lane<Pose>::block_parents(a) *
              (kLargeWeights<Pose> ? a.tile * Pose::kE : warps_positions(a) * Pose::kWeightStride);
  }

  static FASTCAPS_DEVICE int warps_positions(const PassArgs& a) { return block_threads() / kWarp / a.warps_parents; }
  FASTCAPS_DEVICE float* child(const PassArgs& a, int seat, int warp_parent) const {
    return children + (warp_parent * a.tile + seat) * child_stride<Pose>(a);
  }
  FASTCAPS_DEVICE float* weights(const PassArgs& a, int warp_position, int parent) const {
    return weight + (warp_position * Lane<Pose>::block_parents(a) + place(parent)) * Pose::kWeightStride;
  }
  // Some lanes put down dW of their first parent while others do of their second, which would lie on the same banks
  // (4x4 poses: kParents * 20 floats on). So each four of the second ones change places with the next four.
  static FASTCAPS_DEVICE int place(int parent) {
    constexpr bool kMeet = Pose::kEach == 2 && Pose::kWeightStride == 20 && Pose::kParents % 8 == 0;
    return kMeet ? parent ^ parent / (kMeet ? Pose::kParents : 1) % 2 * 4 : parent;
  }
};

// Rows d .. d + V of dP, summed over the parents and columns of the warp, for B of the lane's positions from r on.
template <class Pose, int R, int B, Storage S>
FASTCAPS_DEVICE void differentiate_children(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage,
                                            const Found<Pose>& found, int d, int r, const Patches<Pose, R>& dvotes) {
  constexpr int V = Pose::kVector, TC = Pose::kPatchRows, TE = Pose::kPatchColumns, N = B * TC * V;
  float x[N] = {};
  FASTCAPS_UNROLL
  for (int p = 0; p < Pose::kEach; ++p) {
    float w[V][TE];
    Weights<Pose, S>(a, lane, stage, p).rows(a, lane, d, w);
    FASTCAPS_UNROLL
    for (int b = 0; b < B; ++b) {
      FASTCAPS_UNROLL
      for (int v = 0; v < V; ++v)
        each_number<Pose>([&](int i, int j) { x[(b * TC + i) * V + v] += dvotes[r + b][p][i][j] * w[v][j]; });
    }
  }
  const auto put = [&](int n, float sum) {
    const int v = n % V, i = n / V % TC, b = n / (V * TC);
    found.child(a, lane.template seat<R>(r + b), lane.warp_parent)[lane.c(i) * row_stride<Pose>(a) + d + v] = sum;
  };
  if constexpr (Pose::kFixed) {
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
      const float sum = sum_parents<Pose>(a, sum_columns<Pose>(a, x[n]));
      if (lane.column == 0 && lane.parent == 0) put(n, sum);
    }
  }
}

// dP where votes are the children themselves.
template <class Pose, int R>
FASTCAPS_DEVICE void hand_back(const PassArgs& a, const Lane<Pose>& lane, const Found<Pose>& found,
                               const Patches<Pose, R>& dvotes) {
  FASTCAPS_UNROLL
  for (int r = 0; r < R; ++r) {
    float* to = found.child(a, lane.template seat<R>(r), lane.warp_parent);
    each_number<Pose>([&](int i, int j) {
      float sum = 0.0f;
      FASTCAPS_UNROLL
      for (int p = 0; p < Pose::kEach; ++p) sum += dvotes[r][p][i][j];
      sum = sum_parents<Pose>(a, sum);
      if (lane.parent == 0 && lane.inside(a, i, j)) to[lane.c(i) * row_stride<Pose>(a) + lane.e(a, j)] = sum;
    });
  }
}

// What a child's gate gains from the lane's parents at its r-th position: summed over those of the warp.
template <class Pose, int R>
FASTCAPS_DEVICE void put_gate(const PassArgs& a, const Lane<Pose>& lane, const Found<Pose>& found, int r, float gain) {
  gain = sum_parents<Pose>(a, gain);
  if (lane.speaks_for_position()) found.gates[lane.template seat<R>(r) * a.warps_parents + lane.warp_parent] = gain;
}

// Rows d .. d + V of dW, summed over the rows and positions of the warp.
template <class Pose, int R>
FASTCAPS_DEVICE void differentiate_weights(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage,
                                           const Found<Pose>& found, int d, const Patches<Pose, R>& dvotes) {
  constexpr int V = Pose::kVector, TC = Pose::kPatchRows, TE = Pose::kPatchColumns, WV = Pose::kWeightVector;
  constexpr int N = Pose::kEach * V * TE;
  float x[N] = {};
  FASTCAPS_UNROLL
  for (int r = 0; r < R; ++r) {
    FASTCAPS_UNROLL
    for (int i = 0; i < TC; ++i) {
      float row[V];
      load_vector<V>(child_row(a, lane, stage, lane.template seat<R>(r), i) + d, row);
      FASTCAPS_UNROLL
      for (int n = 0; n < N; ++n) x[n] += row[n / TE % V] * dvotes[r][n / (TE * V)][i][n % TE];
    }
  }
  // WV neighbours at n: to shared memory, where the other warps' will be added, or to the gradient itself.
  const auto put = [&](int n, const float* sum) {
    const int v = n / TE % V, p = n / (TE * V), e = lane.e(a, n % TE);
    if constexpr (Pose::kWeightStride > 0) {
      float* to = found.weights(a, lane.warp_position, lane.in_block(p)) + (d + v) * Pose::kE + e;
      store_vector<WV>(to, sum);
    } else if (lane.alive(a, p) && (Pose::kFixed || (d + v < a.D && e < a.E))) {
      float part[WV];
      FASTCAPS_UNROLL
      for (int w = 0; w < WV; ++w) part[w] = sum[w];
      float* to = gradient_of_weights<Pose>(a, stage.t, lane.m(p)) + (d + v) * Pose::E_(a) + e;
      add_vector<WV>(to, part, a.alone_with_weights);
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
      const float sum = sum_rows<Pose>(a, sum_positions<Pose>(a, x[n]));
      if (lane.row == 0 && lane.position == 0) put(n, &sum);
    }
  }
}

template <class Pose>
FASTCAPS_DEVICE void differentiate_weights_on_tensor_cores(const PassArgs& a, const Lane<Pose>& lane,
                                                           const Stage<Pose>& stage, const Found<Pose>& found,
                                                           const Patches<Pose, 1>& dvotes) {
  FASTCAPS_UNROLL
  for (int p = 0; p < Pose::kEach; ++p) {
    float rows[2][4];
    outer_on_tensor_cores(lane, stage, dvotes[0][p], rows);
    float* to = found.weights(a, lane.warp_position, lane.in_block(p)) + lane.position * 2 * Pose::kE;
    if (lane.position < 2) {
      store_vector<4>(to, rows[0]);
      store_vector<4>(to + Pose::kE, rows[1]);
    }
  }
}

// Where weights are large, dL/dV itself is put down; the block makes dW from it and the children (multiply_outer).
template <class Pose, int R>
FASTCAPS_DEVICE void put_down(const PassArgs& a, const Lane<Pose>& lane, const Found<Pose>& found,
                              const Patches<Pose, R>& dvotes) {
  static_assert(Pose::kPatchRows == 1, "large weights belong to vectors");
  each_tile<Pose, R>([&](int r, int p) {
    float* to = found.weight + (lane.in_block(p) * a.tile + lane.template seat<R>(r)) * Pose::kE;
    FASTCAPS_UNROLL
    for (int j = 0; j < Pose::kPatchColumns; j += Pose::kWeightVector)
      store_vector<Pose::kWeightVector>(to + lane.e(a, j), &dvotes[r][p][0][j]);
  });
}

template <class Pose, int R>
FASTCAPS_DEVICE void differentiate_bias(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage,
                                        const Patches<Pose, R>& dvotes) {
  const int64_t first = int64_t(a.bias_stride_i ? Child(a, stage.t).i : stage.t % kSharedSums) * a.M;
  FASTCAPS_UNROLL
  for (int p = 0; p < Pose::kEach; ++p)
    each_number<Pose>([&](int i, int j) {
      float sum = 0.0f;
      FASTCAPS_UNROLL
      for (int r = 0; r < R; ++r) sum += dvotes[r][p][i][j];
      sum = sum_positions<Pose>(a, sum);
      if (lane.position == 0 && lane.alive(a, p) && lane.inside(a, i, j))
        add(part_of(a, a.dbias, a.dbias_part) + (first + lane.m(p)) * Pose::C_(a) * Pose::E_(a) + lane.number(a, i, j),
            sum, a.alone_with_weights);
    });
}

// From dL/dV to dP and dW.
template <class Pose, int R>
FASTCAPS_DEVICE void multiply_back(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage,
                                   const Found<Pose>& found, const Patches<Pose, R>& votes) {
  const int depth = Pose::padded_depth(a);
  with_weights<Pose>(a, [&](auto stored) {
    _Pragma("unroll Pose::kDepthUnroll") for (int d = 0; d < depth; d += Pose::kVector) {
      if (a.dchildren) {
        constexpr int B = Pose::kPatchRows == 1 ? R : 1;
        FASTCAPS_UNROLL
        for (int r = 0; r < R; r += B) differentiate_children<Pose, R, B, stored()>(a, lane, stage, found, d, r, votes);
      }
      if constexpr (!kLargeWeights<Pose> && Pose::kProducts == 0)
        if (a.dweight) differentiate_weights<Pose, R>(a, lane, stage, found, d, votes);
    }
  });
  if (a.dweight) {
    if constexpr (kLargeWeights<Pose>)
      put_down<Pose, R>(a, lane, found, votes);
    else if constexpr (Pose::kProducts > 0)
      differentiate_weights_on_tensor_cores<Pose>(a, lane, stage, found, votes);
  }
}

// One child, at the lane's R positions.
template <class Pose, int R, bool PLAIN, class State>
FASTCAPS_DEVICE void differentiate(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage,
                                   const Found<Pose>& found, const Seat* seats, char* shared, State& state) {
  Patches<Pose, R> votes;
  make_votes<Pose, R, PLAIN, State::kIdentity>(a, lane, stage, votes);
  if (!state.dvote(a, lane, stage, found, seats, shared, votes)) return;
  if (State::kIdentity && !a.weight) {
    if (a.dchildren) hand_back<Pose, R>(a, lane, found, votes);
  } else {
    multiply_back<Pose, R>(a, lane, stage, found, votes);
  }
  if (!PLAIN && a.dbias) differentiate_bias<Pose, R>(a, lane, stage, votes);
}

// All warps' dP of a stage, added up and brought to the children.
template <class Pose>
FASTCAPS_DEVICE void flush_children(const PassArgs& a, const Found<Pose>& found, int first, int count,
                                    const Seat* seats) {
  constexpr int V = Pose::kVector;
  const int rows = Pose::padded_rows(a), depth = Pose::padded_depth(a), vectors = depth / V;
  const int units = count * a.tile * rows * vectors;
  for (int unit = thread_index(); unit < units; unit += block_threads()) {
    const int rest = unit / (rows * vectors), c = unit / vectors % rows, d = unit % vectors * V;
    const int k = a.by_tile.quotient(rest), at = a.by_tile.remainder(rest, k);
    const Child child(a, first + k);
    if (!child.exists(a, seats[at]) || c >= Pose::C_(a)) continue;
    const float* from = found.child(a, at, k * a.warps_parents) + c * row_stride<Pose>(a) + d;
    float sum[V] = {};
    for (int w = 0; w < a.warps_parents; ++w) {
      float x[V];
      load_vector<V>(from + w * a.tile * child_stride<Pose>(a), x);
      FASTCAPS_UNROLL
      for (int v = 0; v < V; ++v) sum[v] += x[v];
    }
    float* to = a.dchildren + (child.cell(a, seats[at]) * Pose::C_(a) + c) * Pose::D_(a) + d;
    if constexpr (Pose::kFixed) {
      add_vector<V>(to, sum, a.alone_with_children);
    } else {
      FASTCAPS_UNROLL
      for (int v = 0; v < V; ++v)
        if (d + v < a.D) add(to + v, sum[v], a.alone_with_children);
    }
  }
}

// All warps' part of the gates' gradient. Behind a gate of 0 it may be NaN or infinite, and is then 0.
template <class Pose>
FASTCAPS_DEVICE void flush_gates(const PassArgs& a, const Found<Pose>& found, const Seen* seen, int first, int count,
                                 const Seat* seats) {
  for (int unit = thread_index(); unit < count * a.tile; unit += block_threads()) {
    if (seen[unit].exists == 0.0f) continue;
    const int k = a.by_tile.quotient(unit);
    float sum = 0.0f;
    for (int w = 0; w < a.warps_parents; ++w) sum += found.gates[unit * a.warps_parents + w];
    if (seen[unit].gate == 0.0f && !(fabsf(sum) < INFINITY)) continue;
    add(a.dgate + Child(a, first + k).cell(a, seats[a.by_tile.remainder(unit, k)]), sum, a.alone_with_children);
  }
}

// All warps' dW of a stage; children that share their weights are added up first.
template <class Pose>
FASTCAPS_DEVICE void flush_weights(const PassArgs& a, const Found<Pose>& found, int first, int count) {
  constexpr int V = Pose::kWeightCopy, kVectors = Pose::kD * Pose::kE / V;
  const int block_parents = Lane<Pose>::block_parents(a), warps = Found<Pose>::warps_positions(a);
  const int first_parent = a.first_parent + int(block_y()) * block_parents;
  for (int unit = thread_index(); unit < block_parents * kVectors; unit += block_threads()) {
    const int m = unit / kVectors, number = unit % kVectors * V;
    if (first_parent + m >= a.M) continue;
    float sum[V] = {};
    for (int k = 0; k < count; ++k) {
      for (int w = 0; w < warps; ++w) {
        float x[V];
        load_vector<V>(found.weights(a, k * warps + w, m) + number, x);
        FASTCAPS_UNROLL
        for (int v = 0; v < V; ++v) sum[v] += x[v];
      }
      const int g = a.by_group.quotient(first + k);
      if (k + 1 < count && a.by_group.quotient(first + k + 1) == g) continue;
      add_vector<V>(gradient_of_weights<Pose>(a, first + k, first_parent + m) + number, sum, a.alone_with_weights);
      FASTCAPS_UNROLL
      for (int v = 0; v < V; ++v) sum[v] = 0.0f;
    }
  }
}

// dW = sum over the tile's positions of P^T dV, four by four numbers a thread; children that share their weights are
// added up first.
template <class Pose, Storage S>
FASTCAPS_DEVICE void multiply_outer(const PassArgs& a, const Stage<Pose>& stage, const Found<Pose>& found, int first,
                                    int count) {
  constexpr int kColumns = Pose::kE / 4, kSquares = Pose::kD / 4 * kColumns;
  const int block_parents = Lane<Pose>::block_parents(a);
  const int first_parent = a.first_parent + int(block_y()) * block_parents;
  const auto* children = stage.template children_as<S>();
  for (int unit = thread_index(); unit < block_parents * kSquares; unit += block_threads()) {
    const int parent = unit / kSquares, d = unit % kSquares / kColumns * 4, e = unit % kColumns * 4;
    if (first_parent + parent >= a.M) continue;
    float sum[4][4] = {};
    for (int k = 0; k < count; ++k) {
      const auto* rows = children + k * a.tile * Pose::kRowStride + d;
      const float* columns = found.weight + (k * block_parents + parent) * a.tile * Pose::kE + e;
      for (int seat = 0; seat < a.tile; ++seat) {
        float p[4], v[4];
        load_vector<S>(rows + seat * Pose::kRowStride, p);
        load_vector<4>(columns + seat * Pose::kE, v);
        FASTCAPS_UNROLL
        for (int x = 0; x < 4; ++x) {
          FASTCAPS_UNROLL
          for (int y = 0; y < 4; ++y) sum[x][y] += p[x] * v[y];
        }
      }
      if (k + 1 < count && a.by_group.quotient(first + k + 1) == a.by_group.quotient(first + k)) continue;
      float* to = gradient_of_weights<Pose>(a, first + k, first_parent + parent) + d * Pose::kE + e;
      FASTCAPS_UNROLL
      for (int x = 0; x < 4; ++x) {
        add_vector<4>(to + x * Pose::kE, sum[x], a.alone_with_weights);
        FASTCAPS_UNROLL
        for (int y = 0; y < 4; ++y) sum[x][y] = 0.0f;
      }
    }
  }
}

// Is there a position in the tile that a launch for tight ones is for? All threads find the same.
FASTCAPS_DEVICE bool any_tight(const PassArgs& a, const Seat* seats) {
  bool any = false;
  for (int k = 0; k < a.tile; ++k) any = any || (seats[k].position >= 0 && a.tight[seats[k].position] != 0.0f);
  return any;
}

template <template <class, int, bool> class Policy, class Pose, int R, bool PLAIN, int THREADS, int BLOCKS>
FASTCAPS_KERNEL(THREADS, BLOCKS)
backward_kernel(const FASTCAPS_CONSTANT PassArgs a) {
  char* shared = shared_memory();
  const Seat* seats = reinterpret_cast<const Seat*>(shared + a.shared_seat);
  const Lane<Pose> lane(a);
  const Found<Pose> found(a, shared);
  const ChildRange range(a);
  for (int tile = range.group; tile < a.tiles; tile += a.groups) {
    make_seats(a, tile, shared);
    make_offsets(a, shared, 0, range.first, range.last);
    barrier();
    if constexpr (Policy<Pose, R, PLAIN>::kMeasures) {
      if (a.tight && !any_tight(a, seats)) {
        barrier();  // the seats are read to the end
        continue;
      }
    }
    Policy<Pose, R, PLAIN> state;
    state.load(a, lane, seats);
    walk<Policy<Pose, R, PLAIN>, Pose>(a, shared, range, [&](int which, int t, int count) {
      Stage<Pose> stage(a, shared, which, t);
      Found<Pose> child = found;
      FASTCAPS_NO_UNROLL
      for (int k = 0; k < count; ++k) {
        differentiate<Pose, R, PLAIN>(a, lane, stage, child, seats, shared, state);
        stage.next(a);
        child.next(a);
      }
      barrier();
      if (!PLAIN && (a.collect || a.measured)) return;
      if (a.dchildren) flush_children<Pose>(a, found, t, count, seats);
      if constexpr (Policy<Pose, R, PLAIN>::kGates)
        if (a.dgate) {
          flush_gates<Pose>(a, found, Stage<Pose>(a, shared, which, t).seen, t, count, seats);
          barrier();  // what was seen is read to the end
        }
      if constexpr (Pose::kWeightStride > 0)
        if (a.dweight) flush_weights<Pose>(a, found, t, count);
      if constexpr (kLargeWeights<Pose>) {
        const auto outer = [&](auto stored) {
          multiply_outer<Pose, stored()>(a, Stage<Pose>(a, shared, which, t), found, t, count);
        };
        if (a.dweight) {
          if constexpr (Pose::kStored)
            with_weights<Pose>(a, outer);
          else
            outer(Stored<Storage::kFloat32>());
        }
        barrier();  // the children are read to the end
      }
    });
    if (PLAIN || !a.collect) state.store(a, lane, seats, range.chunk);
    barrier();  // the seats are read to the end
  }
}

template <template <class, int, bool> class Policy, bool HAS_PLAIN, class... B>
PassKernels backward_kernels() {
  static const PassKernel all[] = {
      B::kernel(&backward_kernel<Policy, typename B::Pose, B::kPositions, false, B::kThreads, B::kBlocks>,
                &backward_kernel<Policy, typename B::Pose, B::kPositions, HAS_PLAIN, B::kThreads, B::kBlocks>)...};
  return {all, sizeof...(B)};
}

}  // namespace fastcaps::gpu
