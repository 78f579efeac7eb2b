// The kernels around those of an iteration that is not a single launch. Forward, `finish` joins the sums of all ranges
// of children and makes parents of them. Backward, `prepare` turns the parents' gradient into that of the sums; the
// first of a call also sets to 0 what the launches behind it add to. A few lanes hold one parent's pose.
#pragma once

#include <cfloat>

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
  void* stored;      // pooling: the sums
  float* logsumexp;  // pooling: [count]
  void* parents;     // [count, C * E]

  // the queries of further iterations, [count, C * E] in the children's type
  const void* query;  // the first one's; or null
  void* queries;      // forward: the next one's; backward: of `steps` iterations, from `earlier_sums`; or null
  const float* earlier_sums;
  int steps;

  // backward: the gradient of parents is `grad`, or that of the queries behind, which is in `parts`
  PosesView grad;
  const float* given_sums;  // [count, C * E] where the parents are not the sums, or null
  float* dsums;             // [count, C * E]
  float* dnorm;             // [blocks, 2, C * E] or null
  float* dconstant;         // pooling: [count], -<dS, S> with S as it is stored; or null
  Zeros zeros;
};

inline EndArgs end_args(const Call& call, int chunks = 1) {
  EndArgs args{};
  static_cast<ParentArgs&>(args) = call.args;
  args.count = call.votes.positions() * args.M;
  args.chunks = chunks, args.by = Sharing(args.C * args.E, chunks);
  return args;
}

// A lane's values of one pose, and the sums over all lanes that hold it.
template <int PER>
struct HeldPose {
  using X = float;
  const Sharing& by;
  float* x;  // [PER]
  int numbers;

  FASTCAPS_DEVICE HeldPose(const EndArgs& args, float* x_) : by(args.by), x(x_), numbers(args.C * args.E) {}
  FASTCAPS_DEVICE float at(int k) const { return x[k]; }
  FASTCAPS_DEVICE int index(int k) const { return by.first() + k / 4 * by.lanes * 4 + k % 4; }
  FASTCAPS_DEVICE bool inside(int k) const { return index(k) < numbers; }
  template <class F>
  FASTCAPS_DEVICE void each(F&& f) const {
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; ++k)
      if (inside(k)) f(x[k], k);
  }
  template <class F>
  FASTCAPS_DEVICE float sum(F&& f) const {
    float sum = 0.0f;
    each([&](float number, int k) { sum += f(number, k); });
    by.add_lanes(sum);
    return sum;
  }
  template <class F>
  FASTCAPS_DEVICE float mean(F&& f) const {
    return sum(f) / float(numbers);
  }
  FASTCAPS_DEVICE float largest() const {
    float largest = 0.0f;
    each([&](float number, int) { largest = fmaxf(largest, fabsf(number)); });
    FASTCAPS_NO_UNROLL
    for (int mask = 1; mask < by.lanes; mask *= 2) largest = fmaxf(largest, shuffle_xor(largest, mask));
    return largest;
  }
  // Of a parent's dense pose at an address that is a multiple of 16: 0 without it.
  FASTCAPS_DEVICE void load(const float* poses, int64_t parent, bool exists, float* to) const {
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; k += 4)
      load_four(poses + parent * numbers + index(k), exists ? numbers - index(k) : 0, numbers % 4 == 0, to + k);
  }
  FASTCAPS_DEVICE void store(void* poses, int64_t parent, Storage storage) const {
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; k += 4)
      store_four(poses, parent * numbers + index(k), numbers - index(k), numbers % 4 == 0, x + k, storage);
  }
};

