// The forward kernels of the attention pass.
#include "attention_forward.h"
#include "poses.h"

namespace fastcaps::gpu {

PassKernels attention_forward_kernels() {
  return forward_kernels<AttentionForward, true, Built<Pose4x4x8>, Built<Pose4x4x12>, Built<Pose4x4x16>,
                         Built<Pose4x4x32>, Built<Pose6x6>, Built<Pose8x8>, Built<Pose1x8, 4>, Built<Pose1x16, 4>,
                         Built<Pose1x64, 8>, Built<Tensor4x4x16<1>>, Built<Tensor4x4x32<1>>,
                         Built<Tensor1x64<1>, 2, 320>, Built<Tensor4x4x16<3>>, Built<Tensor4x4x32<3>>,
                         Built<Tensor1x64<3>, 2, 320>, Built<PoseMatrix>, Built<PoseVector>>();
}

}  // namespace fastcaps::gpu
