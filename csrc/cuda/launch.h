// Starting kernels: on the tensor's device, on torch's current stream, with every error raised where it happened.
#pragma once

#ifdef FASTCAPS_CUDA_ON_CPU
#include "cuda_on_cpu_launch.h"
#else

#include <cuda_runtime.h>
#include <dlfcn.h>

#include "../tensors.h"

namespace fastcaps::gpu {

struct Grid {
  int64_t x = 1, y = 1;
  int threads = 32;
  int64_t shared_bytes = 0;
};

inline void check(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, "fastcaps: ", what, ": ", cudaGetErrorString(error));
}

// Work goes to the device of a tensor while this lives, whichever device was current before.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Tensor& x) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    device() = int(x.get_device_index());
    check(cudaSetDevice(device()), "cudaSetDevice");  // whatever torch's own copy of the runtime believes
  }
  ~DeviceGuard() { cudaSetDevice(before_); }
  DeviceGuard(const DeviceGuard&) = delete;

  static int& device() {
    static thread_local int index = 0;
    return index;
  }

 private:
  int before_ = 0;
};

// torch's current stream on the guarded device. The symbol lives in libtorch_cuda, which a machine that only builds
// need not have: it is looked up when first used.
inline cudaStream_t current_stream() {
  using Lookup = int32_t (*)(int32_t device, void** stream);
  static const Lookup lookup = [] {
    // Python loads torch's libraries into a scope of their own, which RTLD_DEFAULT does not search: ask by name.
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Lookup>(dlsym(library ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
  }();
  STD_TORCH_CHECK(lookup != nullptr, "fastcaps: torch is loaded without its CUDA library");
  void* stream = nullptr;
  STD_TORCH_CHECK(lookup(DeviceGuard::device(), &stream) == 0, "fastcaps: torch has no current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

inline int attribute(cudaDeviceAttr which) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, DeviceGuard::device()), "cudaDeviceGetAttribute");
  return value;
}
inline int multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }
inline int64_t shared_limit() { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }  // bytes a block can have

template <class Args>
void launch(void (*kernel)(const Args), const Grid& grid, const Args& args) {
  if (grid.x == 0 || grid.y == 0) return;
  const void* function = reinterpret_cast<const void*>(kernel);
  if (grid.shared_bytes > 48 * 1024)  // always to the limit: another thread may be about to launch the same kernel
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_limit())),
          "cudaFuncSetAttribute");
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(grid.x), unsigned(grid.y));
  config.blockDim = dim3(unsigned(grid.threads));
  config.dynamicSmemBytes = size_t(grid.shared_bytes);
  config.stream = current_stream();
  void* arguments[] = {const_cast<Args*>(&args)};
  check(cudaLaunchKernelExC(&config, function, arguments), "launch");
}

}  // namespace fastcaps::gpu
#endif  // FASTCAPS_CUDA_ON_CPU
