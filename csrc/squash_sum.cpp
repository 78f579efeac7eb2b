// The op that squashes capsules in channels, weighs them and adds, on the CPU. Schema: fastcaps/ops/squash_sum.py.
#include "cpu/squash_sum.h"

#include "arguments.h"

namespace fastcaps {
namespace {

Tensor result(const Tensor& beside, const Shape& shape) {
  return fresh(new_tensor(beside, shape, beside.scalar_type(), "a result"));
}

// Runs a kernel over all rows; a thread gets rows of 8,192 numbers or more at a time.
template <class Kernel>
void run(const SquashSum& call, Kernel kernel) {
  STD_TORCH_CHECK(call.storage != Storage::kFloat16, "fastcaps: the CPU kernels take no float16");
  if (call.rows == 0 || call.positions == 0) return;
  const int64_t grain = ceil_div(8192, call.dim * call.positions);
  torch::stable::parallel_for(0, call.rows, grain, [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
}

}  // namespace

std::vector<Tensor> squash_sum(Stack stack) {
  SquashSumArguments op{stack};
  SquashSum call = op.check();
  const Tensor out = result(op.x, shape_of(op.x));
  call.out = data_of(out);
  run(call, squash_sum_kernels().forward);
  return {out};
}

std::vector<Tensor> squash_sum_backward(Stack stack) {
  SquashSumBackward op{stack};
  SquashSum call = op.check();
  std::vector<Tensor> gradients = op.gradients(call, [&](const Shape& shape) { return result(op.grad, shape); });
  run(call, squash_sum_kernels().backward);
  return gradients;
}

}  // namespace fastcaps
