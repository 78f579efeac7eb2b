// The six ops. Schemas: fastcaps/ops; arguments: arguments.h; formulas: docs/algebra.md.
#pragma once

#include "arguments.h"

namespace fastcaps {

std::vector<Tensor> attention_routing(Stack);
std::vector<Tensor> attention_routing_backward(Stack);
std::vector<Tensor> pooling_routing(Stack);
std::vector<Tensor> pooling_routing_backward(Stack);
std::vector<Tensor> gaussian_routing(Stack);
std::vector<Tensor> gaussian_routing_backward(Stack);

}  // namespace fastcaps
