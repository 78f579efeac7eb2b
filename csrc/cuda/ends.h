// Both ends of a turn, where one launch does not make all of it: the sums of all ranges of children, joined, become
// parents; and the parents' gradient becomes that of the sums. A few lanes hold one parent's pose.
#pragma once

#include "../algebra/turns.h"
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
  float* sums;       // [count, C * E], where they are wanted and are not the one part there is
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
  EndArgs a{};
  static_cast<ParentArgs&>(a) = call.args;
  a.count = call.votes.positions() * a.M;
  a.chunks = 1, a.lanes = 1;
  while (a.lanes < 32 && a.lanes * 4 < a.C * a.E) a.lanes *= 2;
  return a;
}
inline int64_t end_blocks(const EndArgs& a, int64_t most) {
  const int64_t blocks = ceil_div(a.count, 256 / a.lanes);
  return blocks < most ? blocks : most;
}
template <class Kernel>
void launch_end(Kernel few, Kernel many, const EndArgs& a, int64_t blocks, int64_t shared_bytes) {
  launch(a.C * a.E <= 4 * a.lanes ? few : many, Grid{blocks, 1, 256, shared_bytes}, a);
}

// A lane's numbers of one pose, and what all its lanes find about it.
template <int PER>
struct HeldPose {
  float x[PER];
  int lanes, first, numbers;

  FASTCAPS_DEVICE explicit HeldPose(const EndArgs& a)
      : lanes(a.lanes), first(thread_index() % a.lanes), numbers(a.C * a.E) {}
  FASTCAPS_DEVICE int index(int k) const { return first + k * lanes; }
  FASTCAPS_DEVICE bool inside(int k) const { return index(k) < numbers; }
  template <class F>
  FASTCAPS_DEVICE float sum(F&& f) const {
    float sum = 0.0f;
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; ++k)
      if (inside(k)) sum += f(k);
    FASTCAPS_NO_UNROLL
    for (int mask = 1; mask < lanes; mask *= 2) sum += shuffle_xor(sum, mask);
    return sum;
  }
  template <class F>
  FASTCAPS_DEVICE float mean(F&& f) const {
    return sum(f) / float(numbers);
  }
  FASTCAPS_DEVICE void squash() {
    float largest = 0.0f;
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; ++k)
      if (inside(k)) largest = fmaxf(largest, fabsf(x[k]));
    FASTCAPS_NO_UNROLL
    for (int mask = 1; mask < lanes; mask *= 2) largest = fmaxf(largest, shuffle_xor(largest, mask));
    const float by = largest > 0.0f && largest < INFINITY ? largest : 1.0f;
    const float share = squash_share(sqrtf(sum([&](int k) { return (x[k] / by) * (x[k] / by); })) * by);
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; ++k) x[k] *= share;
  }
  // To mean 0 and variance 1; returns 1 / sqrt(variance + eps). Centred twice: the backward formula wants a mean of 0
  // to the last place of the differences.
  FASTCAPS_DEVICE float standardise(float eps) {
    FASTCAPS_UNROLL
    for (int turn = 0; turn < 2; ++turn) {
      const float middle = mean([&](int k) { return x[k]; });
      FASTCAPS_UNROLL
      for (int k = 0; k < PER; ++k) x[k] -= middle;
    }
    const float inverse = reciprocal_sqrt(mean([&](int k) { return x[k] * x[k]; }) + eps);
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; ++k) x[k] *= inverse;
    return inverse;
  }
};

// Every thread of a warp goes round equally often, since lanes speak to each other; `exists` says which have a parent.
template <int PER>
FASTCAPS_KERNEL(256, 2)
finish_kernel(const FASTCAPS_CONSTANT EndArgs a) {
  const int64_t step = blocks_x() * (block_threads() / a.lanes);
  const int64_t mine = block_x() * (block_threads() / a.lanes) + thread_index() / a.lanes;
  for (int64_t base = 0; base < a.count; base += step) {
    const int64_t parent = base + mine;
    const bool exists = parent < a.count;
    HeldPose<PER> pose(a);
    float top = -INFINITY, total = 0.0f;
    if (a.logsumexps && exists) {
      for (int chunk = 0; chunk < a.chunks; ++chunk) top = fmaxf(top, a.logsumexps[chunk * a.count + parent]);
      top = top == -INFINITY ? 0.0f : top;
      for (int chunk = 0; chunk < a.chunks; ++chunk) total += expf(a.logsumexps[chunk * a.count + parent] - top);
      if (pose.first == 0) a.logsumexp[parent] = total == 0.0f ? -INFINITY : top + logf(total);
    }
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; ++k) {
      pose.x[k] = 0.0f;
      if (!exists || !pose.inside(k)) continue;
      const int64_t at = parent * pose.numbers + pose.index(k);
      for (int chunk = 0; chunk < a.chunks; ++chunk) {
        const float share = a.logsumexps ? expf(a.logsumexps[chunk * a.count + parent] - top) : 1.0f;
        pose.x[k] += share * a.parts[chunk * a.count * pose.numbers + at];
      }
      if (a.logsumexps) {
        pose.x[k] = total == 0.0f ? 0.0f : pose.x[k] / total;
        store_number(a.stored, at, pose.x[k], a.storage);
      }
      if (a.sums) a.sums[at] = pose.x[k];
    }
    if (a.rule == Rule::kLayerNorm) pose.standardise(a.eps);
    if (a.rule == Rule::kSquash) pose.squash();
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; ++k) {
      if (!exists || !pose.inside(k)) continue;
      float y = pose.x[k];
      if (a.norm_weight) y *= load_number(a.norm_weight, pose.index(k), a.storage);
      if (a.norm_bias) y += load_number(a.norm_bias, pose.index(k), a.storage);
      store_number(a.parents, parent * pose.numbers + pose.index(k), y, a.storage);
    }
  }
}

