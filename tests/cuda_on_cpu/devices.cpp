// csrc/cuda/launch.h itself, with a runtime of two GPUs in the place of CUDA's: which contexts a call opens.
#include "cuda/launch.h"

#define VISIBLE extern "C" __attribute__((visibility("default")))

namespace {

bool open[2];
thread_local int chosen = 0;  // the runtime's own memory of the thread's device
thread_local bool* current = nullptr;
int64_t launched = -1;  // on which device the last kernel was

}  // namespace

cudaError_t cudaSetDevice(int device) {
  chosen = device, current = &open[device], open[device] = true;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current ? int(current - open) : chosen;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  *value = which == cudaDevAttrMultiProcessorCount ? 100 + device : 1000 * (1 + device);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  launched = current ? current - open : -1;
  return cudaSuccess;
}
VISIBLE int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
VISIBLE int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}
VISIBLE int cuCtxSetCurrent(void* context) {
  current = static_cast<bool*>(context);
  return 0;
}

// A launch for a tensor on `device`, on a thread whose context is that of `before` (-1: it has none, as a new thread),
// around one on `within` (-1: there is none).
// Returns the device of the outer launch, multiprocessors as seen from there, the contexts that are open afterwards
// (bits), the thread's (-1: none).
VISIBLE void devices_call(int device, int before, int within, int64_t* found) {
  using namespace fastcaps::gpu;
  const auto kernel = +[](const int) {};
  open[0] = open[1] = false, current = nullptr, chosen = 0;
  if (before >= 0) cudaSetDevice(before);
  {
    const DeviceGuard guard(device);
    if (within >= 0) {
      const DeviceGuard inner(within);
      launch(kernel, Grid{}, 0);
    }
    launch(kernel, Grid{}, 0);
    found[0] = launched;
    found[1] = multiprocessors();
  }
  found[2] = int(open[0]) + 2 * int(open[1]);
  found[3] = current ? current - open : -1;
}
