// The ops of routings whose parents compete: check, schedule, allocate, launch.
#include "attention_forward.h"
#include "ends.h"

namespace fastcaps::gpu {
namespace {

std::vector<Tensor> attention_routing(Stack stack) {
  const AttentionRouting op{stack};
  const Tensor& children = op.votes.children;
  const DeviceGuard guard(children);
  Call call(Pass::kAttention, op.votes, op.options);
  const Votes& v = call.votes;
  op.check(v);
  PassArgs& a = call.args;
  if (op.query) a.query = view_of(*op.query, v.is_set);
  a.scale = float(op.scale), a.eps = float(op.eps), a.rule = op.rule;
  const Schedule c = call.schedule_forward(op.iterations);
  Tensor result = new_tensor(children, call.poses(), children.scalar_type(), "parents");
  Tensor sums = call.empty(call.poses(op.iterations));
  if (v.positions() == 0) return {result, sums};
  call.take(c);
  Tensor norms[2];
  if (op.norm_weight) a.norm_weight = data_of(norms[0] = as_dense(*op.norm_weight));
  if (op.norm_bias) a.norm_bias = data_of(norms[1] = as_dense(*op.norm_bias));
  const Tensor statistics = op.query ? call.collect(c, 2) : Tensor();
  if (op.iterations > 1) {
    a.turns = int(op.iterations), a.sums = floats(sums), a.result = data_of(result);
    call.launch(c, 0, c.parent_blocks);
    return {result, sums};
  }
  const Tensor parts = c.chunks == 1 ? sums : call.empty(call.parts(c, true));
  a.sums = floats(parts);
  call.launch(c, 0, c.parent_blocks);
  EndArgs end = end_args(call);
  end.parts = floats(parts), end.chunks = c.chunks, end.sums = c.chunks == 1 ? nullptr : floats(sums);
  end.parents = data_of(result);
  launch_end(&finish_kernel<4>, &finish_kernel<16>, end, end_blocks(end, 1 << 20), 0);
  return {result, sums};
}

std::vector<Tensor> attention_routing_backward(Stack stack) {
  const AttentionBackward op{stack};
  const Tensor& children = op.votes.children;
  const DeviceGuard guard(children);
  Call call(Pass::kAttention, op.votes, op.options);
  const Votes& v = call.votes;
  const ScalarType storage = children.scalar_type();
  const Turns turns = op.check(v);
  const bool wants_query = op.wants_query(), wants_norm = op.wants_norm(), empty = v.positions() == 0;

  PassArgs& a = call.args;
  a.scale = float(op.scale), a.eps = float(op.eps), a.detach = op.needs & kDetach;
  VoteGradients gradients(call, op.votes, op.needs);
  const Schedule& c = gradients.schedule;
  EndArgs end = end_args(call);
  Tensor norm;
  if (op.norm_weight) end.norm_weight = data_of(norm = as_dense(*op.norm_weight));
  const int64_t blocks = end_blocks(end, 1024), numbers = wants_norm ? v.parent_size() : 0;
  const Tensor dnorms = empty ? call.zeros({1, 2, numbers}) : call.empty({turns.count * blocks, 2, numbers});
  Tensor dquery = new_tensor(children, wants_query ? call.poses() : Shape{0}, storage, "dquery");
  const bool direct = c.chunks == 1 && storage == ScalarType::Float;
  const Tensor dqueries = direct || empty || !wants_query ? dquery : call.empty(call.parts(c, true));
  const Tensor dsums = call.empty({v.positions() * v.parents_size()});
  a.dsums = end.dsums = floats(dsums);
  if (wants_query) a.dquery = static_cast<float*>(data_of(dqueries));
  for (int64_t turn = 0; turn < turns.count && !empty; ++turn) {
    const MaybeTensor given = turns.at(op.sums, turn);
    const Tensor kept = given ? as_dense(*given) : Tensor();
    a.query = turns.view(op.query, turn);
    end.grad = turns.view(op.grad, turn);
    end.given_sums = given ? floats(kept) : nullptr;
    end.dnorm = wants_norm ? floats(dnorms) + turn * blocks * 2 * numbers : nullptr;
    launch_end(&prepare_kernel<4>, &prepare_kernel<16>, end, blocks,
               256 / end.lanes * 2 * v.parent_size() * int64_t(sizeof(float)));
    if (gradients.any() || wants_query) gradients.run(3);  // else the LayerNorm is all there is to differentiate
  }
  if (wants_query && !direct && !empty) {
    EndArgs add = end_args(call);
    add.rule = Rule::kPlain;
    add.parts = floats(dqueries), add.chunks = c.chunks, add.parents = data_of(dquery);
    launch_end(&finish_kernel<4>, &finish_kernel<16>, add, end_blocks(add, 1 << 20), 0);
  }
  const auto affine = [&](int64_t bit, int64_t row) {
    if (!wants_norm || !(op.needs & bit)) return gradients.finished(false, dnorms, {});
    const Tensor all = torch::stable::view(over(dnorms, 0), {2, numbers});
    return gradients.finished(true, copied(torch::stable::select(all, 0, row), ScalarType::Float), {numbers});
  };
  return {gradients.children(),   gradients.weight(),  gradients.bias(), gradients.gate(), dquery,
          affine(kNormWeight, 0), affine(kNormBias, 1)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(FASTCAPS_CUDA_NAMESPACE, FASTCAPS_CUDA_KEY, m) {
  m.impl("attention_routing", &boxed<attention_routing>);
  m.impl("attention_routing_backward", &boxed<attention_routing_backward>);
}

}  // namespace fastcaps::gpu
