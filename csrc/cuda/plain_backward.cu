// The backward of attention without matrices through all iterations, the last one first, in one launch: for each, with
// dS from the parents' gradient, a walk over the children makes
//   h = <dS, x>, r (again), dl = r (h - sum_m r h), dQ = scale sum_i g dl x, dx += g sum_m (r dS + scale dl Q), dg +=
//   sum_m r h
// Logits and gains h are one product, whose rows are those of Q and behind them those of dS. Their coefficients, scale
// g dl and g r, change places in shared memory: then the same rows are the depth of the product that makes dx.
#include "ends.h"
#include "forward.h"
#include "plain.h"

namespace fastcaps::gpu {
namespace {

FASTCAPS_DEVICE float plus(float x, float y) { return x + y; }

// squash_backward with an eps under the root of squash.
template <int PER>
FASTCAPS_DEVICE void squash_backward(const PoseInWarp<PER>& grad, const PoseInWarp<PER>& pose, float eps) {
  if (eps == 0.0f) return fastcaps::squash_backward(grad, pose, FLT_MIN);
  const float size = length(pose), inverse = 1.0f / fmaxf(size, FLT_MIN);
  pose.each([&](float& x, int) { x *= inverse; });
  const float root = size / sqrtf(size * size + eps), bend = 2.0f - root * root - 2.0f / (1.0f + inverse * inverse);
  const float along = grad.sum([&](float dy, int k) { return dy * pose.at(k); });
  grad.each([&](float& dy, int k) { dy = (dy + bend * pose.at(k) * along) * root / (size + inverse); });
}

// PARENTS: rows of Q, and as many of dS: 8, 16 or 32.
template <int K_, int PARENTS, Storage S>
struct PlainBackward : PlainBlock<K_, S> {
  using Block = PlainBlock<K_, S>;
  using Block::args, Block::lane, Block::g, Block::t, Block::warp, Block::warps, Block::units, Block::K, Block::kPart,
      Block::position;
  using Pose = PoseInWarp<Block::kPer>;
  static constexpr bool kPacked = PARENTS == 8;
  static constexpr int kTiles = PARENTS / 8, kSumTiles = PARENTS == 32 ? 2 : 1;  // of Q and dS, and of dQ
  static constexpr int kFactor = kTiles * 2 * 16 * K;
  static constexpr int kTurn = Block::template kTurn<kTiles>;
  static constexpr int kHeld = K + 8;  // from child to child

  float *factor, *carried, *turn, *held;  // carried: the gradient of the queries behind, [M, K]
  bool first = true, last = false;        // walk

  FASTCAPS_DEVICE explicit PlainBackward(const PlainArgs& given) : Block(given) {
    factor = Block::rest;
    carried = factor + kFactor;
    turn = carried + args.M * K + warp * kUnit * kTurn;
    held = carried + args.M * K + warps * (kUnit * kTurn + args.M * kPart) + warp * args.slots * kSlot * kHeld;
  }
  static constexpr int kBlocks = K <= 64 && PARENTS == 8 ? 2 : 1;  // of a multiprocessor, at least
  static int64_t shared_bytes(const PlainArgs& args, int warps) {
    const int64_t parts = args.resident ? args.M * kPart : 0, sums = args.held() ? args.slots * kSlot * kHeld : 0;
    return Block::shared_bytes(args, warps) + 4 * (kFactor + args.M * K + warps * (kUnit * kTurn + parts + sums));
  }
  static_assert(Block::kSlots * kSlot * Block::kRow * sizeof(typename Block::X) >= PARENTS * kPart * sizeof(float));
  FASTCAPS_DEVICE float* part(int w) const {
    if (!args.resident) return reinterpret_cast<float*>(Block::ring_of(w));
    return carried + args.M * K + warps * kUnit * kTurn + w * args.M * kPart;
  }

