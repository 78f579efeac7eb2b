// The kernels around those of an iteration that is not a single launch. Forward, `finish` joins the sums of all ranges
// of children and makes parents of them. Backward, `prepare` turns the parents' gradient into that of the sums; the
// first of a call also sets to 0 what the launches behind it add to.
#pragma once

#include "call.h"
#include "stage.h"

namespace fastcaps::gpu {

// The lanes of a warp that work on one parent. `lanes` of them hold its pose, four neighbours at a time; `shares` such
// groups take turns with the parts that ranges of children have left of it. Both are powers of two.
struct Sharing {
  static constexpr int kAtOnce = 4;  // parts that a lane loads before it adds any; if there are more, more lanes share
  int lanes = 1, shares = 1;

  Sharing() = default;
  explicit Sharing(int64_t numbers, int64_t parts = 1) {
    while (lanes < 32 && lanes * 4 < numbers) lanes *= 2;
    while (lanes * shares < 32 && shares * kAtOnce < parts) shares *= 2;
  }
  Grid grid(int64_t parents, int64_t most = 1 << 20) const {
    const int64_t blocks = ceil_div(parents, 256 / (lanes * shares));
    return {blocks < most ? blocks : most, 1, 256};
  }
  FASTCAPS_DEVICE int first() const { return (thread_index() & (lanes - 1)) * 4; }  // value of the lane
  FASTCAPS_DEVICE int share() const { return (thread_index() & (lanes * shares - 1)) / lanes; }
  // Sums over the shares of a parent, or over the lanes of a share; the same in all of them.
  template <class X>
  FASTCAPS_DEVICE void add_shares(X& x) const {
    FASTCAPS_NO_UNROLL
    for (int mask = lanes; mask < lanes * shares; mask *= 2) x += shuffle_xor(x, mask);
  }
  FASTCAPS_DEVICE void add_lanes(float& x) const {
    FASTCAPS_NO_UNROLL
    for (int mask = 1; mask < lanes; mask *= 2) x += shuffle_xor(x, mask);
  }
};

// Four neighbours, of which `inside` exist; the others are 0. `vector`: the address is a multiple of 16, and either all
// four exist or none does.
FASTCAPS_DEVICE void load_four(const float* from, int inside, bool vector, float* to) {
  if (vector) {
    const float4 x = inside > 0 ? load4(from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    return;
  }
  FASTCAPS_UNROLL
  for (int v = 0; v < 4; ++v) to[v] = v < inside ? from[v] : 0.0f;
}
FASTCAPS_DEVICE void store_four(void* to, int64_t at, int inside, bool vector, const float* x, Storage storage) {
  if (vector && storage == Storage::kFloat32) {
    if (inside > 0) store4(static_cast<float*>(to) + at, make_float4(x[0], x[1], x[2], x[3]));
    return;
  }
  if (vector) {
    const auto pair = [&](int k) {
      return bits_float(uint32_t(narrowed(x[k], storage)) | uint32_t(narrowed(x[k + 1], storage)) << 16);
    };
    if (inside > 0) store2(reinterpret_cast<float*>(static_cast<uint16_t*>(to) + at), make_float2(pair(0), pair(2)));
    return;
  }
  FASTCAPS_UNROLL
  for (int v = 0; v < 4; ++v)
    if (v < inside) store_number(to, at + v, x[v], storage);
}

// The gradient of parents, [B, Ho, Wo, M, C, E]; no data stands for 0. `vector`: poses are dense, of a multiple of 4
// values, and begin at multiples of 16 bytes.
struct PosesView : View {
  int E;
  bool vector;

  PosesView() = default;
  PosesView(const View& view, int C, int E_) : View(view), E(E_), vector(view.data && C * E % 4 == 0) {
    vector = vector && stride[5] == 1 && (C == 1 || stride[4] == E) && reinterpret_cast<uintptr_t>(data) % 16 == 0;
    for (int k = 0; k < 4; ++k) vector = vector && stride[k] % 4 == 0;
  }
  // Four neighbours of the pose that begins at `from`, `inside` of which exist; the others are 0.
  FASTCAPS_DEVICE void load(int64_t from, int number, int inside, float* to) const {
    const float* pose = static_cast<const float*>(data) + from;
    if (vector) return load_four(pose + number, inside, true, to);
    FASTCAPS_UNROLL
    for (int v = 0; v < 4; ++v) {
      const int c = (number + v) / E, e = number + v - c * E;
      to[v] = data && v < inside ? pose[c * stride[4] + e * stride[5]] : 0.0f;
    }
  }
};

struct EndArgs : ParentArgs {
  Sharing by;
  int64_t count;  // parents in all: B * Ho * Wo * M

  // forward
  const float* parts;       // [chunks, count, C * E]
  const float* logsumexps;  // pooling: [chunks, count], by which parts are weighed; or null: they are added
  int chunks;
  float* sums;       // [count, C * E]; null if not wanted, or if they are the only part
  void* stored;      // pooling: the sums, in the children's type
  float* logsumexp;  // pooling: [count]
  void* parents;     // [count, C * E]

  // the queries of further iterations, [count, C * E] in the children's type
  const void* query;  // the first one's; or null
  void* queries;      // forward: the next one's; backward: of `steps` iterations, from `earlier_sums`; or null
  const void* earlier_sums;
  int steps;

  // backward: the gradient of parents is `grad`, or that of the queries behind, which is in `parts`
  PosesView grad;
  const void* given_sums;  // [count, C * E] where the parents are not the sums, or null
  float* dsums;            // [count, C * E]
  float* dnorm;            // [blocks, 2, C * E] or null
  float* dconstant;        // pooling: [count], -<dS, S> with S as it is stored; or null
  Zeros zeros;
};

// [B, Ho, Wo, M, C, E], dense
inline View dense_poses(const void* data, const Votes& v) {
  const int64_t row = v.Wo * v.parents_size();
  return {data, {v.Ho * row, row, v.parents_size(), v.parent_size(), v.E, 1}};
}

inline EndArgs end_args(const Call& call, int chunks = 1) {
  EndArgs args{};
  static_cast<ParentArgs&>(args) = call.args;
  args.count = call.votes.positions() * args.M;
  args.chunks = chunks, args.by = Sharing(args.C * args.E, chunks);
  return args;
}

// Sets to 0 what the launches behind this one add to, if this block is one of those that do so.
FASTCAPS_DEVICE bool set_to_zero(const Zeros& zeros) {
  const int64_t first = (block_x() - zeros.working) * block_threads() + thread_index();
  if (block_x() < zeros.working) return false;
  const int64_t step = (blocks_x() - zeros.working) * block_threads();
  for (int piece = 0; piece < zeros.pieces; ++piece) {
    float* values = zeros.values[piece];
    const int64_t count = zeros.count[piece];
    for (int64_t k = first; k < count / 4; k += step) store4(values + 4 * k, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    if (first < count % 4) values[count - 1 - first] = 0.0f;
  }
  return true;
}

void finish(const EndArgs& args);
// Blocks that share the parents: each has a part of `dnorm`, if that is wanted.
Grid prepare_grid(const EndArgs& args);
void prepare(EndArgs& args);

}  // namespace fastcaps::gpu
