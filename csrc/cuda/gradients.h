// From gradients of votes to those of children and weights: sums over the lanes of a warp, over the warps of a block by
// way of shared memory, and over all blocks in global memory.
#pragma once

#include "child_sums.h"
#include "tensor_large.h"

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
  } else if constexpr (N == 2) {
    if (alone) {
      const float2 old = load2(at);
      store2(at, make_float2(old.x + x[0], old.y + x[1]));
    } else {
      atomic_add2(at, make_float2(x[0], x[1]));
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

// Poses whose gradients tensor cores make, parent by parent: see tensor_gradients.h.
template <class Pose>
constexpr bool kByParent = Pose::kProducts > 0 && !kLargeWeights<Pose>;

// Where a block adds up the gradients that it makes for the children of a stage, one child after another. Where a
// single warp has all parents, and matrices lie in shared memory, its lanes add dP, and Gaussians' and pooling's gates,
// to memory themselves; else they put them here. Attention adds a gate's gradient from the lane of the first parent.
template <class Pose, int R>
struct StageGradients {
  static constexpr int V = Pose::kVector, TC = Pose::kPatchRows, TE = Pose::kPatchColumns, WV = Pose::kWeightVector;
  using Sums = ChildSums<Pose, R>;
  const Lane<Pose, R>& lane;
  const PassArgs& args;
  float* children;  // [stage, warps that share parents, tile_size, C, D], child_stride apart
  float* weight;    // where weights are large, dL/dV: [stage, parents of the block, tile_size, E]; else see slots
  float* gates;     // [stage, tile_size, warps that share parents]
  const Sums sums;
  int k = 0, parity = 0;         // the child within the stage; which of two stages
  const Offset* offset;          // of the child
  unsigned own_slots;            // its parts of dW that the warp makes, in shared memory
  float* own[R][Sums::kPlaces];  // where the lane's sums from its r-th position on belong: see gradient

  FASTCAPS_DEVICE explicit StageGradients(const Lane<Pose, R>& lane_)
      : lane(lane_),
        args(lane.args),
        children(reinterpret_cast<float*>(lane.shared + args.shared_dchildren)),
        weight(reinterpret_cast<float*>(lane.shared + args.shared_dweight)),
        gates(reinterpret_cast<float*>(lane.shared + args.shared_dgate)),
        sums(lane) {}
  FASTCAPS_DEVICE void begin_tile() {
    if constexpr (kByParent<Pose>) {
      if constexpr (kOnePair) own[0][0] = pair(0);
      return;
    }
    FASTCAPS_UNROLL
    for (int r = 0; r < R; r += Sums::kTogether) {
      FASTCAPS_UNROLL
      for (int n = 0; n < Sums::kPlaces; ++n)
        own[r][n] = sums.speaks && args.dchildren ? gradient(lane.in_tile(r + sums.r(n))) : nullptr;
    }
  }
  FASTCAPS_DEVICE void begin_stage(const ChildRange& range, int t) {
    k = 0, parity ^= args.late_weights;
    offset = offsets_of(args, lane.shared, range, t);
    own_slots = slots(parity, 0, lane.warp_position);
    if constexpr (kByParent<Pose>) own_slots += in_slot(lane.in_block(0), lane.position * Pose::kD * 2);
  }
  FASTCAPS_DEVICE void next() {
    ++k, ++offset;
    own_slots += lane.warps_positions() * lane.block_parents() * Pose::kSlotStride * 4;
  }

  // Whether lanes add to memory themselves.
  FASTCAPS_DEVICE bool adds_directly() const { return Pose::kWeightStride > 0 && args.warps_parents == 1; }
  FASTCAPS_DEVICE float* child(int in_tile, int of, int warp_parent) const {
    return children + ((of * args.warps_parents + warp_parent) * args.tile_size + in_tile) * lane.child_stride();
  }
  // Where the gradient of the window's first child is added up, at a position; null if there is none.
  FASTCAPS_DEVICE float* gradient(int in_tile) const {
    const Position& at = lane.tile[in_tile];
    return at.exists() ? args.dchildren + at.cell * lane.C() * lane.D() : nullptr;
  }
  // From there to the child.
  FASTCAPS_DEVICE int64_t distance() const { return offset->cell * lane.C() * lane.D(); }

  // Rows d .. d + kRows of dP, summed over the parents and columns of the warp, for the lane's positions from r on.
  // matrix_row(p, d, to): of the lane's p-th parent. exists(in_tile): whether there is a child.
  template <class MatrixRow, class Exists>
  FASTCAPS_DEVICE void put_children(int d, int r, const Patches<Pose, R>& dvotes, MatrixRow&& matrix_row,
                                    Exists&& exists) const {
    float x[Sums::kSums] = {};
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) {
      FASTCAPS_UNROLL
      for (int v = 0; v < Sums::kRows; ++v) {
        float w[TE];
        matrix_row(p, d + sums.row(v), w);
        FASTCAPS_UNROLL
        for (int b = 0; b < Sums::kTogether; ++b)
          each_number<Pose>([&](int i, int j) { x[Sums::number(v, b, i)] += dvotes[r + b][p][i][j] * w[j]; });
      }
    }
    sums.add_up(x, lane);
    FASTCAPS_UNROLL
    for (int n = 0; n < Sums::kMost; ++n) {
      float* const to = own[r][n % Sums::kPlaces];
      if (n >= sums.count || !(Pose::kWeightStride > 0 ? to != nullptr : sums.speaks)) continue;
      const int in_tile = lane.in_tile(r + sums.r(n)), c = lane.c(sums.i(n)), row = d + sums.d(n);
      if (!adds_directly())
        child(in_tile, k, lane.warp_parent)[c * lane.row_stride() + row] = x[n];
      else if (exists(in_tile))
        add(to + distance() + c * Pose::kD + row, x[n], args.alone_with_children);
    }
  }

  // By parent, a lane ends with pairs of neighbours of dP: of rows parent, parent + 8, ... of all positions, two
  // columns from 2 position on; in 4 x 4 poses with one. Where the n-th is added up, of the window's first child; null:
  // nowhere.
  static constexpr bool kOnePair = Pose::kD == 4;
  FASTCAPS_DEVICE int pair_row(int n) const { return lane.parent + 8 * (kOnePair ? lane.position / 2 : n); }
  FASTCAPS_DEVICE int pair_in_tile(int n) const { return lane.warp_position * 4 + pair_row(n) / TC; }
  FASTCAPS_DEVICE int pair_number(int n) const {
    return pair_row(n) % TC * Pose::kD + (kOnePair ? lane.position % 2 : lane.position) * 2;
  }
  FASTCAPS_DEVICE float* pair(int n) const {
    float* to = gradient(pair_in_tile(n));
    return args.dchildren && to ? to + pair_number(n) : nullptr;
  }
  template <bool LEAN>
  FASTCAPS_DEVICE void put_pair(const Stage<Pose>& stage, int n, const float (&x)[2]) const {
    if (!adds_directly()) return store_vector<2>(child(pair_in_tile(n), k, lane.warp_parent) + pair_number(n), x);
    float* const to = kOnePair ? own[0][0] : pair(n);
    if (to && (LEAN || stage.seen[pair_in_tile(n)].exists != 0.0f))
      add_vector<2>(to + distance(), x, args.alone_with_children);
  }

  // dP where votes are the children themselves.
  FASTCAPS_DEVICE void put_identity(const Stage<Pose>& stage, const Patches<Pose, R>& dvotes) const {
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      Patch<Pose> sums;
      each_number<Pose>([&](int i, int j) {
        sums[i][j] = dvotes[r][0][i][j];
        FASTCAPS_UNROLL
        for (int p = 1; p < Pose::kEach; ++p) sums[i][j] += dvotes[r][p][i][j];
      });
      sum_parents(lane, sums);
      each_vector<Pose>([&](int i, int j) {
        float x[WV];
        FASTCAPS_UNROLL
        for (int v = 0; v < WV; ++v) x[v] = sums[i][j + v];
        if (lane.parent != 0 || !lane.inside(i, j)) return;
        if (!adds_directly())
          store_vector<WV>(child(lane.in_tile(r), k, lane.warp_parent) + lane.c(i) * lane.row_stride() + lane.e(j), x);
        else if (stage.seen[lane.in_tile(r)].exists != 0.0f)
          add_vector<WV>(gradient(lane.in_tile(r)) + distance() + lane.number(i, j), x, args.alone_with_children);
      });
    }
  }

  // The gradient of a gate, summed over the block's parents. Behind a gate of 0 it may be NaN or infinite, and is then
  // 0.
  FASTCAPS_DEVICE void add_gate(const Seen& seen, int64_t cell, float gain) const {
    if (seen.exists != 0.0f && (seen.gate != 0.0f || fabsf(gain) < INFINITY))
      add(args.dgate + cell, gain, args.alone_with_children);
  }
  // The part of the warp's parents, at the lane's r-th position.
  FASTCAPS_DEVICE void put_gate(const Stage<Pose>& stage, int r, float gain) const {
    if (!lane.speaks_for_position()) return;
    const int at = lane.in_tile(r);
    if (adds_directly())
      add_gate(stage.seen[at], lane.tile[at].cell + offset->cell, gain);
    else
      gates[(k * args.tile_size + at) * args.warps_parents + lane.warp_parent] = gain;
  }

  // The parts of dW that a warp makes for a child, of one of two stages, in bytes of shared memory; and where there a
  // parent's number-th value lies. Vectors of four are in an order by which the lanes of a quarter warp, when they
  // store theirs, use different banks.
  FASTCAPS_DEVICE unsigned slots(int of, int child, int warp_position) const {
    const int warp = (of * args.stage + child) * lane.warps_positions() + warp_position;
    return args.shared_dweight + warp * lane.block_parents() * Pose::kSlotStride * 4;
  }
  static FASTCAPS_DEVICE unsigned in_slot(int parent, int number) {
    constexpr unsigned kMask = WV < 4 ? 0 : Pose::kSlotStride == 16 ? 48 : 96;  // of bytes within a matrix
    const int shift = Pose::kSlotStride == 16 ? (parent >> 1) ^ parent / Pose::kParents % 2 * 3 : parent * 2;
    const unsigned at = unsigned(number) * 4;
    return unsigned(parent * Pose::kSlotStride * 4) + (at & ~kMask) + ((at ^ unsigned(shift) * 16) & kMask);
  }
  // Of the lane's p-th parent; `number` is the first column's, the lane's own lies next to it.
  FASTCAPS_DEVICE float* slot(int p, int number) const {
    return reinterpret_cast<float*>(lane.shared + own_slots + in_slot(lane.in_block(p), number) + lane.column * WV * 4);
  }
  // By parent: what an instruction leaves there for the q-th pair of columns. (An exclusive or adds, where in_slot has
  // changed the same bits.)
  FASTCAPS_DEVICE float* fragment(int p, int q) const {
    const unsigned moved = in_slot(p * Pose::kParents, 0), change = (moved & 48) ^ unsigned(q * 16);
    const unsigned to = Pose::kD == 6 ? own_slots + q * 16 : own_slots ^ change;
    return reinterpret_cast<float*>(lane.shared + to + (moved & ~48u));
  }

  // The lane's part of rows d .. d + V of dW, [kEach, V, TE].
  static constexpr int kWeightSums = Pose::kEach * V * TE;
  template <class Row>
  FASTCAPS_DEVICE static void add_weights(int d, const Patches<Pose, R>& dvotes, Row&& row_of, float* x) {
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      FASTCAPS_UNROLL
      for (int i = 0; i < TC; ++i) {
        float row[V];
        row_of(r, i, d, row);
        FASTCAPS_UNROLL
        for (int n = 0; n < kWeightSums; ++n) x[n] += row[n / TE % V] * dvotes[r][n / (TE * V)][i][n % TE];
      }
    }
  }
  // They, summed over the rows and positions of the warp.
  FASTCAPS_DEVICE void put_weights(const Stage<Pose>& stage, int d, float* x) const {
    constexpr int N = kWeightSums;
    if constexpr (Pose::kFixed) {
      constexpr int kLanes = Pose::kPositions, kLeft = N / kLanes;
      static_assert(kLeft % WV == 0, "lanes part their sums between vectors");
      int begin, count;
      scattered<N, Pose::kColumns, kLanes, Pose::kSwaps>(lane.lane, begin, count);
      scatter_sums<N, Pose::kColumns, kLanes, Pose::kSwaps>(x, lane.lane);
      FASTCAPS_UNROLL
      for (int n = 0; n < kLeft; n += WV) {
        const int at = begin + n, p = at / (TE * V),
                  number = (d + at / TE % V) * Pose::kE + lane.e(at % TE) - lane.column * WV;
        store_vector<WV>(slot(p, number), x + n);
      }
    } else {
      FASTCAPS_UNROLL
      for (int n = 0; n < N; ++n) {
        const float sum = lane.sum_rows(lane.sum_positions(x[n]));
        const int v = n / TE, e = lane.e(n % TE);
        if (lane.row == 0 && lane.position == 0 && lane.alive(0) && d + v < args.D && e < args.E)
          add(gradient_of_weights(lane, stage.t, lane.m(0)) + (d + v) * args.E + e, sum, args.alone_with_weights);
      }
    }
  }

  // What a lane has summed up of dW over all children (SHARED, see put_held): as that of a stage's only child.
  FASTCAPS_DEVICE void put_shared(float (&x)[kWeightSums]) {
    parity = 0, own_slots = slots(0, 0, lane.warp_position);
    put_weights(Stage<Pose>(args, lane.shared, 0, 0), 0, x);
  }

  // If weights are large: stores dL/dV itself, from which the block makes dW (flush_large_weights).
  static constexpr int kRow = Pose::kProducts > 0 ? kVoteRow : Pose::kE;  // from row to row
  FASTCAPS_DEVICE void put_votes(const Patches<Pose, R>& dvotes) const {
    static_assert(TC == 1, "large weights belong to vectors");
    each_patch<Pose, R>([&](int r, int p) {
      float* to = weight + ((k * lane.block_parents() + lane.in_block(p)) * args.tile_size + lane.in_tile(r)) * kRow;
      FASTCAPS_UNROLL
      for (int j = 0; j < TE; j += WV) {
        float part[WV];
        FASTCAPS_UNROLL
        for (int v = 0; v < WV; ++v) {
          const float number = dvotes[r][p][0][j + v];
          part[v] = Pose::kProducts == 1 ? bits_float(to_tf32(number)) : number;
        }
        store_vector<WV>(to + lane.e(j), part);
      }
    });
  }

  // From dL/dV to dP and dW. row_of(r, i, d, to): values from the d-th on of a row of the child.
  template <class Row, class Exists>
  FASTCAPS_DEVICE void put(const Stage<Pose>& stage, const Patches<Pose, R>& dvotes, Row&& row_of,
                           Exists&& exists) const {
    const int depth = lane.padded_depth();
    if (args.dchildren)
      with_weights<Pose>(args, [&](auto stored) {
        if constexpr (Pose::kProducts > 0)
          return differentiate_rows<stored()>(lane, stage, dvotes, [&](int r, int d, const float (&x)[2]) {
            store_vector<2>(child(lane.in_tile(r), k, lane.warp_parent) + d, x);
          });
        const auto matrix_row = [&](int p, int d, float (&w)[TE]) {
          Weights<Pose, R, stored()>(lane, stage, p).row(d, w);
        };
        _Pragma("unroll Sums::kRows == Pose::kD ? 1 : Pose::kDepthUnroll") for (int d = 0; d < depth;
                                                                                d += Sums::kRows) {
          FASTCAPS_UNROLL
          for (int r = 0; r < R; r += Sums::kTogether) put_children(d, r, dvotes, matrix_row, exists);
        }
      });
    if (!args.dweight) return;
    if constexpr (kLargeWeights<Pose>) {
      put_votes(dvotes);
    } else {
      _Pragma("unroll Pose::kDepthUnroll") for (int d = 0; d < depth; d += V) {
        float x[kWeightSums] = {};
        add_weights(d, dvotes, row_of, x);
        put_weights(stage, d, x);
      }
    }
  }
  // The same of a child that the lane holds; then() may read the next one. SHARED: all children have the same matrices,
  // so dW stays in the lane's sums. Both gradients, whatever is wanted: that costs less than to ask.
  template <bool SHARED, class Exists, class Then>
  FASTCAPS_DEVICE void put_held(const Stage<Pose>& stage, const Rows<Pose>& rows, const Matrices<Pose>& matrices,
                                const Patches<Pose, R>& dvotes, float (&sums_of_weights)[kWeightSums], Exists&& exists,
                                Then&& then) const {
    static_assert(!SHARED || Pose::kTurns, "stages bring no matrices");
    const auto row_of = [&](int, int i, int d, float (&row)[V]) {
      FASTCAPS_UNROLL
      for (int v = 0; v < V; ++v) row[v] = rows[i][d + v];
    };
    const auto matrix_row = [&](int p, int d, float (&w)[TE]) {
      if constexpr (Pose::kTurns) {
        FASTCAPS_UNROLL
        for (int j = 0; j < TE; ++j) w[j] = matrices[p][d][j];
      } else {  // in the lane's order
        Weights<Pose, R>(lane, stage, p).row(d, w);
      }
    };
    put_children(0, 0, dvotes, matrix_row, exists);
    FASTCAPS_UNROLL
    for (int d = 0; d < Pose::kD; d += V) {
      float x[kWeightSums] = {};
      add_weights(d, dvotes, row_of, SHARED ? sums_of_weights : x);
      if (d + V == Pose::kD) then();
      if constexpr (!SHARED) put_weights(stage, d, x);
    }
  }

  // Adds all warps' dP of a stage to the gradients of the children.
  FASTCAPS_DEVICE void flush_children(int first, int count) const {
    const int units = count * args.tile_size * lane.padded_rows() * (lane.padded_depth() / V);
    for (int unit = thread_index(); unit < units; unit += block_threads()) {
      const auto [child_of_stage, c, d] = lane.vector_of_child(unit);
      const int of = args.by_tile.quotient(child_of_stage), at = args.by_tile.remainder(child_of_stage, of);
      const Child one(args, first + of);
      if (!one.exists(args, lane.tile[at]) || c >= lane.C()) continue;
      const float* from = child(at, of, 0) + c * lane.row_stride() + d;
      float sum[V] = {};
      for (int w = 0; w < args.warps_parents; ++w) {
        float x[V];
        load_vector<V>(from + w * args.tile_size * lane.child_stride(), x);
        FASTCAPS_UNROLL
        for (int v = 0; v < V; ++v) sum[v] += x[v];
      }
      float* to = args.dchildren + ((lane.tile[at].cell + one.cell(args)) * lane.C() + c) * lane.D() + d;
      if constexpr (Pose::kFixed) {
        add_vector<V>(to, sum, args.alone_with_children);
      } else {
        FASTCAPS_UNROLL
        for (int v = 0; v < V; ++v)
          if (d + v < args.D) add(to + v, sum[v], args.alone_with_children);
      }
    }
  }

  // All warps' part of the gates' gradient.
  FASTCAPS_DEVICE void flush_gates(const Seen* seen, int first, int count) const {
    for (int unit = thread_index(); unit < count * args.tile_size; unit += block_threads()) {
      const int of = args.by_tile.quotient(unit), at = args.by_tile.remainder(unit, of);
      float sum = 0.0f;
      for (int w = 0; w < args.warps_parents; ++w) sum += gates[unit * args.warps_parents + w];
      add_gate(seen[unit], lane.tile[at].cell + Child(args, first + of).cell(args), sum);
    }
  }

  // All warps' dW of the stage `of`; children that share their weights are added up first. By parent, slots hold what
  // instructions made: for two rows and two columns, which are two apart in 4 x 4 poses, a vector.
  FASTCAPS_DEVICE void flush_weights(int of, int first, int count) const {
    constexpr int V = Pose::kWeightCopy, W = kByParent<Pose> ? 2 * Pose::kD : V, kVectors = Pose::kD * Pose::kE / W;
    const auto place = [](int number) {  // of the number-th in two rows
      const int x = number / Pose::kE, e = number % Pose::kE, q = Pose::kE == 4 ? e % 2 : e / 2;
      return !kByParent<Pose> ? number : q * 4 + (Pose::kE == 4 ? e / 2 : e % 2) * 2 + x;
    };
    const int units = lane.block_parents() * kVectors, warps = lane.warps_positions();
    for (int unit = thread_index(), child = 0;; unit += block_threads()) {
      while (unit >= units) unit -= units, ++child;
      if (child >= count) break;
      const int m = unit / kVectors, number = unit % kVectors * W, g = args.by_group.quotient(first + child);
      if (lane.first_parent + m >= args.M) continue;
      if (child > 0 && args.by_group.quotient(first + child - 1) == g) continue;
      float sum[W] = {};
      for (int same = child; same < count && args.by_group.quotient(first + same) == g; ++same) {
        for (int w = 0; w < warps; ++w) {
          FASTCAPS_UNROLL
          for (int n = 0; n < W; n += V) {
            float x[V];
            load_vector<V>(reinterpret_cast<const float*>(lane.shared + slots(of, same, w) + in_slot(m, number + n)),
                           x);
            FASTCAPS_UNROLL
            for (int v = 0; v < V; ++v) sum[n + v] += x[v];
          }
        }
      }
      float* to = gradient_of_weights(lane, first + child, lane.first_parent + m) + number;
      FASTCAPS_UNROLL
      for (int n = 0; n < W; n += V) {
        float row[V];
        FASTCAPS_UNROLL
        for (int v = 0; v < V; ++v) row[v] = sum[place(n + v)];
        add_vector<V>(to + n, row, args.alone_with_weights);
      }
    }
  }

  // dW = sum over the tile's positions of P^T dV; children that share their weights are added up first. A thread makes
  // four by four values, on tensor cores a warp 16 rows of 32 columns.
  template <Storage S>
  FASTCAPS_DEVICE void flush_large_weights(const Stage<Pose>& stage, int first, int count) const {
    constexpr bool kTensor = Pose::kProducts > 0;
    constexpr int kTogether = kTensor ? kWarp : 1, kRows = kTensor ? 16 : 4, kColumns = kTensor ? 32 : 4;
    constexpr int kAcross = Pose::kE / kColumns, kUnits = Pose::kD / kRows * kAcross;
    const int block_parents = lane.block_parents(), g = lane.lane / 4, t = lane.lane % 4;
    const auto* children = stage.template children_as<S>();
    for (int unit = thread_index() / kTogether; unit < block_parents * kUnits; unit += block_threads() / kTogether) {
      const int parent = unit / kUnits, d = unit % kUnits / kAcross * kRows, e = unit % kAcross * kColumns;
      if (lane.first_parent + parent >= args.M) continue;
      float sum[4][4] = {};
      for (int k = 0; k < count; ++k) {
        const auto* rows = children + k * args.tile_size * Pose::kRowStride + d;
        const float* columns = weight + (k * block_parents + parent) * args.tile_size * kRow + e;
        if constexpr (kTensor) {
          add_outer_product<Pose::kProducts>(
              rows, Pose::kRowStride, columns, args.tile_size,
              [](const Element<S>* from, int at) { return load_number(from, at, S); }, sum);
        } else {
          for (int at = 0; at < args.tile_size; ++at) {
            float p[4], v[4];
            load_vector<S>(rows + at * Pose::kRowStride, p);
            load_vector<4>(columns + at * kRow, v);
            FASTCAPS_UNROLL
            for (int n = 0; n < 16; ++n) sum[n / 4][n % 4] += p[n / 4] * v[n % 4];
          }
        }
        if (k + 1 < count && args.by_group.quotient(first + k + 1) == args.by_group.quotient(first + k)) continue;
        float* to = gradient_of_weights(lane, first + k, lane.first_parent + parent) + d * Pose::kE + e;
        FASTCAPS_UNROLL
        for (int n = 0; n < 4; ++n) {
          if constexpr (kTensor) {
            float* const two = to + g * Pose::kE + 8 * n + 2 * t;
            add_vector<2>(two, {sum[n][0], sum[n][1]}, args.alone_with_weights);
            add_vector<2>(two + 8 * Pose::kE, {sum[n][2], sum[n][3]}, args.alone_with_weights);
          } else {
            add_vector<4>(to + n * Pose::kE, sum[n], args.alone_with_weights);
          }
        }
        FASTCAPS_UNROLL
        for (int n = 0; n < 16; ++n) sum[n / 4][n % 4] = 0.0f;
      }
    }
  }

  // All that the warps have put for a stage, except parts of dW.
  FASTCAPS_DEVICE void flush(const Stage<Pose>& stage, int count, bool with_gates) const {
    if (!adds_directly() && args.dchildren) flush_children(stage.t, count);
    if (!adds_directly() && with_gates) flush_gates(stage.seen, stage.t, count);
    if constexpr (kLargeWeights<Pose>) {
      const auto outer = [&](auto stored) { flush_large_weights<stored()>(stage, stage.t, count); };
      if (!args.dweight) return;
      if constexpr (Pose::kStored)
        with_weights<Pose>(args, outer);
      else
        outer(Stored<Storage::kFloat32>());
    }
  }
};

}  // namespace fastcaps::gpu
