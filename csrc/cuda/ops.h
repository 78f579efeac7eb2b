// The passes on a GPU as ops. They are those of fastcaps/ops with one more argument, bits of Options: what
// fastcaps/dispatch.py read off torch's settings when the call was made.
#pragma once

#include "../attention.h"
#include "../gaussian.h"
#include "../pooling.h"

namespace fastcaps::gpu {

enum Options : int64_t { kDeterministic = 1, kTF32 = 2 };

std::tuple<Tensor, Tensor> attention_pass(const Tensor children, const Tensor weight, const MaybeTensor query,
                                          const MaybeTensor bias, const MaybeTensor gate, const MaybeTensor norm_weight,
                                          const MaybeTensor norm_bias, double scale, double eps, bool normalize,
                                          const std::vector<int64_t> window, int64_t options);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_pass_backward(
    const MaybeTensor grad_parents, const MaybeTensor grad_sums, const Tensor children, const Tensor weight,
    const MaybeTensor query, const MaybeTensor bias, const MaybeTensor gate, const MaybeTensor norm_weight,
    const Tensor sums, double scale, double eps, bool normalize, const std::vector<int64_t> window, int64_t needs,
    int64_t options);

std::tuple<Tensor, Tensor> pooling_pass(const Tensor children, const MaybeTensor weight, const MaybeTensor query,
                                        const MaybeTensor bias, const MaybeTensor gate, double scale, bool normalize,
                                        const std::vector<int64_t> window, int64_t options);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pooling_pass_backward(
    const MaybeTensor grad_parents, const MaybeTensor grad_logsumexp, const Tensor children, const MaybeTensor weight,
    const MaybeTensor query, const MaybeTensor bias, const MaybeTensor gate, const Tensor parents,
    const Tensor logsumexp, double scale, bool normalize, const std::vector<int64_t> window, int64_t needs,
    int64_t options);

std::tuple<Tensor, Tensor, Tensor, Tensor> gaussian_pass(const Tensor children, const Tensor weight,
                                                         const MaybeTensor mean, const MaybeTensor variance,
                                                         const MaybeTensor log_weight, const MaybeTensor bias,
                                                         const MaybeTensor gate, const MaybeTensor beta_use,
                                                         const MaybeTensor beta_ignore, double eps,
                                                         const std::vector<int64_t> window, int64_t options);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gaussian_pass_backward(
    const MaybeTensor grad_counts, const MaybeTensor grad_means, const MaybeTensor grad_variances,
    const MaybeTensor grad_evidence, const Tensor children, const Tensor weight, const MaybeTensor mean,
    const MaybeTensor variance, const MaybeTensor log_weight, const MaybeTensor bias, const MaybeTensor gate,
    const MaybeTensor beta_use, const MaybeTensor beta_ignore, const Tensor counts, const Tensor means,
    const Tensor variances, double eps, const std::vector<int64_t> window, int64_t needs, int64_t options);

// Whole routings, all turns in one launch: errors where routing_refusal (cut.h) says that they should not be.
std::tuple<Tensor, Tensor> attention_routing(const Tensor children, const Tensor weight, const MaybeTensor query,
                                             const MaybeTensor bias, const MaybeTensor gate,
                                             const MaybeTensor norm_weight, const MaybeTensor norm_bias, double scale,
                                             double eps, bool normalize, int64_t rule, int64_t iterations, bool frozen,
                                             const std::vector<int64_t> window, int64_t options);

std::tuple<Tensor, Tensor, Tensor> pooling_routing(const Tensor children, const MaybeTensor weight,
                                                   const MaybeTensor bias, const MaybeTensor gate, double scale,
                                                   bool normalize, int64_t parents, int64_t rule, int64_t iterations,
                                                   bool frozen, const std::vector<int64_t> window, int64_t options);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gaussian_routing(
    const Tensor children, const Tensor weight, const MaybeTensor bias, const MaybeTensor gate, const Tensor beta_a,
    const Tensor beta_b, const std::vector<double> schedule, int64_t model, double eps,
    const std::vector<int64_t> window, int64_t options);

}  // namespace fastcaps::gpu
