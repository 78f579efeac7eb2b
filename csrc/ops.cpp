// Registration of the CPU kernels. The schemas are defined once, in fastcaps/ops; torch's stable ABI carries the
// calls, so that a library built against one torch serves every later one.
#include "attention.h"
#include "gaussian.h"
#include "pooling.h"

STABLE_TORCH_LIBRARY_IMPL(fastcaps, CPU, m) {
  m.impl("attention_pass", TORCH_BOX(&fastcaps::attention_pass));
  m.impl("attention_pass_backward", TORCH_BOX(&fastcaps::attention_pass_backward));
  m.impl("attention_turns_backward", TORCH_BOX(&fastcaps::attention_turns_backward));
  m.impl("attention_routing", TORCH_BOX(&fastcaps::attention_routing));
  m.impl("pooling_pass", TORCH_BOX(&fastcaps::pooling_pass));
  m.impl("pooling_pass_backward", TORCH_BOX(&fastcaps::pooling_pass_backward));
  m.impl("pooling_turns_backward", TORCH_BOX(&fastcaps::pooling_turns_backward));
  m.impl("pooling_routing", TORCH_BOX(&fastcaps::pooling_routing));
  m.impl("gaussian_pass", TORCH_BOX(&fastcaps::gaussian_pass));
  m.impl("gaussian_pass_backward", TORCH_BOX(&fastcaps::gaussian_pass_backward));
  m.impl("gaussian_turns_backward", TORCH_BOX(&fastcaps::gaussian_turns_backward));
  m.impl("gaussian_routing", TORCH_BOX(&fastcaps::gaussian_routing));
}
