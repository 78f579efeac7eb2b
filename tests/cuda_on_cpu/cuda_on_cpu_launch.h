// What csrc/cuda/launch.h is on a GPU, for kernels that run on the CPU in the tests.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "machine.h"

namespace fastcaps::gpu {

struct Grid {
  int64_t x = 1, y = 1;
  int threads = 32;
  int64_t shared_bytes = 0;
  int carveout = -1;
};

class DeviceGuard {
 public:
  explicit DeviceGuard(const torch::stable::Tensor&) {}
};

inline int multiprocessors() { return 4; }
inline int64_t shared_limit() { return cuda_on_cpu::kSharedLimit; }
inline int64_t parts_bytes() { return 256; }  // little: small calls too have more blocks of parents than room for parts

// Every thread has the argument for itself, as on a GPU. What copies it is not the kernel's doing: not watched.
template <class Args>
__attribute__((no_sanitize("thread"))) void call_kernel(const void* kernel, const void* args) {
  reinterpret_cast<void (*)(const Args)>(const_cast<void*>(kernel))(*static_cast<const Args*>(args));
}

template <class Args>
void launch(void (*kernel)(const Args), const Grid& grid, const Args& args) {
  static_assert(sizeof(Args) <= 4096, "a kernel's arguments are at most 4 KB");
  if (grid.x == 0 || grid.y == 0) return;
  cuda_on_cpu::run({reinterpret_cast<const void*>(kernel), call_kernel<Args>, &args, grid.x, grid.y, grid.threads,
                    grid.shared_bytes});
}

}  // namespace fastcaps::gpu
