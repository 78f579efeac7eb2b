// LayerNorm at both ends of a pass. Forward: the sums of all chunks, added in their order, become parents. Backward:
// the parents' gradient becomes the sums'. A few lanes hold one parent's pose.
#pragma once

#include "stage.h"

namespace fastcaps::gpu {

constexpr int kLargestPose = 512;  // numbers of a parent: 16 in each of 32 lanes

struct LayerNormArgs {
  int M, C, E, Ho, Wo;
  int lanes;      // of a parent: a power of two
  int64_t count;  // parents in all: B * Ho * Wo * M
  bool normalize;
  float eps;
  Storage storage;          // of parents, grad_parents, norm_weight, norm_bias
  const void* norm_weight;  // [C * E] or null
  const void* norm_bias;

  // forward
  const float* parts;  // [chunks, count, C * E]
  int chunks;
  float* sums;    // [count, C * E], where the sums are wanted and are not the one part there is
  void* parents;  // [count, C * E]

  // backward
  View grad_parents, grad_sums;  // [B, Ho, Wo, M, C, E], either may be null; grad_sums in float
  const float* given_sums;       // [count, C * E]
  float* dsums;                  // [count, C * E]
  float* dnorm;                  // [blocks, 2, C * E] or null
};

// A lane's numbers of one pose, and what all its lanes find about it.
template <int PER>
struct HeldPose {
  float x[PER];
  int lanes, first, numbers;

  FASTCAPS_DEVICE explicit HeldPose(const LayerNormArgs& a)
      : lanes(a.lanes), first(thread_index() % a.lanes), numbers(a.C * a.E) {}
  FASTCAPS_DEVICE int index(int k) const { return first + k * lanes; }
  FASTCAPS_DEVICE bool inside(int k) const { return index(k) < numbers; }
  template <class F>
  FASTCAPS_DEVICE float mean(F&& f) const {
    float sum = 0.0f;
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; ++k)
      if (inside(k)) sum += f(k);
    FASTCAPS_NO_UNROLL
    for (int mask = 1; mask < lanes; mask *= 2) sum += shuffle_xor(sum, mask);
    return sum / float(numbers);
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
finish_kernel(const FASTCAPS_CONSTANT LayerNormArgs a) {
  const int64_t step = blocks_x() * (block_threads() / a.lanes);
  const int64_t mine = block_x() * (block_threads() / a.lanes) + thread_index() / a.lanes;
  for (int64_t base = 0; base < a.count; base += step) {
    const int64_t parent = base + mine;
    const bool exists = parent < a.count;
    HeldPose<PER> pose(a);
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; ++k) {
      pose.x[k] = 0.0f;
      if (!exists || !pose.inside(k)) continue;
      const int64_t at = parent * pose.numbers + pose.index(k);
      for (int chunk = 0; chunk < a.chunks; ++chunk) pose.x[k] += a.parts[chunk * a.count * pose.numbers + at];
      if (a.sums) a.sums[at] = pose.x[k];
    }
    if (a.normalize) pose.standardise(a.eps);
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
prepare_kernel(const FASTCAPS_CONSTANT LayerNormArgs a) {
  const int64_t step = blocks_x() * (block_threads() / a.lanes);
  const int64_t mine = block_x() * (block_threads() / a.lanes) + thread_index() / a.lanes;
  float dweight[PER] = {}, dbias[PER] = {};
  HeldPose<PER> grad(a), standard(a);
  for (int64_t base = 0; base < a.count; base += step) {
    const int64_t parent = base + mine;
    const bool exists = parent < a.count;
    const int64_t q = parent / a.M, row = q / a.Wo, b = row / a.Ho;
    const int64_t m = parent - q * a.M, x = q - row * a.Wo, y = row - b * a.Ho;
    const auto offset = [&](const View& view, int number) {
      const int c = number / a.E, e = number - c * a.E;
      return b * view.stride[0] + y * view.stride[1] + x * view.stride[2] + m * view.stride[3] + c * view.stride[4] +
             e * view.stride[5];
    };
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; ++k) {
      const bool inside = exists && grad.inside(k);
      grad.x[k] = inside && a.grad_parents.data
                      ? load_number(a.grad_parents.data, offset(a.grad_parents, grad.index(k)), a.storage)
                      : 0.0f;
      standard.x[k] = inside && a.normalize ? a.given_sums[parent * grad.numbers + grad.index(k)] : 0.0f;
    }
    if (a.normalize && a.grad_parents.data) {
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
    FASTCAPS_UNROLL
    for (int k = 0; k < PER; ++k) {
      if (!exists || !grad.inside(k)) continue;
      if (a.grad_sums.data)
        grad.x[k] += static_cast<const float*>(a.grad_sums.data)[offset(a.grad_sums, grad.index(k))];
      a.dsums[parent * grad.numbers + grad.index(k)] = grad.x[k];
    }
  }
  if (!a.dnorm) return;
  // Threads that hold the same numbers of different parents meet in shared memory, two by two.
  float* meeting = reinterpret_cast<float*>(shared_memory());  // [threads / lanes, 2, C * E]
  float* own = meeting + thread_index() / a.lanes * 2 * grad.numbers;
  FASTCAPS_UNROLL
  for (int k = 0; k < PER; ++k) {
    if (!grad.inside(k)) continue;
    own[grad.index(k)] = dweight[k];
    own[grad.numbers + grad.index(k)] = dbias[k];
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
