// Attention of children that share matrices, between two products of the library that make U = scale Q W^T, and S of
// sums of poses (fastcaps/ops/folded.py has the algebra). No logit is stored. A block has a range of the
// children of one group of one sample: its parents in registers, kEach a thread, its children in shared memory, a few
// at a time.
//   forward:  r = softmax over m of <U_m, P_i>, T_m = sum_i g_i r_im P_i
//   backward: h = <Y_m, P_i>, mean_i = sum_m r h, dl = r (h - mean_i), and T; dU_m = sum_i g_i dl P_i,
//             dP_i = g_i sum_m (r Y_m + dl U_m), dg_i = mean_i
#include "../arguments.h"
#include "forward.h"
#include "launch.h"
#include "softmax.h"

namespace fastcaps::gpu {
namespace {

constexpr int kEach = 2, kLeastWarps = 2, kMostWarps = 8;  // parents of a thread; warps of a block
constexpr int kShared = 16;                                // values that the warps of a block exchange at a time

struct FoldedArgs {
  View children, gate;            // [b, G, n, C, D], [b, G, n]; the gate's data may be null
  const float *pulled, *targets;  // U and Y: [M, b, C, G, D]
  float *sums, *dpulled;          // T and dU: [chunks, M, b, C, G, D]
  float *dchildren, *dgate;       // [b, G, n, C D], [b, G, n]
  int64_t samples;
  int M, G, n, D, CD, chunk_children;
  bool vector;  // whether poses of parents are read and written four values at once
  Storage storage;
};

// Joins COUNT values of all lanes; a lane ends with one of them, that of value_of<COUNT>(lane).
template <int COUNT, int MASK = 1, class Join>
FASTCAPS_DEVICE float join_values(const float (&x)[COUNT], int lane, Join&& join) {
  if constexpr (COUNT == 1) {
    return join_lanes<MASK, kWarp / MASK>(x[0], join);
  } else {
    float half[COUNT / 2];
    FASTCAPS_UNROLL
    for (int k = 0; k < COUNT / 2; ++k) {
      const bool upper = lane & MASK;
      const float other = shuffle_xor(upper ? x[k] : x[k + COUNT / 2], MASK);
      half[k] = join(upper ? x[k + COUNT / 2] : x[k], other);
    }
    return join_values<COUNT / 2, MASK * 2>(half, lane, join);
  }
}
template <int COUNT>
FASTCAPS_DEVICE int value_of(int lane) {
  int value = 0;
  FASTCAPS_UNROLL
  for (int half = COUNT / 2, mask = 1; half > 0; half /= 2, mask *= 2) value += lane & mask ? half : 0;
  return value;
}
FASTCAPS_DEVICE float plus(float a, float b) { return a + b; }

// K: values of a pose, padded with zeros.
template <int K, bool BACKWARD>
struct Folded {
  static constexpr int kTile = BACKWARD ? kShared / 2 : kShared;  // children at a time: they exchange one value or two
  static constexpr int kTiles = 3, kLoads = kTile * K / (kLeastWarps * kWarp);

  struct Memory {
    alignas(16) float poses[kTiles][kTile][K], gates[kTiles][kTile];
    alignas(16) float parts[4][kMostWarps][kShared], found[kMostWarps][kShared];
    float dposes[BACKWARD ? 2 : 1][BACKWARD ? kMostWarps : 1][BACKWARD ? kTile * K : 1];
  };

  const FoldedArgs& args;
  Memory& memory = *reinterpret_cast<Memory*>(shared_memory());
  const int thread = thread_index(), lane = thread % kWarp, warp = thread / kWarp, warps = block_threads() / kWarp;
  const int value = value_of<kShared>(lane);
  const int first = int(block_y()) * args.chunk_children;  // of the block's children
  const int last = first + args.chunk_children < args.n ? first + args.chunk_children : args.n;
  const int64_t sample = block_x() / args.G, group = block_x() % args.G;
  float pulled[kEach][K], targets[kEach][K], sums[kEach][K], dpulled[kEach][K];
  float e[kTile][kEach], h[kTile][kEach];

  FASTCAPS_DEVICE explicit Folded(const FoldedArgs& args_) : args(args_) {}

  FASTCAPS_DEVICE int parent(int p) const { return thread + p * block_threads(); }

