// Op bodies of the pooling pass on the CPU, and of routings made of it.
#include "pooling.h"

#include "calls.h"

namespace fastcaps {

std::tuple<Tensor, Tensor> pooling_pass(const Tensor children, const MaybeTensor weight, const MaybeTensor query,
                                        const MaybeTensor bias, const MaybeTensor gate, double scale, bool normalize,
                                        const std::vector<int64_t> window, bool) {
  const Given given(children, weight, bias, gate, pooling_geometry(children, weight, query, bias, gate, window));
  ForwardCall<Pooling> call{given.in, {}, {}};
  call.with.scale = scale;
  call.with.normalize = normalize;
  if (query) call.with.query = view_of(*query);
  Tensor parents = torch::stable::new_empty(children, parents_shape(given.in.geometry));
  call.with.parents = data_of(parents);
  Tensor logsumexp = given.result(true, numbers_shape(given.in.geometry), call.with.logsumexp);
  run_forward(given, call);
  return {parents, logsumexp};
}

std::tuple<Tensor, Tensor, Tensor> pooling_routing(const Tensor children, const MaybeTensor weight,
                                                   const MaybeTensor bias, const MaybeTensor gate, double scale,
                                                   bool normalize, int64_t parents, int64_t rule, int64_t iterations,
                                                   bool, const std::vector<int64_t> window) {
  STD_TORCH_CHECK(parents >= 1, "fastcaps: parents must be at least 1, got ", parents);
  STD_TORCH_CHECK(!weight || weight->dim() != 4 || weight->size(1) == parents, "fastcaps: weight is not for ", parents,
                  " parents: ", text(weight ? shape_of(*weight) : std::vector<int64_t>{}));
  const Given given(children, weight, bias, gate, pass_geometry(children, weight, parents, bias, gate, window));
  STD_TORCH_CHECK(rule == 0 || rule == 1, "fastcaps: rule must be 0 (unit) or 1 (dynamic), got ", rule);
  STD_TORCH_CHECK(iterations >= 1, "fastcaps: iterations must be at least 1, got ", iterations);
  ForwardCall<Pooling> call{given.in, {}, {}};
  call.total = iterations;
  call.with.scale = scale;
  call.with.normalize = normalize;
  call.with.update = rule == 1 ? Update::kSquash : Update::kUnit;
  const auto every_turn = [&](std::vector<int64_t> shape) {
    shape.insert(shape.begin(), iterations);
    return shape;
  };
  Tensor result = torch::stable::new_empty(children, parents_shape(given.in.geometry));
  Tensor sums = torch::stable::new_empty(children, every_turn(parents_shape(given.in.geometry)));
  call.with.parents = data_of(sums);
  call.with.result = data_of(result);
  Tensor logsumexp = given.result(true, every_turn(numbers_shape(given.in.geometry)), call.with.logsumexp);
  run_forward(given, call);
  return {result, sums, logsumexp};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pooling_pass_backward(
    const MaybeTensor grad_parents, const MaybeTensor grad_logsumexp, const Tensor children, const MaybeTensor weight,
    const MaybeTensor query, const MaybeTensor bias, const MaybeTensor gate, const Tensor parents,
    const Tensor logsumexp, double scale, bool normalize, const std::vector<int64_t> window, int64_t needs) {
  const Given given(children, weight, bias, gate, pooling_geometry(children, weight, query, bias, gate, window));
  const Geometry& g = given.in.geometry;
  const std::vector<int64_t> shape = parents_shape(g), numbers = numbers_shape(g);
  if (grad_parents) check_tensor(*grad_parents, "grad_parents", shape, given.storage, children);
  if (grad_logsumexp) check_tensor(*grad_logsumexp, "grad_logsumexp", numbers, given.compute, children);
  check_tensor(parents, "parents", shape, given.storage, children);
  check_tensor(logsumexp, "logsumexp", numbers, given.compute, children);
  if (!weight) needs &= ~kPoolingWeight;
  if (!query) needs &= ~kPoolingQuery;
  if (!bias) needs &= ~kPoolingBias;
  if (!gate) needs &= ~kPoolingGate;

  BackwardCall<Pooling> call;
  call.with.scale = scale;
  call.with.normalize = normalize;
  call.with.frozen = needs & kFrozen;
  if (query) call.with.query = view_of(*query);
  if (grad_parents) call.with.grad_parents = view_of(*grad_parents);
  if (grad_logsumexp) call.with.grad_logsumexp = view_of(*grad_logsumexp);
  call.with.given_parents = view_of(parents);
  call.with.given_logsumexp = view_of(logsumexp);
  cut_call(given, call);
  const bool empty = g.positions() == 0 || (!grad_parents && !grad_logsumexp);
  Tensor dquery = given.result(needs & kPoolingQuery, shape, call.with.dquery, empty);
  const Gradients out = run_backward(given, call, needs & kPoolingChildren, needs & kPoolingWeight,
                                     needs & kPoolingBias, needs & kPoolingGate, needs & kPoolingQuery, empty);
  Tensor dweight = given.none(), dbias = given.none();
  if (needs & kPoolingWeight)
    dweight = given.stored(sum_of_parts(out.weights, call.weight_parts, {g.G, g.M, g.D, g.E}));
  if (needs & kPoolingBias) dbias = given.stored(sum_of_parts(out.biases, call.cut.items(), given.bias_shape));
  return {needs & kPoolingChildren ? given.stored(out.dchildren) : given.none(), dweight,
          needs & kPoolingQuery ? given.stored(dquery) : given.none(), dbias,
          needs & kPoolingGate ? given.stored(out.dgate) : given.none()};
}

}  // namespace fastcaps
