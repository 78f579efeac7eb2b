// The ops of routings whose parents compete: check, schedule, allocate, launch.
#include "attention_forward.h"
#include "ends.h"

namespace fastcaps::gpu {
namespace {

std::tuple<Tensor, Tensor> attention_routing(const Tensor children, const MaybeTensor weight, const MaybeTensor bias,
                                             const MaybeTensor gate, int64_t parents, const std::vector<int64_t> window,
                                             const MaybeTensor query, const MaybeTensor norm_weight,
                                             const MaybeTensor norm_bias, double scale, double eps, int64_t rule,
                                             int64_t iterations, int64_t options) {
  const DeviceGuard guard(children);
  Call call(Pass::kAttention, {children, weight, bias, gate, parents, window}, options);
  const Geometry& g = call.geometry;
  const ScalarType storage = children.scalar_type();
  STD_TORCH_CHECK(rule >= 0 && rule <= int64_t(Rule::kSquash), "fastcaps: attention_routing has no rule ", rule);
  call.check(query, "query", call.poses(), storage);
  call.check(norm_weight, "norm_weight", {g.C * g.E}, storage);
  call.check(norm_bias, "norm_bias", {g.C * g.E}, storage);
  PassArgs& a = call.args;
  if (query) a.query = view_of(*query);
  a.scale = float(scale), a.eps = float(eps), a.rule = Rule(rule);
  const Schedule c = call.schedule_forward(iterations);
  Tensor result = torch::stable::new_empty(children, call.poses());
  Tensor sums = call.empty(with_turns(iterations, call.poses()));
  if (g.positions() == 0) return {result, sums};
  call.take(c);
  EndArgs end = end_args(call);
  end.rule = a.rule;
  Tensor norms[2];
  if (norm_weight && a.rule == Rule::kLayerNorm)
    a.norm_weight = end.norm_weight = data_of(norms[0] = torch::stable::contiguous(*norm_weight));
  if (norm_bias && a.rule == Rule::kLayerNorm)
    a.norm_bias = end.norm_bias = data_of(norms[1] = torch::stable::contiguous(*norm_bias));
  const Tensor statistics = query ? call.collect(c, 2) : Tensor();
  if (iterations > 1) {
    a.turns = int(iterations), a.sums = floats(sums), a.result = data_of(result);
    call.launch(c, 0, c.parent_blocks);
    return {result, sums};
  }
  const Tensor parts = c.chunks == 1 ? sums : call.empty(call.parts(c, true));
  a.sums = floats(parts);
  call.launch(c, 0, c.parent_blocks);
  end.parts = floats(parts), end.chunks = c.chunks, end.sums = c.chunks == 1 ? nullptr : floats(sums);
  end.parents = data_of(result);
  launch_end(&finish_kernel<4>, &finish_kernel<16>, end, end_blocks(end, 1 << 20), 0);
  return {result, sums};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_routing_backward(
    const Tensor grad, const Tensor children, const MaybeTensor weight, const MaybeTensor bias, const MaybeTensor gate,
    int64_t parents, const std::vector<int64_t> window, const MaybeTensor query, const MaybeTensor norm_weight,
    const MaybeTensor sums, double scale, double eps, int64_t needs, int64_t options) {
  const DeviceGuard guard(children);
  const VotesGiven votes{children, weight, bias, gate, parents, window};
  Call call(Pass::kAttention, votes, options);
  const Geometry& g = call.geometry;
  const ScalarType storage = children.scalar_type();
  STD_TORCH_CHECK(grad.dim() == 7 && grad.size(0) >= 1, "fastcaps: grad must be [T, B, Ho, Wo, M, C, E]");
  const int64_t turns = grad.size(0);
  call.check_turns(grad, "grad", call.poses(), storage, turns);
  call.check_turns(query, "query", call.poses(), storage, turns, true);
  call.check_turns(sums, "sums", call.poses(), ScalarType::Float, turns);
  call.check(norm_weight, "norm_weight", {g.C * g.E}, storage);
  const auto wants = [&](int64_t bit, bool given) { return given && (needs & bit) != 0; };
  const bool wants_query = wants(kQuery, query.has_value()), empty = g.positions() == 0;
  const bool wants_norm = wants(kNormWeight | kNormBias, sums.has_value());
  STD_TORCH_CHECK(!wants_query || turns == 1, "fastcaps: dquery is of one turn, got ", turns);

  PassArgs& a = call.args;
  a.scale = float(scale), a.eps = float(eps), a.detach = needs & kDetach;
  Gradients gradients(call, votes, needs);
  const Schedule& c = gradients.schedule;
  EndArgs end = end_args(call);
  Tensor norm;
  if (norm_weight) end.norm_weight = data_of(norm = torch::stable::contiguous(*norm_weight));
  const int64_t blocks = end_blocks(end, 1024);
  const std::vector<int64_t> norms_shape{turns * blocks, 2, wants_norm ? g.parent_pose() : 0};
  const Tensor dnorms = empty ? call.zeros(with_turns(1, {2, norms_shape[2]})) : call.empty(norms_shape);
  Tensor dquery = torch::stable::new_empty(children, wants_query ? call.poses() : std::vector<int64_t>{0});
  const bool direct = c.chunks == 1 && storage == ScalarType::Float;
  const Tensor dqueries = direct || empty || !wants_query ? dquery : call.empty(call.parts(c, true));
  const Tensor dsums = call.empty({g.positions() * g.parents()});
  a.dsums = end.dsums = floats(dsums);
  if (wants_query) a.dquery = static_cast<float*>(data_of(dqueries));
  for (int64_t turn = 0; turn < turns && !empty; ++turn) {
    const MaybeTensor asked = of_turn(query, turns, turn), given = of_turn(sums, turns, turn);
    const Tensor kept = given ? torch::stable::contiguous(*given) : Tensor();
    a.query = asked ? view_of(*asked) : View{};
    end.grad = view_of(torch::stable::select(grad, 0, turn));
    end.given_sums = given ? floats(kept) : nullptr;
    end.dnorm = wants_norm ? floats(dnorms) + turn * blocks * 2 * g.parent_pose() : nullptr;
    launch_end(&prepare_kernel<4>, &prepare_kernel<16>, end, blocks,
               256 / end.lanes * 2 * g.parent_pose() * int64_t(sizeof(float)));
    if (gradients.any() || wants_query) gradients.run(3);  // or the LayerNorm is all there is to differentiate
  }
  if (wants_query && !direct && !empty) {
    EndArgs add = end_args(call);
    add.parts = floats(dqueries), add.chunks = c.chunks, add.parents = data_of(dquery);
    launch_end(&finish_kernel<4>, &finish_kernel<16>, add, end_blocks(add, 1 << 20), 0);
  }
  const auto affine = [&](int64_t bit, int64_t row) {
    if (!wants_norm || !(needs & bit)) return gradients.finished(false, dnorms, {});
    const Tensor all = torch::stable::view(over(dnorms, 0), {2, g.C * g.E});
    return gradients.finished(true, torch::stable::clone(torch::stable::select(all, 0, row)), {g.C * g.E});
  };
  return {gradients.children(),   gradients.weight(),  gradients.bias(), gradients.gate(), dquery,
          affine(kNormWeight, 0), affine(kNormBias, 1)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(FASTCAPS_CUDA_NAMESPACE, FASTCAPS_CUDA_KEY, m) {
  m.impl("attention_routing", TORCH_BOX(&attention_routing));
  m.impl("attention_routing_backward", TORCH_BOX(&attention_routing_backward));
}

}  // namespace fastcaps::gpu