  // Calls body(p, k, at, exists) for every STEP-th value k of the thread's parents, in [.., M, b, C, G, D].
  template <int STEP, class Body>
  FASTCAPS_DEVICE void each_value(int64_t chunk, Body&& body) const {
    FASTCAPS_UNROLL
    for (int p = 0; p < kEach; ++p) {
      int64_t at = ((chunk * args.M + parent(p)) * args.samples + sample) * args.CD * args.G + group * args.D;
      int d = 0;
      FASTCAPS_UNROLL
      for (int k = 0; k < K; k += STEP) {
        body(p, k, at, parent(p) < args.M && k < args.CD);
        at += STEP, d += STEP;
        if (d == args.D) d = 0, at += (args.G - 1) * args.D;
      }
    }
  }
  FASTCAPS_DEVICE void load_parents(const float* from, float factor, float (&to)[kEach][K]) const {
    if (args.vector)
      each_value<4>(0, [&](int p, int k, int64_t at, bool exists) {
        const float4 x = exists ? load4(from + at) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        to[p][k] = factor * x.x, to[p][k + 1] = factor * x.y, to[p][k + 2] = factor * x.z, to[p][k + 3] = factor * x.w;
      });
    else
      each_value<1>(0, [&](int p, int k, int64_t at, bool exists) { to[p][k] = exists ? factor * from[at] : 0.0f; });
  }
  FASTCAPS_DEVICE void store_parents(float* to, float factor, const float (&from)[kEach][K]) const {
    if (args.vector)
      each_value<4>(block_y(), [&](int p, int k, int64_t at, bool exists) {
        const float* x = &from[p][k];
        if (exists) store4(to + at, make_float4(factor * x[0], factor * x[1], factor * x[2], factor * x[3]));
      });
    else
      each_value<1>(block_y(), [&](int p, int k, int64_t at, bool exists) {
        if (exists) to[at] = factor * from[p][k];
      });
  }

  // A tile's poses and gates, from memory: a thread has every (threads / K)-th child's k-th value. A child with a gate
  // of 0 has no pose forward; backward, where its gate has a gradient, none that is not finite.
  FASTCAPS_DEVICE void load(int tile, float (&pose)[kLoads], float (&gate)[kLoads]) const {
    const int k = thread % K;
    const int64_t begin = sample * args.children.stride[0] + group * args.children.stride[1] +
                          k / args.D * args.children.stride[3] + k % args.D * args.children.stride[4];
    FASTCAPS_UNROLL
    for (int j = 0; j < kLoads; ++j) {
      const int place = thread + j * block_threads(), child = first + tile * kTile + place / K;
      pose[j] = gate[j] = 0.0f;
      if (place - lane >= kTile * K) break;  // the same for all of a warp
      if (child < last) {
        gate[j] = 1.0f;
        if (args.gate.data)
          gate[j] = load_number(
              args.gate.data, sample * args.gate.stride[0] + group * args.gate.stride[1] + child * args.gate.stride[2],
              args.storage);
        if (k < args.CD)
          pose[j] = load_number(args.children.data, begin + child * args.children.stride[2], args.storage);
      }
      float broken = BACKWARD && fabsf(pose[j]) <= FLT_MAX ? 0.0f : 1.0f;
      if constexpr (BACKWARD) broken = join_lanes<1, K>(broken, plus);
      if (gate[j] == 0.0f && broken != 0.0f) pose[j] = 0.0f;
    }
  }
  FASTCAPS_DEVICE void store(int tile, const float (&pose)[kLoads], const float (&gate)[kLoads]) {
    FASTCAPS_UNROLL
    for (int j = 0; j < kLoads; ++j) {
      const int place = thread + j * block_threads();
      if (place >= kTile * K) break;
      memory.poses[tile % kTiles][place / K][place % K] = pose[j];
      if (place % K == 0) memory.gates[tile % kTiles][place / K] = gate[j];
    }
  }

