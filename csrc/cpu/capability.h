/* The CPU library's C interface, which Python calls through ctypes. */
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

/* The level in use: "default", "avx2" or "avx512". FASTCAPS_CPU_CAPABILITY forces one. Null if this processor
   has none of the levels built, or not the forced one. */
FASTCAPS_EXPORT const char* fastcaps_capability(void);

/* What the native libraries were built with, as JSON: csrc/build_info.cpp.in. */
FASTCAPS_EXPORT const char* fastcaps_build_info(void);

/* The levels in this build, lowest first, separated by commas. */
FASTCAPS_EXPORT const char* fastcaps_capabilities_built(void);

/* Describes in one line, for people, how a call of the routing `stem` is cut up, and its kernel. `sizes`: B H W N C D
   Ho Wo M E G and the window's 8. `facts`, as for the CUDA library: whether it is the backward; the children's Storage;
   the bias (0 none, 1 one for all children, 2 one for each); whether the call starts from parents; iterations; unused;
   and how many values bias and betas have. The text of an unknown routing says so. It is valid until the thread's next
   call. */
FASTCAPS_EXPORT const char* fastcaps_cpu_schedule(const char* stem, const int64_t* sizes, const int64_t* facts);

#ifdef __cplusplus
}
#endif
