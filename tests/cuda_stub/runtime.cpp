// A CUDA runtime without a GPU, under the host code that nvcc compiled: it opens contexts, remembers attributes and
// launches, and refuses what a device would. No kernel runs. What a call did is asked through the stub_ functions.
//
// The shipped library holds NVIDIA's runtime, which no other driver can serve; so its very objects are linked anew,
// with this runtime in the other's place. What the objects want and this file lacks does not link: a call that makes
// the host wait (cudaDeviceSynchronize, cudaMemcpy, cudaMalloc) would be found by that alone.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#define VISIBLE extern "C" __attribute__((visibility("default")))

namespace {

// Two different devices: an H100's facts, and those of the smallest that the kernels are built for.
struct Device {
  int multiprocessors, shared_optin;
};
constexpr Device kDevices[] = {{132, 227 << 10}, {36, 99 << 10}};
constexpr int kCount = 2, kShared = 48 << 10;

struct Launch {
  std::string kernel;
  int64_t facts[8];  // device, grid x, y, z, threads, shared bytes, stream, while captured
};

bool open[kCount];
thread_local int current = -1;  // the thread's context
int64_t streams[kCount];        // torch's current ones
bool capturing;
std::map<const void*, std::string> kernels;
std::map<std::pair<int, const void*>, int> allowed;  // shared memory, by device and kernel
std::vector<Launch> launches;
std::map<std::string, int64_t> calls;
std::pair<std::string, cudaError_t> planted;

cudaError_t called(const char* name) {
  ++calls[name];
  return planted.first == name ? planted.second : cudaSuccess;
}

cudaError_t refused(const cudaLaunchConfig_t& c, const void* kernel, void** arguments) {
  const auto dim = [](unsigned x, unsigned most) { return x >= 1 && x <= most; };
  if (!kernels.count(kernel)) return cudaErrorInvalidDeviceFunction;
  if (!arguments || !arguments[0]) return cudaErrorInvalidValue;
  if (!dim(c.gridDim.x, 0x7fffffff) || !dim(c.gridDim.y, 65535) || !dim(c.gridDim.z, 65535))
    return cudaErrorInvalidConfiguration;
  if (!dim(c.blockDim.x, 1024) || c.blockDim.y != 1 || c.blockDim.z != 1) return cudaErrorInvalidConfiguration;
  const auto found = allowed.find({current, kernel});
  if (c.dynamicSmemBytes > size_t(found == allowed.end() ? kShared : found->second)) return cudaErrorInvalidValue;
  for (unsigned k = 0; k < c.numAttrs; ++k) {  // shared memory of a multiprocessor, which a block must fit into
    if (c.attrs[k].id != cudaLaunchAttributePreferredSharedMemoryCarveout) return cudaErrorInvalidValue;
    const int64_t percent = c.attrs[k].val.sharedMemCarveout, all = kDevices[current].shared_optin + 1024;
    if (percent > 100 || percent * all < 100 * (int64_t(c.dynamicSmemBytes) + 1024)) return cudaErrorInvalidValue;
  }
  if (capturing && !c.stream) return cudaErrorStreamCaptureImplicit;
  if (int64_t(c.stream) != streams[current]) return cudaErrorInvalidResourceHandle;  // another device's, or none at all
  return cudaSuccess;
}

}  // namespace

// Kernels of torch, and its pieces of memory, which the other file makes.
void launched_by_torch(const char* kernel, int device) {
  launches.push_back({std::string("torch ") + kernel, {device, 1, 1, 1, 1, 0, streams[device], capturing}});
}
void allocated() { ++calls["allocation"]; }

