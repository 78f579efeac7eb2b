// Attention without matrices: the vote of a child for every parent is its pose x_i, of up to 256 values. A block has
// one sample, all its parents, and makes all iterations. Each of its warps walks over a part of the children, 16 at a
// time (a unit), which it copies into a ring of its own in shared memory: eight children are one slot of it.
//
// On tensor cores, tf32 with remainders (tensor.h): the rows of an instruction are parents, its columns eight children
// for logits = Q X^T, and values of poses for sums = R X. A lane (g, t) = (lane / 4, lane % 4) ends the first with rows
// g and g + 8 of children 2 t and 2 t + 1, and these are just what it gives to the second: nothing moves.
#pragma once

#include <cfloat>
#include <optional>

#include "call.h"
#include "tensor.h"

namespace fastcaps::gpu {

constexpr int kPlainWarps = 8, kPlainParents = 32, kPlainValues = 256;
constexpr int kSlot = 8, kUnit = 2 * kSlot;  // children

struct PlainArgs : ParentArgs {
  View children;         // of a position [B, Ho, Wo, I, C, D]
  const void* gate;      // [positions, I] in the children's type, or null
  const float* prior;    // [I or 1, M], or null
  int64_t prior_stride;  // from child to child
  float scale;
  bool vector;  // whether poses are copied 16 bytes at a time
  int I, D, K;  // K: C * D
  Divider by_depth;
  int64_t positions, first, launched;  // of the call; of this launch the first, and how many
  // Of a warp: slots in shared memory. resident: they hold all its children, in all iterations; else what it adds up
  // takes their place.
  int slots;
  bool resident;

  const void* query;  // [positions, M, K], dense in the children's type; or null
  int iterations;
  float* sums;   // [iterations, positions, M, K]; backward: given, or null where the gradient is that of S
  void* result;  // [positions, M, K], in the children's type

  // Backward. chain: `grad` is that of the last parents; else there is one for the parents of every iteration, each of
  // which has its query, but for the first ones that have none. Null where a gradient is not wanted.
  bool chain, detach;
  View grad;  // [B, Ho, Wo, M, C, D] in float
  int64_t grad_iteration;
  int without_query;
  void *dchildren, *dgate, *dquery;  // in the children's type: [positions, I, K], [positions, I], [positions, M, K]
  bool sums_up;                      // whether several iterations add to them, in the following
  float *children_sums, *gate_sums;
  float *dnorm, *dprior;  // [positions, 2, K], [launched, I, M]

  // Backward: whether shared memory has the sums of children's gradients.
  constexpr bool held() const { return resident && sums_up && dchildren; }
};

// Values of one parent's pose: four neighbours of every 128 in each lane of a warp.
template <int PER>
struct PoseInWarp {
  using X = float;
  float* x;  // [PER]
  int numbers;

  FASTCAPS_DEVICE static int index(int k) { return k / 4 * 128 + thread_index() % kWarp * 4 + k % 4; }
  FASTCAPS_DEVICE float at(int k) const { return x[k]; }
  template <class F>
  FASTCAPS_DEVICE void each(F&& f) const {
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; ++k)
      if (index(k) < numbers) f(x[k], k);
  }
  template <class F>
  FASTCAPS_DEVICE float sum(F&& f) const {
    float sum = 0.0f;
    each([&](float number, int k) { sum += f(number, k); });
    return join_lanes<1, kWarp>(sum, [](float a, float b) { return a + b; });
  }
  template <class F>
  FASTCAPS_DEVICE float mean(F&& f) const {
    return sum(f) / float(numbers);
  }
  FASTCAPS_DEVICE float largest() const {
    float largest = 0.0f;
    each([&](float number, int) { largest = fmaxf(largest, fabsf(number)); });
    return join_lanes<1, kWarp>(largest, [](float a, float b) { return fmaxf(a, b); });
  }
};

