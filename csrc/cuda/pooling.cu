// The ops of routings whose children compete: check, schedule, allocate, launch.
#include "pooling_forward.h"

#include "ends.h"
#include "flat.h"

namespace fastcaps::gpu {
namespace {

std::tuple<Tensor, Tensor, Tensor> pooling_routing(const Tensor children, const MaybeTensor weight,
                                                   const MaybeTensor bias, const MaybeTensor gate, int64_t parents,
                                                   const std::vector<int64_t> window, const MaybeTensor query,
                                                   double scale, bool normalize, int64_t rule, int64_t iterations,
                                                   int64_t options) {
  if (flattens(children, weight)) {
    const auto [result, sums, logsumexp] = pooling_routing(flat(children), weight, flat(bias), gate, parents, window,
                                                           flat(query), scale, normalize, rule, iterations, options);
    return {unflat(result, children), unflat(sums, children), logsumexp};
  }
  const DeviceGuard guard(children);
  Call call(Pass::kPooling, {children, weight, bias, gate, parents, window}, options);
  const Geometry& g = call.geometry;
  STD_TORCH_CHECK(rule == int64_t(Rule::kSquash) || rule == int64_t(Rule::kUnit),
                  "fastcaps: pooling_routing has no rule ", rule);
  call.check(query, "query", call.poses(), children.scalar_type());
  PassArgs& a = call.args;
  if (query) a.query = view_of(*query);
  a.scale = float(scale), a.normalize = normalize, a.rule = Rule(rule);
  const Schedule c = call.schedule_forward(iterations);
  Tensor result = torch::stable::new_empty(children, call.poses());
  Tensor sums = torch::stable::new_empty(children, with_turns(iterations, call.poses()));
  Tensor logsumexp = call.empty(with_turns(iterations, call.numbers()));
  if (g.positions() == 0) return {result, sums, logsumexp};
  call.take(c);
  if (c.chunks == 1) {
    a.turns = int(iterations);
    a.history = data_of(sums), a.logsumexp = floats(logsumexp), a.result = data_of(result);
    call.launch(c, 0, c.parent_blocks);
    return {result, sums, logsumexp};
  }
  const Tensor parts = call.empty(call.parts(c, true)), logsumexps = call.empty(call.parts(c, false));
  a.sums = floats(parts), a.logsumexp = floats(logsumexps);
  call.launch(c, 0, c.parent_blocks);
  EndArgs end = end_args(call);
  end.rule = a.rule;
  end.parts = floats(parts), end.logsumexps = floats(logsumexps), end.chunks = c.chunks;
  end.stored = data_of(sums), end.logsumexp = floats(logsumexp), end.parents = data_of(result);
  launch_end(&finish_kernel<4>, &finish_kernel<16>, end, end_blocks(end, 1 << 20), 0);
  return {result, sums, logsumexp};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pooling_routing_backward(
    const Tensor grad, const Tensor children, const MaybeTensor weight, const MaybeTensor bias, const MaybeTensor gate,
    int64_t parents, const std::vector<int64_t> window, const MaybeTensor query, const Tensor sums,
    const Tensor logsumexp, double scale, bool normalize, int64_t needs, int64_t options) {
  if (flattens(children, weight)) {
    const auto [dchildren, dweight, dbias, dgate, dquery] =
        pooling_routing_backward(flat(grad), flat(children), weight, flat(bias), gate, parents, window, flat(query),
                                 flat(sums), logsumexp, scale, normalize, needs, options);
    return {unflat(dchildren, children), dweight, unflat(dbias, children), dgate, unflat(dquery, children)};
  }
  const DeviceGuard guard(children);
  const VotesGiven votes{children, weight, bias, gate, parents, window};
  Call call(Pass::kPooling, votes, options);
  const Geometry& g = call.geometry;
  const ScalarType storage = children.scalar_type();
  STD_TORCH_CHECK(grad.dim() == 7 && grad.size(0) >= 1, "fastcaps: grad must be [T, B, Ho, Wo, M, C, E]");
  const int64_t turns = grad.size(0);
  call.check_turns(grad, "grad", call.poses(), storage, turns);
  call.check_turns(query, "query", call.poses(), storage, turns, true);
  call.check_turns(sums, "sums", call.poses(), storage, turns);
  call.check_turns(logsumexp, "logsumexp", call.numbers(), ScalarType::Float, turns);
  const bool wants_query = query && (needs & kQuery), empty = g.positions() == 0;
  STD_TORCH_CHECK(!wants_query || turns == 1, "fastcaps: dquery is of one turn, got ", turns);

  PassArgs& a = call.args;
  a.scale = float(scale), a.normalize = normalize, a.detach = needs & kDetach;
  Gradients gradients(call, votes, needs);
  if (a.detach) a.dgate = nullptr;  // and stays 0
  EndArgs end = end_args(call);
  const Tensor dquery = !wants_query ? gradients.none() : call.empty(call.parts(gradients.schedule, true));
  const Tensor dsums = call.empty({g.positions() * g.parents()}), dconstant = call.empty({end.count});
  a.dsums = end.dsums = floats(dsums), a.dconstant = end.dconstant = floats(dconstant), a.dquery = floats(dquery);
  for (int64_t turn = 0; turn < turns && !empty; ++turn) {
    const MaybeTensor asked = of_turn(query, turns, turn);
    const Tensor stored = torch::stable::contiguous(torch::stable::select(sums, 0, turn));
    const Tensor shift = torch::stable::contiguous(torch::stable::select(logsumexp, 0, turn));
    a.query = asked ? view_of(*asked) : View{};
    a.logsumexp = floats(shift);
    end.grad = view_of(torch::stable::select(grad, 0, turn)), end.stored = data_of(stored);
    launch_end(&prepare_kernel<4>, &prepare_kernel<16>, end, end_blocks(end, 1 << 20), 0);
    gradients.run(0);
  }
  return {gradients.children(), gradients.weight(), gradients.bias(), gradients.gate(),
          gradients.finished(wants_query, wants_query ? over(dquery, 0) : dquery, call.poses())};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(FASTCAPS_CUDA_NAMESPACE, FASTCAPS_CUDA_KEY, m) {
  m.impl("pooling_routing", TORCH_BOX(&pooling_routing));
  m.impl("pooling_routing_backward", TORCH_BOX(&pooling_routing_backward));
}

}  // namespace fastcaps::gpu
