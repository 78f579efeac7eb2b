// The instantiations of the backward kernel for the pooling pass.
#include "pooling_backward.h"

#include "poses.h"

namespace fastcaps::gpu {
namespace {

template <class Pose, int R, int THREADS, int BLOCKS>
constexpr auto kernel = backward<PoolingBackward, false, Pose, R, THREADS, BLOCKS>;

}  // namespace

PassKernels pooling_backward_kernels() {
  static const PassKernel all[] = {
      kernel<Pose4x4x8, 1, 256, 1>(),         kernel<Pose4x4x32Back, 1, 256, 1>(), kernel<Pose1x8, 2, 256, 1>(),
      kernel<SinglePose1x16<2>, 1, 256, 1>(), kernel<Pose1x16, 2, 256, 1>(),       kernel<PoseMatrix, 1, 256, 1>(),
      kernel<PoseVector, 1, 256, 1>(),
  };
  return {all, sizeof(all) / sizeof(all[0])};
}

}  // namespace fastcaps::gpu
