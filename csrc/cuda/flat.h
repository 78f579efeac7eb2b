// Identity votes of a matrix pose are those of a vector of as many numbers, where the children lie in memory like that.
#pragma once

#include "../tensors.h"

namespace fastcaps::gpu {

constexpr int64_t kFlat = 16;  // numbers: there are kernels for so long a vector

inline bool flattens(const Tensor& children, const MaybeTensor& weight) {
  return !weight && children.dim() == 6 && children.size(4) > 1 && children.size(4) * children.size(5) == kFlat &&
         children.stride(4) == children.size(5) * children.stride(5);
}

inline Tensor flat(const Tensor& x) {
  std::vector<int64_t> shape = shape_of(x);
  if (shape.size() < 2) return x;  // which is an error that others will name
  const size_t last = shape.size() - 1;
  const bool dense = x.stride(int64_t(last) - 1) == shape[last] * x.stride(int64_t(last));
  shape[last] *= shape[last - 1];
  shape[last - 1] = 1;
  return torch::stable::view(dense ? x : torch::stable::contiguous(x), shape);
}
inline MaybeTensor flat(const MaybeTensor& x) { return x ? MaybeTensor(flat(*x)) : x; }

// A result's poses in the shape of the children's; nothing stays nothing.
inline Tensor unflat(const Tensor& x, const Tensor& children) {
  std::vector<int64_t> shape = shape_of(x);
  if (shape.size() < 2) return x;
  shape[shape.size() - 2] = children.size(4), shape[shape.size() - 1] = children.size(5);
  return torch::stable::view(x, shape);
}

}  // namespace fastcaps::gpu
