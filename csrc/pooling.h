// The pooling pass as ops: see fastcaps/ops for the schemas, docs/algebra.md for the formulas.
#pragma once

#include <tuple>
#include <vector>

#include "tensors.h"

namespace fastcaps {

// Which gradients a backward call is asked for: the bits of its argument `needs`.
enum PoolingNeeds : int64_t {
  kPoolingChildren = 1,
  kPoolingWeight = 2,
  kPoolingQuery = 4,
  kPoolingBias = 8,
  kPoolingGate = 16
};

std::tuple<Tensor, Tensor> pooling_pass(const Tensor children, const MaybeTensor weight, const MaybeTensor query,
                                        const MaybeTensor bias, const MaybeTensor gate, double scale, bool normalize,
                                        const std::vector<int64_t> window, bool frozen);

// All turns of a routing: its result, and the parents and log-sum-exps of every turn.
std::tuple<Tensor, Tensor, Tensor> pooling_routing(const Tensor children, const MaybeTensor weight,
                                                   const MaybeTensor bias, const MaybeTensor gate, double scale,
                                                   bool normalize, int64_t parents, int64_t rule, int64_t iterations,
                                                   bool frozen, const std::vector<int64_t> window);

using PoolingGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

PoolingGradients pooling_pass_backward(const MaybeTensor grad_parents, const MaybeTensor grad_logsumexp,
                                       const Tensor children, const MaybeTensor weight, const MaybeTensor query,
                                       const MaybeTensor bias, const MaybeTensor gate, const Tensor parents,
                                       const Tensor logsumexp, double scale, bool normalize,
                                       const std::vector<int64_t> window, int64_t needs);

// The same for several turns over the same votes at once: what belongs to parents has turns in its first dimension.
PoolingGradients pooling_turns_backward(const MaybeTensor grad_parents, const MaybeTensor grad_logsumexp,
                                        const Tensor children, const MaybeTensor weight, const MaybeTensor query,
                                        const MaybeTensor bias, const MaybeTensor gate, const Tensor parents,
                                        const Tensor logsumexp, double scale, bool normalize,
                                        const std::vector<int64_t> window, int64_t needs);

}  // namespace fastcaps
