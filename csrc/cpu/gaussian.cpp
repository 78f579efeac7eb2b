// The Gaussian pass's kernels of one instruction set.
#include "gaussian.h"

#include "kernels.h"

namespace fastcaps {

extern const Kernels<Gaussian> FASTCAPS_CONCAT(gaussian_kernels, FASTCAPS_ISA);
const Kernels<Gaussian> FASTCAPS_CONCAT(gaussian_kernels, FASTCAPS_ISA) =
    FASTCAPS_NAMESPACE::Functions<FASTCAPS_NAMESPACE::GaussianForward, FASTCAPS_NAMESPACE::GaussianBackward>::table();

}  // namespace fastcaps