  // Calls body(c, pose) for a tile's children.
  template <class Body>
  FASTCAPS_DEVICE void each_child(int tile, Body&& body) const {
    FASTCAPS_UNROLL
    for (int c = 0; c < kTile; ++c) {
      float pose[K];
      FASTCAPS_UNROLL
      for (int k = 0; k < K; k += 4) {
        const float4 four = load4(&memory.poses[tile % kTiles][c][k]);
        pose[k] = four.x, pose[k + 1] = four.y, pose[k + 2] = four.z, pose[k + 3] = four.w;
      }
      body(c, pose);
    }
  }
  // e becomes the logits, in units of log2; -inf for parents that do not exist. Backward h, too.
  FASTCAPS_DEVICE void compare(int tile) {
    each_child(tile, [&](int c, const float (&pose)[K]) {
      FASTCAPS_UNROLL
      for (int p = 0; p < kEach; ++p) {
        e[c][p] = parent(p) < args.M ? 0.0f : -INFINITY;
        h[c][p] = 0.0f;
        FASTCAPS_UNROLL
        for (int k = 0; k < K; ++k) {
          e[c][p] += pose[k] * pulled[p][k];
          if constexpr (BACKWARD) h[c][p] += pose[k] * targets[p][k];
        }
      }
    });
  }

  // A value for each child (and backward another one, behind those) of all parents; lane k has the one of number k mod
  // kShared.
  template <class Join>
  FASTCAPS_DEVICE float exchange(int region, const float (&x)[kShared], Join&& join) {
    const float mine = join_values<kShared>(x, lane, join);
    if (lane < kShared) memory.parts[region][warp][value] = mine;
    barrier();
    float found = memory.parts[region][0][lane % kShared];
    FASTCAPS_NO_UNROLL
    for (int w = 1; w < warps; ++w) found = join(found, memory.parts[region][w][lane % kShared]);
    return found;
  }
  // e becomes exponentials relative to `shift` (0 without one); returns sums of e, and backward of e h.
  FASTCAPS_DEVICE float total(int region, const float* shift) {
    float x[kShared];
    FASTCAPS_UNROLL
    for (int c = 0; c < kTile; ++c) {
      x[c] = 0.0f;
      if constexpr (BACKWARD) x[c + kTile] = 0.0f;
      FASTCAPS_UNROLL
      for (int p = 0; p < kEach; ++p) {
        e[c][p] = exp2_fast(shift ? e[c][p] - shift[c] : e[c][p]);
        x[c] += e[c][p];
        if constexpr (BACKWARD) x[c + kTile] += e[c][p] * h[c][p];
      }
    }
    return exchange(region, x, plus);
  }
  // The same relative to the largest logits, for a tile some of whose totals are out of range.
  FASTCAPS_DEVICE float safe_total(int tile) {
    compare(tile);
    float x[kShared];
    FASTCAPS_UNROLL
    for (int c = 0; c < kShared; ++c) x[c] = c < kTile ? fmaxf(e[c % kTile][0], e[c % kTile][1]) : 0.0f;
    const float highest = exchange(2, x, [](float a, float b) { return fmaxf(a, b); });
    if (lane < kShared) memory.found[warp][lane] = highest;
    barrier_warp();
    return total(3, memory.found[warp]);
  }

  // e becomes g r, and h g dl ln 2, from a tile's totals.
  FASTCAPS_DEVICE void compete(int tile, float sum) {
    const int c = lane % kTile, child = first + tile * kTile + c;
    const float gate = memory.gates[tile % kTiles][c], one = reciprocal(sum);
    float mean = 0.0f;
    if constexpr (BACKWARD) {
      mean = shuffle_xor(sum, kTile) * one;
      if (warp == 0 && lane < kTile && args.dgate && child < last)
        args.dgate[block_x() * args.n + child] = gate == 0.0f && !(fabsf(mean) <= FLT_MAX) ? 0.0f : mean;
    }
    if (lane < kTile) {
      memory.found[warp][c] = gate * one;
      if constexpr (BACKWARD) memory.found[warp][c + kTile] = mean;
    }
    barrier_warp();
    FASTCAPS_UNROLL
    for (int k = 0; k < kTile; ++k) {
      const float factor = memory.found[warp][k];
      const bool closed = memory.gates[tile % kTiles][k] == 0.0f;
      FASTCAPS_UNROLL
      for (int p = 0; p < kEach; ++p) {
        e[k][p] = closed ? 0.0f : e[k][p] * factor;
        if constexpr (BACKWARD) h[k][p] = closed ? 0.0f : kLn2 * e[k][p] * (h[k][p] - memory.found[warp][k + kTile]);
      }
    }
  }

