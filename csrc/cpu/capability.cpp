// The choice among builds of the same kernels, made once at run time.
#include "capability.h"

#include <cstdlib>
#include <cstring>

#if defined(FASTCAPS_BUILT_AVX512) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "levels.h"

namespace fastcaps {
namespace {

struct Level {
  const char* name;
  bool (*supported)();
};

#if defined(FASTCAPS_BUILT_AVX512)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}

// Tiles need the system's permission, once for a process (Linux 5.16).
bool has_amx() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned a, b, c, d, bf16, count;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !__get_cpuid_count(7, 1, &bf16, &b, &c, &count))
    return false;
  const bool amx = d >> 22 & d >> 24 & bf16 >> 5 & 1;  // bfloat16 products of tiles; tiles; AVX-512's conversion
  return amx && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

const Level kLevels[] = {
    {"default", [] { return true; }},
#if defined(FASTCAPS_BUILT_AVX512)
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
    {"avx512", has_avx512},
    {"amx", has_amx},  // AVX-512's kernels, which ask by_tiles()
#endif
};

// The level that the user wants, or null.
const char* forced() {
  static const char* name = std::getenv("FASTCAPS_CPU_CAPABILITY");
  return name == nullptr || *name == '\0' ? nullptr : name;
}

// The highest available level, or the forced one; null if that is not available.
const Level* chosen() {
  static const Level* const found = [] {
    const Level* best = nullptr;
    for (const Level& level : kLevels)
      if ((forced() == nullptr || std::strcmp(forced(), level.name) == 0) && level.supported()) best = &level;
    return best;
  }();
  return found;
}

bool has_tiles() { return chosen() && std::strcmp(chosen()->name, "amx") == 0; }

}  // namespace

int level_in_use() { return chosen() ? int(chosen() - kLevels) - has_tiles() : 0; }
bool level_is_forced() { return forced() != nullptr; }
bool by_tiles(const Votes& in) {
  return has_tiles() && in.storage == Storage::kBFloat16 && in.G == in.I && in.C == 1 && in.D % 32 == 0 &&
         in.E % 32 == 0;
}

}  // namespace fastcaps

extern "C" {

const char* fastcaps_capability(void) { return fastcaps::chosen() ? fastcaps::chosen()->name : nullptr; }

double fastcaps_multiply_adds(int64_t rounds) {
  using namespace fastcaps;
  return table_of<Peak>(level_in_use()).multiply_adds(rounds);
}

const char* fastcaps_capabilities_built(void) {
#define FASTCAPS_NAME(level) "," #level
#if defined(FASTCAPS_BUILT_AVX512)
  return &(FASTCAPS_LEVELS(FASTCAPS_NAME) ",amx")[1];
#else
  return &(FASTCAPS_LEVELS(FASTCAPS_NAME))[1];
#endif
}

}  // extern "C"
