// Whether the processor has a level's instructions: for the choice at run time (capability.cpp), and for builds that
// compile the kernels for the building machine alone (CMakeLists.txt).
#pragma once

namespace fastcaps {

inline bool has_default() { return true; }
#if defined(__x86_64__)
inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

}  // namespace fastcaps