  FASTCAPS_DEVICE static int row_of_target(int m) { return PARENTS + m; }
  FASTCAPS_DEVICE int64_t pose_of(int64_t iteration, int m) const {
    return ((iteration * args.positions + position) * args.M + m) * args.K;
  }
  // Whether an iteration has a query; and to make that, zeros without one.
  FASTCAPS_DEVICE bool asks(int iteration) const {
    return args.chain ? iteration > 0 || args.query : iteration >= args.without_query;
  }
  FASTCAPS_DEVICE void make_query(int iteration, int m) {
    float q[Block::kPer] = {}, x[Block::kPer] = {};
    const Pose query{q, args.K}, step{x, args.K};
    const bool adds = args.rule == Rule::kSquash;
    const int64_t given = args.chain ? 0 : iteration - args.without_query;
    if (asks(iteration) && (!args.chain || iteration == 0 || (adds && args.query)))
      query.each(
          [&](float& number, int k) { number = load_number(args.query, pose_of(given, m) + query.index(k), S); });
    FASTCAPS_NO_UNROLL
    for (int before = !args.chain ? iteration : adds ? 0 : iteration - 1; before < iteration; ++before) {
      if (before < 0) continue;
      step.each([&](float& number, int k) { number = args.sums[pose_of(before, m) + step.index(k)]; });
      take_plain_step(args, step);
      const bool replaces = !adds || (before == 0 && !args.query);
      query.each(
          [&](float& number, int k) { number = replaces ? rounded(x[k], S) : rounded(number + rounded(x[k], S), S); });
    }
    query.each([&](float& number, int k) { Block::template put<2>(factor, m, m, query.index(k), number); });
  }
  // dS, and in dnorm what the affine of LayerNorm has of it: [weight or bias][values of the lane].
  FASTCAPS_DEVICE void make_target(int iteration, int m, float (&dnorm)[2][Block::kPer]) {
    float dy[Block::kPer] = {}, s[Block::kPer] = {};
    const Pose grad{dy, args.K}, pose{s, args.K};
    grad.each([&](float& number, int k) {
      if (args.chain && iteration + 1 < args.iterations) {
        number = carried[m * K + grad.index(k)];
        return;
      }
      const int64_t *stride = args.grad.stride, row = position / args.Wo, sample = row / args.Ho;
      const int c = args.by_depth.quotient(grad.index(k)), d = args.by_depth.remainder(grad.index(k), c);
      number = static_cast<const float*>(
          args.grad.data)[(args.chain ? 0 : iteration * args.grad_iteration) + sample * stride[0] +
                          (row - sample * args.Ho) * stride[1] + (position - row * args.Wo) * stride[2] +
                          m * stride[3] + c * stride[4] + d * stride[5]];
    });
    if (args.rule != Rule::kPlain)
      pose.each([&](float& number, int k) { number = args.sums[pose_of(iteration, m) + pose.index(k)]; });
    if (args.rule == Rule::kSquash) squash_backward(grad, pose, args.eps);
    if (args.rule == Rule::kLayerNorm) {
      const float inverse = standardise(pose, args.eps);
      grad.each([&](float& number, int k) {
        dnorm[0][k] += number * s[k], dnorm[1][k] += number;
        if (args.norm_weight) number *= load_number(args.norm_weight, grad.index(k), S);
      });
      standardise_backward(grad, inverse, [&](int k) { return s[k]; });
    }
    grad.each([&](float& number, int k) {
      const int row = row_of_target(m);
      Block::template put<2>(factor, row, row, grad.index(k), number);
    });
  }

