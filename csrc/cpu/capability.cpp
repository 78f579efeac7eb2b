// The choice among builds of the same kernels, made once at run time.
#include "capability.h"

#include <cstdlib>
#include <cstring>

#include "levels.h"

namespace fastcaps {
namespace {

struct Level {
  const char* name;
  bool (*supported)();
};

const Level kLevels[] = {
    {"default", [] { return true; }},
#if defined(FASTCAPS_BUILT_AVX512)
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
    {"avx512",
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

// The highest that there is, or the forced one; null if that cannot be had.
const Level* chosen() {
  static const Level* const found = [] {
    const Level* best = nullptr;
    for (const Level& level : kLevels)
      if (level.supported() && (forced() == nullptr || std::strcmp(forced(), level.name) == 0)) best = &level;
    return best;
  }();
  return found;
}

}  // namespace

int level_in_use() { return chosen() ? int(chosen() - kLevels) : 0; }
bool level_is_forced() { return forced() != nullptr; }

}  // namespace fastcaps

extern "C" {

const char* fastcaps_capability(void) { return fastcaps::chosen() ? fastcaps::chosen()->name : nullptr; }

double fastcaps_multiply_adds(int64_t rounds) {
  using namespace fastcaps;
  return table_of<Peak>(level_in_use()).multiply_adds(rounds);
}

const char* fastcaps_capabilities_built(void) {
#define FASTCAPS_NAME(level) "," #level
  return &(FASTCAPS_LEVELS(FASTCAPS_NAME))[1];
}

}  // extern "C"