// From S to the step of a rule; eps is under the root of squash, too.
template <int PER>
FASTCAPS_DEVICE void take_plain_step(const PlainArgs& args, const PoseInWarp<PER>& pose) {
  float share = 1.0f;
  if (args.rule == Rule::kSquash && args.eps > 0.0f) {
    const float size = length(pose);
    share = size > 0.0f ? 1.0f / sqrtf(1.0f + args.eps / size / size) : 0.0f;
  }
  between<false>(args, pose, true);
  pose.each([&](float& x, int k) {
    if (args.rule == Rule::kLayerNorm) x = affine(args, x, pose.index(k));
    x *= share;
  });
}

// Which of a slot's children is column n of an instruction: in this order neither the lanes that read one child for
// every g, nor those that read two for every t, meet in a bank.
FASTCAPS_DEVICE int child_of_column(int n) { return (n >> 1 & 1) | ((n ^ n >> 2) & 1) << 1 | (n >> 2) << 2; }

// K: values of a pose, padded with zeros.
template <int K_, Storage S>
struct PlainBlock {
  static constexpr int K = K_, kPer = K > 128 ? 8 : 4;
  static constexpr bool kFloat = S == Storage::kFloat32;
  static constexpr int kRow = kFloat ? K + 8 : K + 16;  // from child to child, in values
  static constexpr int kPart = K + 4;                   // from parent to parent in what a warp adds up, in floats
  static constexpr int kSlots = (K > 128 ? 2 : 4) * (kFloat ? 1 : 2);
  using X = Element<S>;
  using Children = Factor<kFloat ? 3 : 1, 4>;  // half precision has no remainders

  const PlainArgs& args;
  const int lane = thread_index() % kWarp, g = lane / 4, t = lane % 4, warp = thread_index() / kWarp;
  const int warps = block_threads() / kWarp;
  const int units = ((args.I + kUnit - 1) / kUnit - warp + warps - 1) / warps;  // of the warp
  const int64_t position = args.first + block_x();
  const X* poses;  // of the position's children
  float *gates, *rest;
  X* ring;

  // Shared memory has the rings, the gates, and what a pass has besides.
  FASTCAPS_DEVICE explicit PlainBlock(const PlainArgs& args_) : args(args_) {
    const int64_t row = position / args.Wo, sample = row / args.Ho;
    const int64_t* stride = args.children.stride;
    poses = static_cast<const X*>(args.children.data) + sample * stride[0] + (row - sample * args.Ho) * stride[1] +
            (position - row * args.Wo) * stride[2];
    ring = ring_of(warp);
    gates = reinterpret_cast<float*>(ring_of(warps)) + warp * args.slots * kSlot;
    rest = reinterpret_cast<float*>(ring_of(warps)) + warps * args.slots * kSlot;
  }
  FASTCAPS_DEVICE X* ring_of(int w) const {
    return reinterpret_cast<X*>(shared_memory()) + w * args.slots * kSlot * kRow;
  }
  static int64_t shared_bytes(const PlainArgs& args, int warps) {
    return int64_t(warps) * args.slots * kSlot * (kRow * int64_t(sizeof(X)) + 4);
  }

  FASTCAPS_DEVICE bool alive(int row) const { return row < args.M; }
  // The first child of the warp's n-th slot, of all of them.
  FASTCAPS_DEVICE int first_child(int n) const { return (n / 2 * warps + warp) * kUnit + n % 2 * kSlot; }
  FASTCAPS_DEVICE int64_t offset(int child, int k) const {
    const int c = args.by_depth.quotient(k), d = args.by_depth.remainder(k, c);
    return child * args.children.stride[3] + c * args.children.stride[4] + d * args.children.stride[5];
  }
  FASTCAPS_DEVICE float gate_of(int child) const {
    if (child >= args.I) return 0.0f;
    return args.gate ? load_number(args.gate, position * args.I + child, S) : 1.0f;
  }
  // Where the warp's n-th slot is: fewer than kSlots are there only if they are all that the warp has.
  FASTCAPS_DEVICE static int place_of(int n) { return (n & (kSlots - 1)) * kSlot; }
  FASTCAPS_DEVICE const X* slot(int n) const { return ring + place_of(n) * kRow; }
  // The gate of a slot's child; 0 if it does not exist.
  FASTCAPS_DEVICE float gate(int n, int child) const { return gates[place_of(n) + child]; }

