// Multiply-adds and nothing else: the most that one thread of this machine can do, by which the bench measures the
// kernels. A matrix product by a library stays below it. bench/timing.py compiles this with -march=native.
#include "cpu/vec.h"

namespace fastcaps::FASTCAPS_NAMESPACE {

// Runs `rounds` rounds of float32 multiply-adds on this thread; returns the operations, two for each. A step of a chain
// waits four cycles for the one before, and a core has two multiply-add units: eight chains are enough, more are on the
// safe side. All chains converge to 2, since values that overflow or vanish might take longer.
extern "C" __attribute__((visibility("default"))) double fastcaps_multiply_adds(int64_t rounds) {
  constexpr int kChains = kManyRegisters ? 24 : 12;
  const VecF half = in_register(broadcast(0.5f)), one = in_register(broadcast(1.0f));
  VecF chains[kChains];
  unroll<kChains>([&](auto k) FASTCAPS_LAMBDA { chains[k] = broadcast(float(k)); });  // equal ones would be merged
  for (int64_t round = 0; round < rounds; ++round)
    unroll<kChains>([&](auto k) FASTCAPS_LAMBDA { chains[k] = chains[k] * half + one; });
  VecF sum{};  // used below, so that the compiler omits nothing
  unroll<kChains>([&](auto k) FASTCAPS_LAMBDA { sum += chains[k]; });
  return all(sum >= 0) ? 2.0 * kChains * kLanes<float> * double(rounds) : 0;
}

}  // namespace fastcaps::FASTCAPS_NAMESPACE
