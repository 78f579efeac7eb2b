// A block of the backward: the gradients of its votes, dV, and of its matrices, dW = P^T dV. For small matrices dW has
// a vector over the lanes for each weight, whose lanes are added up once, at the end. For vector poses dW is a matmul
// over the lanes, of poses and vote gradients transposed to rows of scalars.
#pragma once

#include "block.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

template <class T, class Pose, Lanes kLane, class Call>
struct WeightGradients : Block<T, Pose, kLane, Call> {
  using Base = Block<T, Pose, kLane, Call>;
  using Base::in, Base::schedule, Base::pose, Base::weights, Base::slots, Base::CE, Base::CD, Base::P, Base::range;
  using Base::kChildLanes, Base::n, Base::child_of;
  using typename Base::V;
  static constexpr bool kByRows = Pose::kWeightGradientByRows && kLane != Lanes::kChildren;
  // Whether dP and dW are computed at once from dV in registers, even if only one of them is wanted.
  static constexpr bool kAtOnce = Pose::kGradientRows > 0;
  static constexpr int64_t kOneMatrixBytes = 1 << 20;

  const int64_t DE;
  const MatrixLayout layout;  // of dW
  const bool shared;          // whether all children of a walk share their matrices,
  const bool one_matrix;      // and the lanes' sums of dW are kept until its end
  V *dV, *dW_lanes = nullptr;
  V* bias_sums;  // [kTogether, C * E], of a bias that children share: long sums, added one by one, lose digits
  T *P_rows = nullptr, *dV_rows = nullptr;
  T *dW = nullptr, *dB = nullptr;  // of the current item; null if not wanted
  const int* places = nullptr;     // of transposed matrices' values, where lanes are children
  // Where lanes are positions and dW is not dense: that of a block's children, from `dense_from` on, before it is laid
  // out; [children, M, D, E].
  T* dW_dense = nullptr;
  int64_t dense_from = 0;
  struct {
    int64_t first, count, t0, nt;
  } block{};  // units [0, count), the first begins with child `first` of the range; rows [t0, t0 + nt)

  WeightGradients(const Call& call, const Pose& pose, Arena& arena)
      : Base(call, pose, arena, call.schedule.rows_per_group),
        DE(in.D * in.E),
        layout(call.dmatrices),
        shared(kLane == Lanes::kSharing || (kLane == Lanes::kPositions && in.G == 1)),
        one_matrix(shared && !kByRows && in.M * DE * int64_t(sizeof(V)) <= kOneMatrixBytes),
        dV(arena.take<V>(Pose::kTogether * slots * CE)),
        bias_sums(call.dbias && weights.bias_i == 0 ? arena.take<V>(Pose::kTogether * CE) : nullptr) {
    if (bias_sums) zero(bias_sums, Pose::kTogether * CE);
    if (Pose::kIdentity || !(call.dweight || kAtOnce)) return;
    const int64_t matrices = kLane == Lanes::kChildren || (in.G == 1 && !one_matrix) ? 1
                             : one_matrix                                            ? in.M
                                                                                     : schedule.block_children * in.M;
    if (!kByRows) dW_lanes = arena.take<V>(matrices * DE);
    if (call.dweight && kChildLanes && layout.transposed()) places = transposed_places(arena, in.D, in.E);
    if (call.dweight && !kChildLanes && (layout.transposed() || layout.row != in.E || layout.parent != DE))
      dW_dense = arena.take<T>(schedule.block_children * in.M * DE);
    if (kByRows) P_rows = arena.take<T>(slots * n * in.D), dV_rows = arena.take<T>(schedule.block_rows * n * in.E);
  }

  // Where dW of the range's child q and parent m is collected.
  T* gradient_of(int64_t q, int64_t m) const {
    return dW_dense ? dW_dense + ((q - dense_from) * in.M + m) * DE : dW + layout.at(range.child(q) % in.G, m);
  }
  bool each_has_matrices() const { return in.G == in.I; }
  // Where the lanes' sums of unit j and parent m are, and whether they begin with row t.
  V* sums_of(int64_t j, int64_t m) const {
    return dW_lanes + (shared ? (one_matrix ? m : 0) : kChildLanes ? 0 : j * in.M + m) * DE;
  }
  bool sums_begin(int64_t j, int64_t t) const { return shared ? !one_matrix && j == 0 && t == 0 : block.t0 + t == 0; }

  // Before and after all rows process children [first, first + count) of the range. A child with own matrices occurs
  // once in a call: their gradient is cleared here, just before it is used; where lanes are children, all rows are in
  // one block, which stores it.
  void begin_children(int64_t first, int64_t count) {
    dense_from = first;
    if (dW_lanes && one_matrix && first == 0) zero(dW_lanes, in.M * DE);
    if (dW && each_has_matrices() && !kChildLanes)
      for (int64_t q = first; q < first + count; ++q) zero(gradient_of(q, 0), in.M * DE);
  }
  void end_children(int64_t first, int64_t count) {
    if (dW && dW_lanes) {
      if (one_matrix && first + count == range.count) add_lane_sums<T>(dW_lanes, in.M * DE, gradient_of(0, 0));
      for (int64_t j = 0; j < count && !kChildLanes && !shared; ++j)
        add_lane_sums<T>(sums_of(j, 0), in.M * DE, gradient_of(first + j, 0));
    }
    for (int64_t q = first; dW && dW_dense && q < first + count; ++q)
      for (int64_t m = 0; m < in.M; ++m) lay_out(gradient_of(q, m), dW + layout.at(range.child(q), m));
  }
  void lay_out(const T* from, T* to) const {
    if (layout.transposed()) {
      for (int64_t e = 0; e < in.E; ++e)
        for (int64_t d = 0; d < in.D; ++d) *to++ = from[d * in.E + e];
    } else {
      for (int64_t d = 0; d < in.D; ++d) std::memcpy(to + d * layout.row, from + d * in.E, size_t(in.E) * sizeof(T));
    }
  }

