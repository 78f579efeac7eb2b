// The attention pass's kernels of one instruction set.
#include "attention.h"

#include "kernels.h"

template <>
const fastcaps::Kernels<fastcaps::Attention>& fastcaps::FASTCAPS_NAMESPACE::table() {
  return Functions<AttentionForward, AttentionBackward>::kTable;
}
