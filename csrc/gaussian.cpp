// Op bodies of the Gaussian pass on the CPU, and of routings made of it.
#include "gaussian.h"

#include "calls.h"

namespace fastcaps {
namespace {

// The pass's own tensors as the kernels want them; the betas are kept alive here.
struct GaussianGiven : Given {
  Gaussian with;
  Tensor beta_use, beta_ignore;

  GaussianGiven(const Tensor& children, const Tensor& weight, const MaybeTensor& mean, const MaybeTensor& variance,
                const MaybeTensor& log_weight, const MaybeTensor& bias, const MaybeTensor& gate,
                const MaybeTensor& beta_use_, const MaybeTensor& beta_ignore_, double eps,
                const std::vector<int64_t>& window)
      : Given(children, weight, bias, gate,
              gaussian_geometry(children, weight, mean, variance, log_weight, bias, gate, beta_use_, beta_ignore_,
                                window)) {
    with.eps = eps;
    if (mean) with.mean = view_of(*mean);
    if (variance) with.variance = view_of(*variance);
    if (log_weight) with.log_weight = view_of(*log_weight);
    if (!beta_use_) return;
    const auto strides = [](const Tensor& beta, int64_t& i, int64_t& m) {
      m = beta.size(1) > 1 ? 1 : 0;
      i = beta.size(0) > 1 ? beta.size(1) : 0;
    };
    with.beta_use = data_of(beta_use = in_compute_type(*beta_use_, compute));
    with.beta_ignore = data_of(beta_ignore = in_compute_type(*beta_ignore_, compute));
    strides(beta_use, with.use_stride_i, with.use_stride_m);
    strides(beta_ignore, with.ignore_stride_i, with.ignore_stride_m);
  }
};

template <class T>
void add(T* x, int64_t count, double number) {
  for (int64_t k = 0; k < count; ++k) x[k] += T(number);
}

// counts, means, variances, evidence of one turn, or of every turn of a routing
struct GaussianResults {
  Tensor counts, means, variances, evidence;