// dL/dS, and each block's part of the affine's gradients.
template <int PER>
FASTCAPS_KERNEL(256, 1)
prepare_kernel(const FASTCAPS_CONSTANT EndArgs a) {
  const int64_t step = blocks_x() * (block_threads() / a.lanes);
  const int64_t mine = block_x() * (block_threads() / a.lanes) + thread_index() / a.lanes;
  float dweight[PER] = {}, dbias[PER] = {};
  HeldPose<PER> grad(a), standard(a);
  for (int64_t base = 0; base < a.count; base += step) {
    const int64_t parent = base + mine;
    const bool exists = parent < a.count;
    const int64_t from = offset_of_parent(a.grad, exists ? parent : 0, a.M, a.Ho, a.Wo);
    const auto offset = [&](int number) {
      const int c = number / a.E;
      return from + c * a.grad.stride[4] + (number - c * a.E) * a.grad.stride[5];
    };
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; ++k) {
      const bool inside = exists && grad.inside(k);
      grad.x[k] = inside ? static_cast<const float*>(a.grad.data)[offset(grad.index(k))] : 0.0f;
      standard.x[k] = inside && a.given_sums ? a.given_sums[parent * grad.numbers + grad.index(k)] : 0.0f;
    }
    if (a.given_sums) {
      const float inverse = standard.standardise(a.eps);
      FASTCAPS_UNROLL
      for (int k = 0; k < PER; ++k) {
        if (!exists || !grad.inside(k)) continue;
        dweight[k] += grad.x[k] * standard.x[k];
        dbias[k] += grad.x[k];
        if (a.norm_weight) grad.x[k] *= load_number(a.norm_weight, grad.index(k), a.storage);
      }
      const float middle = grad.mean([&](int k) { return grad.x[k]; });
      const float slope = grad.mean([&](int k) { return grad.x[k] * standard.x[k]; });
      FASTCAPS_UNROLL
      for (int k = 0; k < PER; ++k) grad.x[k] = inverse * (grad.x[k] - middle - standard.x[k] * slope);
    }
    if (a.dconstant) {
      const float along = grad.sum([&](int k) {  // where its gradient is 0 nothing comes of S, be it NaN
        return grad.x[k] == 0.0f ? 0.0f
                                 : grad.x[k] * load_number(a.stored, parent * grad.numbers + grad.index(k), a.storage);
      });
      if (exists && grad.first == 0) a.dconstant[parent] = -along;
    }
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; ++k)
      if (exists && grad.inside(k)) a.dsums[parent * grad.numbers + grad.index(k)] = grad.x[k];
  }
  if (!a.dnorm) return;
  // Threads that hold the same numbers of different parents meet in shared memory, two by two.
  float* meeting = reinterpret_cast<float*>(shared_memory());  // [threads / lanes, 2, C * E]
  float* place = meeting + thread_index() / a.lanes * 2 * grad.numbers;
  FASTCAPS_UNROLL
  for (int k = 0; k < PER; ++k) {
    if (!grad.inside(k)) continue;
    place[grad.index(k)] = dweight[k];
    place[grad.numbers + grad.index(k)] = dbias[k];
  }
  barrier();
  for (int threads = block_threads() / a.lanes / 2; threads > 0; threads /= 2) {
    for (int n = thread_index(); n < threads * 2 * grad.numbers; n += block_threads())
      meeting[n] += meeting[threads * 2 * grad.numbers + n];
    barrier();
  }
  for (int n = thread_index(); n < 2 * grad.numbers; n += block_threads())
    a.dnorm[block_x() * 2 * grad.numbers + n] = meeting[n];
}

}  // namespace fastcaps::gpu