  // Begins to copy the warp's n-th slot, whose place nobody reads any more.
  FASTCAPS_DEVICE void stage(int n) {
    constexpr int kVector = 16 / int(sizeof(X)), kVectors = K / kVector;
    constexpr int kTogether = kVectors < kWarp ? kWarp / kVectors : 1;  // children
    if (n < 2 * units) {
      X* to = ring + place_of(n) * kRow;
      const int first = first_child(n);
      if (args.vector) {
        const int column = lane % kVectors * kVector;
        const X* from = poses + (first + lane / kVectors) * args.children.stride[3] + column;
        FASTCAPS_UNROLL
        for (int child = lane / kVectors; child < kSlot; child += kTogether) {
          FASTCAPS_UNROLL
          for (int k = 0; k < K; k += kVector * kWarp) {
            const bool exists = first + child < args.I && column + k < args.K;
            copy_async<16>(to + child * kRow + column + k, exists ? from + k : poses, exists);
          }
          from += kTogether * args.children.stride[3];
        }
      } else {
        FASTCAPS_NO_UNROLL
        for (int at = lane; at < kSlot * K; at += kWarp) {
          const int child = at / K, k = at % K;
          stage_scattered<1>(to + child * kRow + k,
                             poses + (first + child < args.I && k < args.K ? offset(first + child, k) : 0), 1,
                             first + child < args.I && k < args.K);
        }
      }
      if (lane < kSlot) gates[place_of(n) + lane] = gate_of(first + lane);
    }
    copy_commit();
  }
  // The first slots of a walk over the children, if they are not there already.
  FASTCAPS_DEVICE void begin(bool first) {
    for (int n = 0; (first || !args.resident) && n < args.slots; ++n) stage(n);
  }
  // Waits for the u-th unit. A child with a gate of 0 has no pose, so that nothing of it makes a NaN; BROKEN: only if
  // that is not finite.
  template <bool BROKEN>
  FASTCAPS_DEVICE void wait(int u) {
    if (args.resident)
      copy_wait<0>();
    else
      copy_wait<kSlots - 2>();
    barrier_warp();
    FASTCAPS_NO_UNROLL
    for (int n = 2 * u; args.gate && n < 2 * u + 2; ++n) {
      X* to = ring + place_of(n) * kRow;
      FASTCAPS_NO_UNROLL
      for (int child = 0; child < kSlot; ++child) {
        if (gate(n, child) != 0.0f) continue;  // the same in all lanes
        bool broken = !BROKEN;
        for (int k = lane; BROKEN && k < K; k += kWarp)
          broken = broken || !(fabsf(load_number(to, child * kRow + k, S)) <= FLT_MAX);
        if (BROKEN) broken = any_lane(broken);
        barrier_warp();
        for (int k = lane; broken && k < K; k += kWarp) to[child * kRow + k] = X(0);
      }
      barrier_warp();
    }
  }

  // ---- factors ----
  // Factors whose rows are parents lie in shared memory as instructions take them: [tiles][PLANES][K / 8][lanes][4], in
  // planes of numbers and remainders. Along the depth, lane t takes four neighbours for two instructions. Lanes are
  // swapped so that backward, where rows are the depth, no two read the same bank.
  FASTCAPS_DEVICE static int place_of_lane(int row, int four, int instruction) {
    return (row * 4 + (four ^ (row & 2) ^ (instruction & 1))) * 4;
  }
  template <int PLANES>
  FASTCAPS_DEVICE static int place(int row, int plane, int k) {
    const int instruction = k / 16 * 2 + k % 4 / 2;
    return ((row / 16 * PLANES + plane) * (K / 8) + instruction) * 128 +
           place_of_lane(row % 8, k % 16 / 4, instruction) + k % 2 * 2 + row % 16 / 8;
  }
  // A parent's value, as a number and what its rounding to tf32 has lost.
  template <int PLANES>
  FASTCAPS_DEVICE static void put(float* factor, int row, int row_of_remainder, int k, float x) {
    const float number = bits_float(to_tf32(x));
    factor[place<PLANES>(row, 0, k)] = number;
    if (row_of_remainder >= 0) factor[place<PLANES>(row_of_remainder, PLANES - 1, k)] = x - number;
  }
  FASTCAPS_DEVICE static void take(const X* from, Children& to) {
    float x[4];
    load_vector<S>(from, x);
    FASTCAPS_UNROLL
    for (int k = 0; k < 4; ++k) to.template take_weight<!kFloat>(k, x[k]);
  }

