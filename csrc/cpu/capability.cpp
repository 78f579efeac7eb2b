// The choice among builds of the same kernels, made once at run time.
#include "capability.h"

#include <cstdlib>
#include <cstring>

#include "pass.h"

namespace fastcaps {

// One object file per pass and level, compiled with that level's flags.
#define FASTCAPS_TABLES(level)                               \
  extern const Kernels<Attention> attention_kernels_##level; \
  extern const Kernels<Pooling> pooling_kernels_##level;     \
  extern const Kernels<Gaussian> gaussian_kernels_##level;
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
  bool (*supported)();
};

#define FASTCAPS_LEVEL(level) &attention_kernels_##level, &pooling_kernels_##level, &gaussian_kernels_##level

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

const Level* choose() {
  const char* forced = std::getenv("FASTCAPS_CPU_CAPABILITY");
  const Level* best = nullptr;
  for (const Level& level : kLevels) {
    if (!level.supported()) continue;
    if (forced == nullptr || *forced == '\0' || std::strcmp(forced, level.name) == 0) best = &level;
  }
  return best;
}

const Level* chosen() {
  static const Level* level = choose();
  return level;
}

}  // namespace

// A forced level that cannot be had is refused where the library is loaded (fastcaps/backends.py); whoever calls on
// regardless gets the portable build.
template <>
const Kernels<Attention>& kernels() {
  return *(chosen() ? chosen() : kLevels)->attention;
}
template <>
const Kernels<Pooling>& kernels() {
  return *(chosen() ? chosen() : kLevels)->pooling;
}
template <>
const Kernels<Gaussian>& kernels() {
  return *(chosen() ? chosen() : kLevels)->gaussian;
}

}  // namespace fastcaps

extern "C" {

const char* fastcaps_capability(void) { return fastcaps::chosen() ? fastcaps::chosen()->name : nullptr; }

const char* fastcaps_capabilities_built(void) {
#if defined(FASTCAPS_BUILT_AVX512)
  return "default,avx2,avx512";
#else
  return "default";
#endif
}

const char* fastcaps_ops(void) {
  return "attention_pass,attention_pass_backward,attention_routing,pooling_pass,pooling_pass_backward,pooling_routing,"
         "gaussian_pass,gaussian_pass_backward,gaussian_routing";
}

}  // extern "C"
