// The CUDA schedule over the true tables of kernels, but with none of the kernels: their lists are compiled here with
// another function in the place of those that would instantiate them.
#define FASTCAPS_CUDA_ON_CPU
#define FASTCAPS_EXPERIMENTS
#include "cuda/schedule.h"

#include "cuda/backward.h"
#include "cuda/forward.h"
#include "native.h"

namespace fastcaps::gpu {

template <bool LEAN>
void no_kernel(const PassArgs) {}

template <template <class, int, bool> class Policy, bool HAS_LEAN, class... B>
PassKernels forward_listed() {
  static const PassKernel all[] = {B::kernel(&no_kernel<false>, &no_kernel<(HAS_LEAN && B::Pose::kFixed)>)...};
  return {all, sizeof...(B)};
}
template <template <class, int, bool> class Policy, class... B>
PassKernels backward_listed() {
  static const PassKernel all[] = {
      B::kernel(&no_kernel<false>, &no_kernel<Policy<typename B::Pose, B::kPositions, true>::kLean>)...};
  return {all, sizeof...(B)};
}

}  // namespace fastcaps::gpu

#define forward_kernels forward_listed
#define backward_kernels backward_listed
#include "cuda/attention_backward.cu"
#include "cuda/attention_forward.cu"
#include "cuda/gaussian_backward.cu"
#include "cuda/gaussian_forward.cu"
#include "cuda/pooling_backward.cu"
#include "cuda/pooling_forward.cu"
#include "cuda/schedule.cu"

namespace fastcaps::native {
namespace {

struct Asked {
  Votes votes;
  gpu::Task task;
  gpu::Machine machine;
  gpu::Bias bias;

  Asked(const std::string& op, const Numbers& sizes, const Fields& facts)
      : votes(votes_of(sizes.data(), Storage(facts.at("storage")))),
        task{.pass = gpu::pass_of(op),
             .backward = facts.at("backward") != 0,
             .products = int(facts.at("products")),
             .ordered = facts.at("ordered") != 0,
             .identity = sizes[10] == 0,
             .whole = facts.at("whole") != 0},
        machine{facts.at("multiprocessors"), facts.at("shared_limit")} {
    if (task.backward && facts.at("bias")) bias = gpu::Bias::of(votes, facts.at("bias") == 1);
  }
};

}  // namespace

Fields cuda_schedule(const std::string& op, const Numbers& sizes, const Fields& facts) {
  const Asked asked(op, sizes, facts);
  const gpu::Schedule c = gpu::make_schedule(asked.task, asked.votes, asked.bias, asked.machine);
  if (!c.kernel) return {};
  return {{"kernel", c.kernel - asked.task.pass->kernels(asked.task.backward).begin},
          {"columns", c.columns},
          {"rows", c.rows},
          {"parents", c.parents},
          {"warps_parents", c.warps_parents},
          {"warps_positions", c.warps_positions},
          {"tile_size", c.tile_size},
          {"tiles", c.tiles},
          {"groups", c.groups},
          {"stage", c.stage},
          {"stages", c.stages},
          {"late_weights", c.late_weights},
          {"chunks", c.chunks},
          {"chunk_children", c.chunk_children},
          {"parts_by_chunk", c.parts_by_chunk},
          {"parent_blocks", c.parent_blocks},
          {"threads", c.threads()},
          {"carveout", c.carveout},
          {"bias_numbers", asked.bias.numbers},
          {"shared_bytes", c.shared_bytes},
          {"shared_weight", c.shared_weight},
          {"shared_seen", c.shared_seen},
          {"shared_stage", c.shared_stage},
          {"shared_float", c.shared_float},
          {"float_stage", c.float_stage},
          {"shared_dchildren", c.shared_dchildren},
          {"shared_dweight", c.shared_dweight},
          {"shared_dgate", c.shared_dgate},
          {"shared_tile", c.shared_tile},
          {"shared_offset", c.shared_offset},
          {"shared_exchange", c.shared_exchange},
          {"shared_turn", c.shared_turn}};
}

std::vector<Fields> cuda_kernels(const std::string& op, bool backward) {
  const gpu::PassKernels table = gpu::pass_of(op)->kernels(backward);
  std::vector<Fields> all;
  for (int k = 0; k < table.count; ++k) {
    const gpu::PassKernel& one = table.begin[k];
    all.push_back({{"C", one.C},
                   {"D", one.D},
                   {"E", one.E},
                   {"patch_rows", one.patch_rows},
                   {"patch_columns", one.patch_columns},
                   {"columns", one.columns},
                   {"parents", one.parents},
                   {"each", one.each},
                   {"products", one.products},
                   {"stored", one.stored},
                   {"vector", one.vector},
                   {"child_stride", one.child_stride},
                   {"weight_stride", one.weight_stride},
                   {"group_stride", one.group_stride},
                   {"slot_stride", one.slot_stride},
                   {"positions", one.positions},
                   {"threads", one.threads},
                   {"blocks", one.blocks},
                   {"by_name", one.by_name},
                   {"lean", one.run != one.run_lean}});
  }
  return all;
}

std::string cuda_refusal(const std::string& op, int64_t C, int64_t D, int64_t E, bool identity) {
  return gpu::refusal(*gpu::pass_of(op), C, D, E, identity);
}

std::string cuda_routing_refusal(const std::string& op, const Numbers& sizes, const Fields& facts) {
  const Asked asked(op, sizes, facts);
  return gpu::routing_refusal(asked.task, asked.votes, asked.machine);
}

// Why a schedule cannot be as FASTCAPS_SCHEDULE wants it; empty if it can.
std::string cuda_experiment_refusal(const std::string& op, const Numbers& sizes, const Fields& facts) {
  const Asked asked(op, sizes, facts);
  std::string why_not;
  gpu::make_schedule(asked.task, asked.votes, asked.bias, asked.machine, &why_not);
  return why_not;
}

std::vector<std::string> cuda_instances(const std::string& op, bool backward) {
  const gpu::PassKernels table = gpu::pass_of(op)->kernels(backward);
  std::vector<std::string> names;
  for (int k = 0; k < table.count; ++k) names.push_back(gpu::name_of_instance(table.begin[k]));
  return names;
}

bool cuda_countable(const Numbers& sizes) { return gpu::fits_30_bits(votes_of(sizes.data(), Storage::kFloat32)); }

Numbers divided(int64_t number, int64_t divisor) {
  const gpu::Divider by(divisor);
  const int quotient = by.quotient(int(number));
  return {quotient, by.remainder(int(number), quotient)};
}

}  // namespace fastcaps::native
