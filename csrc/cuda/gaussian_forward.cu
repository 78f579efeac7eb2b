// The instantiations of the forward kernel for the Gaussian pass.
#include "gaussian_forward.h"

#include "poses.h"

namespace fastcaps::gpu {
namespace {

template <class Pose, int R, int THREADS, int BLOCKS>
constexpr auto kernel = forward<GaussianForward, false, Pose, R, THREADS, BLOCKS>;

}  // namespace

PassKernels gaussian_forward_kernels() {
  static const PassKernel all[] = {
      kernel<Pose4x4x8One, 1, 256, 2>(), kernel<Pose4x4x16One, 1, 256, 2>(), kernel<Pose4x4x32Back, 1, 256, 1>(),
      kernel<Pose1x8, 4, 256, 1>(),      kernel<Pose1x16, 4, 256, 1>(),      kernel<PoseMatrix, 1, 256, 1>(),
      kernel<PoseVector, 1, 256, 1>(),
  };
  return {all, sizeof(all) / sizeof(all[0])};
}

}  // namespace fastcaps::gpu