  GaussianResults(GaussianGiven& given, int64_t turns, bool evidence_too) {
    const auto shaped = [&](std::vector<int64_t> shape) {
      if (turns > 0) shape.insert(shape.begin(), turns);
      return shape;
    };
    const std::vector<int64_t> poses = shaped(parents_shape(given.in.geometry)),
                               numbers = shaped(numbers_shape(given.in.geometry));
    counts = given.result(true, numbers, given.with.counts);
    means = given.result(true, poses, given.with.means);
    variances = given.result(true, poses, given.with.variances);
    evidence = given.result(evidence_too, numbers, turns > 0 ? given.with.scores : given.with.evidence);
  }
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> gaussian_pass(const Tensor children, const Tensor weight,
                                                         const MaybeTensor mean, const MaybeTensor variance,
                                                         const MaybeTensor log_weight, const MaybeTensor bias,
                                                         const MaybeTensor gate, const MaybeTensor beta_use,
                                                         const MaybeTensor beta_ignore, double eps,
                                                         const std::vector<int64_t> window) {
  GaussianGiven given(children, weight, mean, variance, log_weight, bias, gate, beta_use, beta_ignore, eps, window);
  const GaussianResults results(given, 0, beta_use.has_value());
  ForwardCall<Gaussian> call{given.in, given.with, {}};
  run_forward(given, call);
  return {results.counts, results.means, results.variances, results.evidence};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gaussian_routing(
    const Tensor children, const Tensor weight, const MaybeTensor bias, const MaybeTensor gate, const Tensor beta_a,
    const Tensor beta_b, const std::vector<double> schedule, int64_t model, double eps,
    const std::vector<int64_t> window) {
  STD_TORCH_CHECK(model >= 0 && model <= 2, "fastcaps: model must be 0, 1 or 2, got ", model);
  STD_TORCH_CHECK(!schedule.empty(), "fastcaps: schedule must have a number for every turn");
  const bool em = model == 0;
  const MaybeTensor none;
  GaussianGiven given(children, weight, none, none, none, bias, gate, em ? none : MaybeTensor(beta_a),
                      em ? none : MaybeTensor(beta_b), eps, window);
  const Geometry& g = given.in.geometry;
  const int64_t turns = int64_t(schedule.size());
  given.with.update = em ? Update::kEM : Update::kEvidence;
  given.with.kmeans = model == 2;
  given.with.schedule = schedule.data();
  Tensor beta_u, beta_v;
  if (em) {
    check_tensor(beta_a, "beta_a", {g.M}, given.compute, children);
    check_tensor(beta_b, "beta_b", {g.M}, given.compute, children);
    given.with.beta_u = data_of(beta_u = torch::stable::contiguous(beta_a));
    given.with.beta_a = data_of(beta_v = torch::stable::contiguous(beta_b));
  }
  const GaussianResults all(given, turns, true);
  ForwardCall<Gaussian> call{given.in, given.with, {}};
  call.total = turns;
  run_forward(given, call);
  const auto last = [&](const Tensor& x) { return torch::stable::clone(torch::stable::select(x, 0, turns - 1)); };
  Tensor variances = last(all.variances);
  if (given.is_double)
    add(static_cast<double*>(data_of(variances)), variances.numel(), eps);
  else
    add(static_cast<float*>(data_of(variances)), variances.numel(), eps);
  return {last(all.evidence), last(all.means), variances, all.counts, all.means, all.variances, all.evidence};
}

namespace {

GaussianGradients gaussian_backward(const MaybeTensor& grad_counts, const MaybeTensor& grad_means,
                                    const MaybeTensor& grad_variances, const MaybeTensor& grad_evidence,
                                    const Tensor& children, const Tensor& weight, const MaybeTensor& mean,
                                    const MaybeTensor& variance, const MaybeTensor& log_weight, const MaybeTensor& bias,
                                    const MaybeTensor& gate, const MaybeTensor& beta_use,
                                    const MaybeTensor& beta_ignore, const Tensor& counts, const Tensor& means,
                                    const Tensor& variances, double eps, const std::vector<int64_t>& window,
                                    int64_t needs, bool stacked) {
  const Turns turns(stacked, counts);
  const std::pair<const MaybeTensor&, const char*> whole[] = {{grad_counts, "grad_counts"},
                                                              {grad_means, "grad_means"},
                                                              {grad_variances, "grad_variances"},
                                                              {grad_evidence, "grad_evidence"}};
  for (const auto& [x, name] : whole) turns.check(x, name);
  turns.check(mean, "mean", true);
  turns.check(variance, "variance", true);
  turns.check(log_weight, "log_weight", true);
  turns.check(means, "means");
  turns.check(variances, "variances");
  const int64_t last = turns.count - 1;
  GaussianGiven given(children, weight, turns.at(mean, last), turns.at(variance, last), turns.at(log_weight, last),
                      bias, gate, beta_use, beta_ignore, eps, window);
  const Geometry& g = given.in.geometry;
  const std::vector<int64_t> shape = parents_shape(g), numbers = numbers_shape(g);
  const bool evidence = grad_evidence && beta_use;
  BackwardCall<Gaussian> call;
  for (int64_t k = 0; k < turns.count; ++k) {
    Gaussian with = given.with;
    with.mean = with.variance = with.log_weight = View{};
    const auto take = [&](const MaybeTensor& all, const char* name, const std::vector<int64_t>& wanted, View& view) {
      const MaybeTensor x = turns.at(all, k);
      if (!x) return;
      check_tensor(*x, name, wanted, given.compute, children);
      view = view_of(*x);
    };
    take(grad_counts, "grad_counts", numbers, with.grad_counts);
    take(grad_means, "grad_means", shape, with.grad_means);
    take(grad_variances, "grad_variances", shape, with.grad_variances);
    if (evidence) take(grad_evidence, "grad_evidence", numbers, with.grad_evidence);
    take(mean, "mean", shape, with.mean);
    take(variance, "variance", shape, with.variance);
    take(log_weight, "log_weight", numbers, with.log_weight);
    take(counts, "counts", numbers, with.given_counts);
    take(means, "means", shape, with.given_means);
    take(variances, "variances", shape, with.given_variances);
    call.with.push_back(with);
  }
  if (stacked) needs &= ~(kGaussianMean | kGaussianVariance | kGaussianLogWeight);
  if (!mean) needs &= ~kGaussianMean;
  if (!variance) needs &= ~kGaussianVariance;
  if (!log_weight) needs &= ~kGaussianLogWeight;
  if (!bias) needs &= ~kGaussianBias;
  if (!gate) needs &= ~kGaussianGate;
  if (!evidence) needs &= ~(kGaussianBetaUse | kGaussianBetaIgnore);

  cut_call(given, call, needs & (kGaussianMean | kGaussianVariance | kGaussianLogWeight),
           (beta_use ? beta_use->numel() : 0) + (beta_ignore ? beta_ignore->numel() : 0));
  const bool empty = g.positions() == 0 || (!grad_counts && !grad_means && !grad_variances && !evidence);
  Tensor dmean = given.result(needs & kGaussianMean, shape, call.with[0].dmean, empty);
  Tensor dvariance = given.result(needs & kGaussianVariance, shape, call.with[0].dvariance, empty);
  Tensor dlog_weight = given.result(needs & kGaussianLogWeight, numbers, call.with[0].dlog_weight, empty);
  const std::vector<int64_t> none;
  const Partial uses = given.partial(needs & kGaussianBetaUse, call.cut.items(), beta_use ? shape_of(*beta_use) : none);
  const Partial ignores =
      given.partial(needs & kGaussianBetaIgnore, call.cut.items(), beta_ignore ? shape_of(*beta_ignore) : none);
  for (Gaussian& with : call.with) with.duse = uses.parts, with.dignore = ignores.parts;
  const bool parents = needs & (kGaussianMean | kGaussianVariance | kGaussianLogWeight);
  const Gradients out = run_backward(given, call, needs & kGaussianChildren, needs & kGaussianWeight,
                                     needs & kGaussianBias, needs & kGaussianGate, parents, empty);
  Tensor dweight = given.none(), dbias = given.none(), duse = given.none(), dignore = given.none();
  if (needs & kGaussianWeight) dweight = given.stored(out.weights.sum());
  if (needs & kGaussianBias) dbias = given.stored(out.biases.sum());
  if (needs & kGaussianBetaUse) duse = uses.sum();
  if (needs & kGaussianBetaIgnore) dignore = ignores.sum();
  return {needs & kGaussianChildren ? given.stored(out.dchildren) : given.none(),
          dweight,
          dmean,
          dvariance,
          dlog_weight,
          dbias,
          needs & kGaussianGate ? given.stored(out.dgate) : given.none(),
          duse,
          dignore};
}

}  // namespace

GaussianGradients gaussian_pass_backward(const MaybeTensor grad_counts, const MaybeTensor grad_means,
                                         const MaybeTensor grad_variances, const MaybeTensor grad_evidence,
                                         const Tensor children, const Tensor weight, const MaybeTensor mean,
                                         const MaybeTensor variance, const MaybeTensor log_weight,
                                         const MaybeTensor bias, const MaybeTensor gate, const MaybeTensor beta_use,
                                         const MaybeTensor beta_ignore, const Tensor counts, const Tensor means,
                                         const Tensor variances, double eps, const std::vector<int64_t> window,
                                         int64_t needs) {
  return gaussian_backward(grad_counts, grad_means, grad_variances, grad_evidence, children, weight, mean, variance,
                           log_weight, bias, gate, beta_use, beta_ignore, counts, means, variances, eps, window, needs,
                           false);
}

GaussianGradients gaussian_turns_backward(const MaybeTensor grad_counts, const MaybeTensor grad_means,
                                          const MaybeTensor grad_variances, const MaybeTensor grad_evidence,
                                          const Tensor children, const Tensor weight, const MaybeTensor mean,
                                          const MaybeTensor variance, const MaybeTensor log_weight,
                                          const MaybeTensor bias, const MaybeTensor gate, const MaybeTensor beta_use,
                                          const MaybeTensor beta_ignore, const Tensor counts, const Tensor means,
                                          const Tensor variances, double eps, const std::vector<int64_t> window,
                                          int64_t needs) {
  return gaussian_backward(grad_counts, grad_means, grad_variances, grad_evidence, children, weight, mean, variance,
                           log_weight, bias, gate, beta_use, beta_ignore, counts, means, variances, eps, window, needs,
                           true);
}

}  // namespace fastcaps
