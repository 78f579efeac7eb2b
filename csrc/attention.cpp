// Op bodies of the attention pass on the CPU, and of routings made of it.
#include "attention.h"

#include "calls.h"

namespace fastcaps {
namespace {

// The pass's own tensors as the kernels want them; the affine is kept alive here.
struct AttentionGiven : Given {
  Attention with;
  Tensor norm_weight, norm_bias;

  AttentionGiven(const Tensor& children, const Tensor& weight, const MaybeTensor& query, const MaybeTensor& bias,
                 const MaybeTensor& gate, const MaybeTensor& norm_weight_, const MaybeTensor& norm_bias_, double scale,
                 double eps, bool normalize, const std::vector<int64_t>& window)
      : Given(children, weight, bias, gate,
              attention_geometry(children, weight, query, bias, gate, norm_weight_, norm_bias_, window)) {
    with.scale = scale;
    with.eps = eps;
    with.normalize = normalize;
    if (query) with.query = view_of(*query);
    if (norm_weight_) with.norm_weight = data_of(norm_weight = in_compute_type(*norm_weight_, compute));
    if (norm_bias_) with.norm_bias = data_of(norm_bias = in_compute_type(*norm_bias_, compute));
  }
};

}  // namespace

std::tuple<Tensor, Tensor> attention_pass(const Tensor children, const Tensor weight, const MaybeTensor query,
                                          const MaybeTensor bias, const MaybeTensor gate, const MaybeTensor norm_weight,
                                          const MaybeTensor norm_bias, double scale, double eps, bool normalize,
                                          const std::vector<int64_t> window, bool) {
  AttentionGiven given(children, weight, query, bias, gate, norm_weight, norm_bias, scale, eps, normalize, window);
  const std::vector<int64_t> shape = parents_shape(given.in.geometry);
  Tensor parents = torch::stable::new_empty(children, shape);
  given.with.parents = data_of(parents);
  Tensor sums = given.result(normalize, shape, given.with.sums);
  ForwardCall<Attention> call{given.in, given.with, {}};
  run_forward(given, call);
  return {parents, sums};
}

std::tuple<Tensor, Tensor> attention_routing(const Tensor children, const Tensor weight, const MaybeTensor query,
                                             const MaybeTensor bias, const MaybeTensor gate,
                                             const MaybeTensor norm_weight, const MaybeTensor norm_bias, double scale,
                                             double eps, bool normalize, int64_t rule, int64_t iterations, bool,
                                             const std::vector<int64_t> window) {
  AttentionGiven given(children, weight, query, bias, gate, norm_weight, norm_bias, scale, eps, normalize, window);
  STD_TORCH_CHECK(rule == 0 || rule == 1, "fastcaps: rule must be 0 (attention) or 1 (dynamic), got ", rule);
  STD_TORCH_CHECK(rule == 0 || !(normalize || norm_weight || norm_bias), "fastcaps: dynamic routing has no LayerNorm");
  STD_TORCH_CHECK(iterations >= 1, "fastcaps: iterations must be at least 1, got ", iterations);
  std::vector<int64_t> shape = parents_shape(given.in.geometry);
  Tensor parents = torch::stable::new_empty(children, shape);
  given.with.parents = data_of(parents);
  given.with.update = rule == 1 ? Update::kSquash : Update::kReplace;
  shape.insert(shape.begin(), iterations);
  Tensor sums = given.result(true, shape, given.with.sums);
  ForwardCall<Attention> call{given.in, given.with, {}};
  call.total = iterations;
  run_forward(given, call);
  return {parents, sums};
}

namespace {

AttentionGradients attention_backward(const MaybeTensor& grad_parents, const MaybeTensor& grad_sums,
                                      const Tensor& children, const Tensor& weight, const MaybeTensor& query,
                                      const MaybeTensor& bias, const MaybeTensor& gate, const MaybeTensor& norm_weight,
                                      const Tensor& sums, double scale, double eps, bool normalize,
                                      const std::vector<int64_t>& window, int64_t needs, bool stacked) {
  const Turns turns(stacked, grad_parents ? grad_parents : grad_sums);
  turns.check(grad_sums, "grad_sums");
  turns.check(query, "query", true);
  if (normalize) turns.check(sums, "sums");
  AttentionGiven given(children, weight, std::nullopt, bias, gate, norm_weight, std::nullopt, scale, eps, normalize,
                       window);
  const Geometry& g = given.in.geometry;
  const std::vector<int64_t> shape = parents_shape(g);
  if (!query || stacked) needs &= ~kQuery;
  if (!bias) needs &= ~kBias;
  if (!gate) needs &= ~kGate;
  if (!normalize || !grad_parents) needs &= ~(kNormWeight | kNormBias);

  BackwardCall<Attention> call;
  std::vector<Tensor> rows;  // kept alive
  for (int64_t k = 0; k < turns.count; ++k) {
    Attention with = given.with;
    const auto take = [&](const MaybeTensor& all, const char* name, ScalarType type, View& view) {
      const MaybeTensor x = turns.at(all, k);
      if (!x) return;
      check_tensor(*x, name, shape, type, children);
      view = view_of(*x);
    };
    take(grad_parents, "grad_parents", given.storage, with.grad_parents);
    take(grad_sums, "grad_sums", given.compute, with.grad_sums);
    take(query, "query", given.storage, with.query);
    if (normalize) {
      const Tensor of_turn = *turns.at(sums, k);
      check_tensor(of_turn, "sums", shape, given.compute, children);
      rows.push_back(in_compute_type(of_turn, given.compute));
      with.given_sums = data_of(rows.back());
    }
    with.frozen = needs & kFrozen;
    call.with.push_back(with);
  }
  cut_call(given, call, needs & kQuery);
  const bool empty = g.positions() == 0 || (!grad_parents && !grad_sums);
  Tensor dquery = given.result(needs & kQuery, shape, call.with[0].dquery, empty);
  const Partial norms = given.partial(needs & (kNormWeight | kNormBias), call.cut.rows(), {2, g.C * g.E});
  for (Attention& with : call.with) with.dnorm = norms.parts;
  const Gradients out = run_backward(given, call, needs & kChildren, needs & kWeight, needs & kBias, needs & kGate,
                                     needs & kQuery, empty);

  Tensor dweight = given.none(), dbias = given.none(), dnorm_weight = given.none(), dnorm_bias = given.none();
  if (needs & kWeight) dweight = given.stored(out.weights.sum());
  if (needs & kBias) dbias = given.stored(out.biases.sum());
  if (needs & (kNormWeight | kNormBias)) {
    const Tensor both = norms.sum();
    if (needs & kNormWeight) dnorm_weight = given.stored(torch::stable::clone(torch::stable::select(both, 0, 0)));
    if (needs & kNormBias) dnorm_bias = given.stored(torch::stable::clone(torch::stable::select(both, 0, 1)));
  }
  return {needs & kChildren ? given.stored(out.dchildren) : given.none(),
          dweight,
          needs & kQuery ? given.stored(dquery) : given.none(),
          dbias,
          needs & kGate ? given.stored(out.dgate) : given.none(),
          dnorm_weight,
          dnorm_bias};
}

}  // namespace

AttentionGradients attention_pass_backward(const MaybeTensor grad_parents, const MaybeTensor grad_sums,
                                           const Tensor children, const Tensor weight, const MaybeTensor query,
                                           const MaybeTensor bias, const MaybeTensor gate,
                                           const MaybeTensor norm_weight, const Tensor sums, double scale, double eps,
                                           bool normalize, const std::vector<int64_t> window, int64_t needs) {
  return attention_backward(grad_parents, grad_sums, children, weight, query, bias, gate, norm_weight, sums, scale, eps,
                            normalize, window, needs, false);
}

AttentionGradients attention_turns_backward(const MaybeTensor grad_parents, const MaybeTensor grad_sums,
                                            const Tensor children, const Tensor weight, const MaybeTensor query,
                                            const MaybeTensor bias, const MaybeTensor gate,
                                            const MaybeTensor norm_weight, const Tensor sums, double scale, double eps,
                                            bool normalize, const std::vector<int64_t> window, int64_t needs) {
  return attention_backward(grad_parents, grad_sums, children, weight, query, bias, gate, norm_weight, sums, scale, eps,
                            normalize, window, needs, true);
}

}  // namespace fastcaps
