// All iterations of attention without matrices in one launch: for each, every warp adds up S of its children, the block
// adds up the warps', and makes the next queries of S.
#include "forward.h"
#include "plain.h"

namespace fastcaps::gpu {
namespace {

// PARENTS: rows of tensor-core instructions, 8, 16 or 32. The first eight leave room for their remainders.
template <int K_, int PARENTS, Storage S>
struct PlainForward : PlainBlock<K_, S> {
  using Block = PlainBlock<K_, S>;
  using Block::args, Block::lane, Block::g, Block::t, Block::warp, Block::warps, Block::units, Block::K, Block::kPart;
  static constexpr bool kPacked = PARENTS == 8;
  static constexpr int kTiles = PARENTS == 32 ? 2 : 1, kEach = kPacked ? 2 : 4;
  static constexpr int kPlanes = kPacked || !Block::kFloat ? 1 : 2;  // queries of half precision have no remainders
  static constexpr int kFactor = kTiles * kPlanes * 16 * K, kTurns = kUnit * Block::template kTurn<kTiles>;

  float *factor, *query, *turn,
      *parts;  // of the queries; the queries themselves [M, K]; see to_turn; [warps][M][kPart]

  FASTCAPS_DEVICE explicit PlainForward(const PlainArgs& given) : Block(given) {
    factor = Block::rest;
    query = factor + kFactor;
    turn = query + args.M * K + warp * kTurns;
    parts = query + args.M * K + warps * kTurns;
  }
  static constexpr int kBlocks = K <= 64 && PARENTS < 32 ? 2 : 1;  // of a multiprocessor, at least
  static int64_t shared_bytes(const PlainArgs& args, int warps) {
    const int64_t own = kFactor + args.M * K + warps * kTurns + (args.resident ? warps * args.M * kPart : 0);
    return Block::shared_bytes(args, warps) + 4 * own;
  }
  static_assert(Block::kSlots * kSlot * Block::kRow * sizeof(typename Block::X) >= PARENTS * kPart * sizeof(float));
  FASTCAPS_DEVICE float* part(int w) const {
    return args.resident ? parts + w * args.M * kPart : reinterpret_cast<float*>(Block::ring_of(w));
  }

  // Value k of parent m's query, for the next iteration.
  FASTCAPS_DEVICE void set_query(int m, int k, float x) {
    query[m * K + k] = x;
    Block::template put<kPlanes>(factor, m, kPacked ? m + 8 : kPlanes == 2 ? m : -1, k, x);
  }
  FASTCAPS_DEVICE void load_queries() {
    for (int k = thread_index(); k < kFactor; k += block_threads()) factor[k] = 0.0f;
    barrier();
    for (int at = thread_index(); args.query && at < args.M * K; at += block_threads()) {
      const int m = at / K, k = at % K;
      const int64_t from = (Block::position * args.M + m) * args.K + k;
      set_query(m, k, k < args.K ? load_number(args.query, from, S) : 0.0f);
    }
    barrier();
  }

  // Logits of a unit, [children's eight][tile][as an instruction leaves them], become coefficients.
  FASTCAPS_DEVICE void compete(int u, float (&e)[2][kTiles][4]) const {
    FASTCAPS_UNROLL
    for (int n = 0; n < 2; ++n) {
      if constexpr (kPacked) e[n][0][0] += e[n][0][2], e[n][0][1] += e[n][0][3];
      FASTCAPS_UNROLL
      for (int b = 0; b < 2; ++b) {
        const int in_slot = child_of_column(2 * t + b), child = Block::first_child(2 * u + n) + in_slot;
        float top = -INFINITY, total = 0.0f;
        each(e[n], b, [&](float& x, int m) {
          x *= kLog2E * args.scale;
          if (args.prior && Block::alive(m) && child < args.I) x += kLog2E * args.prior[child * args.prior_stride + m];
          if (!Block::alive(m)) x = -INFINITY;
          top = fmaxf(top, x);
        });
        top = join_lanes<4, 8>(top, [](float x, float y) { return fmaxf(x, y); });
        each(e[n], b, [&](float& x, int) { total += x = exp2_fast(x - top); });
        total = join_lanes<4, 8>(total, [](float x, float y) { return x + y; });
        const float gate = Block::gate(2 * u + n, in_slot), one = gate * reciprocal(total);
        each(e[n], b, [&](float& x, int) { x = gate == 0.0f ? 0.0f : x * one; });
      }
    }
  }
  // Calls body(value, parent) for the values of a child of column 2 t + b.
  template <class Body>
  FASTCAPS_DEVICE void each(float (&e)[kTiles][4], int b, Body&& body) const {
    FASTCAPS_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      FASTCAPS_UNROLL
      for (int x = 0; x < kEach; x += 2) body(e[tile][x + b], tile * 16 + x * 4 + g);
    }
  }

