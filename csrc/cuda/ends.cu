// The kernels of ends.h. A few lanes hold one parent's pose.
#include "ends.h"

#include <cfloat>

namespace fastcaps::gpu {
namespace {

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
  // Of the history: attention's is in float, pooling's in the children's type.
  FASTCAPS_DEVICE void load_sums(const EndArgs& args, const void* sums, int64_t parent, bool exists) const {
    if (!args.stored || args.storage == Storage::kFloat32)
      return load(static_cast<const float*>(sums), parent, exists, x);
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; ++k)
      x[k] = exists && inside(k) ? load_number(sums, parent * numbers + index(k), args.storage) : 0.0f;
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

// From S to what the rule makes of it: the next parents, or what is added to the query.
template <int PER>
FASTCAPS_DEVICE void take_step(const EndArgs& args, const HeldPose<PER>& pose) {
  if (args.rule == Rule::kUnit) {  // the last parents are the stored sums
    pose.each([&](float& number, int) { number = rounded(number, args.storage); });
    if (args.queries) unit(pose);
  } else {
    between<false>(args, pose, true);
  }
  if (args.rule == Rule::kLayerNorm)
    pose.each([&](float& number, int k) { number = affine(args, number, pose.index(k)); });
}

// Stores the query that follows `query` behind the step that `pose` holds.
template <int PER>
FASTCAPS_DEVICE void store_query(const EndArgs& args, const HeldPose<PER>& pose, int64_t parent, const void* query,
                                 void* next) {
  if (query && (args.rule == Rule::kSquash || args.rule == Rule::kUnit))
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
    pose.load_sums(args, args.earlier_sums, step * args.count + parent, exists);
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
    if (args.given_sums) standard.load_sums(args, args.given_sums, parent, exists);
    if (args.given_sums && (args.rule == Rule::kSquash || args.rule == Rule::kUnit)) {
      squash_backward(grad, standard, FLT_MIN, args.rule == Rule::kUnit);
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

}  // namespace

void finish(const EndArgs& args) {
  launch(args.C * args.E <= 4 * args.by.lanes ? &finish_kernel<4> : &finish_kernel<16>, args.by.grid(args.count), args);
}
Grid prepare_grid(const EndArgs& args) { return args.by.grid(args.count, 4 * multiprocessors()); }
void prepare(EndArgs& args) {
  Grid grid = prepare_grid(args);
  if (args.dnorm) grid.shared_bytes = 256 / args.by.lanes * 2 * args.C * args.E * int64_t(sizeof(float));
  args.zeros.add_blocks(grid);
  launch(args.C * args.E <= 4 * args.by.lanes ? &prepare_kernel<4> : &prepare_kernel<16>, grid, args);
  args.zeros.pieces = 0;
}

}  // namespace fastcaps::gpu
