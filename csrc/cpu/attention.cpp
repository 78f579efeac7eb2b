// The attention pass's kernels of one instruction set.
#include "attention.h"

#include "kernels.h"

namespace fastcaps {

extern const Kernels<Attention> FASTCAPS_CONCAT(attention_kernels, FASTCAPS_ISA);
const Kernels<Attention> FASTCAPS_CONCAT(attention_kernels, FASTCAPS_ISA) =
    FASTCAPS_NAMESPACE::Functions<FASTCAPS_NAMESPACE::AttentionForward, FASTCAPS_NAMESPACE::AttentionBackward>::table();

}  // namespace fastcaps
