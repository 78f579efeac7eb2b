// The op that squashes capsules in channels, weighs them and adds, on the CPU. Schema: fastcaps/ops/squash_sum.py.
#include <cstring>

#include "arguments.h"
#include "cpu/capability.h"
#include "cpu/squash_sum.h"

namespace fastcaps {

extern const SquashSumKernels squash_sum_kernels_default;
#if defined(FASTCAPS_BUILT_AVX512)
extern const SquashSumKernels squash_sum_kernels_avx2, squash_sum_kernels_avx512;
#endif

namespace {

const SquashSumKernels& kernels() {
#if defined(FASTCAPS_BUILT_AVX512)
  const char* level = fastcaps_capability();
  if (level != nullptr && std::strcmp(level, "avx512") == 0) return squash_sum_kernels_avx512;
  if (level != nullptr && std::strcmp(level, "avx2") == 0) return squash_sum_kernels_avx2;
#endif
  return squash_sum_kernels_default;
}

// Arguments as the schema has them, checked and dense; members are read off the stack in their order.
struct Arguments {
  Stack& from;
  Tensor x = from.tensor();
  MaybeTensor a = from.maybe(), y = from.maybe(), b = from.maybe();
  int64_t types = from.number();
  bool relu = from.flag();

  SquashSum call() {
    STD_TORCH_CHECK(x.dim() == 4, "fastcaps: x must be [B, types * dim, H, W], got ", text(shape_of(x)));
    STD_TORCH_CHECK(types >= 1 && x.size(1) >= types && x.size(1) % types == 0, "fastcaps: x has ", x.size(1),
                    " channels, which are not those of ", types, " types");
    STD_TORCH_CHECK(x.is_cpu(), "fastcaps: x must be on the CPU");
    STD_TORCH_CHECK(y || !b, "fastcaps: b must be None without y");
    SquashSum call{};
    call.storage = storage_of(x);
    STD_TORCH_CHECK(call.storage != Storage::kFloat16, "fastcaps: the CPU kernels take no float16");
    call.rows = x.size(0) * types, call.dim = x.size(1) / types, call.positions = x.size(2) * x.size(3);
    call.relu = relu;
    call.count = y ? 2 : 1;
    const Shape numbers = {x.size(0), types, x.size(2), x.size(3)};
    const auto dense = [&](MaybeTensor& tensor, const char* name, const Shape& shape) -> const void* {
      if (!tensor) return nullptr;
      check_tensor(*tensor, name, shape, x.scalar_type(), x);
      tensor = in_compute_type(*tensor, x.scalar_type());
      return data_of(*tensor);
    };
    const Shape shape = shape_of(x);
    x = in_compute_type(x, x.scalar_type());
    call.parts[0] = {data_of(x), dense(a, "a", numbers)};
    call.parts[1] = {dense(y, "y", shape), dense(b, "b", numbers)};
    return call;
  }
};

// A thread gets rows of some 8,192 numbers at least.
template <class Kernel>
void run(const SquashSum& call, Kernel kernel) {
  if (call.rows == 0 || call.positions == 0) return;
  const int64_t grain = ceil_div(8192, call.dim * call.positions);
  torch::stable::parallel_for(0, call.rows, grain, [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
}

std::vector<Tensor> squash_sum(Stack stack) {
  Arguments given{stack};
  SquashSum call = given.call();
  const Tensor out = fresh(new_tensor(given.x, shape_of(given.x), given.x.scalar_type()));
  call.out = data_of(out);
  run(call, kernels().forward);
  return {out};
}

std::vector<Tensor> squash_sum_backward(Stack stack) {
  Tensor grad = stack.tensor();
  Arguments given{stack};
  const int64_t needs = stack.number();
  SquashSum call = given.call();
  check_tensor(grad, "grad", shape_of(given.x), given.x.scalar_type(), given.x);
  grad = in_compute_type(grad, grad.scalar_type());
  call.grad = data_of(grad);
  const MaybeTensor inputs[] = {given.x, given.a, given.y, given.b};
  void** places[] = {&call.parts[0].dcapsules, &call.parts[0].dcoefficient, &call.parts[1].dcapsules,
                     &call.parts[1].dcoefficient};
  std::vector<Tensor> gradients;
  for (int k = 0; k < 4; ++k) {
    const bool wanted = needs >> k & 1 && inputs[k];
    gradients.push_back(fresh(new_tensor(grad, wanted ? shape_of(*inputs[k]) : Shape{0}, grad.scalar_type())));
    if (wanted) *places[k] = data_of(gradients.back());
  }
  run(call, kernels().backward);
  return gradients;
}

}  // namespace
}  // namespace fastcaps

STABLE_TORCH_LIBRARY_IMPL(fastcaps_cpu, CPU, m) {
  m.impl("squash_sum", &fastcaps::boxed<fastcaps::squash_sum>);
  m.impl("squash_sum_backward", &fastcaps::boxed<fastcaps::squash_sum_backward>);
}
