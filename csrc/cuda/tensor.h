// Votes on the tensor cores, in tf32: products of values of 11 significant bits, 10 of them stored, and sums in float.
// Used if the user's precision allows it, and for half precision, whose values fit into tf32. If the depth fills a
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
  // ROUNDED: it is a tf32 value already (round_kernel).
  template <bool ROUNDED>
  FASTCAPS_DEVICE void take_weight(int k, float x) {
    if constexpr (ROUNDED)
      number[k] = float_bits(x);
    else
      take(k, x);
  }
};

// Two neighbours along the depth, in half precision: the lower or upper halves of words of two rows.
FASTCAPS_DEVICE uint32_t pair_of(uint32_t row, uint32_t next, bool upper) {
  return upper ? row >> 16 | (next & 0xffff0000) : (row & 0xffff) | next << 16;
}

// d += a * b; small products first.
template <int PRODUCTS>
FASTCAPS_DEVICE void multiply_add(float (&d)[4], const Factor<PRODUCTS, 4>& a, const Factor<PRODUCTS, 2>& b) {
  if constexpr (PRODUCTS == 3) {
    mma_tf32_16x8x8(d, a.remainder, b.number);
    mma_tf32_16x8x8(d, a.number, b.remainder);
  }
  mma_tf32_16x8x8(d, a.number, b.number);
}

// The same of half precision, for a depth of 8.
template <Storage S>
FASTCAPS_DEVICE void multiply_add_halves(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  if constexpr (S == Storage::kBFloat16)
    mma_bf16_16x8x8(d, a, b);
  else
    mma_f16_16x8x8(d, a, b);
}

// N x N poses. One instruction takes 8 parents with two columns each (rows) and 4 positions with two rows each of the
// child's pose (columns): a[(e, m), d] = W[m, d, e], b[d, (position, row)] = P[position, row, d]. A lane reads weights
// at depth t, its position, and t + 4; or 2 t and 2 t + 1 in half precision. Beyond the pose both factors are 0.
// STORED: half precision is read as it is stored.
template <int N, int EACH, int PRODUCTS, bool STORED = true>
struct TensorPose : FixedPose<N, N, N, N, N % 4 == 0 ? 4 : 2, 1, 8, EACH,
                              N == 4   ? 16
                              : N == 6 ? 40
                                       : 68> {
  static constexpr int kProducts = PRODUCTS;
  static constexpr bool kStored = STORED, kRounded = PRODUCTS == 1;
  // Between the two rows that one instruction takes. With it and the strides, a fragment uses (almost) all banks.
  static constexpr int kApart = N == 4 ? 1 : N == 6 ? 3 : 2;
  static constexpr int kChildPad = N == 4 ? 8 : N == 6 ? 0 : 4;
  static constexpr int kChildStride = N * N + kChildPad;
};

// 1 x 64 poses. One instruction takes 16 positions (rows) and 8 columns of one parent's pose, for 8 of the child's
// columns, or 16 of half precision; a lane ends with two positions and two columns. Column n of the e-th instruction is
// column 32 (e / 4) + 4 (n / 2) + 16 (n % 2) + e % 4 of the pose: a lane reads four neighbours of a weight's row for
// four instructions, and ends with four times four neighbours. STAGED: weights lie in shared memory, not in place.
template <int PRODUCTS, bool STAGED = true>
struct TensorPose1x64 : FixedPose<1, 64, 64, 16, 4, 4, 1, 1, STAGED ? 64 * 68 : 0> {
  static constexpr int kProducts = PRODUCTS;
  static constexpr bool kStored = true, kRounded = PRODUCTS == 1;
  static constexpr int kRowStride = 68;  // 8 positions x 4 columns of a fragment use 32 banks
  static constexpr int kWeightRow = STAGED ? 68 : 64;
};

// 1 x 8 children and 1 x 16 parents. One instruction takes 16 positions (rows) and 8 columns of one parent's pose.
// Column n of the k-th instruction is column 2 n + k of the pose: a lane reads two neighbours of a weight's row for two
// instructions, and ends with four neighbours at two positions.
template <int EACH>
struct TensorPose1x8 : FixedPose<1, 8, 16, 4, 4, 4, 1, EACH, 8 * 16> {
  static constexpr int kProducts = 1;
  static constexpr bool kStored = true;
  static constexpr int kChildPad = 4;  // 8 positions x 4 columns of a fragment use 32 banks
};

