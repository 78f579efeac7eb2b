// The backward kernels of the pooling pass.
#include "pooling_backward.h"
#include "poses.h"

namespace fastcaps::gpu {

PassKernels pooling_backward_kernels() {
  return backward_kernels<PoolingBackward, false, Built<Pose4x4x8>, Built<Pose4x4x32Back>, Built<Pose1x8, 2>,
                          Built<SinglePose1x16<2>>, Built<Pose1x16, 2>, Built<PoseMatrix>, Built<PoseVector>>();
}

}  // namespace fastcaps::gpu
