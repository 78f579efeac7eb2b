// Identity votes of a matrix pose are those of a vector of as many numbers, where the children lie in memory like that.
#pragma once

#include "../arguments.h"

namespace fastcaps::gpu {

constexpr int64_t kFlat = 16;  // numbers: there are kernels for so long a vector

inline Tensor flat(const Tensor& x) {
  Shape shape = shape_of(x);
  if (shape.size() < 2) return x;  // which is an error that others will name
  const size_t last = shape.size() - 1;
  const bool dense = x.stride(int64_t(last) - 1) == shape[last] * x.stride(int64_t(last));
  shape[last] *= shape[last - 1];
  shape[last - 1] = 1;
  return torch::stable::view(dense ? x : as_dense(x), shape);
}
inline MaybeTensor flat(const MaybeTensor& x) { return x ? MaybeTensor(flat(*x)) : x; }

// Makes vectors of the poses of such votes, and of the query's; returns whether it did.
inline bool flatten(VoteTensors& votes, MaybeTensor& query) {
  const Tensor& x = votes.children;
  const int64_t rows = x.dim() - 2, columns = x.dim() - 1;
  if (votes.weight || (x.dim() != 4 && x.dim() != 6) || x.size(rows) == 1 || x.size(rows) * x.size(columns) != kFlat ||
      x.stride(rows) != x.size(columns) * x.stride(columns))
    return false;
  votes.children = flat(votes.children), votes.bias = flat(votes.bias), query = flat(query);
  return true;
}

// A result's poses in the shape of the children's; nothing stays nothing.
inline Tensor unflat(const Tensor& x, const Tensor& children) {
  Shape shape = shape_of(x);
  if (shape.size() < 2) return x;
  shape[shape.size() - 2] = children.size(children.dim() - 2);
  shape[shape.size() - 1] = children.size(children.dim() - 1);
  return torch::stable::view(x, shape);
}

}  // namespace fastcaps::gpu
