// The ops of routings whose children compete for every parent: vector-normed pooling, dynamic routing over children.
#include "calls.h"
#include "ops.h"

namespace fastcaps {

std::vector<Tensor> pooling_routing(Stack stack) {
  const PoolingRouting call{stack};
  const Given given(call.votes);
  const Votes& votes = given.votes;
  STD_TORCH_CHECK(call.rule == Rule::kUnit || call.rule == Rule::kSquash,
                  "fastcaps: rule must be 2 (squash) or 3 (unit), got ", int(call.rule));
  STD_TORCH_CHECK(call.iterations >= 1, "fastcaps: iterations must be at least 1, got ", call.iterations);
  ForwardCall<Pooling> run{votes};
  run.total = call.iterations;
  run.with.scale = call.scale;
  run.with.normalize = call.normalize;
  run.with.rule = call.rule;
  run.with.query = given.view(call.query, "query", poses_shape(votes), given.storage);
  const Tensor parents = given.stored_result(poses_shape(votes), run.with.parents);
  const Tensor sums = given.stored_result(poses_shape(votes, call.iterations), run.with.sums);
  const Tensor logsumexp = given.result(numbers_shape(votes, call.iterations), run.with.logsumexp);
  run_forward(given, run);
  return {parents, sums, logsumexp};
}

std::vector<Tensor> pooling_routing_backward(Stack stack) {
  const PoolingBackward call{stack};
  const Given given(call.votes);
  const Votes& votes = given.votes;
  const Shape shape = poses_shape(votes);
  const Turns turns(call.votes, call.grad.dim() > 0 ? call.grad.size(0) : 0);
  turns.check(call.grad, "grad", shape, given.storage);
  turns.check(call.query, "query", shape, given.storage, false);
  turns.check(call.sums, "sums", shape, given.storage);
  turns.check(call.logsumexp, "logsumexp", numbers_shape(votes), given.compute);
  const bool dquery = call.needs & kQuery && call.query;
  STD_TORCH_CHECK(!dquery || turns.count == 1, "fastcaps: a query has a gradient in a single turn alone");

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
  run.schedule = schedule_of(run, given.is_double, dquery, given.bias ? given.bias->numel() : 0);
  const bool empty = votes.positions() == 0;
  const MaybeTensor query = given.maybe(dquery, shape, run.with[0].dquery, empty);
  const Gradients found = run_backward(given, run, call.needs, dquery, empty);
  return {found.children, found.weight, found.bias, found.gate, given.stored(query)};
}

}  // namespace fastcaps