// Adds up a parent's parts, each times exp of its log-sum-exp - `top` if WEIGHED; returns the sum of these weights. A
// lane has some parts on their way at a time. The order of sums is fixed.
template <bool WEIGHED, int PER>
FASTCAPS_DEVICE float add_parts(const EndArgs& args, const HeldPose<PER>& pose, int64_t parent, bool exists,
                                float top) {
  constexpr int kAtOnce = PER == 4 ? Sharing::kAtOnce : 2;
  const int shares = args.by.shares;
  float total = 0.0f;
  FASTCAPS_NO_UNROLL
  for (int chunk = args.by.share(); chunk < args.chunks; chunk += kAtOnce * shares) {
    float weight[kAtOnce], part[kAtOnce][PER];
    FASTCAPS_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      const bool there = exists && chunk + j * shares < args.chunks;
      const int64_t at = (chunk + j * shares) * args.count + parent;
      if constexpr (WEIGHED) weight[j] = there ? args.logsumexps[at] : -INFINITY;
      pose.load(args.parts, at, there, part[j]);
    }
    FASTCAPS_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      weight[j] = WEIGHED ? expf(weight[j] - top) : 1.0f;
      total += weight[j];
      FASTCAPS_UNROLL
      for (int k = 0; k < PER; ++k) pose.x[k] += weight[j] * part[j][k];
    }
  }
  FASTCAPS_UNROLL
  for (int k = 0; k < PER; ++k) args.by.add_shares(pose.x[k]);
  if constexpr (WEIGHED) args.by.add_shares(total);
  return total;
}

