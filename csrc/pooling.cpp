// The ops of routings whose children compete for every parent: vector-normed pooling, dynamic routing over children.
#include "cpu/call.h"

namespace fastcaps {
namespace {

std::vector<Tensor> pooling_routing(Stack stack) {
  const PoolingRouting call{stack};
  CpuCall cpu(call.votes);
  call.check(cpu.votes);
  ForwardCall<Pooling> run{cpu.votes};
  run.total = call.iterations;
  run.with.scale = call.scale;
  run.with.normalize = call.normalize;
  run.with.rule = call.rule;
  run.with.query = cpu.view(call.query);
  const Tensor parents = cpu.stored_result("parents", cpu.poses(), run.with.parents);
  const Tensor sums = cpu.stored_result("sums", cpu.poses(call.iterations), run.with.sums);
  const Tensor logsumexp = cpu.result("logsumexp", cpu.numbers(call.iterations), run.with.logsumexp);
  run_forward(cpu, run);
  return {parents, sums, logsumexp};
}

std::vector<Tensor> pooling_routing_backward(Stack stack) {
  const PoolingBackward call{stack};
  CpuCall cpu(call.votes);
  const Votes& votes = cpu.votes;
  const Iterations iterations = call.check(votes);
  const bool dquery = call.wants_query();

  BackwardCall<Pooling> run{votes};
  Pooling with;
  with.scale = call.scale;
  with.normalize = call.normalize;
  with.detach = call.needs & kDetach;
  for (int64_t k = 0; k < iterations.count; ++k) {
    with.grad = iterations.view(call.grad, k);
    with.given_sums = iterations.view(call.sums, k);
    with.given_logsumexp = iterations.view(call.logsumexp, k);
    with.query = iterations.view(call.query, k);
    run.with.push_back(with);
  }
  run.schedule = schedule_of(run, dquery, cpu.bias_numbers());
  const bool empty = votes.positions() == 0;
  const MaybeTensor query = cpu.maybe("dquery", dquery, cpu.poses(), run.with[0].dquery, empty);
  const Gradients found = run_backward(cpu, run, call.needs, dquery, empty);
  return {found.children, found.weight, found.bias, found.gate, cpu.stored(query)};
}

}  // namespace

FASTCAPS_REGISTER(pooling_routing)

}  // namespace fastcaps
