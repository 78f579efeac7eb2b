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

namespace {

PoolingGradients pooling_backward(const MaybeTensor& grad_parents, const MaybeTensor& grad_logsumexp,
                                  const Tensor& children, const MaybeTensor& weight, const MaybeTensor& query,
                                  const MaybeTensor& bias, const MaybeTensor& gate, const Tensor& parents,
                                  const Tensor& logsumexp, double scale, bool normalize,
                                  const std::vector<int64_t>& window, int64_t needs, bool stacked) {
  const Turns turns(stacked, parents);
  turns.check(grad_parents, "grad_parents");
  turns.check(grad_logsumexp, "grad_logsumexp");
  turns.check(query, "query", true);
  turns.check(logsumexp, "logsumexp");
  const Given given(children, weight, bias, gate,
                    pooling_geometry(children, weight, turns.at(query, turns.count - 1), bias, gate, window));
  const Geometry& g = given.in.geometry;
  const std::vector<int64_t> shape = parents_shape(g), numbers = numbers_shape(g);
  if (!weight) needs &= ~kPoolingWeight;
  if (!query || stacked) needs &= ~kPoolingQuery;
  if (!bias) needs &= ~kPoolingBias;
  if (!gate) needs &= ~kPoolingGate;

  BackwardCall<Pooling> call;
  for (int64_t k = 0; k < turns.count; ++k) {
    Pooling with;
    const auto take = [&](const MaybeTensor& all, const char* name, const std::vector<int64_t>& wanted, ScalarType type,
                          View& view) {
      const MaybeTensor x = turns.at(all, k);
      if (!x) return;
      check_tensor(*x, name, wanted, type, children);
      view = view_of(*x);
    };
    take(grad_parents, "grad_parents", shape, given.storage, with.grad_parents);
    take(grad_logsumexp, "grad_logsumexp", numbers, given.compute, with.grad_logsumexp);
    take(query, "query", shape, given.storage, with.query);
    take(parents, "parents", shape, given.storage, with.given_parents);
    take(logsumexp, "logsumexp", numbers, given.compute, with.given_logsumexp);
    with.scale = scale;
    with.normalize = normalize;
    with.frozen = needs & kFrozen;
    call.with.push_back(with);
  }
  cut_call(given, call, needs & kPoolingQuery);
  const bool empty = g.positions() == 0 || (!grad_parents && !grad_logsumexp);
  Tensor dquery = given.result(needs & kPoolingQuery, shape, call.with[0].dquery, empty);
  const Gradients out = run_backward(given, call, needs & kPoolingChildren, needs & kPoolingWeight,
                                     needs & kPoolingBias, needs & kPoolingGate, needs & kPoolingQuery, empty);
  Tensor dweight = given.none(), dbias = given.none();
  if (needs & kPoolingWeight) dweight = given.stored(out.weights.sum());
  if (needs & kPoolingBias) dbias = given.stored(out.biases.sum());
  return {needs & kPoolingChildren ? given.stored(out.dchildren) : given.none(), dweight,
          needs & kPoolingQuery ? given.stored(dquery) : given.none(), dbias,
          needs & kPoolingGate ? given.stored(out.dgate) : given.none()};
}

}  // namespace

PoolingGradients pooling_pass_backward(const MaybeTensor grad_parents, const MaybeTensor grad_logsumexp,
                                       const Tensor children, const MaybeTensor weight, const MaybeTensor query,
                                       const MaybeTensor bias, const MaybeTensor gate, const Tensor parents,
                                       const Tensor logsumexp, double scale, bool normalize,
                                       const std::vector<int64_t> window, int64_t needs) {
  return pooling_backward(grad_parents, grad_logsumexp, children, weight, query, bias, gate, parents, logsumexp, scale,
                          normalize, window, needs, false);
}

PoolingGradients pooling_turns_backward(const MaybeTensor grad_parents, const MaybeTensor grad_logsumexp,
                                        const Tensor children, const MaybeTensor weight, const MaybeTensor query,
                                        const MaybeTensor bias, const MaybeTensor gate, const Tensor parents,
                                        const Tensor logsumexp, double scale, bool normalize,
                                        const std::vector<int64_t> window, int64_t needs) {
  return pooling_backward(grad_parents, grad_logsumexp, children, weight, query, bias, gate, parents, logsumexp, scale,
                          normalize, window, needs, true);
}

}  // namespace fastcaps
