// Counting the wavefronts of shared memory, while a test asks for it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_on_cpu {

enum class Shared { kRead, kWrite, kCopy };

// The running thread's access to shared memory, from byte `first` on.
void count_shared(size_t first, size_t bytes, Shared what, const void* caller);
// These warps have met, or are at their end: what their lanes did is complete.
void settle_wavefronts(uint32_t warps);

extern "C" {
__attribute__((visibility("default"))) void cuda_on_cpu_count(bool on);
__attribute__((visibility("default"))) const char* cuda_on_cpu_wavefronts();
}

}  // namespace cuda_on_cpu
