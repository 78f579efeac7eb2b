// The Gaussian pass as ops: see fastcaps/ops for the schemas, docs/algebra.md for the formulas.
#pragma once

#include <tuple>
#include <vector>

#include "tensors.h"

namespace fastcaps {

// Which gradients a backward call is asked for: the bits of its argument `needs`.
enum GaussianNeeds : int64_t {
  kGaussianChildren = 1,
  kGaussianWeight = 2,
  kGaussianMean = 4,
  kGaussianVariance = 8,
  kGaussianLogWeight = 16,
  kGaussianBias = 32,
  kGaussianGate = 64,
  kGaussianBetaUse = 128,
  kGaussianBetaIgnore = 256
};

// counts, means, variances, evidence
std::tuple<Tensor, Tensor, Tensor, Tensor> gaussian_pass(const Tensor children, const Tensor weight,
                                                         const MaybeTensor mean, const MaybeTensor variance,
                                                         const MaybeTensor log_weight, const MaybeTensor bias,
                                                         const MaybeTensor gate, const MaybeTensor beta_use,
                                                         const MaybeTensor beta_ignore, double eps,
                                                         const std::vector<int64_t> window);

// All turns of a routing: scores, means and variances of the last, then counts, means, variances and scores of every
// turn.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gaussian_routing(
    const Tensor children, const Tensor weight, const MaybeTensor bias, const MaybeTensor gate, const Tensor beta_a,
    const Tensor beta_b, const std::vector<double> schedule, int64_t model, double eps,
    const std::vector<int64_t> window);

using GaussianGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

GaussianGradients gaussian_pass_backward(const MaybeTensor grad_counts, const MaybeTensor grad_means,
                                         const MaybeTensor grad_variances, const MaybeTensor grad_evidence,
                                         const Tensor children, const Tensor weight, const MaybeTensor mean,
                                         const MaybeTensor variance, const MaybeTensor log_weight,
                                         const MaybeTensor bias, const MaybeTensor gate, const MaybeTensor beta_use,
                                         const MaybeTensor beta_ignore, const Tensor counts, const Tensor means,
                                         const Tensor variances, double eps, const std::vector<int64_t> window,
                                         int64_t needs);

// The same for several turns over the same votes at once: what belongs to parents has turns in its first dimension.
GaussianGradients gaussian_turns_backward(const MaybeTensor grad_counts, const MaybeTensor grad_means,
                                          const MaybeTensor grad_variances, const MaybeTensor grad_evidence,
                                          const Tensor children, const Tensor weight, const MaybeTensor mean,
                                          const MaybeTensor variance, const MaybeTensor log_weight,
                                          const MaybeTensor bias, const MaybeTensor gate, const MaybeTensor beta_use,
                                          const MaybeTensor beta_ignore, const Tensor counts, const Tensor means,
                                          const Tensor variances, double eps, const std::vector<int64_t> window,
                                          int64_t needs);

}  // namespace fastcaps
