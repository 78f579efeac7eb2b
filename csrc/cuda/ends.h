// The kernels around those of an iteration that is not a single launch. Forward, `finish` joins the sums of all ranges
// of children and makes parents of them. Backward, `prepare` turns the parents' gradient into that of the sums. A few
// lanes hold one parent's pose.
#pragma once

#include "call.h"
#include "stage.h"

namespace fastcaps::gpu {

struct EndArgs : ParentArgs {
  int lanes;      // of a parent: a power of two
  int64_t count;  // parents in all: B * Ho * Wo * M

  // forward
  const float* parts;       // [chunks, count, C * E]
  const float* logsumexps;  // pooling: [chunks, count], by which parts are weighed; or null: they are added
  int chunks;
  float* sums;       // [count, C * E]; null if not wanted, or if they are the only part
  void* stored;      // pooling: the sums
  float* logsumexp;  // pooling: [count]
  void* parents;     // [count, C * E]

  // backward
  View grad;                // [B, Ho, Wo, M, C, E]
  const float* given_sums;  // [count, C * E] where there was a LayerNorm, or null
  float* dsums;             // [count, C * E]
  float* dnorm;             // [blocks, 2, C * E] or null
  float* dconstant;         // pooling: [count], -<dS, S> with S as it is stored; or null
};

inline EndArgs end_args(const Call& call) {
  EndArgs args{};
  static_cast<ParentArgs&>(args) = call.args;
  args.count = call.votes.positions() * args.M;
  args.chunks = 1, args.lanes = 1;
  while (args.lanes < 32 && args.lanes * 4 < args.C * args.E) args.lanes *= 2;
  return args;
}
inline int64_t end_blocks(const EndArgs& args, int64_t most) {
  const int64_t blocks = ceil_div(args.count, 256 / args.lanes);
  return blocks < most ? blocks : most;
}

// A lane's values of one pose, and the sums over all lanes that hold it.
template <int PER>
struct HeldPose {
  using X = float;
  float* x;  // [PER]
  int lanes, first, numbers;

  FASTCAPS_DEVICE HeldPose(const EndArgs& args, float* x_)
      : x(x_), lanes(args.lanes), first(thread_index() % args.lanes), numbers(args.C * args.E) {}
  FASTCAPS_DEVICE int index(int k) const { return first + k * lanes; }
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
    FASTCAPS_NO_UNROLL
    for (int mask = 1; mask < lanes; mask *= 2) sum += shuffle_xor(sum, mask);
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
    for (int mask = 1; mask < lanes; mask *= 2) largest = fmaxf(largest, shuffle_xor(largest, mask));
    return largest;
  }
};

template <int PER>
FASTCAPS_KERNEL(256, 2)
finish_kernel(const FASTCAPS_CONSTANT EndArgs args) {
  each_parent(args.count, args.lanes, [&](int64_t parent, bool exists) {
    float x[PER] = {};
    const HeldPose<PER> pose(args, x);
    float top = -INFINITY, total = 0.0f;
    if (args.logsumexps && exists) {
      for (int chunk = 0; chunk < args.chunks; ++chunk) top = fmaxf(top, args.logsumexps[chunk * args.count + parent]);
      top = top == -INFINITY ? 0.0f : top;
      for (int chunk = 0; chunk < args.chunks; ++chunk)
        total += expf(args.logsumexps[chunk * args.count + parent] - top);
      if (pose.first == 0) args.logsumexp[parent] = total == 0.0f ? -INFINITY : top + logf(total);
    }
    pose.each([&](float& sum, int k) {
      if (!exists) return;
      const int64_t at = parent * pose.numbers + pose.index(k);
      for (int chunk = 0; chunk < args.chunks; ++chunk) {
        const float weight = args.logsumexps ? expf(args.logsumexps[chunk * args.count + parent] - top) : 1.0f;
        sum += weight * args.parts[chunk * args.count * pose.numbers + at];
      }
      if (args.logsumexps) {
        sum = total == 0.0f ? 0.0f : sum / total;
        store_number(args.stored, at, sum, args.storage);
      }
      if (args.sums) args.sums[at] = sum;
    });
    between(args, pose, true);
    pose.each([&](float number, int k) {
      if (!exists) return;
      store_number(args.parents, parent * pose.numbers + pose.index(k), affine(args, number, pose.index(k)),
                   args.storage);
    });
  });
}

// dL/dS, and each block's part of the affine's gradients.
template <int PER>
FASTCAPS_KERNEL(256, 1)
prepare_kernel(const FASTCAPS_CONSTANT EndArgs args) {
  float dweight[PER] = {}, dbias[PER] = {}, ds[PER], s[PER];
  const HeldPose<PER> grad(args, ds), standard(args, s);
  each_parent(args.count, args.lanes, [&](int64_t parent, bool exists) {
    const int64_t from = offset_of_parent(args.grad, exists ? parent : 0, args.M, args.Ho, args.Wo);
    const auto offset = [&](int number) {
      const int c = number / args.E;
      return from + c * args.grad.stride[4] + (number - c * args.E) * args.grad.stride[5];
    };
    grad.each([&](float& number, int k) {
      number = exists ? static_cast<const float*>(args.grad.data)[offset(grad.index(k))] : 0.0f;
      s[k] = exists && args.given_sums ? args.given_sums[parent * grad.numbers + grad.index(k)] : 0.0f;
    });
    if (args.given_sums) {
      const float inverse = standardise(standard, args.eps);
      grad.each([&](float& number, int k) {
        if (!exists) return;
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
      if (exists && grad.first == 0) args.dconstant[parent] = -along;
    }
    grad.each([&](float number, int k) {
      if (exists) args.dsums[parent * grad.numbers + grad.index(k)] = number;
    });
  });
  if (!args.dnorm) return;
  // Adds up, in shared memory and pairwise, the threads that hold the same values of different parents.
  float* meeting = reinterpret_cast<float*>(shared_memory());  // [threads / lanes, 2, C * E]
  float* place = meeting + thread_index() / args.lanes * 2 * grad.numbers;
  grad.each([&](float, int k) {
    place[grad.index(k)] = dweight[k];
    place[grad.numbers + grad.index(k)] = dbias[k];
  });
  barrier();
  for (int threads = block_threads() / args.lanes / 2; threads > 0; threads /= 2) {
    for (int n = thread_index(); n < threads * 2 * grad.numbers; n += block_threads())
      meeting[n] += meeting[threads * 2 * grad.numbers + n];
    barrier();
  }
  for (int n = thread_index(); n < 2 * grad.numbers; n += block_threads())
    args.dnorm[block_x() * 2 * grad.numbers + n] = meeting[n];
}

// Launch both. If `dnorm` is wanted, each block has a part of it, and room in shared memory.
inline void finish(const EndArgs& args) {
  launch(args.C * args.E <= 4 * args.lanes ? &finish_kernel<4> : &finish_kernel<16>,
         Grid{end_blocks(args, 1 << 20), 1, 256}, args);
}
inline void prepare(const EndArgs& args) {
  const int64_t room = args.dnorm ? 256 / args.lanes * 2 * args.C * args.E * int64_t(sizeof(float)) : 0;
  launch(args.C * args.E <= 4 * args.lanes ? &prepare_kernel<4> : &prepare_kernel<16>,
         Grid{end_blocks(args, args.dnorm ? 1024 : 1 << 20), 1, 256, room}, args);
}

}  // namespace fastcaps::gpu
