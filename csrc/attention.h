// The attention pass as ops: see fastcaps/ops for the schemas, docs/algebra.md for the formulas.
#pragma once

#include <tuple>
#include <vector>

#include "tensors.h"

namespace fastcaps {

// Which gradients a backward call is asked for: the bits of its argument `needs`.
enum Needs : int64_t {
  kChildren = 1,
  kWeight = 2,
  kQuery = 4,
  kBias = 8,
  kGate = 16,
  kNormWeight = 32,
  kNormBias = 64
};

std::tuple<Tensor, Tensor> attention_pass(const Tensor children, const Tensor weight, const MaybeTensor query,
                                          const MaybeTensor bias, const MaybeTensor gate, const MaybeTensor norm_weight,
                                          const MaybeTensor norm_bias, double scale, double eps, bool normalize,
                                          const std::vector<int64_t> window, bool frozen);

// All turns of a routing: the last turn's parents, and the sums of every turn.
std::tuple<Tensor, Tensor> attention_routing(const Tensor children, const Tensor weight, const MaybeTensor query,
                                             const MaybeTensor bias, const MaybeTensor gate,
                                             const MaybeTensor norm_weight, const MaybeTensor norm_bias, double scale,
                                             double eps, bool normalize, int64_t rule, int64_t iterations, bool frozen,
                                             const std::vector<int64_t> window);

using AttentionGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

AttentionGradients attention_pass_backward(const MaybeTensor grad_parents, const MaybeTensor grad_sums,
                                           const Tensor children, const Tensor weight, const MaybeTensor query,
                                           const MaybeTensor bias, const MaybeTensor gate,
                                           const MaybeTensor norm_weight, const Tensor sums, double scale, double eps,
                                           bool normalize, const std::vector<int64_t> window, int64_t needs);

// The same for several turns over the same votes at once: what belongs to parents has turns in its first dimension.
AttentionGradients attention_turns_backward(const MaybeTensor grad_parents, const MaybeTensor grad_sums,
                                            const Tensor children, const Tensor weight, const MaybeTensor query,
                                            const MaybeTensor bias, const MaybeTensor gate,
                                            const MaybeTensor norm_weight, const Tensor sums, double scale, double eps,
                                            bool normalize, const std::vector<int64_t> window, int64_t needs);

}  // namespace fastcaps