  FASTCAPS_DEVICE void add(int tile) {
    each_child(tile, [&](int c, const float (&pose)[K]) {
      FASTCAPS_UNROLL
      for (int p = 0; p < kEach; ++p) {
        FASTCAPS_UNROLL
        for (int k = 0; k < K; ++k) {
          sums[p][k] += e[c][p] * pose[k];
          if constexpr (BACKWARD) dpulled[p][k] += h[c][p] * pose[k];
        }
      }
    });
  }
  // The warp's parts of dP.
  FASTCAPS_DEVICE void add_dposes(int tile) {
    FASTCAPS_UNROLL
    for (int begin = 0; begin < kTile * K; begin += kShared) {
      float x[kShared];
      FASTCAPS_UNROLL
      for (int j = 0; j < kShared; ++j) {
        const int c = (begin + j) / K, k = (begin + j) % K;
        x[j] = 0.0f;
        FASTCAPS_UNROLL
        for (int p = 0; p < kEach; ++p) {
          x[j] += e[c][p] * targets[p][k];
          x[j] += h[c][p] * pulled[p][k];
        }
      }
      const float mine = join_values<kShared>(x, lane, plus);
      if (lane < kShared) memory.dposes[tile % 2][warp][begin + value] = mine;
    }
  }
  // Adds up the warps' parts of a tile before.
  FASTCAPS_DEVICE void store_dposes(int tile) const {
    for (int at = thread; at < kTile * K; at += block_threads()) {
      const int child = first + tile * kTile + at / K, k = at % K;
      if (child >= last || k >= args.CD) continue;
      float sum = 0.0f;
      FASTCAPS_NO_UNROLL
      for (int w = 0; w < warps; ++w) sum += memory.dposes[tile % 2][w][at];
      if (memory.gates[tile % kTiles][at / K] == 0.0f) sum = 0.0f;
      args.dchildren[(block_x() * args.n + child) * args.CD + k] = sum;
    }
  }

