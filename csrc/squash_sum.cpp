// The op squash_sum on the CPU: a weighted sum of squashed capsules in channels.
#include "squash_sum_op.h"

#include "cpu/levels.h"

namespace fastcaps {
namespace {

struct Cpu {
  struct Guard {
    explicit Guard(const Tensor&) {}
  };
  static Tensor make(const Tensor& beside, const Shape& shape) {
    return fresh(new_tensor(beside, shape, beside.scalar_type(), "a result"));
  }
  // Over all rows; a thread gets at least 8,192 values at a time.
  static void run(const SquashSum& call, bool backward) {
    STD_TORCH_CHECK(call.storage != Storage::kFloat16, "fastcaps: the CPU kernels take no float16");
    if (call.rows == 0 || call.positions == 0) return;
    const SquashSumKernels& kernels = table_of<SquashSumKernels>(level_in_use());
    const auto kernel = backward ? kernels.backward : kernels.forward;
    const int64_t grain = ceil_div(8192, call.dim * call.positions);
    torch::stable::parallel_for(0, call.rows, grain, [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  }
};
constexpr Op squash_sum = &squash_sum_op<Cpu>, squash_sum_backward = &squash_sum_backward_op<Cpu>;

}  // namespace

FASTCAPS_REGISTER(squash_sum)

}  // namespace fastcaps
