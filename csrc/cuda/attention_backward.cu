// The backward kernels of the attention pass.
#include "attention_backward.h"
#include "poses.h"

namespace fastcaps::gpu {

PassKernels attention_backward_kernels() {
  return backward_kernels<AttentionBackward, true, Built<Pose4x4x8>, Built<Pose4x4x16>, Built<Pose4x4x32Back>,
                          Built<Pose6x6>, Built<Pose8x8>, Built<Pose1x8, 2>, Built<Pose1x16, 2>, Built<Pose1x64, 4>,
                          Built<Tensor4x4x16<1>>, Built<Tensor1x64<1>, 2>, Built<Tensor4x4x16<3>>,
                          Built<Tensor1x64<3>, 2>, Built<PoseMatrix>, Built<PoseVector>>();
}

}  // namespace fastcaps::gpu