  FASTCAPS_DEVICE void run() {
    load_parents(args.pulled, kLog2E, pulled);
    if constexpr (BACKWARD) load_parents(args.targets, 1.0f, targets);
    FASTCAPS_UNROLL
    for (int p = 0; p < kEach; ++p) {
      FASTCAPS_UNROLL
      for (int k = 0; k < K; ++k) sums[p][k] = dpulled[p][k] = 0.0f;
    }
    float pose[kLoads], gate[kLoads];
    load(0, pose, gate);
    store(0, pose, gate);
    barrier();
    const int tiles = (last - first + kTile - 1) / kTile;
    FASTCAPS_NO_UNROLL
    for (int tile = 0; tile < tiles; ++tile) {
      load(tile + 1, pose, gate);
      compare(tile);
      // other warps may still read the poses of the tile before, but not those before
      store(tile + 1, pose, gate);
      float sum = total(tile % 2, nullptr);
      constexpr float kMost = BACKWARD ? 0x1p40f : kMostTotal;  // as in add_up
      const bool of_gains = BACKWARD && lane % kShared >= kTile;
      const float size = fabsf(sum), most = of_gains ? kMostTotal : kMost;
      const bool fits = (size > 1 / most && size < most) || (of_gains && size == 0.0f);
      if (BACKWARD && tile > 0) store_dposes(tile - 1);
      if (any_lane(!fits)) sum = safe_total(tile);  // all warps have the same totals
      compete(tile, sum);
      add(tile);
      if constexpr (BACKWARD) add_dposes(tile);
    }
    if constexpr (BACKWARD) {
      barrier();
      if (tiles > 0) store_dposes(tiles - 1);
    }
    store_parents(args.sums, 1.0f, sums);
    if constexpr (BACKWARD) store_parents(args.dpulled, kLog2E, dpulled);
  }
};

template <int K, bool BACKWARD>
FASTCAPS_KERNEL(kWarp* kMostWarps, BACKWARD&& K > 8 ? 1 : 2)
folded_kernel(FASTCAPS_CONSTANT const FoldedArgs args) {
  Folded<K, BACKWARD>(args).run();
}

template <int K, bool BACKWARD>
void launch_folded(const FoldedArgs& args, int64_t blocks, int64_t chunks) {
  const Grid grid{blocks, chunks,
                  kWarp * int(args.M > kWarp * kLeastWarps * kEach ? ceil_div(args.M, kWarp * kEach) : kLeastWarps),
                  sizeof(typename Folded<K, BACKWARD>::Memory)};
  launch(folded_kernel<K, BACKWARD>, grid, args);
}

// sums [chunks, M, b, C, G, D], and with targets dpulled, the same, dchildren [b, G, n, C D] and dgate [b, G, n].
std::vector<Tensor> folded(Stack from) {
  const Tensor children = from.tensor();
  const MaybeTensor gate = from.maybe();
  const Tensor pulled = from.tensor();
  const MaybeTensor targets = from.maybe();
  STD_TORCH_CHECK(children.dim() == 5 && pulled.dim() == 5,
                  "fastcaps: children must be [b, G, n, C, D], pulled [M, b, C, G, D]");
  const int64_t b = children.size(0), G = children.size(1), n = children.size(2), M = pulled.size(0);
  const int64_t C = children.size(3), D = children.size(4), CD = C * D;
  STD_TORCH_CHECK(
      CD >= 1 && CD <= 16 && M >= 1 && M <= kMostWarps * kWarp * kEach && n >= 1 && n < int64_t(1) << 30 && G >= 1,
      "fastcaps: no kernel folds ", n, " children a group of ", CD, " values for ", M, " parents");
  const DeviceGuard guard(children);
  const auto check_poses = [&](const Tensor& x, const char* name) {
    check_tensor(x, name, {M, b, C, G, D}, ScalarType::Float, children);
    STD_TORCH_CHECK(x.is_contiguous(), "fastcaps: ", name, " must be contiguous");
  };
  check_poses(pulled, "pulled");
  if (targets) check_poses(*targets, "targets");
  if (gate) check_tensor(*gate, "gate", {b, G, n}, children.scalar_type(), children);
  FoldedArgs args{};
  args.children = view_of(children, false), args.storage = storage_of(children);
  STD_TORCH_CHECK(args.storage != Storage::kFloat64, "fastcaps: no kernel folds float64");
  if (gate) args.gate = view_of(*gate, false);
  args.samples = b, args.M = int(M), args.G = int(G), args.n = int(n), args.D = int(D), args.CD = int(CD);
  // blocks for all multiprocessors, of at least 64 children each
  const int64_t blocks = b * G, wanted = ceil_div(4 * multiprocessors(), blocks > 0 ? blocks : 1);
  const int64_t least = ceil_div(n, wanted) > 64 ? ceil_div(n, wanted) : 64;
  args.chunk_children = int(ceil_div(least, kShared) * kShared);
  const int64_t chunks = ceil_div(n, args.chunk_children);
  const auto make = [&](const Shape& shape) { return new_tensor(children, shape, ScalarType::Float, "sums of poses"); };
  const Tensor sums = make({chunks, M, b, C, G, D}), dpulled = make(targets ? shape_of(sums) : Shape{0});
  const Tensor dchildren = make(targets ? Shape{b, G, n, CD} : Shape{0});
  const Tensor dgate = make(targets && gate ? Shape{b, G, n} : Shape{0});
  const auto at = [](const Tensor& x) { return x.numel() ? static_cast<float*>(data_of(x)) : nullptr; };
  args.pulled = at(pulled), args.targets = targets ? at(*targets) : nullptr;
  args.sums = at(sums), args.dpulled = at(dpulled), args.dchildren = at(dchildren), args.dgate = at(dgate);
  args.vector = D % 4 == 0;
  for (const float* poses :
       {args.pulled, args.targets, static_cast<const float*>(args.sums), static_cast<const float*>(args.dpulled)})
    args.vector = args.vector && reinterpret_cast<uintptr_t>(poses) % 16 == 0;
  const auto run = CD <= 8 ? (targets ? launch_folded<8, true> : launch_folded<8, false>)
                           : (targets ? launch_folded<16, true> : launch_folded<16, false>);
  run(args, blocks, chunks);
  return {sums, dpulled, dchildren, dgate};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(FASTCAPS_LIBRARY, FASTCAPS_KEY, folded_op) { folded_op.impl("folded", &boxed<folded>); }

}  // namespace fastcaps::gpu
