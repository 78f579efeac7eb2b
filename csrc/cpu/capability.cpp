// The choice among builds of the same kernels, made once at run time.
#include "capability.h"

#include <cstdlib>
#include <cstring>

#include "attention.h"

namespace fastcaps {

// One object file per level, compiled from attention.cpp with that level's flags.
extern const AttentionKernels attention_kernels_default;
#if defined(FASTCAPS_BUILT_AVX512)
extern const AttentionKernels attention_kernels_avx2, attention_kernels_avx512;
#endif

namespace {

struct Level {
  const char* name;
  const AttentionKernels* attention;
  bool (*supported)();
};

const Level kLevels[] = {
    {"default", &attention_kernels_default, [] { return true; }},
#if defined(FASTCAPS_BUILT_AVX512)
    {"avx2", &attention_kernels_avx2, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
    {"avx512", &attention_kernels_avx512,
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
const AttentionKernels& attention_kernels() { return chosen() ? *chosen()->attention : *kLevels[0].attention; }

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

const char* fastcaps_ops(void) { return "attention_pass,attention_pass_backward"; }

}  // extern "C"
