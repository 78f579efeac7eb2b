// What this build of the CUDA kernels holds; asks nothing of a driver.
#include "capability.h"

#define FASTCAPS_EXPORT __attribute__((visibility("default")))

extern "C" {

FASTCAPS_EXPORT const char* fastcaps_cuda_toolkit(void) { return FASTCAPS_CUDA_TOOLKIT; }

FASTCAPS_EXPORT const char* fastcaps_cuda_architectures(void) { return FASTCAPS_CUDA_ARCHITECTURES; }

FASTCAPS_EXPORT const char* fastcaps_cuda_ops(void) {
  return "attention_pass,attention_pass_backward,pooling_pass,pooling_pass_backward,gaussian_pass,"
         "gaussian_pass_backward,attention_routing,pooling_routing,gaussian_routing";
}

}  // extern "C"
