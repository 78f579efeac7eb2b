// The pooling pass's kernels of one instruction set.
#include "pooling.h"

#include "kernels.h"

template <>
const fastcaps::Kernels<fastcaps::Pooling>& fastcaps::FASTCAPS_NAMESPACE::table() {
  return Functions<PoolingForward, PoolingBackward>::kTable;
}
