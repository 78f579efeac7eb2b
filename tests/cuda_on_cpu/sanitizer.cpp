// What the compiler calls from code made with -fsanitize=thread,bounds: every access to memory, which must be aligned,
// and every index outside of an array. Outside of kernels nothing is done about them. -fsanitize=alignment would more
// than double the time that kernels take to compile.
#include <algorithm>
#include <cstring>
#include <string>

#include "machine.h"
#include "watch.h"

using cuda_on_cpu::Access;

namespace {

struct Place {
  const char* file;
  uint32_t line, column;

  std::string text() const {
    const char* name = std::strrchr(file, '/');
    return std::string(" (") + (name ? name + 1 : file) + ":" + std::to_string(line) + ")";
  }
};
struct Type {
  uint16_t kind, info;
  char name[1];
};
struct OutOfBounds {
  Place place;
  const Type *array, *index;
};

}  // namespace

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define HOOK(name, how, bytes, access) \
  void __tsan_##name(void* at) { cuda_on_cpu::how(at, bytes, Access::access, __builtin_return_address(0)); }
#define HOOKS(bytes)                               \
  HOOK(read##bytes, watch_aligned, bytes, kRead)   \
  HOOK(write##bytes, watch_aligned, bytes, kWrite) \
  HOOK(unaligned_read##bytes, watch, bytes, kRead) \
  HOOK(unaligned_write##bytes, watch, bytes, kWrite)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
#undef HOOKS
#undef HOOK
void __tsan_read_range(void* at, size_t bytes) {
  cuda_on_cpu::watch(at, bytes, Access::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* at, size_t bytes) {
  cuda_on_cpu::watch(at, bytes, Access::kWrite, __builtin_return_address(0));
}
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  cuda_on_cpu::watch(from, bytes, Access::kRead, __builtin_return_address(0));
  cuda_on_cpu::watch(to, bytes, Access::kWrite, __builtin_return_address(0));
  return std::memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  cuda_on_cpu::watch(to, bytes, Access::kWrite, __builtin_return_address(0));
  return std::memset(to, value, bytes);
}

// Atomics are the host code's, in the same files: reference counts.
#define ATOMICS(bits, T)                                                                                              \
  T __tsan_atomic##bits##_load(const volatile T* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }           \
  void __tsan_atomic##bits##_store(volatile T* at, T x, int) { __atomic_store_n(at, x, __ATOMIC_SEQ_CST); }           \
  T __tsan_atomic##bits##_exchange(volatile T* at, T x, int) { return __atomic_exchange_n(at, x, __ATOMIC_SEQ_CST); } \
  T __tsan_atomic##bits##_fetch_add(volatile T* at, T x, int) { return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST); } \
  T __tsan_atomic##bits##_fetch_sub(volatile T* at, T x, int) { return __atomic_fetch_sub(at, x, __ATOMIC_SEQ_CST); } \
  T __tsan_atomic##bits##_fetch_or(volatile T* at, T x, int) { return __atomic_fetch_or(at, x, __ATOMIC_SEQ_CST); }   \
  T __tsan_atomic##bits##_fetch_and(volatile T* at, T x, int) { return __atomic_fetch_and(at, x, __ATOMIC_SEQ_CST); } \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* at, T* old, T x, int, int) {                          \
    return __atomic_compare_exchange_n(at, old, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                        \
  }                                                                                                                   \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* at, T* old, T x, int, int) {                            \
    return __atomic_compare_exchange_n(at, old, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                        \
  }
ATOMICS(8, unsigned char)
ATOMICS(16, unsigned short)
ATOMICS(32, unsigned)
ATOMICS(64, unsigned long)
#undef ATOMICS
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

void __ubsan_handle_out_of_bounds(const OutOfBounds* what, size_t index) {
  if (!cuda_on_cpu::block.running) return;
  cuda_on_cpu::fail("takes element " + std::to_string(int64_t(index)) + " of " + what->array->name +
                    what->place.text());
}

}  // extern "C"