// ---- the runtime, as CUDA documents it ------------------------------------------------------------------------------
VISIBLE cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t error = called("cudaSetDevice")) return error;
  if (device < 0 || device >= kCount) return cudaErrorInvalidDevice;
  open[current = device] = true;
  return cudaSuccess;
}
VISIBLE cudaError_t cudaGetDevice(int* device) {
  *device = current < 0 ? 0 : current;
  return called("cudaGetDevice");
}
VISIBLE cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  if (const cudaError_t error = called("cudaDeviceGetAttribute")) return error;
  if (device < 0 || device >= kCount) return cudaErrorInvalidDevice;
  if (which == cudaDevAttrMultiProcessorCount)
    *value = kDevices[device].multiprocessors;
  else if (which == cudaDevAttrMaxSharedMemoryPerBlockOptin)
    *value = kDevices[device].shared_optin;
  else
    return cudaErrorInvalidValue;
  return cudaSuccess;
}
VISIBLE cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute which, int value) {
  if (const cudaError_t error = called("cudaFuncSetAttribute")) return error;
  if (current < 0 || !kernels.count(kernel)) return cudaErrorInvalidDeviceFunction;
  if (which != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > kDevices[current].shared_optin)
    return cudaErrorInvalidValue;
  allowed[{current, kernel}] = value;
  return cudaSuccess;
}
VISIBLE cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  if (const cudaError_t error = called("cudaLaunchKernelExC")) return error;
  if (current < 0) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = refused(*config, kernel, arguments)) return error;
  launches.push_back({kernels[kernel],
                      {current, config->gridDim.x, config->gridDim.y, config->gridDim.z, config->blockDim.x,
                       int64_t(config->dynamicSmemBytes), int64_t(config->stream), capturing}});
  return cudaSuccess;
}
VISIBLE const char* cudaGetErrorString(cudaError_t error) {
  static thread_local std::string text;
  text = "error " + std::to_string(int(error));
  return text.c_str();
}

// What nvcc's host code calls when the library is loaded, and for launches in angle brackets, of which there are none.
VISIBLE void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
VISIBLE void __cudaRegisterFatBinaryEnd(void**) {}
VISIBLE void __cudaUnregisterFatBinary(void**) {}
VISIBLE void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
VISIBLE void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                                    dim3*, int*) {
  kernels[host] = name;
}
VISIBLE cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }
VISIBLE cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}
VISIBLE cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorNotSupported; }

// ---- the driver, and torch's current stream: looked up by name ------------------------------------------------------
VISIBLE int cuCtxGetCurrent(void** context) {
  *context = current < 0 ? nullptr : &open[current];
  return 0;
}
VISIBLE int cuCtxSetCurrent(void* context) {
  current = context ? int(static_cast<bool*>(context) - open) : -1;
  return 0;
}
VISIBLE int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  ++calls["aoti_torch_get_current_cuda_stream"];
  *stream = reinterpret_cast<void*>(streams[device]);
  return 0;
}

// ---- what the tests ask ---------------------------------------------------------------------------------------------
// A thread with the context of `device` (-1: none), torch's current streams, and whether they are being captured. What
// kernels are allowed stays, as it does on a device.
VISIBLE void stub_begin(int device, int64_t stream0, int64_t stream1, int captured) {
  for (bool& one : open) one = false;
  if ((current = device) >= 0) open[device] = true;
  streams[0] = stream0, streams[1] = stream1, capturing = captured != 0;
  launches.clear(), calls.clear();
  planted = {};
}
VISIBLE void stub_forget() { launches.clear(), calls.clear(); }
VISIBLE void stub_fail(const char* function, int error) { planted = {function, cudaError_t(error)}; }
VISIBLE int stub_context() { return current; }
VISIBLE int stub_open() { return int(open[0]) + 2 * int(open[1]); }
VISIBLE int64_t stub_calls(const char* name) { return calls[name]; }
VISIBLE int64_t stub_launches() { return int64_t(launches.size()); }
VISIBLE const char* stub_launch(int64_t k, int64_t* facts) {
  std::memcpy(facts, launches[size_t(k)].facts, sizeof(Launch::facts));
  return launches[size_t(k)].kernel.c_str();
}
