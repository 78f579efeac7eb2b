// The op squash_sum of both libraries (fastcaps/encapnet/op.py): capsules in channels, without votes. A Library creates
// tensors and runs kernels: Guard, make(beside, shape), run(call, backward).
#pragma once

#include "arguments.h"
#include "squash_sum.h"

namespace fastcaps {

// Copies tensors that are not dense.
struct SquashSumArguments {
  Stack& from;
  Tensor x = from.tensor();
  MaybeTensor a = from.maybe(), y = from.maybe(), b = from.maybe();
  int64_t types = from.number();
  bool relu = from.flag();

  SquashSum check() {
    STD_TORCH_CHECK(x.dim() == 4, "fastcaps: x must be [B, types * dim, H, W], got ", text(shape_of(x)));
    STD_TORCH_CHECK(types >= 1 && x.size(1) >= types && x.size(1) % types == 0, "fastcaps: x has ", x.size(1),
                    " channels, which are not those of ", types, " types");
    STD_TORCH_CHECK(y || !b, "fastcaps: b must be None without y");
    SquashSum call{};
    call.storage = storage_of(x);
    call.rows = x.size(0) * types, call.dim = x.size(1) / types, call.positions = x.size(2) * x.size(3);
    call.relu = relu;
    call.count = y ? 2 : 1;
    const Shape numbers = {x.size(0), types, x.size(2), x.size(3)}, shape = shape_of(x);
    call.parts[0] = {dense(x, "x", shape), dense(a, "a", numbers)};
    call.parts[1] = {dense(y, "y", shape), dense(b, "b", numbers)};
    return call;
  }
  void* dense(Tensor& tensor, const char* name, const Shape& shape) const {
    check_tensor(tensor, name, shape, x.scalar_type(), x);
    tensor = as_dense(tensor);
    return data_of(tensor);
  }
  void* dense(MaybeTensor& tensor, const char* name, const Shape& shape) const {
    return tensor ? dense(*tensor, name, shape) : nullptr;
  }
};

template <class Library>
std::vector<Tensor> squash_sum_op(Stack stack) {
  SquashSumArguments op{stack};
  SquashSum call = op.check();
  const typename Library::Guard guard(op.x);
  const Tensor out = Library::make(op.x, shape_of(op.x));
  call.out = data_of(out);
  Library::run(call, false);
  return {out};
}

// Returns the gradients of x, a, y and b, empty if not needed. The bits of `needs` have the same order.
template <class Library>
std::vector<Tensor> squash_sum_backward_op(Stack stack) {
  Tensor grad = stack.tensor();
  SquashSumArguments op{stack};
  const int64_t needs = stack.number();
  SquashSum call = op.check();
  call.grad = op.dense(grad, "grad", shape_of(op.x));
  const typename Library::Guard guard(grad);
  const MaybeTensor inputs[] = {op.x, op.a, op.y, op.b};
  void** places[] = {&call.parts[0].dcapsules, &call.parts[0].dcoefficient, &call.parts[1].dcapsules,
                     &call.parts[1].dcoefficient};
  std::vector<Tensor> gradients;
  for (int k = 0; k < 4; ++k) {
    const bool wanted = needs >> k & 1 && inputs[k];
    gradients.push_back(Library::make(grad, wanted ? shape_of(*inputs[k]) : Shape{0}));
    if (wanted) *places[k] = data_of(gradients.back());
  }
  Library::run(call, true);
  return gradients;
}

}  // namespace fastcaps