  // A factor's rows times the children of the u-th unit.
  template <int TILES, int PLANES>
  FASTCAPS_DEVICE void multiply(const float* factor, int u, float (&d)[2][TILES][4]) const {
    float small[2][TILES][4] = {};
    const X* from[2];
    FASTCAPS_UNROLL
    for (int n = 0; n < 2; ++n) {
      from[n] = slot(2 * u + n) + child_of_column(g) * kRow + 4 * t;
      FASTCAPS_UNROLL
      for (int tile = 0; tile < TILES; ++tile) {
        FASTCAPS_UNROLL
        for (int x = 0; x < 4; ++x) d[n][tile][x] = 0.0f;
      }
    }
    _Pragma("unroll 2") for (int k = 0; k < K; k += 16) {
      Children x[2];
      take(from[0] + k, x[0]), take(from[1] + k, x[1]);
      FASTCAPS_UNROLL
      for (int half = 0; half < 2; ++half) {
        FASTCAPS_UNROLL
        for (int tile = 0; tile < TILES; ++tile) {
          uint32_t a[PLANES][4];
          FASTCAPS_UNROLL
          for (int plane = 0; plane < PLANES; ++plane) {
            const int at = (tile * PLANES + plane) * (K / 8) + k / 8 + half;
            const float4 four = load4(factor + at * 128 + place_of_lane(g, t, half));
            a[plane][0] = float_bits(four.x), a[plane][1] = float_bits(four.y);
            a[plane][2] = float_bits(four.z), a[plane][3] = float_bits(four.w);
          }
          FASTCAPS_UNROLL
          for (int n = 0; n < 2; ++n) {
            const uint32_t b[2] = {x[n].number[2 * half], x[n].number[2 * half + 1]};
            mma_tf32_16x8x8(d[n][tile], a[0], b);
            if constexpr (PLANES == 2) mma_tf32_16x8x8(small[n][tile], a[1], b);
            if constexpr (kFloat)
              mma_tf32_16x8x8(small[n][tile], a[0], {x[n].remainder[2 * half], x[n].remainder[2 * half + 1]});
          }
        }
      }
    }
    FASTCAPS_UNROLL
    for (int n = 0; n < 2; ++n) {
      FASTCAPS_UNROLL
      for (int tile = 0; tile < TILES; ++tile) {
        FASTCAPS_UNROLL
        for (int x = 0; x < 4; ++x) d[n][tile][x] += small[n][tile][x];
      }
    }
  }

