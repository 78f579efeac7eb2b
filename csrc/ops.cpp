// Registration of the CPU kernels. The schemas are defined once, in fastcaps/ops; torch's stable ABI carries the
// calls, so that a library built against one torch serves every later one.
#include "arguments.h"
#include "cpu/capability.h"

namespace fastcaps {

std::vector<Tensor> attention_routing(Stack), attention_routing_backward(Stack), pooling_routing(Stack),
    pooling_routing_backward(Stack), gaussian_routing(Stack), gaussian_routing_backward(Stack);

}  // namespace fastcaps

namespace {

struct {
  const char* name;
  void (*run)(StableIValue*, uint64_t, uint64_t);
} const kOps[] = {
    {"attention_routing", &fastcaps::boxed<fastcaps::attention_routing>},
    {"attention_routing_backward", &fastcaps::boxed<fastcaps::attention_routing_backward>},
    {"pooling_routing", &fastcaps::boxed<fastcaps::pooling_routing>},
    {"pooling_routing_backward", &fastcaps::boxed<fastcaps::pooling_routing_backward>},
    {"gaussian_routing", &fastcaps::boxed<fastcaps::gaussian_routing>},
    {"gaussian_routing_backward", &fastcaps::boxed<fastcaps::gaussian_routing_backward>},
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastcaps_cpu, CPU, m) {
  for (const auto& op : kOps) m.impl(op.name, op.run);
}

extern "C" const char* fastcaps_ops(void) {
  static const std::string names = [] {
    std::string all;
    for (const auto& op : kOps) all += (all.empty() ? "" : ",") + std::string(op.name);
    return all;
  }();
  return names.c_str();
}
