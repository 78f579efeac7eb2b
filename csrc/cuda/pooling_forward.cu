// The instantiations of the forward kernel for the pooling pass.
#include "pooling_forward.h"

#include "poses.h"

namespace fastcaps::gpu {
namespace {

template <class Pose, int R, int THREADS, int BLOCKS>
constexpr auto kernel = forward<PoolingForward, false, Pose, R, THREADS, BLOCKS>;

}  // namespace

PassKernels pooling_forward_kernels() {
  static const PassKernel all[] = {
      kernel<Pose4x4x8, 1, 256, 1>(),         kernel<Pose4x4x32, 1, 256, 1>(), kernel<Pose1x8, 4, 256, 1>(),
      kernel<SinglePose1x16<4>, 1, 256, 1>(), kernel<Pose1x16, 4, 256, 1>(),   kernel<PoseMatrix, 1, 256, 1>(),
      kernel<PoseVector, 1, 256, 1>(),
  };
  return {all, sizeof(all) / sizeof(all[0])};
}

}  // namespace fastcaps::gpu