  // Adds the n-th slot's children, times coefficients as `multiply` leaves values, to sums for each tile of parents.
  // PACKED: there are eight parents, and the lower rows of the sums are those of the coefficients' remainders.
  template <bool PACKED, int TILES>
  FASTCAPS_DEVICE void add(const float (*r)[4], int n, float (&sums)[TILES][K / 8][4]) const {
    Factor<PACKED ? 1 : 3, 4> a[TILES];
    FASTCAPS_UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
      FASTCAPS_UNROLL
      for (int x = 0; x < 4; ++x) a[tile].take(x, PACKED ? r[tile][x / 2] : r[tile][x % 2 * 2 + x / 2]);
      if constexpr (PACKED) {
        FASTCAPS_UNROLL
        for (int x = 0; x < 2; ++x) a[tile].take(2 * x + 1, r[tile][x] - bits_float(a[tile].number[2 * x]));
      }
    }
    const X *one = slot(n) + child_of_column(2 * t) * kRow + 4 * g,
            *two = slot(n) + child_of_column(2 * t + 1) * kRow + 4 * g;
    FASTCAPS_UNROLL
    for (int k = 0; k < K; k += 32) {
      Children x[2];
      take(one + k, x[0]), take(two + k, x[1]);
      FASTCAPS_UNROLL
      for (int tile = 0; tile < TILES; ++tile) {
        const auto each = [&](auto multiply) {
          FASTCAPS_UNROLL
          for (int v = 0; v < 4; ++v) multiply(sums[tile][k / 8 + v], v);
        };
        if constexpr (kFloat)
          each([&](auto& d, int v) { mma_tf32_16x8x8(d, a[tile].number, {x[0].remainder[v], x[1].remainder[v]}); });
        if constexpr (!PACKED)
          each([&](auto& d, int v) { mma_tf32_16x8x8(d, a[tile].remainder, {x[0].number[v], x[1].number[v]}); });
        each([&](auto& d, int v) { mma_tf32_16x8x8(d, a[tile].number, {x[0].number[v], x[1].number[v]}); });
      }
    }
  }

  // ---- without tensor cores, for units with products that are not finite: infinity times a remainder of 0 is NaN ----
  // Whether all of a lane's products are finite, in all lanes.
  template <int TILES>
  FASTCAPS_DEVICE static bool finite(const float (&d)[2][TILES][4]) {
    float zero = 0.0f;
    FASTCAPS_UNROLL
    for (int n = 0; n < 2 * TILES; ++n) {
      FASTCAPS_UNROLL
      for (int x = 0; x < 4; ++x) zero += d[n / TILES][n % TILES][x] * 0.0f;
    }
    return !any_lane(!(zero == 0.0f));
  }
  // A place in shared memory where values change lanes: [children in the order of columns][kTurn<TILES>].
  template <int TILES>
  static constexpr int kTurn = 16 * TILES + 4;
  template <int TILES>
  FASTCAPS_DEVICE void to_turn(const float (&d)[2][TILES][4], float* turn) const {
    FASTCAPS_UNROLL
    for (int n = 0; n < 2; ++n) {
      FASTCAPS_UNROLL
      for (int tile = 0; tile < TILES; ++tile) {
        FASTCAPS_UNROLL
        for (int x = 0; x < 4; ++x)
          turn[(n * 8 + 2 * t + x % 2) * kTurn<TILES> + tile * 16 + x / 2 * 8 + g] = d[n][tile][x];
      }
    }
    barrier_warp();
  }
  // As `multiply`, for a factor value(row, k).
  template <int TILES, class Value>
  FASTCAPS_DEVICE void multiply_safely(int u, float* turn, float (&d)[2][TILES][4], Value&& value) const {
    FASTCAPS_NO_UNROLL
    for (int at = 0; at < kUnit * 16 * TILES; ++at) {
      const int column = at / (16 * TILES), row = at % (16 * TILES);
      const X* x = slot(2 * u + column / 8) + child_of_column(column % 8) * kRow;
      float sum = 0.0f;
      for (int k = lane; k < args.K; k += kWarp) sum += value(row, k) * load_number(x, k, S);
      sum = join_lanes<1, kWarp>(sum, [](float a, float b) { return a + b; });
      if (lane == 0) turn[column * kTurn<TILES> + row] = sum;
    }
    barrier_warp();
    FASTCAPS_UNROLL
    for (int n = 0; n < 2; ++n) {
      FASTCAPS_UNROLL
      for (int tile = 0; tile < TILES; ++tile) {
        FASTCAPS_UNROLL
        for (int x = 0; x < 4; ++x)
          d[n][tile][x] = turn[(n * 8 + 2 * t + x % 2) * kTurn<TILES> + tile * 16 + x / 2 * 8 + g];
      }
    }
    barrier_warp();
  }
  // As `add` of a unit's slots, for coefficients in `turn`, from row to row `stride` apart.
  template <bool PACKED, int TILES>
  FASTCAPS_DEVICE void add_safely(int u, const float* turn, int stride, float (&sums)[TILES][K / 8][4]) const {
    FASTCAPS_NO_UNROLL
    for (int column = 0; column < kUnit; ++column) {
      const int n = 2 * u + column / 8, child = child_of_column(column % 8);
      if (gate(n, child) == 0.0f) continue;
      FASTCAPS_UNROLL
      for (int k = 0; k < K / 16; ++k) {
        float x[4];
        load_vector<S>(slot(n) + child * kRow + k / 2 * 32 + 8 * t + k % 2 * 4, x);
        FASTCAPS_UNROLL
        for (int half = 0; half < (PACKED ? 1 : 2) * TILES; ++half) {
          FASTCAPS_UNROLL
          for (int v = 0; v < 4; ++v)
            sums[half / 2][k / 2 * 4 + v][half % 2 * 2 + k % 2] += turn[column * stride + half * 8 + g] * x[v];
        }
      }
    }
  }

  // Stores a warp's sums: [M][kPart].
  template <bool PACKED, int TILES>
  FASTCAPS_DEVICE void store_sums(const float (&sums)[TILES][K / 8][4], float* to) const {
    FASTCAPS_UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
      FASTCAPS_UNROLL
      for (int half = 0; half < (PACKED ? 1 : 2); ++half) {
        const int row = tile * 16 + half * 8 + g;
        FASTCAPS_UNROLL
        for (int k = 0; k < K; k += 4) {
          const auto value = [&](int v) {
            const float (&d)[4] = sums[tile][k / 32 * 4 + v];
            return PACKED ? d[k / 4 % 2] + d[k / 4 % 2 + 2] : d[half * 2 + k / 4 % 2];
          };
          if (k % 32 < 8 && alive(row))
            store4(to + row * kPart + k / 32 * 32 + 8 * t + k % 8, make_float4(value(0), value(1), value(2), value(3)));
        }
      }
    }
  }
};

