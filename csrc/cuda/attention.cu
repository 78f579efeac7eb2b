// The ops of routings whose parents compete: check, schedule, allocate, launch.
#include "ends.h"

namespace fastcaps::gpu {
namespace {

std::vector<Tensor> attention_routing(Stack stack) {
  const AttentionRouting op{stack};
  const Tensor& children = op.votes.children;
  const DeviceGuard guard(children);
  Call call("attention", op.votes, op.options);
  const Votes& v = call.votes;
  op.check(v);
  PassArgs& args = call.args;
  args.query = call.view(op.query);
  args.scale = float(op.scale), args.eps = float(op.eps), args.rule = op.rule;
  const Schedule c = call.schedule_forward(op.iterations);
  Tensor result = new_tensor(children, call.poses(), children.scalar_type(), "parents");
  Tensor sums = call.empty(call.poses(op.iterations));
  if (v.positions() == 0) return {result, sums};
  call.take(c);
  args.norm_weight = call.as_given(op.norm_weight), args.norm_bias = call.as_given(op.norm_bias);
  const Tensor statistics = op.query ? call.collect(c, 2) : Tensor();
  if (op.iterations > 1 || (c.chunks == 1 && !call.is_lean(c))) {  // a lean kernel makes no parents
    args.iterations = int(op.iterations), args.sums = floats(sums), args.result = data_of(result);
    call.launch(c, 0, c.parent_blocks);
    return {result, sums};
  }
  const Tensor parts = c.chunks == 1 ? sums : call.empty({call.parts(c).all()});
  args.sums = floats(parts);
  call.launch(c, 0, c.parent_blocks);
  EndArgs end = end_args(call, c.chunks);
  end.parts = floats(parts), end.sums = c.chunks == 1 ? nullptr : floats(sums), end.parents = data_of(result);
  finish(end);
  return {result, sums};
}

std::vector<Tensor> attention_routing_backward(Stack stack) {
  const AttentionBackward op{stack};
  const DeviceGuard guard(op.votes.children);
  Call call("attention", op.votes, op.options);
  const Votes& v = call.votes;
  const Iterations iterations = op.check(v);
  const bool wants_query = op.wants_query(), wants_norm = op.wants_norm(), empty = v.positions() == 0;
  PassArgs& args = call.args;
  args.scale = float(op.scale), args.eps = float(op.eps), args.detach = op.needs & kDetach;
  VoteGradients gradients(call, op.needs, !empty);
  EndArgs end = end_args(call);
  end.norm_weight = call.as_given(op.norm_weight);
  const int64_t numbers = v.parent_size(), part = 2 * numbers, blocks = prepare_grid(end).x;
  float *dsums = nullptr, *dnorm = nullptr;
  gradients.reserve(dsums, v.positions() * v.parents_size());
  if (wants_norm) gradients.reserve(dnorm, iterations.count * blocks * part);
  const Tensor dquery =
      gradients.add(wants_query, args.dquery, call.parts(gradients.schedule), call.poses(), call.storage);
  const auto affine = [&](int64_t bit, int64_t row) {
    return gradients.add_sum(wants_norm && (op.needs & bit), dnorm, {iterations.count * blocks, numbers}, {numbers},
                             call.storage, row * numbers, part);
  };
  const Tensor dnorm_weight = affine(kNormWeight, 0), dnorm_bias = affine(kNormBias, 1);
  end.zeros = gradients.allocate();
  args.dsums = end.dsums = dsums;
  const size_t kept = call.kept.size();
  for (int64_t k = 0; k < iterations.count && !empty; ++k) {
    const MaybeTensor given = iterations.at(op.sums, k);
    args.query = iterations.view(op.query, k);
    end.grad = PosesView(iterations.view(op.grad, k), args.C, args.E);
    end.given_sums = call.table(given);
    end.dnorm = wants_norm ? dnorm + k * blocks * part : nullptr;
    prepare(end);
    if (gradients.any() || wants_query) gradients.run(3);  // else the LayerNorm is all there is to differentiate
    call.kept.resize(kept);
  }
  gradients.add_up();
  return {gradients.children, gradients.weight, gradients.bias, gradients.gate, dquery, dnorm_weight, dnorm_bias};
}

}  // namespace

FASTCAPS_REGISTER(attention_routing)

}  // namespace fastcaps::gpu
