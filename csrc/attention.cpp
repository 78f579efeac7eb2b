// The ops of routings whose parents compete for every child: attention and dynamic routing.
#include "cpu/call.h"

namespace fastcaps {
namespace {

std::vector<Tensor> attention_routing(Stack stack) {
  const AttentionRouting call{stack};
  CpuCall cpu(call.votes);
  call.check(cpu.votes);
  ForwardCall<Attention> run{cpu.votes};
  run.total = call.iterations;
  run.with.scale = call.scale;
  run.with.eps = call.eps;
  run.with.rule = call.rule;
  run.with.query = cpu.view(call.query);
  run.with.norm_weight = cpu.table(call.norm_weight);
  run.with.norm_bias = cpu.table(call.norm_bias);
  const Tensor parents = cpu.stored_result("parents", cpu.poses(), run.with.parents);
  const Tensor sums = cpu.result("sums", cpu.poses(call.iterations), run.with.sums);
  run_forward(cpu, run);
  return {parents, sums};
}

std::vector<Tensor> attention_routing_backward(Stack stack) {
  const AttentionBackward call{stack};
  CpuCall cpu(call.votes);
  const Votes& votes = cpu.votes;
  const Iterations iterations = call.check(votes);
  const bool dquery = call.wants_query(), dnorm = call.wants_norm();

  BackwardCall<Attention> run{votes};
  Attention with;
  with.scale = call.scale;
  with.eps = call.eps;
  with.detach = call.needs & kDetach;
  with.norm_weight = cpu.table(call.norm_weight);
  for (int64_t k = 0; k < iterations.count; ++k) {
    with.grad = iterations.view(call.grad, k);
    with.query = iterations.view(call.query, k);
    with.given_sums = iterations.view(call.sums, k);
    run.with.push_back(with);
  }
  run.schedule = schedule_of(run, dquery, cpu.bias_numbers());
  const bool empty = votes.positions() == 0;
  const MaybeTensor query = cpu.maybe("dquery", dquery, cpu.poses(), run.with[0].dquery, empty);
  const Partial norms = cpu.partial("dnorm", dnorm, run.schedule.rows(), {2, votes.parent_size()});
  for (Attention& one : run.with) one.dnorm = norms.parts;
  const Gradients found = run_backward(cpu, run, call.needs, dquery, empty);
  const MaybeTensor& both = norms.sum();
  const auto half = [&](int64_t bit, int64_t which) {
    return dnorm && call.needs & bit ? cpu.stored(cpu.entry(*both, which)) : cpu.stored({});
  };
  return {found.children,    found.weight,         found.bias,        found.gate,
          cpu.stored(query), half(kNormWeight, 0), half(kNormBias, 1)};
}

}  // namespace

FASTCAPS_REGISTER(attention_routing)

}  // namespace fastcaps