// A lane's part of a row of a child's pose, at `row`.
template <Storage S, int N, int PRODUCTS>
FASTCAPS_DEVICE void take_row(const Element<S>* row, int t, Factor<PRODUCTS, 2>& child) {
  if constexpr (N == 4) {
    child.take(0, load_number(row, t, S));
  } else if constexpr (S == Storage::kFloat32) {
    child.take(0, row[t]);
    child.take(1, t + 4 < N ? row[t + 4] : 0.0f);
  } else {
    child.number[0] = 2 * t < N ? *reinterpret_cast<const uint32_t*>(row + 2 * t) : 0;
  }
}

// A lane's part of W columns of a parent's matrix, the first at `from`: a factor for each.
template <Storage S, int N, int W, int PRODUCTS>
FASTCAPS_DEVICE void take_matrix(const Element<S>* from, int t, Factor<PRODUCTS, 2> (&columns)[W]) {
  constexpr int V = W % 4 == 0 ? 4 : 2;
  const auto take_row = [&](int k, int d) {
    FASTCAPS_UNROLL
    for (int e = 0; e < W; e += V) {
      float part[V] = {};
      if (d < N) load_vector<S>(from + d * N + e, part);
      FASTCAPS_UNROLL
      for (int v = 0; v < V; ++v) columns[e + v].template take_weight<PRODUCTS == 1>(k, part[v]);
    }
  };
  if constexpr (N == 4 || S == Storage::kFloat32) {
    take_row(0, t);
    if constexpr (N > 4) take_row(1, t + 4);
  } else {
    static_assert(W == N);
    uint32_t rows[2][N / 2] = {};
    if (2 * t < N) {
      FASTCAPS_UNROLL
      for (int word = 0; word < N; word += 2) {
        const float2 pair = load2(reinterpret_cast<const float*>(from + 2 * t * N) + word);
        rows[word / (N / 2)][word % (N / 2)] = float_bits(pair.x);
        rows[(word + 1) / (N / 2)][(word + 1) % (N / 2)] = float_bits(pair.y);
      }
    }
    FASTCAPS_UNROLL
    for (int e = 0; e < N; ++e) columns[e].number[0] = pair_of(rows[0][e / 2], rows[1][e / 2], e % 2);
  }
}

// d += (column one of W, column two) * a pair of rows, in two steps: small products, which three products alone have,
// and large ones. The other step's instructions lie between those that continue each other's sums.
FASTCAPS_DEVICE void multiply_small(float (&d)[4], const Factor<3, 2>& one, const Factor<3, 2>& two,
                                    const Factor<3, 2>& child) {
  // both small products at once: the depth of 4 fills half of an instruction
  mma_tf32_16x8x8(d, {one.number[0], two.number[0], one.remainder[0], two.remainder[0]},
                  {child.remainder[0], child.number[0]});
}
template <Storage S, int N, int PRODUCTS>
FASTCAPS_DEVICE void multiply_large(float (&d)[4], const Factor<PRODUCTS, 2>& one, const Factor<PRODUCTS, 2>& two,
                                    const Factor<PRODUCTS, 2>& child) {
  if constexpr (N > 4 && S != Storage::kFloat32) {
    multiply_add_halves<S>(d, {one.number[0], two.number[0]}, child.number[0]);
  } else if constexpr (N == 6) {
    mma_tf32_16x8x8(d, {one.number[0], two.number[0], one.number[1], two.number[1]}, child.number);
  } else {  // as weights are read: for a depth of 8, the compiler moves them
    FASTCAPS_UNROLL
    for (int k = 0; k < N / 4; ++k) mma_tf32_16x8x4(d, {one.number[k], two.number[k]}, child.number[k]);
  }
}

// What a lane takes of a child for all its parents: a factor for each pair of rows.
template <class Pose>
using ChildFactors = Factor<Pose::kProducts, 2>[Pose::kD / 2];

// The first row of a pair.
template <class Pose>
FASTCAPS_DEVICE constexpr int upper_row(int pair) {
  return pair / Pose::kApart * 2 * Pose::kApart + pair % Pose::kApart;
}

// Where, of a stage's children, the lane's first row begins; and its rows from there.
template <class Pose, int R>
FASTCAPS_DEVICE int first_row(const Lane<Pose, R>& lane) {
  return (lane.warp_position * 4 + lane.parent / 2) * Pose::kChildStride +
         lane.parent % 2 * Pose::kApart * Pose::kRowStride;
}
template <Storage S, class Pose>
FASTCAPS_DEVICE void take_child(const Element<S>* rows, int t, ChildFactors<Pose>& child) {
  FASTCAPS_UNROLL
  for (int pair = 0; pair < Pose::kD / 2; ++pair)
    take_row<S, Pose::kD>(rows + upper_row<Pose>(pair) * Pose::kRowStride, t, child[pair]);
}

