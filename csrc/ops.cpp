// Registration of the CPU kernels. The schemas are defined once, in fastcaps/ops; torch's stable ABI carries the
// calls, so that a library built against one torch serves every later one.
#include "arguments.h"

namespace fastcaps {

std::vector<Tensor> attention_routing(Stack), attention_routing_backward(Stack), pooling_routing(Stack),
    pooling_routing_backward(Stack), gaussian_routing(Stack), gaussian_routing_backward(Stack), squash_sum(Stack),
    squash_sum_backward(Stack);

}  // namespace fastcaps

#define FASTCAPS_IMPL(op) m.impl(#op, &fastcaps::boxed<fastcaps::op>)

STABLE_TORCH_LIBRARY_IMPL(fastcaps_cpu, CPU, m) {
  FASTCAPS_IMPL(attention_routing);
  FASTCAPS_IMPL(attention_routing_backward);
  FASTCAPS_IMPL(pooling_routing);
  FASTCAPS_IMPL(pooling_routing_backward);
  FASTCAPS_IMPL(gaussian_routing);
  FASTCAPS_IMPL(gaussian_routing_backward);
  FASTCAPS_IMPL(squash_sum);
  FASTCAPS_IMPL(squash_sum_backward);
}