  // Calls body(logit, gain, parent) for a child of column 2 t + b.
  template <class Body>
  FASTCAPS_DEVICE void each(float (&d)[kTiles][4], int b, Body&& body) const {
    FASTCAPS_UNROLL
    for (int half = 0; half < PARENTS / 8; ++half) {
      const int target = half + PARENTS / 8;
      body(d[half / 2][half % 2 * 2 + b], d[target / 2][target % 2 * 2 + b], half * 8 + g);
    }
  }
  // Logits and gains of a unit become scale g dl and g r.
  FASTCAPS_DEVICE void compete(int u, bool flows, float (&d)[2][kTiles][4]) const {
    FASTCAPS_UNROLL
    for (int n = 0; n < 2; ++n) {
      FASTCAPS_UNROLL
      for (int b = 0; b < 2; ++b) {
        const int in_slot = child_of_column(2 * t + b), child = Block::first_child(2 * u + n) + in_slot;
        float top = -INFINITY, total = 0.0f, mean = 0.0f;
        each(d[n], b, [&](float& x, float&, int m) {
          x *= kLog2E * args.scale;
          if (args.prior && Block::alive(m) && child < args.I) x += kLog2E * args.prior[child * args.prior_stride + m];
          if (!Block::alive(m)) x = -INFINITY;
          top = fmaxf(top, x);
        });
        top = join_lanes<4, 8>(top, [](float x, float y) { return fmaxf(x, y); });
        each(d[n], b, [&](float& x, float& gain, int m) {
          total += x = exp2_fast(x - top);
          if (Block::alive(m)) mean += x * gain;
        });
        const float one = reciprocal(join_lanes<4, 8>(total, plus));
        mean = join_lanes<4, 8>(mean, plus) * one;
        const float gate = Block::gate(2 * u + n, in_slot);
        if (g == 0 && args.dgate && child < args.I)
          add_gate(child, gate == 0.0f && !(fabsf(mean) <= FLT_MAX) ? 0.0f : mean);
        each(d[n], b, [&](float& x, float& gain, int m) {
          const bool open = gate != 0.0f && Block::alive(m);
          const float r = open ? x * one * gate : 0.0f, dl = open && flows ? r * (gain - mean) : 0.0f;
          x = dl * args.scale, gain = r;
          if (args.dprior && Block::alive(m) && child < args.I) {
            float& sum = args.dprior[(block_x() * args.I + child) * args.M + m];
            sum = first ? dl : sum + dl;
          }
        });
      }
    }
  }
  FASTCAPS_DEVICE void add_gate(int child, float x) const {
    const int64_t at = position * args.I + child;
    if (!first) x += args.gate_sums[at];
    if (last)
      store_number(args.dgate, at, x, S);
    else
      args.gate_sums[at] = x;
  }
  // Where dx of a slot's child is made: the sum of the walks so far, in shared memory if that holds all children's, and
  // the result.
  struct Target {
    float* sum;
    int64_t at;
    bool exists;
  };
  FASTCAPS_DEVICE Target target_of(int n, int in_slot) const {
    const int child = Block::first_child(n) + in_slot;
    const int64_t at = (position * args.I + child) * args.K;
    return {args.held() ? held + (Block::place_of(n) + in_slot) * kHeld : args.children_sums + at, at, child < args.I};
  }
  // Four values of the walks so far, the k-th and those behind; and stores them with this walk's. VECTOR: all four
  // exist, and begin at a multiple of their size. Loads come long before their use.
  template <bool VECTOR>
  FASTCAPS_DEVICE void fetch(const Target& from, int k, float (&before)[4]) const {
    if (first || !from.exists || k >= args.K) return;
    load_four(from.sum + k, VECTOR ? 4 : args.K - k, VECTOR, before);
  }
  template <bool VECTOR>
  FASTCAPS_DEVICE void put_sum(const Target& to, int k, const float (&x)[4]) const {
    const int inside = VECTOR ? 4 : args.K - k;
    if (!to.exists || k >= args.K) return;
    if (last)
      store_four(args.dchildren, to.at + k, inside, VECTOR, x, S);
    else
      store_four(to.sum, k, inside, VECTOR, x, Storage::kFloat32);
  }
  // dx of a unit from its coefficients, in `turn`.
  template <bool VECTOR>
  FASTCAPS_DEVICE void add_children(int u) const {
    Factor<3, 4> a[2 * kTiles];
    FASTCAPS_UNROLL
    for (int rows = 0; rows < 2 * kTiles; ++rows) {
      FASTCAPS_UNROLL
      for (int x = 0; x < 4; ++x) a[rows].take(x, turn[(g + x % 2 * 8) * kTurn + rows * 8 + t + x / 2 * 4]);
    }
    const Target targets[2] = {target_of(2 * u, child_of_column(g)), target_of(2 * u + 1, child_of_column(g))};
    float before[2][4] = {};
    fetch<VECTOR>(targets[0], 4 * t, before[0]), fetch<VECTOR>(targets[1], 4 * t, before[1]);
    _Pragma("unroll VECTOR ? 2 : 1") for (int k = 0; k < K; k += 16) {
      float next[2][4] = {};
      fetch<VECTOR>(targets[0], k + 16 + 4 * t, next[0]), fetch<VECTOR>(targets[1], k + 16 + 4 * t, next[1]);
      float dx[2][4] = {}, small[2][4] = {};  // of columns g: values 4 (g / 2) + 2 (g % 2) and, in the second, the next
      FASTCAPS_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        float b[2][2][4];
        FASTCAPS_UNROLL
        for (int plane = 0; plane < 2; ++plane) {
          FASTCAPS_UNROLL
          for (int next = 0; next < 2; ++next) {
            const int instruction = k / 8 + g % 2;
            load_vector<4>(factor + ((tile * 2 + plane) * (K / 8) + instruction) * 128 +
                               Block::place_of_lane(t + 4 * next, g / 2, g),
                           b[plane][next]);
          }
        }
        FASTCAPS_UNROLL
        for (int half = 0; half < 2; ++half) {
          const auto& rows = a[2 * tile + half];
          FASTCAPS_UNROLL
          for (int v = 0; v < 2; ++v) {
            const auto word = [&](int plane, int next) { return float_bits(b[plane][next][2 * v + half]); };
            mma_tf32_16x8x8(small[v], rows.remainder, {word(0, 0), word(0, 1)});
            mma_tf32_16x8x8(small[v], rows.number, {word(1, 0), word(1, 1)});
            mma_tf32_16x8x8(dx[v], rows.number, {word(0, 0), word(0, 1)});
          }
        }
      }
      FASTCAPS_UNROLL
      for (int n = 0; n < 2; ++n) {
        float x[4];
        FASTCAPS_UNROLL
        for (int v = 0; v < 4; ++v) {
          x[v] = before[n][v] + (dx[v % 2][2 * n + v / 2] + small[v % 2][2 * n + v / 2]);
          before[n][v] = next[n][v];
        }
        put_sum<VECTOR>(targets[n], k + 4 * t, x);
      }
    }
  }