// The largest log-sum-exp of a parent's parts, by which exponentials cannot overflow: all its lanes look for it.
FASTCAPS_DEVICE float top_of(const EndArgs& args, int64_t parent, bool exists) {
  const int lanes = args.by.lanes * args.by.shares;
  float top = -INFINITY;
  for (int chunk = thread_index() & (lanes - 1); exists && chunk < args.chunks; chunk += lanes)
    top = fmaxf(top, args.logsumexps[chunk * args.count + parent]);
  FASTCAPS_NO_UNROLL
  for (int mask = 1; mask < lanes; mask *= 2) top = fmaxf(top, shuffle_xor(top, mask));
  return top == -INFINITY ? 0.0f : top;
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

// From S to what the rule makes of it: the next parents, or what is added to the query.
template <int PER>
FASTCAPS_DEVICE void take_step(const EndArgs& args, const HeldPose<PER>& pose) {
  between<false>(args, pose, true);
  if (args.rule == Rule::kLayerNorm)
    pose.each([&](float& number, int k) { number = affine(args, number, pose.index(k)); });
}

// Stores the query that follows `query` behind the step that `pose` holds.
template <int PER>
FASTCAPS_DEVICE void store_query(const EndArgs& args, const HeldPose<PER>& pose, int64_t parent, const void* query,
                                 void* next) {
  if (query && args.rule == Rule::kSquash)
    pose.each([&](float& number, int k) {
      const int64_t at = parent * pose.numbers + pose.index(k);
      number = rounded(number, args.storage) + load_number(query, at, args.storage);
    });
  pose.store(next, parent, args.storage);
}

template <int PER>
FASTCAPS_KERNEL(256, 2)
finish_kernel(const FASTCAPS_CONSTANT EndArgs args) {
  each_parent(args.count, args.by.lanes * args.by.shares, blocks_x(), [&](int64_t parent, bool exists) {
    float x[PER] = {};
    const HeldPose<PER> pose(args, x);
    const bool stores = exists && args.by.share() == 0;
    if (args.logsumexps) {
      const float top = top_of(args, parent, exists), total = add_parts<true>(args, pose, parent, exists, top);
      pose.each([&](float& sum, int) { sum = total == 0.0f ? 0.0f : sum / total; });
      if (stores) pose.store(args.stored, parent, args.storage);
      if (stores && args.by.first() == 0) args.logsumexp[parent] = total == 0.0f ? -INFINITY : top + logf(total);
    } else {
      add_parts<false>(args, pose, parent, exists, 0.0f);
    }
    if (stores && args.sums) pose.store(args.sums, parent, Storage::kFloat32);
    take_step(args, pose);
    if (stores) pose.store(args.parents, parent, args.storage);
    if (stores && args.queries) store_query(args, pose, parent, args.query, args.queries);
  });
}

// Makes the queries of all iterations but the first again.
template <int PER>
FASTCAPS_DEVICE void make_queries(const EndArgs& args, const HeldPose<PER>& pose, int64_t parent, bool exists) {
  const int64_t bytes = args.count * pose.numbers * (args.storage == Storage::kFloat32 ? 4 : 2);
  const void* query = args.query;
  char* next = static_cast<char*>(args.queries);
  for (int step = 0; step < args.steps; ++step, query = next, next += bytes) {
    pose.load(args.earlier_sums + step * args.count * pose.numbers, parent, exists, pose.x);
    take_step(args, pose);
    if (exists && args.by.share() == 0) store_query(args, pose, parent, query, next);
  }
}

// dL/dS, and each block's part of the affine's gradients.
template <int PER>
FASTCAPS_KERNEL(256, 1)
prepare_kernel(const FASTCAPS_CONSTANT EndArgs args) {
  if (set_to_zero(args.zeros)) return;
  float dweight[PER] = {}, dbias[PER] = {}, ds[PER], s[PER];
  const HeldPose<PER> grad(args, ds), standard(args, s);
  each_parent(args.count, args.by.lanes * args.by.shares, args.zeros.working, [&](int64_t parent, bool exists) {
    const bool stores = exists && args.by.share() == 0;
    if (args.steps > 0) make_queries(args, standard, parent, exists);
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; ++k) ds[k] = 0.0f;
    if (args.parts) {
      add_parts<false>(args, grad, parent, exists, 0.0f);
    } else {
      const int64_t from = offset_of_parent(args.grad, exists ? parent : 0, args.M, args.Ho, args.Wo);
      FASTCAPS_UNROLL
      for (int k = 0; k < PER; k += 4)
        args.grad.load(from, grad.index(k), exists ? grad.numbers - grad.index(k) : 0, ds + k);
    }
    if (args.given_sums) standard.load(args.given_sums, parent, exists, s);
    if (args.given_sums && args.rule == Rule::kSquash) {
      squash_backward(grad, standard, FLT_MIN);
    } else if (args.given_sums) {
      const float inverse = standardise(standard, args.eps);
      grad.each([&](float& number, int k) {
        if (!stores) return;
        dweight[k] += number * s[k];
        dbias[k] += number;
        if (args.norm_weight) number *= load_number(args.norm_weight, grad.index(k), args.storage);
      });
      standardise_backward(grad, inverse, [&](int k) { return s[k]; });
    }
    if (args.dconstant) {
      const float along = grad.sum([&](float number, int k) {  // a gradient of 0 ignores S, even if that is NaN
        const int64_t at = parent * grad.numbers + grad.index(k);
        return number == 0.0f ? 0.0f : number * load_number(args.stored, at, args.storage);
      });
      if (stores && args.by.first() == 0) args.dconstant[parent] = -along;
    }
    if (stores) grad.store(args.dsums, parent, Storage::kFloat32);
  });
  if (!args.dnorm) return;
  // Adds up, in shared memory and pairwise, the threads that hold the same values of different parents.
  float* meeting = reinterpret_cast<float*>(shared_memory());  // [threads / lanes, 2, C * E]
  float* place = meeting + thread_index() / args.by.lanes * 2 * grad.numbers;
  grad.each([&](float, int k) {
    place[grad.index(k)] = dweight[k];
    place[grad.numbers + grad.index(k)] = dbias[k];
  });
  barrier();
  for (int threads = block_threads() / args.by.lanes / 2; threads > 0; threads /= 2) {
    for (int n = thread_index(); n < threads * 2 * grad.numbers; n += block_threads())
      meeting[n] += meeting[threads * 2 * grad.numbers + n];
    barrier();
  }
  for (int n = thread_index(); n < 2 * grad.numbers; n += block_threads())
    args.dnorm[block_x() * 2 * grad.numbers + n] = meeting[n];
}

inline void finish(const EndArgs& args) {
  launch(args.C * args.E <= 4 * args.by.lanes ? &finish_kernel<4> : &finish_kernel<16>, args.by.grid(args.count), args);
}
// Blocks that share the parents: each has a part of `dnorm`, if that is wanted.
inline Grid prepare_grid(const EndArgs& args) { return args.by.grid(args.count, 4 * multiprocessors()); }
inline void prepare(EndArgs& args) {
  Grid grid = prepare_grid(args);
  if (args.dnorm) grid.shared_bytes = 256 / args.by.lanes * 2 * args.C * args.E * int64_t(sizeof(float));
  args.zeros.add_blocks(grid);
  launch(args.C * args.E <= 4 * args.by.lanes ? &prepare_kernel<4> : &prepare_kernel<16>, grid, args);
  args.zeros.pieces = 0;
}

}  // namespace fastcaps::gpu
