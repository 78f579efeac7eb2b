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

#ifdef __cplusplus
}
#endif