  // S of the warp's children, to its part.
  FASTCAPS_DEVICE void walk(bool asks) {
    float sums[kTiles][K / 8][4] = {};
    FASTCAPS_NO_UNROLL
    for (int u = 0; u < units; ++u) {
      Block::template wait<false>(u);
      float e[2][kTiles][4] = {};
      if (asks) Block::template multiply<kTiles, kPlanes>(factor, u, e);
      if (!Block::finite(e))
        Block::multiply_safely(u, turn, e, [&](int m, int k) { return m < args.M ? query[m * K + k] : 0.0f; });
      compete(u, e);
      const bool finite = Block::finite(e);
      if (!finite) {
        Block::to_turn(e, turn);
        Block::template add_safely<kPacked>(u, turn, Block::template kTurn<kTiles>, sums);
      }
      FASTCAPS_UNROLL
      for (int n = 0; n < 2; ++n) {
        if (finite) Block::template add<kPacked>(e[n], 2 * u + n, sums);
        barrier_warp();
        if (!args.resident) Block::stage(2 * u + n + Block::kSlots);
      }
    }
    barrier_warp();
    Block::template store_sums<kPacked>(sums, part(warp));
  }
  // The same without queries, of which all parents have one sum: the first's.
  FASTCAPS_DEVICE void walk_evenly() {
    constexpr int kLanes = K / 4 < kWarp ? K / 4 : kWarp, kFours = K / 4 / kLanes, kTogether = kWarp / kLanes;
    float sums[kFours][4] = {};
    FASTCAPS_NO_UNROLL
    for (int u = 0; u < units; ++u) {
      Block::template wait<false>(u);
      for (int n = 2 * u; n < 2 * u + 2; ++n) {
        FASTCAPS_UNROLL
        for (int first = 0; first < kSlot; first += kTogether) {
          const int child = first + lane / kLanes;
          const float gate = Block::gate(n, child);
          FASTCAPS_UNROLL
          for (int k = 0; k < kFours; ++k) {
            float x[4];
            load_vector<S>(Block::slot(n) + child * Block::kRow + k * 128 + lane % kLanes * 4, x);
            FASTCAPS_UNROLL
            for (int v = 0; v < 4; ++v) sums[k][v] += gate * x[v];
          }
        }
        barrier_warp();
        if (!args.resident) Block::stage(n + Block::kSlots);
      }
    }
    barrier_warp();
    FASTCAPS_UNROLL
    for (int k = 0; k < kFours; ++k) {
      FASTCAPS_UNROLL
      for (int v = 0; v < 4; ++v)
        sums[k][v] = join_lanes<kLanes, kTogether>(sums[k][v], [](float x, float y) { return x + y; });
      if (lane < kLanes)
        store4(part(warp) + k * 128 + lane * 4, make_float4(sums[k][0], sums[k][1], sums[k][2], sums[k][3]));
    }
  }

  // Adds up the warps' parts in part 0.
  FASTCAPS_DEVICE void add_parts(int rows) {
    for (int at = thread_index(); at < rows * K; at += block_threads()) {
      const int place = at / K * kPart + at % K;
      float sum = part(0)[place];
      for (int w = 1; w < warps; ++w) sum += part(w)[place];
      part(0)[place] = sum;
    }
    barrier();
  }

  // From S in part 0 to the next queries, or to the parents. even: there was neither a query nor a prior.
  FASTCAPS_DEVICE void step(int iteration, bool even, bool replaces) {
    const int64_t before = iteration * args.positions + Block::position;
    FASTCAPS_NO_UNROLL
    for (int m = warp; m < args.M; m += warps) {
      float x[Block::kPer] = {};
      const PoseInWarp<Block::kPer> pose{x, args.K};
      pose.each([&](float& number, int k) {
        number = part(0)[(even ? 0 : m) * kPart + pose.index(k)];
        if (even) number /= float(args.M);
        args.sums[(before * args.M + m) * args.K + pose.index(k)] = number;
      });
      take_plain_step(args, pose);
      pose.each([&](float& number, int k) {
        number = rounded(number, S);
        if (iteration + 1 == args.iterations) {
          store_number(args.result, (Block::position * args.M + m) * args.K + pose.index(k), number, S);
          return;
        }
        if (!replaces) number = rounded(query[m * K + pose.index(k)] + number, S);
        set_query(m, pose.index(k), number);
      });
    }
    barrier();
  }

  FASTCAPS_DEVICE void run() {
    load_queries();
    FASTCAPS_NO_UNROLL
    for (int iteration = 0; iteration < args.iterations; ++iteration) {
      const bool asks = iteration > 0 || args.query, even = !asks && !args.prior;
      Block::begin(iteration == 0);
      if (even)
        walk_evenly();
      else
        walk(asks);
      barrier();
      add_parts(even ? 1 : args.M);
      step(iteration, even, !asks || args.rule != Rule::kSquash);
    }
  }
};

template <int K, int PARENTS>
constexpr PlainKernel Built = plain_kernel_of<PlainForward, K, PARENTS>;

// clang-format off
constexpr PlainKernel kKernels[] = {  // the smallest first
    Built<32, 8>, Built<64, 8>, Built<64, 16>, Built<64, 32>, Built<128, 8>, Built<128, 16>, Built<128, 32>,
    Built<256, 8>, Built<256, 16>,
};
// clang-format on

}  // namespace

bool run_plain_forward(Call& call, PlainArgs args, const MaybeTensor& query, int64_t iterations, const Tensor& result,
                       const Tensor& sums) {
  args.query = call.as_given(query), args.iterations = int(iterations);
  args.result = data_of(result), args.sums = floats(sums);
  return launch_plain(kKernels, int(std::size(kKernels)), args);
}

}  // namespace fastcaps::gpu