  FASTCAPS_DEVICE void add_children_safely(int u) const {
    FASTCAPS_NO_UNROLL
    for (int column = 0; column < kUnit; ++column) {
      const int child = child_of_column(column % 8);
      const bool open = Block::gate(2 * u + column / 8, child) != 0.0f;
      for (int k = 4 * lane; k < args.K; k += 4 * kWarp) {
        const Target to = target_of(2 * u + column / 8, child);
        float x[4] = {}, before[4] = {};
        fetch<false>(to, k, before);
        for (int m = 0; open && m < 2 * args.M; ++m) {
          const int row = m < args.M ? m : row_of_target(m - args.M);
          FASTCAPS_UNROLL
          for (int v = 0; v < 4; ++v) x[v] += turn[column * kTurn + row] * value(row, k + v);
        }
        FASTCAPS_UNROLL
        for (int v = 0; v < 4; ++v) x[v] += before[v];
        put_sum<false>(to, k, x);
      }
    }
  }
  // A value of Q or dS again.
  FASTCAPS_DEVICE float value(int row, int k) const {
    const float number = factor[Block::template place<2>(row, 0, k)];
    return fabsf(number) <= FLT_MAX ? number + factor[Block::template place<2>(row, 1, k)] : number;
  }

  // One walk over the children; the warp's sums of dQ go to its part.
  FASTCAPS_DEVICE void walk(bool flows, bool wants_query) {
    float sums[kSumTiles][K / 8][4] = {};
    FASTCAPS_NO_UNROLL
    for (int u = 0; u < units; ++u) {
      Block::template wait<true>(u);
      float d[2][kTiles][4];
      Block::template multiply<kTiles, 2>(factor, u, d);
      if (!Block::finite(d)) Block::multiply_safely(u, turn, d, [&](int row, int k) { return value(row, k); });
      compete(u, flows, d);
      Block::to_turn(d, turn);
      const bool finite = Block::finite(d);
      if (!finite) {
        if (args.dchildren) add_children_safely(u);
        if (wants_query) Block::template add_safely<kPacked>(u, turn, kTurn, sums);
      } else if (args.dchildren) {
        args.K % 4 == 0 ? add_children<true>(u) : add_children<false>(u);
      }
      FASTCAPS_UNROLL
      for (int n = 0; n < 2; ++n) {
        if (finite && wants_query) Block::template add<kPacked>(d[n], 2 * u + n, sums);
        barrier_warp();
        if (!args.resident) Block::stage(2 * u + n + Block::kSlots);
      }
    }
    barrier_warp();
    if (wants_query) Block::template store_sums<kPacked>(sums, part(warp));
  }
  // The same without queries and prior: all coefficients are 1 / M, and all children but for their gates alike.
  FASTCAPS_DEVICE void walk_evenly() {
    float* mean = carried;  // nothing is behind
    for (int k = thread_index(); k < K; k += block_threads()) {
      float sum = 0.0f;
      for (int m = 0; m < args.M; ++m) sum += value(row_of_target(m), k);
      mean[k] = sum / float(args.M);
    }
    barrier();
    FASTCAPS_NO_UNROLL
    for (int at = 0; at < 2 * units * kSlot; at += 4) {
      const int begin = Block::first_child(at / kSlot) + at % kSlot;
      float gates[4];
      FASTCAPS_UNROLL
      for (int c = 0; c < 4; ++c) gates[c] = Block::gate_of(begin + c);
      if (args.dgate) differentiate_gates(begin, gates, mean);
      if (args.dchildren) args.K % 4 == 0 ? add_evenly<true>(at, gates, mean) : add_evenly<false>(at, gates, mean);
    }
  }
  // Of four children, the first of which is `begin`.
  FASTCAPS_DEVICE void differentiate_gates(int begin, const float (&gates)[4], const float* mean) const {
    float along[4] = {};
    for (int k = lane; k < args.K; k += kWarp) {
      FASTCAPS_UNROLL
      for (int c = 0; c < 4; ++c)
        if (begin + c < args.I) along[c] += mean[k] * load_number(Block::poses, Block::offset(begin + c, k), S);
    }
    FASTCAPS_UNROLL
    for (int c = 0; c < 4; ++c) {
      along[c] = join_lanes<1, kWarp>(along[c], plus);
      if (lane == 0 && begin + c < args.I)
        add_gate(begin + c, gates[c] == 0.0f && !(fabsf(along[c]) <= FLT_MAX) ? 0.0f : along[c]);
    }
  }
  template <bool VECTOR>
  FASTCAPS_DEVICE void add_evenly(int at, const float (&gates)[4], const float* mean) const {
    FASTCAPS_UNROLL
    for (int begin = 0; begin < K; begin += 4 * kWarp) {
      const int k = begin + 4 * lane;
      float before[4][4] = {};
      FASTCAPS_UNROLL
      for (int c = 0; c < 4; ++c) fetch<VECTOR>(target_of(at / kSlot, at % kSlot + c), k, before[c]);
      FASTCAPS_UNROLL
      for (int c = 0; c < 4; ++c) {
        FASTCAPS_UNROLL
        for (int v = 0; v < 4; ++v)
          if (gates[c] != 0.0f && k < K) before[c][v] += gates[c] * mean[k + v];
        put_sum<VECTOR>(target_of(at / kSlot, at % kSlot + c), k, before[c]);
      }
    }
  }

