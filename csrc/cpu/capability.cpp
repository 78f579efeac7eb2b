// The choice among builds of the same kernels, made once at run time.
#include "capability.h"

#include <cstdlib>
#include <cstring>

#include "pass.h"
#include "squash_sum.h"

namespace fastcaps {

// One object file per op and level, compiled with that level's flags.
#define FASTCAPS_TABLES(level)                               \
  extern const Kernels<Attention> attention_kernels_##level; \
  extern const Kernels<Pooling> pooling_kernels_##level;     \
  extern const Kernels<Gaussian> gaussian_kernels_##level;   \
  extern const SquashSumKernels squash_sum_kernels_##level;  \
  double multiply_adds_##level(int64_t rounds);
FASTCAPS_TABLES(default)
#if defined(FASTCAPS_BUILT_AVX512)
FASTCAPS_TABLES(avx2)
FASTCAPS_TABLES(avx512)
#endif

namespace {

struct Level {
  const char* name;
  const Kernels<Attention>* attention;
  const Kernels<Pooling>* pooling;
  const Kernels<Gaussian>* gaussian;
  const SquashSumKernels* squash_sum;
  double (*multiply_adds)(int64_t rounds);
  bool (*supported)();
};

#define FASTCAPS_LEVEL(level)                                                                                   \
  &attention_kernels_##level, &pooling_kernels_##level, &gaussian_kernels_##level, &squash_sum_kernels_##level, \
      multiply_adds_##level

const Level kLevels[] = {
    {"default", FASTCAPS_LEVEL(default), [] { return true; }},
#if defined(FASTCAPS_BUILT_AVX512)
    {"avx2", FASTCAPS_LEVEL(avx2), [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
    {"avx512", FASTCAPS_LEVEL(avx512),
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
     }},
#endif
};

// The level that the user wants, or null.
const char* forced() {
  static const char* name = std::getenv("FASTCAPS_CPU_CAPABILITY");
  return name == nullptr || *name == '\0' ? nullptr : name;
}

const Level* choose() {
  const Level* best = nullptr;
  for (const Level& level : kLevels)
    if (level.supported() && (forced() == nullptr || std::strcmp(forced(), level.name) == 0)) best = &level;
  return best;
}

const Level* chosen() {
  static const Level* level = choose();
  return level;
}

// A forced level that cannot be had is refused where the library is loaded (fastcaps/backends.py); whoever calls on
// regardless gets the portable build. Unless a level is forced, positions that fill half a vector at most get the level
// below where its vectors are half as long: as many of them are worked on at once.
template <class Operands>
const Kernels<Operands>& choose_kernels(const Kernels<Operands>* const Level::* kernels, const Votes& in) {
  const Level* level = chosen() ? chosen() : kLevels;
  const Kernels<Operands>& table = *(level->*kernels);
  if (level == kLevels || in.is_double() || forced()) return table;
  const Kernels<Operands>& below = *((level - 1)->*kernels);
  const bool half = 2 * below.lanes_float == table.lanes_float && below.lanes_float >= 8;
  const int64_t most = below.lanes_float, positions = in.positions();
  return half && positions > most / 4 && positions <= most ? below : table;
}

}  // namespace

template <>
const Kernels<Attention>& kernels(const Votes& in) {
  return choose_kernels(&Level::attention, in);
}
template <>
const Kernels<Pooling>& kernels(const Votes& in) {
  return choose_kernels(&Level::pooling, in);
}
template <>
const Kernels<Gaussian>& kernels(const Votes& in) {
  return choose_kernels(&Level::gaussian, in);
}

const SquashSumKernels& squash_sum_kernels() { return *(chosen() ? chosen() : kLevels)->squash_sum; }

}  // namespace fastcaps

extern "C" {

const char* fastcaps_capability(void) { return fastcaps::chosen() ? fastcaps::chosen()->name : nullptr; }

double fastcaps_multiply_adds(int64_t rounds) {
  using namespace fastcaps;
  return (chosen() ? chosen() : kLevels)->multiply_adds(rounds);
}

const char* fastcaps_capabilities_built(void) {
#if defined(FASTCAPS_BUILT_AVX512)
  return "default,avx2,avx512";
#else
  return "default";
#endif
}

}  // extern "C"
