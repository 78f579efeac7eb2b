// Included before a file of bare kernels with many variants (bench/gpu.sh pack): a run can begin at any variant and
// says on stderr which one it is at, so that one that fails or hangs loses none of the others.
#pragma once
#include <cstdio>
#include <cstdlib>

// Whether to leave this variant out: it comes before FIRST_VARIANT.
inline bool skip_variant() {
  static int variant = -1;
  static const char* const first = std::getenv("FIRST_VARIANT");
  if (++variant < (first ? std::atoi(first) : 0)) return true;
  std::fprintf(stderr, "variant %d\n", variant);
  return false;
}
