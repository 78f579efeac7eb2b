// The instantiations of the forward kernel.
#include "attention_forward.h"
#include "poses.h"

namespace fastcaps::gpu {
namespace {

template <class Pose, int R, int THREADS, int BLOCKS>
constexpr auto kernel = forward<AttentionForward, true, Pose, R, THREADS, BLOCKS>;

}  // namespace

PassKernels attention_forward_kernels() {
  static const PassKernel all[] = {
      kernel<Pose4x4x8, 1, 256, 1>(),    kernel<Pose4x4x12, 1, 256, 1>(),   kernel<Pose4x4x16, 1, 256, 1>(),
      kernel<Pose4x4x32, 1, 256, 1>(),   kernel<Pose6x6, 1, 256, 1>(),      kernel<Pose8x8, 1, 256, 1>(),
      kernel<Pose1x8, 4, 256, 1>(),      kernel<Pose1x16, 4, 256, 1>(),     kernel<Pose1x64, 8, 256, 1>(),
      kernel<Tensor4x4x16, 1, 256, 1>(), kernel<Tensor4x4x32, 1, 256, 1>(), kernel<Tensor1x64, 2, 320, 1>(),
      kernel<PoseMatrix, 1, 256, 1>(),   kernel<PoseVector, 1, 256, 1>(),
  };
  return {all, sizeof(all) / sizeof(all[0])};
}

}  // namespace fastcaps::gpu
