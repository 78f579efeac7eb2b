// The pooling pass's kernels of one instruction set.
#include "pooling.h"

#include "kernels.h"

namespace fastcaps {

extern const Kernels<Pooling> FASTCAPS_CONCAT(pooling_kernels, FASTCAPS_ISA);
const Kernels<Pooling> FASTCAPS_CONCAT(pooling_kernels, FASTCAPS_ISA) =
    FASTCAPS_NAMESPACE::Functions<FASTCAPS_NAMESPACE::PoolingForward, FASTCAPS_NAMESPACE::PoolingBackward>::table();

}  // namespace fastcaps
