// The gaussian pass's kernels of one instruction set.
#include "gaussian.h"

#include "kernels.h"

template <>
const fastcaps::Kernels<fastcaps::Gaussian>& fastcaps::FASTCAPS_NAMESPACE::table() {
  return Functions<GaussianForward, GaussianBackward>::kTable;
}
