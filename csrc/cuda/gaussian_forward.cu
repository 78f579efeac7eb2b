// The forward kernels of the Gaussian pass.
#include "gaussian_forward.h"
#include "poses.h"

namespace fastcaps::gpu {

PassKernels gaussian_forward_kernels() {
  return forward_kernels<GaussianForward, false, Built<Pose4x4x8One, 1, 256, 2>, Built<Pose4x4x16One, 1, 256, 2>,
                         Built<Pose4x4x32Back>, Built<Pose1x8, 4>, Built<Pose1x16, 4>, Built<PoseMatrix>,
                         Built<PoseVector>>();
}

}  // namespace fastcaps::gpu