// W columns of the vote for one parent, the first of whose matrix is at `from`; t: the lane's place in the depth.
template <Storage S, class Pose, int W>
FASTCAPS_DEVICE void multiply_on_tensor_cores(const Element<S>* from, int t, const ChildFactors<Pose>& child,
                                              float (&vote)[Pose::kC][W]) {
  constexpr int N = Pose::kD, kPairs = N / 2, PRODUCTS = Pose::kProducts;
  static_assert(N == 4 || PRODUCTS == 1);
  Factor<PRODUCTS, 2> columns[W];
  take_matrix<S, N>(from, t, columns);
  float d[W / 2][kPairs][4] = {};
  const auto each_tile = [&](auto multiply) {
    FASTCAPS_UNROLL
    for (int e = 0; e < W; e += 2) {
      FASTCAPS_UNROLL
      for (int pair = 0; pair < kPairs; ++pair) multiply(d[e / 2][pair], columns[e], columns[e + 1], child[pair]);
    }
  };
  if constexpr (PRODUCTS == 3)
    each_tile([](auto& d, auto& one, auto& two, auto& child) { multiply_small(d, one, two, child); });
  each_tile([](auto& d, auto& one, auto& two, auto& child) { multiply_large<S, N>(d, one, two, child); });
  FASTCAPS_UNROLL
  for (int e = 0; e < W; e += 2) {
    FASTCAPS_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      FASTCAPS_UNROLL
      for (int x = 0; x < 4; ++x) vote[upper_row<Pose>(pair) + x % 2 * Pose::kApart][e + x / 2] = d[e / 2][pair][x];
    }
  }
}

template <Storage S, int N, int EACH, int PRODUCTS, bool STORED, int R>
FASTCAPS_DEVICE void multiply_on_tensor_cores(const Lane<TensorPose<N, EACH, PRODUCTS, STORED>, R>& lane,
                                              const Stage<TensorPose<N, EACH, PRODUCTS, STORED>>& stage,
                                              Patch<TensorPose<N, EACH, PRODUCTS, STORED>> (&votes)[R][EACH]) {
  using Pose = TensorPose<N, EACH, PRODUCTS, STORED>;
  static_assert(R == 1, "the four positions of an instruction are four lanes'");
  ChildFactors<Pose> child;
  take_child<S, Pose>(stage.template children_as<S>() + first_row(lane), lane.position, child);
  FASTCAPS_UNROLL
  for (int p = 0; p < EACH; ++p)
    multiply_on_tensor_cores<S, Pose>(Weights<Pose, R, S>(lane, stage, p).from, lane.position, child, votes[0][p]);
}

