// The attention pass on a GPU as ops. They are those of fastcaps/ops.py with one more argument, bits of Options: what
// fastcaps/backends.py read off torch's settings when the call was made.
#pragma once

#include "../attention.h"

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

}  // namespace fastcaps::gpu