  // Adds up the warps' parts of dQ, to the gradient of the queries so far or in its place.
  FASTCAPS_DEVICE void carry(int iteration) {
    const bool adds = args.chain && args.rule == Rule::kSquash && iteration + 1 < args.iterations;
    for (int at = thread_index(); at < args.M * K; at += block_threads()) {
      float sum = 0.0f;
      for (int w = 0; w < warps; ++w) sum += part(w)[at / K * kPart + at % K];
      carried[at] = adds ? carried[at] + sum : sum;
    }
    barrier();
  }

  // The block's part of the affine's gradients: those of its warps, one after the other.
  FASTCAPS_DEVICE void store_norm(const float (&dnorm)[2][Block::kPer]) {
    FASTCAPS_NO_UNROLL
    for (int w = 0; w < warps; ++w) {
      FASTCAPS_UNROLL
      for (int which = 0; which < 2; ++which) {
        FASTCAPS_UNROLL
        for (int k = 0; k < Block::kPer; ++k) {
          const int at = Pose::index(k);
          if (warp != w || at >= args.K) continue;
          float& sum = args.dnorm[(position * 2 + which) * args.K + at];
          sum = w == 0 ? dnorm[which][k] : sum + dnorm[which][k];
        }
      }
      barrier();
    }
  }

  FASTCAPS_DEVICE void run() {
    for (int k = thread_index(); k < kFactor + args.M * K; k += block_threads()) factor[k] = 0.0f;  // carried, too
    barrier();
    float dnorm[2][Block::kPer] = {};
    bool begun = false;
    FASTCAPS_NO_UNROLL
    for (int iteration = args.iterations - 1; iteration >= 0; --iteration) {
      const bool queried = asks(iteration), even = !queried && !args.prior, flows = !args.detach && !even;
      const bool wants_query = flows && queried && (args.dquery || (args.chain && iteration > 0));
      if (!even) Block::begin(!begun), begun = true;
      FASTCAPS_NO_UNROLL
      for (int m = warp; m < args.M; m += warps) {
        make_query(iteration, m);
        make_target(iteration, m, dnorm);
      }
      barrier();
      last = iteration == 0 || (args.chain && args.detach);
      if (even)
        walk_evenly();
      else
        walk(flows, wants_query);
      barrier();
      if (wants_query) carry(iteration);
      first = false;
      if (last) break;
    }
    for (int at = thread_index(); args.dquery && at < args.M * args.K; at += block_threads())
      store_number(args.dquery, position * args.M * args.K + at, carried[at / args.K * K + at % args.K], S);
    if (args.dnorm) store_norm(dnorm);
  }
};

template <int K, int PARENTS>
constexpr PlainKernel Built = plain_kernel_of<PlainBackward, K, PARENTS>;

// clang-format off
constexpr PlainKernel kKernels[] = {  // the smallest first
    Built<32, 8>, Built<64, 8>, Built<64, 16>, Built<64, 32>, Built<128, 8>, Built<128, 16>, Built<128, 32>,
    Built<256, 8>, Built<256, 16>,
};
// clang-format on

}  // namespace

bool run_plain_backward(const PlainArgs& args) { return launch_plain(kKernels, int(std::size(kKernels)), args); }

}  // namespace fastcaps::gpu
