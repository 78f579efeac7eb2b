// The ops of routings whose parents compete for every child: attention and dynamic routing.
#include "cpu/call.h"

namespace fastcaps {

std::vector<Tensor> attention_routing(Stack stack) {
  const AttentionRouting call{stack};
  const CpuCall cpu(call.votes);
  const Votes& votes = cpu.votes;
  call.check(votes);
  MaybeTensor norm_weight, norm_bias;
  ForwardCall<Attention> run{votes};
  run.total = call.iterations;
  run.with.scale = call.scale;
  run.with.eps = call.eps;
  run.with.rule = call.rule;
  run.with.query = cpu.view(call.query);
  run.with.norm_weight = cpu.table(call.norm_weight, norm_weight);
  run.with.norm_bias = cpu.table(call.norm_bias, norm_bias);
  const Tensor parents = cpu.stored_result("parents", poses_shape(votes), run.with.parents);
  const Tensor sums = cpu.result("sums", poses_shape(votes, call.iterations), run.with.sums);
  run_forward(cpu, run);
  return {parents, sums};
}

std::vector<Tensor> attention_routing_backward(Stack stack) {
  const AttentionBackward call{stack};
  const CpuCall cpu(call.votes);
  const Votes& votes = cpu.votes;
  const Shape shape = poses_shape(votes);
  const Turns turns = call.check(votes);
  const bool dquery = call.wants_query(), dnorm = call.wants_norm();

  BackwardCall<Attention> run{votes};
  Attention with;
  with.scale = call.scale;
  with.eps = call.eps;
  with.detach = call.needs & kDetach;
  MaybeTensor norm_weight;
  with.norm_weight = cpu.table(call.norm_weight, norm_weight);
  for (int64_t k = 0; k < turns.count; ++k) {
    run.with.push_back(with);
    run.with[k].grad = turns.view(call.grad, k);
    run.with[k].query = turns.view(call.query, k);
    run.with[k].given_sums = turns.view(call.sums, k);
  }
  run.schedule = schedule_of(run, dquery, cpu.bias ? cpu.bias->numel() : 0);
  const bool empty = votes.positions() == 0;
  const MaybeTensor query = cpu.maybe("dquery", dquery, shape, run.with[0].dquery, empty);
  const Partial norms = cpu.partial("dnorm", dnorm, run.schedule.rows(), {2, votes.parent_size()});
  for (Attention& turn : run.with) turn.dnorm = norms.parts;
  const Gradients found = run_backward(cpu, run, call.needs, dquery, empty);
  const MaybeTensor& both = norms.sum();
  const auto half = [&](int64_t bit, int64_t which) {
    void* data = nullptr;
    const MaybeTensor out = cpu.maybe("dnorm", dnorm && call.needs & bit, {votes.parent_size()}, data);
    const size_t bytes = out ? size_t(out->numel()) * out->element_size() : 0;
    if (out) std::memcpy(data, static_cast<const char*>(data_of(*both)) + which * bytes, bytes);
    return cpu.stored(out);
  };
  return {found.children,    found.weight,         found.bias,        found.gate,
          cpu.stored(query), half(kNormWeight, 0), half(kNormBias, 1)};
}

}  // namespace fastcaps
