// The forward kernels of the pooling pass.
#include "pooling_forward.h"
#include "poses.h"

namespace fastcaps::gpu {

PassKernels pooling_forward_kernels() {
  return forward_kernels<PoolingForward, false, Built<Pose4x4x8>, Built<Pose4x4x32>, Built<Pose1x8, 4>,
                         Built<SinglePose1x16<4>>, Built<Pose1x16, 4>, Built<PoseMatrix, 1, 256, 2>,
                         Built<PoseVector>>();
}

}  // namespace fastcaps::gpu