// Factors of 1 x 64 poses for four columns: from two rows of weights, which lie four apart; in half precision from four
// rows, as pairs of neighbours. ROW: from row to row.
template <int ROW, int PRODUCTS>
FASTCAPS_DEVICE void take_rows(const float* at, Factor<PRODUCTS, 2> (&columns)[4]) {
  FASTCAPS_UNROLL
  for (int k = 0; k < 2; ++k) {
    float row[4];
    load_vector<4>(at + k * 4 * ROW, row);
    FASTCAPS_UNROLL
    for (int e = 0; e < 4; ++e) columns[e].template take_weight<PRODUCTS == 1>(k, row[e]);
  }
}
template <int ROW, int PRODUCTS>
FASTCAPS_DEVICE void take_rows(const uint16_t* at, Factor<PRODUCTS, 2> (&columns)[4]) {
  FASTCAPS_UNROLL
  for (int k = 0; k < 2; ++k) {
    const float* rows = reinterpret_cast<const float*>(at + k * 4 * ROW);
    const float2 one = load2(rows), next = load2(rows + ROW / 2);
    FASTCAPS_UNROLL
    for (int e = 0; e < 4; ++e) {
      const uint32_t low = float_bits(e < 2 ? one.x : one.y), high = float_bits(e < 2 ? next.x : next.y);
      columns[e].number[k] = pair_of(low, high, e % 2);
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

template <Storage S, int PRODUCTS, bool STAGED, int R>
FASTCAPS_DEVICE void multiply_on_tensor_cores(const Lane<TensorPose1x64<PRODUCTS, STAGED>, R>& lane,
                                              const Stage<TensorPose1x64<PRODUCTS, STAGED>>& stage,
                                              Patch<TensorPose1x64<PRODUCTS, STAGED>> (&votes)[R][1]) {
  using Pose = TensorPose1x64<PRODUCTS, STAGED>;
  static_assert(R == 2, "the sixteen positions of an instruction are two of eight lanes'");
  constexpr bool kFloat = S == Storage::kFloat32;
  constexpr int kRow = Pose::kWeightRow;
  const int t = lane.column;
  // Where the lane begins along the depth, whose order is free. Half-precision words, which are pairs, use all banks if
  // lanes 2 and 3 begin half a row later: in the children; or 8 values later: in staged weights.
  constexpr int kLater = STAGED ? 8 : 32, kStep = kFloat || !STAGED ? 8 : 16, kEnd = kFloat || STAGED ? 64 : 32;
  const int begin = kFloat ? t : t % 2 * 2 + t / 2 * kLater;
  const auto* weight =
      Weights<Pose, R, S>(lane, stage, 0).from + begin * kRow + lane.position / 2 * 4 + lane.position % 2 * 16;
  const auto* rows = stage.template children_as<S>() + begin;
  float d[8][4] = {};
  _Pragma("unroll PRODUCTS == 3 ? 1 : 2") for (int first = 0; first < kEnd; first += kStep) {
    Factor<PRODUCTS, 4> children;
    FASTCAPS_UNROLL
    for (int x = 0; x < 4; ++x) {
      const auto* from = rows + lane.in_tile(x % 2) * Pose::kRowStride + first + x / 2 * 4;
      if constexpr (kFloat)
        children.take(x, *from);
      else
        children.number[x] = *reinterpret_cast<const uint32_t*>(from);
    }
    FASTCAPS_UNROLL
    for (int four = 0; four < 8; four += 4) {
      Factor<PRODUCTS, 2> weights[4];
      take_rows<kRow>(weight + first * kRow + four * 8, weights);
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

template <Storage S, int EACH, int R>
FASTCAPS_DEVICE void multiply_on_tensor_cores(const Lane<TensorPose1x8<EACH>, R>& lane,
                                              const Stage<TensorPose1x8<EACH>>& stage,
                                              Patch<TensorPose1x8<EACH>> (&votes)[R][EACH]) {
  using Pose = TensorPose1x8<EACH>;
  static_assert(R == 2, "the sixteen positions of an instruction are two of eight lanes'");
  constexpr bool kFloat = S == Storage::kFloat32;
  const int t = lane.column;
  Factor<1, 4> child = {};
  FASTCAPS_UNROLL
  for (int x = 0; x < (kFloat ? 4 : 2); ++x) {
    const auto* row = stage.template children_as<S>() + lane.in_tile(x % 2) * (Pose::kD + Pose::kChildPad);
    if constexpr (kFloat)
      child.take(x, row[x / 2 * 4 + t]);
    else
      child.number[x] = *reinterpret_cast<const uint32_t*>(row + 2 * t);
  }
  FASTCAPS_UNROLL
  for (int p = 0; p < EACH; ++p) {
    const auto* from = Weights<Pose, R, S>(lane, stage, p).from + 2 * lane.position;
    float d[2][4] = {};
    Factor<1, 2> columns[2] = {};
    if constexpr (kFloat) {
      FASTCAPS_UNROLL
      for (int k = 0; k < 2; ++k) {
        const float2 pair = load2(from + (k * 4 + t) * 16);
        columns[0].take(k, pair.x), columns[1].take(k, pair.y);
      }
    } else {
      const auto word = [&](int row) { return *reinterpret_cast<const uint32_t*>(from + row * 16); };
      const uint32_t row = word(2 * t), next = word(2 * t + 1);
      columns[0].number[0] = pair_of(row, next, false), columns[1].number[0] = pair_of(row, next, true);
    }
    FASTCAPS_UNROLL
    for (int k = 0; k < 2; ++k) {
      if constexpr (kFloat)
        multiply_add(d[k], child, columns[k]);
      else
        multiply_add_halves<S>(d[k], {child.number[0], child.number[1]}, columns[k].number[0]);
      FASTCAPS_UNROLL
      for (int x = 0; x < 4; ++x) votes[x / 2][p][0][x % 2 * 2 + k] = d[k][x];
    }
  }
}

}  // namespace fastcaps::gpu
