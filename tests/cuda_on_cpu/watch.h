// Watching memory: whether two accesses to the same place, one of them a write, are ordered by a barrier or not.
// Kernels are compiled with -fsanitize=thread, so that the compiler announces every access; what it calls is defined
// here, not in a sanitizer's library. An error so does not depend on the order in which the fibers happened to run.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_on_cpu {

void watch_launch();                 // what earlier launches did is in order
void watch_block();                  // and what earlier blocks did to shared memory
void watch_barrier(uint32_t warps);  // these warps passed a barrier: each now sees what the others did

enum class Access { kRead, kWrite, kAtomic };
// `caller` is where the access is in the kernel's code.
void watch(const void* at, size_t bytes, Access access, const void* caller);
// The same, where the address must be a multiple of `bytes`.
void watch_aligned(const void* at, size_t bytes, Access access, const void* caller);

// To be called where a thread leaves the processor: its last write is done.
void watch_settle();

// An asynchronous copy may land at any time: until it has, no thread may touch its target.
void watch_copy_issued(const void* target, size_t bytes, const void* caller);
void watch_copy_landed(const void* target, size_t bytes);

}  // namespace cuda_on_cpu
