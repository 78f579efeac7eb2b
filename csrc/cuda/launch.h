// Starting kernels: on the tensor's device, on torch's current stream, with every error raised where it happened.
#pragma once

#ifdef FASTCAPS_CUDA_ON_CPU
#include "cuda_on_cpu_launch.h"
#else

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <map>
#include <set>
#include <utility>

#include "../tensors.h"

#ifndef FASTCAPS_CUDA_DRIVER  // the tests use another one
#define FASTCAPS_CUDA_DRIVER "libcuda.so.1"
#endif

namespace fastcaps::gpu {

struct Grid {
  int64_t x = 1, y = 1;
  int threads = 32;
  int64_t shared_bytes = 0;
  int carveout = -1;  // percent of a multiprocessor's memory that is to be shared memory; -1: the driver's choice
};

inline void check(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, "fastcaps: ", what, ": ", cudaGetErrorString(error));
}

// A function of a library that is loaded but not linked: Python loads torch's libraries into a scope of their own,
// which RTLD_DEFAULT does not search, so they are opened by name.
template <class Function>
Function loaded_function(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<Function>(dlsym(handle ? handle : RTLD_DEFAULT, name));
}

// While this lives, launches go to its device; afterwards it restores the thread's context, if the driver reports that.
// It restores the context, not the device: in a thread that never used GPU 0, cudaSetDevice would create a context
// there. Each launch sets the device itself, since torch may change it when it is asked for memory.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Tensor& x) : DeviceGuard(int(x.get_device_index())) {}
  explicit DeviceGuard(int index) : device_before_(device()), found_(get() != nullptr && get()(&context_before_) == 0) {
    device() = index;
  }
  ~DeviceGuard() {
    device() = device_before_;
    if (found_ && set() != nullptr) set()(context_before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;

  static int& device() {
    static thread_local int index = 0;
    return index;
  }

 private:
  using Get = int (*)(void** context);
  using Set = int (*)(void* context);
  static Get get() {
    static const Get function = loaded_function<Get>(FASTCAPS_CUDA_DRIVER, "cuCtxGetCurrent");
    return function;
  }
  static Set set() {
    static const Set function = loaded_function<Set>(FASTCAPS_CUDA_DRIVER, "cuCtxSetCurrent");
    return function;
  }

  void* context_before_ = nullptr;
  int device_before_;
  bool found_;
};

// torch's current stream on the guarded device. A machine that only builds need not have libtorch_cuda: the symbol is
// looked up when first used.
inline cudaStream_t current_stream() {
  using Lookup = int32_t (*)(int32_t device, void** stream);
  static const Lookup lookup = loaded_function<Lookup>("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream");
  STD_TORCH_CHECK(lookup != nullptr, "fastcaps: torch is loaded without its CUDA library");
  void* stream = nullptr;
  STD_TORCH_CHECK(lookup(DeviceGuard::device(), &stream) == 0, "fastcaps: torch has no current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

// An attribute of the guarded device; each thread asks for it once.
inline int attribute(cudaDeviceAttr which) {
  static thread_local std::map<std::pair<int, cudaDeviceAttr>, int> known;
  const std::pair key{DeviceGuard::device(), which};
  if (const auto found = known.find(key); found != known.end()) return found->second;
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, DeviceGuard::device()), "cudaDeviceGetAttribute");
  return known[key] = value;
}
inline int multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }
inline int64_t shared_limit() { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }  // most bytes of a block
constexpr int64_t parts_bytes() { return 64 << 20; }  // about: of all that blocks of parents store for themselves

// Lets blocks of a kernel have as much shared memory as the device has; set once by every thread, since it takes longer
// than the launch. Always to the limit: another thread may be about to launch the same kernel.
inline void allow_shared_memory(const void* kernel) {
  static thread_local std::set<std::pair<int, const void*>> allowed;
  const std::pair<int, const void*> key{DeviceGuard::device(), kernel};
  if (allowed.count(key)) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_limit())),
        "cudaFuncSetAttribute");
  allowed.insert(key);
}

template <class Args>
void launch(void (*kernel)(const Args), const Grid& grid, const Args& args) {
  if (grid.x == 0 || grid.y == 0) return;
  const void* function = reinterpret_cast<const void*>(kernel);
  check(cudaSetDevice(DeviceGuard::device()), "cudaSetDevice");  // whatever torch's own copy of the runtime has set
  if (grid.shared_bytes > 48 * 1024) allow_shared_memory(function);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(grid.x), unsigned(grid.y));
  config.blockDim = dim3(unsigned(grid.threads));
  config.dynamicSmemBytes = size_t(grid.shared_bytes);
  config.stream = current_stream();
#if CUDART_VERSION >= 13000  // all its drivers know the attribute
  cudaLaunchAttribute carveout{};
  carveout.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  carveout.val.sharedMemCarveout = unsigned(grid.carveout);
  config.attrs = &carveout, config.numAttrs = grid.carveout >= 0;
#endif
  void* arguments[] = {const_cast<Args*>(&args)};
  check(cudaLaunchKernelExC(&config, function, arguments), "launch");
}

}  // namespace fastcaps::gpu
#endif  // FASTCAPS_CUDA_ON_CPU
