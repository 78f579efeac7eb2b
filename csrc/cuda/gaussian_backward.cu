// The backward kernels of the Gaussian pass.
#include "gaussian_backward.h"
#include "poses.h"

namespace fastcaps::gpu {

PassKernels gaussian_backward_kernels() {
  return backward_kernels<GaussianBackward, false, Built<Pose4x4x8One>, Built<Pose4x4x16One>, Built<Pose4x4x32One>,
                          Built<Pose1x8, 2>, Built<Pose1x16, 2>, Built<PoseMatrix>, Built<PoseVector>>();
}

}  // namespace fastcaps::gpu
