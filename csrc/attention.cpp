// The ops of routings whose parents compete for every child: attention and dynamic routing.
#include "calls.h"
#include "ops.h"

namespace fastcaps {

std::vector<Tensor> attention_routing(Stack stack) {
  const AttentionRouting call{stack};
  const Given given(call.votes);
  const Votes& votes = given.votes;
  const bool norm = call.rule == Rule::kLayerNorm;
  STD_TORCH_CHECK(norm || call.rule == Rule::kPlain || call.rule == Rule::kSquash,
                  "fastcaps: rule must be 0 (LayerNorm), 1 (plain) or 2 (squash), got ", int(call.rule));
  STD_TORCH_CHECK(norm || !(call.norm_weight || call.norm_bias), "fastcaps: only rule 0 has an affine");
  STD_TORCH_CHECK(call.iterations >= 1, "fastcaps: iterations must be at least 1, got ", call.iterations);
  MaybeTensor norm_weight, norm_bias;
  ForwardCall<Attention> run{votes};
  run.total = call.iterations;
  run.with.scale = call.scale;
  run.with.eps = call.eps;
  run.with.rule = call.rule;
  run.with.query = given.view(call.query, "query", poses_shape(votes), given.storage);
  const Shape affine = {votes.parent_size()};
  run.with.norm_weight = given.table(call.norm_weight, "norm_weight", affine, given.storage, norm_weight);
  run.with.norm_bias = given.table(call.norm_bias, "norm_bias", affine, given.storage, norm_bias);
  const Tensor parents = given.stored_result(poses_shape(votes), run.with.parents);
  const Tensor sums = given.result(poses_shape(votes, call.iterations), run.with.sums);
  run_forward(given, run);
  return {parents, sums};
}

std::vector<Tensor> attention_routing_backward(Stack stack) {
  const AttentionBackward call{stack};
  const Given given(call.votes);
  const Votes& votes = given.votes;
  const Shape shape = poses_shape(votes);
  const Turns turns(call.votes, call.grad.dim() > 0 ? call.grad.size(0) : 0);
  turns.check(call.grad, "grad", shape, given.storage);
  turns.check(call.query, "query", shape, given.storage, false);
  turns.check(call.sums, "sums", shape, given.compute);
  const bool dquery = call.needs & kQuery && call.query;
  STD_TORCH_CHECK(!dquery || turns.count == 1, "fastcaps: a query has a gradient in a single turn alone");
  const bool dnorm = call.needs & (kNormWeight | kNormBias) && call.sums;

  BackwardCall<Attention> run{votes};
  Attention with;
  with.scale = call.scale;
  with.eps = call.eps;
  with.detach = call.needs & kDetach;
  MaybeTensor norm_weight;
  with.norm_weight = given.table(call.norm_weight, "norm_weight", {votes.parent_size()}, given.storage, norm_weight);
  MaybeTensor sums;
  if (call.sums) sums = in_compute_type(*call.sums, given.compute);
  for (int64_t k = 0; k < turns.count; ++k) {
    run.with.push_back(with);
    run.with[k].grad = turns.view(call.grad, k);
    run.with[k].query = turns.view(call.query, k);
    run.with[k].given_sums = turns.view(sums, k).data;
  }
  run.schedule = schedule_of(run, given.is_double, dquery, given.bias ? given.bias->numel() : 0);
  const bool empty = votes.positions() == 0;
  const MaybeTensor query = given.maybe(dquery, shape, run.with[0].dquery, empty);
  const Partial norms = given.partial(dnorm, run.schedule.rows(), {2, votes.parent_size()});
  for (Attention& turn : run.with) turn.dnorm = norms.parts;
  const Gradients found = run_backward(given, run, call.needs, dquery, empty);
  const MaybeTensor& both = norms.sum();
  const auto half = [&](int64_t bit, int64_t which) {
    void* data = nullptr;
    const MaybeTensor out = given.maybe(dnorm && call.needs & bit, {votes.parent_size()}, data);
    const size_t bytes = out ? size_t(out->numel()) * out->element_size() : 0;
    if (out) std::memcpy(data, static_cast<const char*>(data_of(*both)) + which * bytes, bytes);
    return given.stored(out);
  };
  return {found.children,      found.weight,         found.bias,        found.gate,
          given.stored(query), half(kNormWeight, 0), half(kNormBias, 1)};
}

}  // namespace fastcaps
