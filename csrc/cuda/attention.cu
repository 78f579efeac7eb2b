// Op bodies of the attention pass on a GPU: check, cut, allocate, launch.
#include "../attention.h"

#include "call.h"
#include "layer_norm.h"
#include "ops.h"

namespace fastcaps::gpu {
namespace {

// A call of either op: LayerNorm goes with the pass.
struct AttentionCall : Call {
  LayerNormArgs norm{};
  Tensor norm_weight, norm_bias;  // kept alive here

  AttentionCall(const Tensor& children_, const Tensor& weight_, const MaybeTensor& query, const MaybeTensor& bias_,
                const MaybeTensor& gate, const MaybeTensor& norm_weight_, const MaybeTensor& norm_bias_, double scale,
                double eps, bool normalize, const std::vector<int64_t>& window)
      : Call(Pass::kAttention,
             attention_geometry(children_, weight_, query, bias_, gate, norm_weight_, norm_bias_, window), children_,
             weight_, bias_, gate) {
    const Geometry& g = geometry;
    if (query) args.query = view_of(*query);
    args.scale = float(scale);
    norm.M = args.M, norm.C = args.C, norm.E = args.E, norm.Ho = args.Ho, norm.Wo = args.Wo;
    norm.count = g.positions() * g.M;
    norm.normalize = normalize;
    norm.eps = float(eps);
    norm.storage = args.storage;
    norm.lanes = 1;
    while (norm.lanes < 32 && norm.lanes * 4 < g.parent_pose()) norm.lanes *= 2;
    if (norm_weight_) norm.norm_weight = data_of(norm_weight = torch::stable::contiguous(*norm_weight_));
    if (norm_bias_) norm.norm_bias = data_of(norm_bias = torch::stable::contiguous(*norm_bias_));
  }

  template <class Kernel>
  void run_norm(Kernel&& few, Kernel&& many, int64_t blocks, int64_t shared_bytes) {
    gpu::launch(geometry.parent_pose() <= 4 * norm.lanes ? few : many, Grid{blocks, 1, 256, shared_bytes}, norm);
  }
  int64_t norm_blocks(int64_t most) const {
    const int64_t blocks = ceil_div(norm.count, 256 / norm.lanes);
    return blocks < most ? blocks : most;
  }

