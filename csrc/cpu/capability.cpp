// The choice among builds of the same kernels, made once at run time.
#include "capability.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "../tensors.h"
#include "levels.h"
#include "processor.h"

#define FASTCAPS_NAME(level) "," #level

namespace fastcaps {
namespace {

struct Level {
  const char* name;
  bool (*supported)();
};

constexpr const char* kNames = &(FASTCAPS_EACH_LEVEL(FASTCAPS_NAME))[1];
#define FASTCAPS_NAMED(level) {#level, &has_##level},
const Level kLevels[] = {FASTCAPS_EACH_LEVEL(FASTCAPS_NAMED)};

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

}  // namespace

int level_in_use() {
  STD_TORCH_CHECK(chosen(), "fastcaps: this processor has none of the levels built (", kNames,
                  "), or not the one that FASTCAPS_CPU_CAPABILITY forces");
  return int(chosen() - kLevels);
}
bool level_is_forced() { return forced() != nullptr; }

}  // namespace fastcaps

extern "C" {

const char* fastcaps_capability(void) { return fastcaps::chosen() ? fastcaps::chosen()->name : nullptr; }

const char* fastcaps_capabilities_built(void) { return fastcaps::kNames; }

}  // extern "C"
