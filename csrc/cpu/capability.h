/* What the CPU library tells of itself, by a C interface that Python reads through ctypes. */
#pragma once

#include <stdint.h>

#if defined(_WIN32)
#define FASTCAPS_EXPORT __declspec(dllexport)
#else
#define FASTCAPS_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The level in use: "default", "avx2", "avx512" or "amx". FASTCAPS_CPU_CAPABILITY forces one; null if that one is
   unknown, not built or more than this processor can do. */
FASTCAPS_EXPORT const char* fastcaps_capability(void);

/* What the native libraries were built with, as JSON: csrc/build_info.cpp.in. */
FASTCAPS_EXPORT const char* fastcaps_build_info(void);

/* The levels in this build, lowest first, commas between. */
FASTCAPS_EXPORT const char* fastcaps_capabilities_built(void);

/* Runs so many rounds of multiply-adds of float32 and nothing else, on this thread and at the level in use; returns the
   operations, two for each. Whoever takes the time knows the peak of one thread. */
FASTCAPS_EXPORT double fastcaps_multiply_adds(int64_t rounds);

/* One line for people: how a call of a routing, told by its stem, would be cut up, and by which kernel. `sizes`: B H W
   N C D Ho Wo M E G and the window's 8. `facts`, as for the CUDA library: backward or not, the children's Storage, the
   bias (0 none, 1 one for all children, 2 one each), whether there are parents to start from, iterations, nothing here,
   and how many numbers bias and betas have. An unknown routing is named. The text lives until the thread's next call.
 */
FASTCAPS_EXPORT const char* fastcaps_cpu_schedule(const char* stem, const int64_t* sizes, const int64_t* facts);

/* Says once where five functions of Python lie, which signals.cpp names: long calls then give way to a signal. */
FASTCAPS_EXPORT void fastcaps_cpu_python(void* const* functions);

/* Called with the GIL: raises what the handler of a signal raised during this thread's last call, if one did. */
FASTCAPS_EXPORT void fastcaps_cpu_raise(void);

#ifdef __cplusplus
}
#endif
