// csrc/cuda/launch.h itself, with a runtime of two GPUs in the place of CUDA's: which contexts a call opens.
#include "cuda/launch.h"

#define VISIBLE extern "C" __attribute__((visibility("default")))

namespace {

bool open[2];
thread_local int chosen = 0;  // the runtime's own memory of the thread's device
thread_local bool* current = nullptr;

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
VISIBLE int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}
VISIBLE int cuCtxSetCurrent(void* context) {
  current = static_cast<bool*>(context);
  return 0;
}

// A call for a tensor on `device`, on a thread whose context is that of `before` (-1: it has none, as a new thread).
// Returns multiprocessors as seen from within, the contexts that are open afterwards (bits), the thread's (-1: none).
VISIBLE void devices_call(int device, int before, int64_t* found) {
  open[0] = open[1] = false, current = nullptr, chosen = 0;
  if (before >= 0) cudaSetDevice(before);
  {
    const fastcaps::gpu::DeviceGuard guard(device);
    found[0] = fastcaps::gpu::multiprocessors();
  }
  found[1] = int(open[0]) + 2 * int(open[1]);
  found[2] = current ? current - open : -1;
}