  // parts [chunks, count, C * E], added up in their order, become `out`.
  void add_up(const Tensor& parts, int chunks, const Tensor& out) {
    const LayerNormArgs before = norm;
    norm.normalize = false;
    norm.norm_weight = norm.norm_bias = nullptr;
    norm.parts = floats(parts), norm.chunks = chunks, norm.sums = nullptr;
    norm.parents = data_of(out);
    run_norm(&finish_kernel<4>, &finish_kernel<16>, norm_blocks(1 << 20), 0);
    norm = before;
  }
};

}  // namespace

std::tuple<Tensor, Tensor> attention_pass(const Tensor children, const Tensor weight, const MaybeTensor query,
                                          const MaybeTensor bias, const MaybeTensor gate, const MaybeTensor norm_weight,
                                          const MaybeTensor norm_bias, double scale, double eps, bool normalize,
                                          const std::vector<int64_t> window, int64_t options) {
  const DeviceGuard guard(children);
  AttentionCall call(children, weight, query, bias, gate, norm_weight, norm_bias, scale, eps, normalize, window);
  const Geometry& g = call.geometry;
  const std::vector<int64_t> shape{g.B, g.Ho, g.Wo, g.M, g.C, g.E};
  Tensor parents = torch::stable::new_empty(children, shape);
  Tensor sums = call.empty(normalize ? shape : std::vector<int64_t>{0});
  if (g.positions() == 0) return {parents, sums};

  const Cut c = call.cut_forward(options);
  call.take(c);
  const Tensor statistics = query ? call.collect(c, 2) : Tensor();
  const bool direct = c.chunks == 1 && (normalize || call.args.storage == Storage::kFloat32);
  const Tensor parts = direct ? (normalize ? sums : parents) : call.empty({c.chunks * g.positions() * g.parents()});
  call.args.sums = floats(parts);
  call.launch(c, 0, c.parent_blocks);
  if (!direct || normalize) {
    call.norm.parts = floats(parts), call.norm.chunks = c.chunks;
    call.norm.sums = normalize && !direct ? floats(sums) : nullptr;
    call.norm.parents = data_of(parents);
    call.run_norm(&finish_kernel<4>, &finish_kernel<16>, call.norm_blocks(1 << 20), 0);
  }
  return {parents, sums};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_pass_backward(
    const MaybeTensor grad_parents, const MaybeTensor grad_sums, const Tensor children, const Tensor weight,
    const MaybeTensor query, const MaybeTensor bias, const MaybeTensor gate, const MaybeTensor norm_weight,
    const Tensor sums, double scale, double eps, bool normalize, const std::vector<int64_t> window, int64_t needs,
    int64_t options) {
  const DeviceGuard guard(children);
  AttentionCall call(children, weight, query, bias, gate, norm_weight, std::nullopt, scale, eps, normalize, window);
  const Geometry& g = call.geometry;
  const ScalarType storage = children.scalar_type();
  const std::vector<int64_t> shape{g.B, g.Ho, g.Wo, g.M, g.C, g.E};
  if (grad_parents) check_tensor(*grad_parents, "grad_parents", shape, storage, children);
  if (grad_sums) check_tensor(*grad_sums, "grad_sums", shape, ScalarType::Float, children);
  if (normalize) check_tensor(sums, "sums", shape, ScalarType::Float, children);
  if (!query) needs &= ~kQuery;
  if (!bias) needs &= ~kBias;
  if (!gate) needs &= ~kGate;
  if (!normalize || !grad_parents) needs &= ~(kNormWeight | kNormBias);
  const bool empty = g.positions() == 0 || (!grad_parents && !grad_sums);

  PassArgs& a = call.args;
  a.frozen = needs & kFrozen;
  needs &= ~kFrozen;
  const auto wants = [&](int64_t bit) { return (needs & bit) != 0; };
  Gradients gradients(call, {wants(kChildren), wants(kWeight), wants(kBias), wants(kGate)}, weight, bias, options);
  const Cut& c = gradients.cut;
  const int64_t norm_blocks = call.norm_blocks(1024);
  const Tensor dnorms = call.empty({norm_blocks, 2, wants(kNormWeight | kNormBias) ? g.parent_pose() : 0});
  Tensor dquery = torch::stable::new_empty(children, wants(kQuery) ? shape : std::vector<int64_t>{0});
  if (empty) torch::stable::zero_(dquery);
  const bool direct = c.chunks == 1 && storage == ScalarType::Float;
  const Tensor dqueries = direct || empty || !wants(kQuery) ? dquery : call.empty(call.parts(c, true));

  if (!empty) {
    const Tensor dsums = call.empty({g.positions() * g.parents()});
    const Tensor given = normalize ? torch::stable::contiguous(sums) : sums;
    if (grad_parents) call.norm.grad_parents = view_of(*grad_parents);
    if (grad_sums) call.norm.grad_sums = view_of(*grad_sums);
    call.norm.given_sums = floats(given);
    call.norm.dsums = floats(dsums);
    call.norm.dnorm = floats(dnorms);
    call.run_norm(&prepare_kernel<4>, &prepare_kernel<16>, norm_blocks,
                  256 / call.norm.lanes * 2 * g.parent_pose() * int64_t(sizeof(float)));
    a.dsums = floats(dsums), a.dquery = floats(dqueries);
    if (needs & ~(kNormWeight | kNormBias)) gradients.run(3);  // or the LayerNorm is all there is to differentiate
    if (wants(kQuery) && !direct) call.add_up(dqueries, c.chunks, dquery);
  }

  const Tensor both = !wants(kNormWeight | kNormBias) ? Tensor()
                      : empty                         ? call.zeros({2, g.C * g.E})
                                                      : torch::stable::view(over(dnorms, 0), {2, g.C * g.E});
  const auto affine = [&](int64_t bit, int64_t row) {
    if (!wants(bit)) return gradients.finished(false, both, {});
    return gradients.finished(true, torch::stable::clone(torch::stable::select(both, 0, row)), {g.C * g.E});
  };
  return {gradients.children(),   gradients.weight(),  dquery, gradients.bias(), gradients.gate(),
          affine(kNormWeight, 0), affine(kNormBias, 1)};
}

}  // namespace fastcaps::gpu
