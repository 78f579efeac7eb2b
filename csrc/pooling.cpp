// The ops of routings whose children compete for every parent: vector-normed pooling, dynamic routing over children.
#include "cpu/call.h"

namespace fastcaps {

std::vector<Tensor> pooling_routing(Stack stack) {
  const PoolingRouting call{stack};
  const CpuCall cpu(call.votes);
  const Votes& votes = cpu.votes;
  call.check(votes);
  ForwardCall<Pooling> run{votes};
  run.total = call.iterations;
  run.with.scale = call.scale;
  run.with.normalize = call.normalize;
  run.with.rule = call.rule;
  run.with.query = cpu.view(call.query);
  const Tensor parents = cpu.stored_result("parents", poses_shape(votes), run.with.parents);
  const Tensor sums = cpu.stored_result("sums", poses_shape(votes, call.iterations), run.with.sums);
  const Tensor logsumexp = cpu.result("logsumexp", numbers_shape(votes, call.iterations), run.with.logsumexp);
  run_forward(cpu, run);
  return {parents, sums, logsumexp};
}

std::vector<Tensor> pooling_routing_backward(Stack stack) {
  const PoolingBackward call{stack};
  const CpuCall cpu(call.votes);
  const Votes& votes = cpu.votes;
  const Shape shape = poses_shape(votes);
  const Turns turns = call.check(votes);
  const bool dquery = call.wants_query();

  BackwardCall<Pooling> run{votes};
  for (int64_t k = 0; k < turns.count; ++k) {
    Pooling with;
    with.scale = call.scale;
    with.normalize = call.normalize;
    with.detach = call.needs & kDetach;
    with.grad = turns.view(call.grad, k);
    with.given_sums = turns.view(call.sums, k);
    with.given_logsumexp = turns.view(call.logsumexp, k);
    with.query = turns.view(call.query, k);
    run.with.push_back(with);
  }
  run.schedule = schedule_of(run, dquery, cpu.bias ? cpu.bias->numel() : 0);
  const bool empty = votes.positions() == 0;
  const MaybeTensor query = cpu.maybe("dquery", dquery, shape, run.with[0].dquery, empty);
  const Gradients found = run_backward(cpu, run, call.needs, dquery, empty);
  return {found.children, found.weight, found.bias, found.gate, cpu.stored(query)};
}

}  // namespace fastcaps
