// Gradients of 1 x 64 poses on the tensor cores, from the gradients dV of votes: see TensorPose1x64.
#pragma once

#include "make_votes.h"

namespace fastcaps::gpu {

// dP of the lane's two positions and one parent: a[position, e] = dV[position, e] and b[e, d] = W[d, e], as the lanes
// hold them: in which order an instruction takes the columns e does not matter. body(d, x) gets two neighbours, the
// first of which is number d, at each position.
template <Storage S, int PRODUCTS, bool STAGED, class Body>
FASTCAPS_DEVICE void differentiate_rows(const Lane<TensorPose1x64<PRODUCTS, STAGED>, 2>& lane,
                                        const Stage<TensorPose1x64<PRODUCTS, STAGED>>& stage,
                                        const Patches<TensorPose1x64<PRODUCTS, STAGED>, 2>& dvotes, Body&& body) {
  static_assert(!STAGED);
  const int g = lane.position, t = lane.column;
  const bool alive = lane.alive(0);
  const auto* from = Weights<TensorPose1x64<PRODUCTS, STAGED>, 2, S>(lane, stage, 0).from + g * 64 + 4 * t;
  Factor<PRODUCTS, 4> factors[8];
  FASTCAPS_UNROLL
  for (int n = 0; n < 32; ++n) factors[n / 4].take(n % 4, dvotes[n % 2][0][0][n / 4 * 2 + n / 2 % 2]);
  _Pragma("unroll 2") for (int first = 0; first < 64; first += 8) {
    float d[4] = {};
    FASTCAPS_UNROLL
    for (int four = 0; four < 4; ++four) {
      float row[4];
      load_vector<S>(from + first * 64 + four * 16, row);
      FASTCAPS_UNROLL
      for (int k = 0; k < 4; k += 2) {
        Factor<PRODUCTS, 2> weights;
        FASTCAPS_UNROLL
        for (int x = 0; x < 2; ++x) weights.template take_weight<PRODUCTS == 1>(x, alive ? row[k + x] : 0.0f);
        multiply_add(d, factors[four * 2 + k / 2], weights);
      }
    }
    FASTCAPS_UNROLL
    for (int r = 0; r < 2; ++r) body(r, first + 2 * t, {d[2 * r], d[2 * r + 1]});
  }
}

// Adds to dW of one parent, for 16 rows from `first` on and 32 columns: a[d, position] = P[position, d] and
// b[position, e] = dV[position, e], of `positions` positions in shared memory,
// whose rows of dV, rounded for one product, lie kVoteRow apart: a fragment uses all banks. `sum`: of rows g and g + 8,
// for lane 4 g + t, columns 8 n + 2 t and 8 n + 2 t + 1.
template <int PRODUCTS, class T, class Load>
FASTCAPS_DEVICE void add_outer_product(const T* rows, int stride, const float* columns, int positions, Load&& load,
                                       float (&sum)[4][4]) {
  const int g = thread_index() % kWarp / 4, t = thread_index() % 4;
  FASTCAPS_NO_UNROLL
  for (int at = t; at < positions; at += 8) {
    Factor<PRODUCTS, 4> poses;
    FASTCAPS_UNROLL
    for (int x = 0; x < 4; ++x) poses.take(x, load(rows, (at + x / 2 * 4) * stride + g + x % 2 * 8));
    FASTCAPS_UNROLL
    for (int n = 0; n < 4; ++n) {
      Factor<PRODUCTS, 2> gradients;
      FASTCAPS_UNROLL
      for (int x = 0; x < 2; ++x)
        gradients.template take_weight<PRODUCTS == 1>(x, columns[(at + x * 4) * kVoteRow + n * 8 + g]);
      multiply_add(sum[n], poses, gradients);
    }
  }
}

}  // namespace fastcaps::gpu
