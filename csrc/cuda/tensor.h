// Votes on the tensor cores, in tf32: products of values rounded to 10 bits of mantissa, sums in float. Used if the
// user's precision allows it, and always for half-precision tensors, whose values fit into tf32. If the depth fills a
// half-precision instruction, that one is used, without conversion.
//
// PRODUCTS: how many tf32 products make one product: one, or three for about float's precision. With three, a float is
// split into a tf32 value and a remainder, which a second tf32 holds except for one bit. The three products are a_r b +
// a b_r + a b, with remainders a_r, b_r; a_r b_r, at most 2^-22 of a b, is left out. (An infinity becomes NaN.)
//
// The layouts are chosen so that the instruction leaves each lane with exactly the values that the lane holds anyway:
// nothing moves between lanes before or after.
#pragma once

#include "operands.h"

namespace fastcaps::gpu {

// N values of a factor, as instructions take them.
template <int PRODUCTS, int N>
struct Factor {
  uint32_t number[N], remainder[PRODUCTS == 3 ? N : 1];

  FASTCAPS_DEVICE void take(int k, float x) {
    number[k] = to_tf32(x);
    if constexpr (PRODUCTS == 3) remainder[k] = float_bits(x - bits_float(number[k]));
  }
  // For a single product, weights are already rounded (round_kernel).
  FASTCAPS_DEVICE void take_weight(int k, float x) {
    if constexpr (PRODUCTS == 3)
      take(k, x);
    else
      number[k] = float_bits(x);
  }
};

// d += a * b; small products first.
template <int PRODUCTS>
FASTCAPS_DEVICE void multiply_add(float (&d)[4], const Factor<PRODUCTS, 4>& a, const Factor<PRODUCTS, 2>& b) {
  if constexpr (PRODUCTS == 3) {
    mma_tf32_16x8x8(d, a.remainder, b.number);
    mma_tf32_16x8x8(d, a.number, b.remainder);
  }
  mma_tf32_16x8x8(d, a.number, b.number);
}

// 4 x 4 poses. One instruction takes 8 parents with two columns each (rows) and 4 positions with two rows each of the
// child's pose (columns): a[(e, m), d] = W[m, d, e], b[d, (position, row)] = P[position, row, d].
template <int EACH, int PRODUCTS>
struct TensorPose4x4 : FixedPose<4, 4, 4, 4, 4, 1, 8, EACH, 16> {
  static constexpr int kProducts = PRODUCTS;
  static constexpr int kChildPad = 8;  // 4 positions x 8 values of a fragment use 32 banks
  static constexpr int kChildStride = 16 + kChildPad;
};

// 1 x 64 poses. One instruction takes 16 positions (rows) and 8 columns of one parent's pose, for 8 of the child's
// columns, or 16 of half precision; a lane ends with two positions and two columns. Column n of the e-th instruction is
// column 32 (e / 4) + 4 (n / 2) + 16 (n % 2) + e % 4 of the pose: a lane reads four neighbours of a weight's row for
// four instructions, and ends with four times four neighbours.
template <int PRODUCTS>
struct TensorPose1x64 : FixedPose<1, 64, 64, 16, 4, 4, 1, 1, 0> {
  static constexpr int kProducts = PRODUCTS;
  static constexpr bool kStored = true;
  static constexpr int kRowStride = 68;  // 8 positions x 4 columns of a fragment use 32 banks
};

template <Storage, int EACH, int PRODUCTS, int R>
FASTCAPS_DEVICE void multiply_on_tensor_cores(const Lane<TensorPose4x4<EACH, PRODUCTS>, R>& lane,
                                              const Stage<TensorPose4x4<EACH, PRODUCTS>>& stage,
                                              Patch<TensorPose4x4<EACH, PRODUCTS>> (&votes)[R][EACH]) {
  using Pose = TensorPose4x4<EACH, PRODUCTS>;
  static_assert(R == 1, "the four positions of an instruction are four lanes'");
  const int t = lane.position, in_tile = lane.warp_position * 4 + lane.parent / 2, row = lane.parent % 2;
  Factor<PRODUCTS, 2> children;
  FASTCAPS_UNROLL
  for (int half = 0; half < 2; ++half)
    children.take(half, stage.children[in_tile * Pose::kChildStride + (2 * half + row) * 4 + t]);
  FASTCAPS_UNROLL
  for (int p = 0; p < EACH; ++p) {
    float numbers[4];
    load_vector<4>(Weights(lane, stage, p).from + t * 4, numbers);
    Factor<PRODUCTS, 4> weights;
    FASTCAPS_UNROLL
    for (int e = 0; e < 4; ++e) weights.take_weight(e, numbers[e]);
    FASTCAPS_UNROLL
    for (int e = 0; e < 4; e += 2) {
      FASTCAPS_UNROLL
      for (int half = 0; half < 2; ++half) {
        float d[4] = {};
        if constexpr (PRODUCTS == 3)  // both small products at once: the depth of 4 fills half of an instruction
          mma_tf32_16x8x8(d, {weights.number[e], weights.number[e + 1], weights.remainder[e], weights.remainder[e + 1]},
                          {children.remainder[half], children.number[half]});
        mma_tf32_16x8x4(d, {weights.number[e], weights.number[e + 1]}, children.number[half]);
        FASTCAPS_UNROLL
        for (int x = 0; x < 4; ++x) votes[0][p][2 * half + x % 2][e + x / 2] = d[x];
      }
    }
  }
}

// Factors of 1 x 64 poses for four columns: from two rows of weights, which lie four apart; in half precision from four
// rows, as pairs of neighbours.
template <int PRODUCTS>
FASTCAPS_DEVICE void take_rows(const float* at, Factor<PRODUCTS, 2> (&columns)[4]) {
  FASTCAPS_UNROLL
  for (int k = 0; k < 2; ++k) {
    float row[4];
    load_vector<4>(at + k * 4 * 64, row);
    FASTCAPS_UNROLL
    for (int e = 0; e < 4; ++e) columns[e].take_weight(k, row[e]);
  }
}
template <int PRODUCTS>
FASTCAPS_DEVICE void take_rows(const uint16_t* at, Factor<PRODUCTS, 2> (&columns)[4]) {
  FASTCAPS_UNROLL
  for (int k = 0; k < 2; ++k) {
    const float* rows = reinterpret_cast<const float*>(at + k * 4 * 64);
    const float2 one = load2(rows), next = load2(rows + 32);
    FASTCAPS_UNROLL
    for (int e = 0; e < 4; ++e) {
      const uint32_t low = float_bits(e < 2 ? one.x : one.y), high = float_bits(e < 2 ? next.x : next.y);
      columns[e].number[k] = e % 2 ? low >> 16 | (high & 0xffff0000) : (low & 0xffff) | high << 16;
    }
  }
}

template <Storage S, int PRODUCTS>
FASTCAPS_DEVICE void multiply_add_as(float (&d)[4], const Factor<PRODUCTS, 4>& a, const Factor<PRODUCTS, 2>& b) {
  if constexpr (S == Storage::kFloat32)
    multiply_add(d, a, b);
  else if constexpr (S == Storage::kBFloat16)
    mma_bf16_16x8x16(d, a.number, b.number);
  else
    mma_f16_16x8x16(d, a.number, b.number);
}

template <Storage S, int PRODUCTS, int R>
FASTCAPS_DEVICE void multiply_on_tensor_cores(const Lane<TensorPose1x64<PRODUCTS>, R>& lane,
                                              const Stage<TensorPose1x64<PRODUCTS>>& stage,
                                              Patch<TensorPose1x64<PRODUCTS>> (&votes)[R][1]) {
  using Pose = TensorPose1x64<PRODUCTS>;
  static_assert(R == 2, "the sixteen positions of an instruction are two of eight lanes'");
  const int t = lane.column;
  // Where the lane begins along the depth, whose order is free. Half-precision words, which are pairs, use all banks if
  // lanes 2 and 3 begin half a row later.
  const int begin = S == Storage::kFloat32 ? t : t % 2 * 2 + t / 2 * 32;
  const auto* weight =
      Weights<Pose, R, S>(lane, stage, 0).from + begin * 64 + lane.position / 2 * 4 + lane.position % 2 * 16;
  const auto* rows = stage.template children_as<S>() + begin;
  float d[8][4] = {};
  _Pragma("unroll PRODUCTS == 3 ? 1 : 2") for (int first = 0; first < (S == Storage::kFloat32 ? 64 : 32); first += 8) {
    Factor<PRODUCTS, 4> children;
    FASTCAPS_UNROLL
    for (int x = 0; x < 4; ++x) {
      const auto* from = rows + lane.in_tile(x % 2) * Pose::kRowStride + first + x / 2 * 4;
      if constexpr (S == Storage::kFloat32)
        children.take(x, *from);
      else
        children.number[x] = *reinterpret_cast<const uint32_t*>(from);
    }
    FASTCAPS_UNROLL
    for (int four = 0; four < 8; four += 4) {
      Factor<PRODUCTS, 2> weights[4];
      take_rows(weight + first * 64 + four * 8, weights);
      FASTCAPS_UNROLL
      for (int e = 0; e < 4; ++e) multiply_add_as<S>(d[four + e], children, weights[e]);
    }
  }
  FASTCAPS_UNROLL
  for (int e = 0; e < 8; ++e) {
    FASTCAPS_UNROLL
    for (int x = 0; x < 4; ++x) votes[x / 2][0][0][e / 4 * 8 + x % 2 * 4 + e % 4] = d[e][x];
  }
}

// dW of one of the lane's parents, summed over the warp's four positions: a[(e, m), (position, row)] = dV[m, position,
// row, e], b[(position, row), d] = P[position, row, d]. Half of the 8 columns d repeat others and are dropped; the
// lanes of the first two positions end with rows d = 2 position + {0, 1}.
template <int EACH, int PRODUCTS>
FASTCAPS_DEVICE void outer_on_tensor_cores(const Lane<TensorPose4x4<EACH, PRODUCTS>, 1>& lane,
                                           const Stage<TensorPose4x4<EACH, PRODUCTS>>& stage,
                                           const Patch<TensorPose4x4<EACH, PRODUCTS>>& dvotes, float (&rows)[2][4]) {
  using Pose = TensorPose4x4<EACH, PRODUCTS>;
  const float* rows_of = stage.children + lane.in_tile(0) * Pose::kChildStride;
  Factor<PRODUCTS, 2> children[2];
  FASTCAPS_UNROLL
  for (int c = 0; c < 4; ++c) children[c / 2].take(c % 2, rows_of[c * 4 + lane.parent % 4]);
  FASTCAPS_UNROLL
  for (int e = 0; e < 4; e += 2) {
    float d[4] = {};
    FASTCAPS_UNROLL
    for (int c = 0; c < 4; c += 2) {
      Factor<PRODUCTS, 4> gradients;
      FASTCAPS_UNROLL
      for (int x = 0; x < 4; ++x) gradients.take(x, dvotes[c + x / 2][e + x % 2]);
      multiply_add(d, gradients, children[c / 2]);
    }
    FASTCAPS_UNROLL
    for (int x = 0; x < 4; ++x) rows[x % 2][e + x / 2] = d[x];
  }
}

}  // namespace fastcaps::gpu