  // Transposes the block's poses, and a unit's vote gradients, to rows of scalars.
  void transpose_poses() {
    if (!P_rows) return;
    for (int64_t t = 0; t < block.nt; ++t)
      for (int64_t j = 0; j < block.count; ++j)
        write_rows(P + (t * schedule.block_children + j) * CD, in.D, P_rows + (j * schedule.block_rows + t) * n * in.D);
  }
  FASTCAPS_INLINE void transpose_gradients(int64_t t, int64_t slot) {
    if (dV_rows) write_rows(dV + slot * CE, in.E, dV_rows + t * n * in.E);
  }
  static FASTCAPS_INLINE void write_rows(const V* numbers, int64_t length, T* row) {
    T* lane[n];
    for (int r = 0; r < n; ++r) lane[r] = row + r * length;
    scatter_rows<false, T>(lane, length, numbers);
  }

  // Adds unit j's part of dW for parents [m0, m0 + kMany), if its matrices are not shared.
  template <int kMany>
  FASTCAPS_INLINE void add_unit(int64_t j, int64_t m0) {
    const int64_t q = child_of(block.first, j);
    if constexpr (kByRows)
      if (dV_rows) add_by_rows(P_rows + j * schedule.block_rows * n * in.D, int(block.nt * n), gradient_of(q, m0));
    if (!kAtOnce && dW_lanes && !shared)
      for (int which = 0; which < kMany; ++which)
        add_weight_gradient<T>(pose, block.nt, schedule.block_children, P + j * CD, dV + (which * slots + j) * CE,
                               block.t0 == 0, sums_of(j, m0 + which));
    if (kLane == Lanes::kChildren && dW) {
      T* lane[n];
      for (int r = 0; r < n; ++r) lane[r] = q + r < range.count ? gradient_of(q + r, m0) : nullptr;
      if (each_has_matrices())
        scatter<false>(lane);
      else
        scatter<true>(lane);
    }
  }
  // Adds the block's part of dW for parent m, the `which`-th of the current ones, if all children share its matrix.
  FASTCAPS_INLINE void add_block(int64_t m, int which) {
    if (!dW || !dW_lanes || !shared) return;
    const int64_t stride = schedule.block_children;
    for (int64_t t = 0; t < block.nt && !kAtOnce; ++t)
      add_weight_gradient<T>(pose, block.count, 1, P + t * stride * CD, dV + (which * slots + t * stride) * CE,
                             !one_matrix && t == 0, sums_of(0, m));
    if (!one_matrix) add_lane_sums<T>(sums_of(0, m), DE, gradient_of(block.first, m));
  }

  // Adds a unit's part of dbias for parent m, the `which`-th of the current ones.
  void add_bias_gradient(int64_t q, int64_t m, int which, const V* sum) {
    const auto at = [&](int64_t k) { return dB + range.child(k) * weights.bias_i + m * weights.bias_m; };
    if (bias_sums) {
      for (int64_t k = 0; k < CE; ++k) bias_sums[which * CE + k] += sum[k];
    } else if constexpr (kLane == Lanes::kChildren) {
      T* lane[n];
      for (int k = 0; k < n; ++k) lane[k] = q + k < range.count ? at(q + k) : nullptr;
      scatter_rows<true, T>(lane, CE, sum);
    } else {
      add_lane_sums<T>(sum, CE, at(q));
    }
  }
  // The sums of a block's children for parent m are complete.
  void end_bias(int64_t m, int which) {
    if (!dB || !bias_sums || (weights.bias_m == 0 && m + 1 < in.M)) return;
    const int64_t many = weights.bias_m == 0 ? Pose::kTogether : 1, first = weights.bias_m == 0 ? 0 : which;
    for (int64_t k = first; k < first + many; ++k) add_lane_sums<T>(bias_sums + k * CE, CE, dB + m * weights.bias_m);
    zero(bias_sums + first * CE, many * CE);
  }

 private:
  // Adds dW of a unit of children, or stores it.
  template <bool kAdd>
  void scatter(T** lane) const {
    if (places) return scatter_rows<kAdd, T>(lane, DE, dW_lanes, Transposed{places});
    if (layout.row == in.E) return scatter_rows<kAdd, T>(lane, DE, dW_lanes);
    for (int64_t d = 0; d < in.D; ++d) {
      scatter_rows<kAdd, T>(lane, in.E, dW_lanes + d * in.E);
      for (int r = 0; r < n; ++r)
        if (lane[r]) lane[r] += layout.row;
    }
  }
  // dW[d, e] += sum over lanes of P[d] dV[e]: with vectors along e.
  void add_by_rows(const T* poses, int positions, T* to) {
    constexpr int D = Pose::D, E = Pose::E, kMost = kManyRegisters ? 4 : 2, kCols = E / n < kMost ? E / n : kMost;
    product<4, kCols, V>(
        D, E / n, positions, [&](int d, int k) FASTCAPS_LAMBDA { return poses[k * D + d]; },
        [&](int k, int e) FASTCAPS_LAMBDA { return load<T>(dV_rows + k * E + e * n); },
        [&](int d, int e) FASTCAPS_LAMBDA { return load<T>(to + d * E + e * n); },
        [&](int d, int e, V x) FASTCAPS_LAMBDA { store<T>(to + d * E + e * n, x); });
  }
};

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
