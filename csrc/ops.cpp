// Registration of the CPU kernels. The schemas are defined once, in fastcaps/ops.py; torch's stable ABI carries the
// calls, so that a library built against one torch serves every later one.
#include "attention.h"

STABLE_TORCH_LIBRARY_IMPL(fastcaps, CPU, m) {
  m.impl("attention_pass", TORCH_BOX(&fastcaps::attention_pass));
  m.impl("attention_pass_backward", TORCH_BOX(&fastcaps::attention_pass_backward));
}
