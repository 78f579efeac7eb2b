// A CUDA runtime and a driver of two GPUs without kernels: what csrc/cuda/launch.h asks of them, as CUDA documents it.
// Which contexts are open, and which of them is a thread's, can be seen (devices.cpp).
#pragma once

#include <cstddef>

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0;
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin };
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 8;
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
cudaError_t cudaSetDevice(int device);  // opens the device's context, as since CUDA 12
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device);
inline cudaError_t cudaFuncSetAttribute(const void*, int, int) { return cudaSuccess; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments);
