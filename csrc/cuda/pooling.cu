// The ops of routings whose children compete: check, schedule, allocate, launch.
#include "pooling_forward.h"

#include "ends.h"
#include "flat.h"

namespace fastcaps::gpu {
namespace {

std::vector<Tensor> pooling_routing(Stack stack) {
  PoolingRouting op{stack};
  const Tensor as_given = op.votes.children;
  const bool flattened = flatten(op.votes, op.query);
  const Tensor& children = op.votes.children;
  const DeviceGuard guard(children);
  Call call(Pass::kPooling, op.votes, op.options);
  const Votes& v = call.votes;
  op.check(v);
  PassArgs& a = call.args;
  if (op.query) a.query = view_of(*op.query, v.is_set);
  a.scale = float(op.scale), a.normalize = op.normalize, a.rule = op.rule;
  const Schedule c = call.schedule_forward(op.iterations);
  const Tensor result = new_tensor(children, call.poses(), children.scalar_type(), "parents");
  const Tensor sums = new_tensor(children, call.poses(op.iterations), children.scalar_type(), "sums");
  const Tensor logsumexp = call.empty(call.numbers(op.iterations));
  const auto results = [&]() -> std::vector<Tensor> {
    if (!flattened) return {result, sums, logsumexp};
    return {unflat(result, as_given), unflat(sums, as_given), logsumexp};
  };
  if (v.positions() == 0) return results();
  call.take(c);
  if (c.chunks == 1) {
    a.turns = int(op.iterations);
    a.history = data_of(sums), a.logsumexp = floats(logsumexp), a.result = data_of(result);
    call.launch(c, 0, c.parent_blocks);
    return results();
  }
  const Tensor parts = call.empty(call.parts(c, true)), logsumexps = call.empty(call.parts(c, false));
  a.sums = floats(parts), a.logsumexp = floats(logsumexps);
  call.launch(c, 0, c.parent_blocks);
  EndArgs end = end_args(call);
  end.parts = floats(parts), end.logsumexps = floats(logsumexps), end.chunks = c.chunks;
  end.stored = data_of(sums), end.logsumexp = floats(logsumexp), end.parents = data_of(result);
  launch_end(&finish_kernel<4>, &finish_kernel<16>, end, end_blocks(end, 1 << 20), 0);
  return results();
}

std::vector<Tensor> pooling_routing_backward(Stack stack) {
  PoolingBackward op{stack};
  const Tensor as_given = op.votes.children;
  const bool flattened = flatten(op.votes, op.query);
  if (flattened) op.grad = flat(op.grad), op.sums = flat(op.sums);
  const Tensor& children = op.votes.children;
  const DeviceGuard guard(children);
  Call call(Pass::kPooling, op.votes, op.options);
  const Votes& v = call.votes;
  const Turns turns = op.check(v);
  const bool wants_query = op.wants_query(), empty = v.positions() == 0;

  PassArgs& a = call.args;
  a.scale = float(op.scale), a.normalize = op.normalize, a.detach = op.needs & kDetach;
  VoteGradients gradients(call, op.votes, op.needs);
  if (a.detach) a.dgate = nullptr;  // and stays 0
  EndArgs end = end_args(call);
  const Tensor dquery = !wants_query ? gradients.none() : call.empty(call.parts(gradients.schedule, true));
  const Tensor dsums = call.empty({v.positions() * v.parents_size()}), dconstant = call.empty({end.count});
  a.dsums = end.dsums = floats(dsums), a.dconstant = end.dconstant = floats(dconstant), a.dquery = floats(dquery);
  for (int64_t turn = 0; turn < turns.count && !empty; ++turn) {
    const Tensor stored = as_dense(*turns.at(op.sums, turn));
    const Tensor shift = as_dense(*turns.at(op.logsumexp, turn));
    a.query = turns.view(op.query, turn);
    a.logsumexp = floats(shift);
    end.grad = turns.view(op.grad, turn), end.stored = data_of(stored);
    launch_end(&prepare_kernel<4>, &prepare_kernel<16>, end, end_blocks(end, 1 << 20), 0);
    gradients.run(0);
  }
  const auto posed = [&](const Tensor& x) { return flattened ? unflat(x, as_given) : x; };
  return {posed(gradients.children()), gradients.weight(), posed(gradients.bias()), gradients.gate(),
          posed(gradients.finished(wants_query, wants_query ? over(dquery, 0) : dquery, call.poses()))};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(FASTCAPS_CUDA_NAMESPACE, FASTCAPS_CUDA_KEY, m) {
  m.impl("pooling_routing", &boxed<pooling_routing>);
  m.impl("pooling_routing_backward", &boxed<pooling_routing_backward>);
}

}  // namespace fastcaps::gpu
