// The ops of routings whose children compete: check, schedule, allocate, launch.
#include "ends.h"

namespace fastcaps::gpu {
namespace {

std::vector<Tensor> pooling_routing(Stack stack) {
  const PoolingRouting op{stack};
  const Tensor& children = op.votes.children;
  const DeviceGuard guard(children);
  Call call("pooling", op.votes, op.options);
  op.check(call.given_votes);
  PassArgs& args = call.args;
  const MaybeTensor query = call.posed(op.query);
  args.query = call.view(query);
  args.scale = float(op.scale), args.normalize = op.normalize, args.rule = op.rule;
  const Schedule c = call.schedule_forward(op.iterations);
  const Tensor result = new_tensor(children, call.poses(), call.storage, "parents");
  const Tensor sums = new_tensor(children, call.poses(op.iterations), call.storage, "sums");
  const Tensor logsumexp = call.empty(call.numbers(op.iterations));
  const std::vector<Tensor> results{result, sums, logsumexp};
  if (call.votes.positions() == 0) return results;
  call.take(c);
  if (c.chunks == 1) {
    args.iterations = int(op.iterations);
    args.history = data_of(sums), args.logsumexp = floats(logsumexp), args.result = data_of(result);
    call.launch(c, 0, c.parent_blocks);
    return results;
  }
  const Tensor parts = call.empty(call.parts(c, true)), logsumexps = call.empty(call.parts(c, false));
  args.sums = floats(parts), args.logsumexp = floats(logsumexps);
  call.launch(c, 0, c.parent_blocks);
  EndArgs end = end_args(call, c.chunks);
  end.parts = floats(parts), end.logsumexps = floats(logsumexps);
  end.stored = data_of(sums), end.logsumexp = floats(logsumexp), end.parents = data_of(result);
  finish(end);
  return results;
}

std::vector<Tensor> pooling_routing_backward(Stack stack) {
  const PoolingBackward op{stack};
  const DeviceGuard guard(op.votes.children);
  Call call("pooling", op.votes, op.options);
  const Votes& v = call.votes;
  const Iterations iterations = op.check(call.given_votes);
  const MaybeTensor grad = call.posed(op.grad), query = call.posed(op.query);
  const bool wants_query = op.wants_query(), empty = v.positions() == 0;

  PassArgs& args = call.args;
  args.scale = float(op.scale), args.normalize = op.normalize, args.detach = op.needs & kDetach;
  VoteGradients gradients(call, op.needs);
  if (args.detach) args.dgate = nullptr;  // and stays 0
  EndArgs end = end_args(call);
  const Tensor dquery = !wants_query ? gradients.none() : call.empty(call.parts(gradients.schedule, true));
  const Tensor dsums = call.empty({v.positions() * v.parents_size()}), dconstant = call.empty({end.count});
  args.dsums = end.dsums = floats(dsums), args.dconstant = end.dconstant = floats(dconstant),
  args.dquery = floats(dquery);
  for (int64_t k = 0; k < iterations.count && !empty; ++k) {
    const Tensor stored = as_dense(*iterations.at(op.sums, k)), shift = as_dense(*iterations.at(op.logsumexp, k));
    args.query = iterations.view(query, k);
    args.logsumexp = floats(shift);
    end.grad = PosesView(iterations.view(grad, k), args.C, args.E), end.stored = data_of(stored);
    prepare(end);
    gradients.run(0);
  }
  return {gradients.children(), gradients.weight(), gradients.bias(), gradients.gate(),
          gradients.finished(wants_query, wants_query ? over(dquery, 0) : dquery, call.poses())};
}

}  // namespace

FASTCAPS_REGISTER(pooling_routing)

}  // namespace fastcaps::gpu
