// Op bodies of whole routings on a GPU: all turns in one launch of the forward kernels.
#include "call.h"
#include "flat.h"
#include "gaussian_forward.h"
#include "ops.h"
#include "turns.h"

namespace fastcaps::gpu {
namespace {

// A call whose block hears all children of its positions, turn after turn.
struct RoutingCall : Call {
  Cut whole;

  RoutingCall(Pass pass, const Geometry& g, const Tensor& children, const MaybeTensor& weight, const MaybeTensor& bias,
              const MaybeTensor& gate, int64_t turns, int64_t options)
      : Call(pass, g, children, weight, bias, gate) {
    STD_TORCH_CHECK(turns >= 1 && turns <= kMostTurns, "fastcaps: one launch has 1 to ", kMostTurns, " turns, got ",
                    turns);
    args.turns = int(turns);
    const bool tensor = rounds(options, Storage::kFloat16), identity = !args.weight;
    whole = cut({.pass = pass, .tensor = tensor, .identity = identity, .whole = true}, g, {}, machine());
    STD_TORCH_CHECK(pass == Pass::kPooling || whole.parent_blocks == 1,
                    "fastcaps: one launch cannot take this routing: its ", g.M, " parents take several blocks");
  }

  void run() {
    if (geometry.positions() == 0) return;
    take(whole);
    args.parts_by_chunk = false;
    launch(whole, 0, whole.parent_blocks);
  }

  // Results of every turn.
  Tensor history(const std::vector<int64_t>& shape) const {
    std::vector<int64_t> all{args.turns};
    all.insert(all.end(), shape.begin(), shape.end());
    return empty(all);
  }
};

}  // namespace

std::tuple<Tensor, Tensor> attention_routing(const Tensor children, const Tensor weight, const MaybeTensor query,
                                             const MaybeTensor bias, const MaybeTensor gate,
                                             const MaybeTensor norm_weight, const MaybeTensor norm_bias, double scale,
                                             double eps, bool normalize, int64_t rule, int64_t iterations, bool,
                                             const std::vector<int64_t> window, int64_t options) {
  const DeviceGuard guard(children);
  const Geometry g = attention_geometry(children, weight, query, bias, gate, norm_weight, norm_bias, window);
  STD_TORCH_CHECK(rule == kSequential || (rule == kDynamic && !normalize), "fastcaps: attention_routing has no rule ",
                  rule, normalize ? " with a LayerNorm" : "");
  RoutingCall call(Pass::kAttention, g, children, weight, bias, gate, iterations, options);
  PassArgs& a = call.args;
  if (query) a.query = view_of(*query);
  a.scale = float(scale), a.eps = float(eps);
  a.rule = int(rule), a.normalized_parents = normalize;
  Tensor weight_of_norm, bias_of_norm;
  if (norm_weight) a.norm_weight = data_of(weight_of_norm = torch::stable::contiguous(*norm_weight));
  if (norm_bias) a.norm_bias = data_of(bias_of_norm = torch::stable::contiguous(*norm_bias));
  Tensor parents = torch::stable::new_empty(children, parents_shape(g)), sums = call.history(parents_shape(g));
  a.result = data_of(parents), a.sums = floats(sums);
  call.run();
  return {parents, sums};
}

std::tuple<Tensor, Tensor, Tensor> pooling_routing(const Tensor children, const MaybeTensor weight,
                                                   const MaybeTensor bias, const MaybeTensor gate, double scale,
                                                   bool normalize, int64_t parents, int64_t rule, int64_t iterations,
                                                   bool frozen, const std::vector<int64_t> window, int64_t options) {
  if (flattens(children, weight) && (!bias || bias->dim() == 4)) {
    const auto [result, sums, logsumexp] = pooling_routing(flat(children), weight, flat(bias), gate, scale, normalize,
                                                           parents, rule, iterations, frozen, window, options);
    const auto pose = [&](const Tensor& x) {
      std::vector<int64_t> shape = shape_of(x);
      shape[shape.size() - 2] = children.size(4), shape[shape.size() - 1] = children.size(5);
      return torch::stable::view(x, shape);
    };
    return {pose(result), pose(sums), logsumexp};
  }
  const DeviceGuard guard(children);
  const Geometry g = pass_geometry(children, weight, parents, bias, gate, window);
  STD_TORCH_CHECK(g.M == parents, "fastcaps: weight is not for ", parents, " parents");
  STD_TORCH_CHECK(rule == 0 || rule == 1, "fastcaps: pooling_routing has no rule ", rule);
  RoutingCall call(Pass::kPooling, g, children, weight, bias, gate, iterations, options);
  PassArgs& a = call.args;
  a.scale = float(scale), a.normalize = normalize;
  a.rule = rule == 0 ? kVectorNormed : kDynamic;
  Tensor result = torch::stable::new_empty(children, parents_shape(g));
  Tensor sums = call.history(parents_shape(g)), logsumexp = call.history(numbers_shape(g));
  a.result = data_of(result), a.sums = floats(sums), a.logsumexp = floats(logsumexp);
  call.run();
  return {result, sums, logsumexp};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gaussian_routing(
    const Tensor children, const Tensor weight, const MaybeTensor bias, const MaybeTensor gate, const Tensor beta_a,
    const Tensor beta_b, const std::vector<double> schedule, int64_t model, double eps,
    const std::vector<int64_t> window, int64_t options) {
  const DeviceGuard guard(children);
  STD_TORCH_CHECK(model >= kExpectation && model <= kMeans, "fastcaps: gaussian_routing has no model ", model);
  const bool expects = model == kExpectation;
  const MaybeTensor use = expects ? MaybeTensor() : MaybeTensor(beta_a);
  const MaybeTensor ignore = expects ? MaybeTensor() : MaybeTensor(beta_b);
  const Geometry g = gaussian_geometry(children, weight, {}, {}, {}, bias, gate, use, ignore, window);
  RoutingCall call(Pass::kGaussian, g, children, weight, bias, gate, int64_t(schedule.size()), options);
  PassArgs& a = call.args;
  a.eps = float(eps), a.model = int(model);
  if (expects) {
    check_tensor(beta_a, "beta_a", {g.M}, ScalarType::Float, children);
    check_tensor(beta_b, "beta_b", {g.M}, ScalarType::Float, children);
    a.cost_of_numbers = call.dense(beta_a), a.activation = call.dense(beta_b);
    for (size_t turn = 0; turn < schedule.size(); ++turn) a.schedule[turn] = float(schedule[turn]);
  } else {
    call.take_betas(use, ignore);
  }
  Tensor score = call.empty(numbers_shape(g)), mean = call.empty(parents_shape(g));
  Tensor variance = call.empty(parents_shape(g));
  Tensor counts = call.history(numbers_shape(g)), means = call.history(parents_shape(g));
  Tensor variances = call.history(parents_shape(g)), scores = call.history(numbers_shape(g));
  a.score = floats(score), a.last_mean = floats(mean), a.last_variance = floats(variance);
  a.counts = floats(counts), a.means = floats(means), a.variances = floats(variances), a.evidence = floats(scores);
  call.run();
  return {score, mean, variance, counts, means, variances, scores};
}

}  // namespace fastcaps::gpu