// A pass's kernels for poses of up to K values and so many parents, by the children's type.
struct PlainKernel {
  int K, parents;
  void (*run[3])(const PlainArgs);
  int64_t (*shared_bytes[3])(const PlainArgs&, int warps);
  int slots[3];  // see PlainBlock
};
template <class Pass>
FASTCAPS_KERNEL(kWarp* kPlainWarps, Pass::kBlocks)
plain_kernel(const FASTCAPS_CONSTANT PlainArgs args) {
  Pass(args).run();
}
template <template <int, int, Storage> class Pass, int K, int PARENTS>
constexpr PlainKernel plain_kernel_of = {
    K,
    PARENTS,
    {plain_kernel<Pass<K, PARENTS, Storage::kFloat32>>, plain_kernel<Pass<K, PARENTS, Storage::kBFloat16>>,
     plain_kernel<Pass<K, PARENTS, Storage::kFloat16>>},
    {Pass<K, PARENTS, Storage::kFloat32>::shared_bytes, Pass<K, PARENTS, Storage::kBFloat16>::shared_bytes,
     Pass<K, PARENTS, Storage::kFloat16>::shared_bytes},
    {Pass<K, PARENTS, Storage::kFloat32>::kSlots, Pass<K, PARENTS, Storage::kBFloat16>::kSlots,
     Pass<K, PARENTS, Storage::kFloat16>::kSlots}};

// A call's votes as these kernels take them, if they can; `call` keeps copies. must: even if others are faster.
std::optional<PlainArgs> plain_args(Call& call, bool must = false);
// Launches the smallest of some kernels that is large enough. These functions return whether there was one.
bool launch_plain(const PlainKernel* kernels, int count, PlainArgs args);
bool run_plain_forward(Call& call, PlainArgs args, const MaybeTensor& query, int64_t iterations, const Tensor& result,
                       const Tensor& sums);
bool run_plain_backward(const PlainArgs& args);

inline constexpr int64_t kPrior = int64_t(1) << 20;  // a bit of `needs`, beside those of the ops
struct PlainGradients {
  Tensor children, gate, query, norm_weight, norm_bias, prior;
};
// The gradients of a call whose tensors are in `args`.
std::optional<PlainGradients> differentiate_plain(Call& call, PlainArgs args, const MaybeTensor& query, int64_t needs);

}  // namespace fastcaps::gpu
