// Op bodies of the Gaussian pass on a GPU: check, cut, allocate, launch.
#include "../gaussian.h"

#include "call.h"
#include "gaussian_forward.h"
#include "ops.h"

namespace fastcaps::gpu {
namespace {

// ---- behind the forward kernel: the moments of several ranges of children, joined -----------------------------------
struct JoinArgs {
  int64_t count;  // parents in all: B * Ho * Wo * M
  int numbers, chunks;
  float eps;
  const float* mean;                       // [count, numbers], the base of all; or null
  const float *parts, *evidences;          // [chunks, count]; evidences may be null
  const float *bases, *offsets, *spreads;  // [chunks, count, numbers]; bases null if there is a mean
  float *counts, *evidence;                // [count]
  float *means, *variances;                // [count, numbers]
};

FASTCAPS_KERNEL(256, 1)
gaussian_join_kernel(const FASTCAPS_CONSTANT JoinArgs a) {
  const int64_t all = a.count * a.numbers;
  for (int64_t k = block_x() * block_threads() + thread_index(); k < all; k += blocks_x() * block_threads()) {
    const int64_t parent = k / a.numbers;
    Moments moments;
    float n = 0.0f, base = a.mean ? a.mean[k] : 0.0f, evidence = 0.0f;
    for (int chunk = 0; chunk < a.chunks; ++chunk) {
      const int64_t one = chunk * a.count + parent, number = chunk * all + k;
      if (a.evidences) evidence += a.evidences[one];
      const float more = a.parts[one];
      if (!a.mean && n == 0.0f) base = a.bases[number];
      const float from = a.mean ? 0.0f : a.bases[number] - base;
      moments.join({from + a.offsets[number], a.spreads[number]}, n, more);
      n += more;
    }
    moments.conclude(base, n, a.eps, a.means[k], a.variances[k]);
    if (k != parent * a.numbers) continue;
    a.counts[parent] = n;
    if (a.evidences) a.evidence[parent] = evidence;
  }
}

// ---- before the backward kernel: what a vote's weight gains, as a parabola in the vote ------------------------------
struct PrepareArgs {
  int64_t count;
  int M, C, E, Ho, Wo;
  float eps;
  const float* dcounts;     // [count] or null
  View dmeans, dvariances;  // [B, Ho, Wo, M, C, E] or null
  const float *counts, *means, *variances;
  float *dconstant, *linear, *square;
  float*
      narrow;  // [B * Ho * Wo], zeros: counts parents whose variance is small beside the square of their mean; or null
};

FASTCAPS_KERNEL(256, 1)
gaussian_prepare_kernel(const FASTCAPS_CONSTANT PrepareArgs a) {
  for (int64_t parent = block_x() * block_threads() + thread_index(); parent < a.count;
       parent += blocks_x() * block_threads()) {
    const int64_t from_means = offset_of_parent(a.dmeans, parent, a.M, a.Ho, a.Wo);
    const int64_t from_variances = offset_of_parent(a.dvariances, parent, a.M, a.Ho, a.Wo);
    const float all = a.counts[parent] + a.eps, inverse = all == 0.0f ? 0.0f : 1.0f / all;
    const auto number = [&](const View& view, int64_t from, int c, int e) {
      return view.data ? static_cast<const float*>(view.data)[from + c * view.stride[4] + e * view.stride[5]] : 0.0f;
    };
    float constant = a.dcounts ? a.dcounts[parent] : 0.0f;
    bool narrow = false;
    for (int c = 0; c < a.C; ++c)
      for (int e = 0; e < a.E; ++e) {
        const int64_t at = (parent * a.C + c) * a.E + e;
        const float square = number(a.dvariances, from_variances, c, e) * inverse;
        a.square[at] = square;
        a.linear[at] = number(a.dmeans, from_means, c, e) * inverse - 2.0f * (a.eps * inverse) * a.means[at] * square;
        constant -= square * a.variances[at];
        narrow = narrow || 64.0f * a.variances[at] < a.means[at] * a.means[at];
      }
    a.dconstant[parent] = constant;
    if (narrow && a.narrow) atomic_add(a.narrow + parent / a.M, 1.0f);
  }
}

Call gaussian_call(const Tensor& children, const Tensor& weight, const MaybeTensor& mean, const MaybeTensor& variance,
                   const MaybeTensor& log_weight, const MaybeTensor& bias, const MaybeTensor& gate,
                   const MaybeTensor& beta_use, const MaybeTensor& beta_ignore, double eps,
                   const std::vector<int64_t>& window) {
  Call call(Pass::kGaussian,
            gaussian_geometry(children, weight, mean, variance, log_weight, bias, gate, beta_use, beta_ignore, window),
            children, weight, bias, gate);
  PassArgs& a = call.args;
  a.mean = call.dense(mean), a.variance = call.dense(variance), a.log_weight = call.dense(log_weight);
  a.eps = float(eps);
  if (beta_use) call.take_betas(beta_use, beta_ignore);
  return call;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> gaussian_pass(const Tensor children, const Tensor weight,
                                                         const MaybeTensor mean, const MaybeTensor variance,
                                                         const MaybeTensor log_weight, const MaybeTensor bias,
                                                         const MaybeTensor gate, const MaybeTensor beta_use,
                                                         const MaybeTensor beta_ignore, double eps,
                                                         const std::vector<int64_t> window, int64_t options) {
  const DeviceGuard guard(children);
  Call call =
      gaussian_call(children, weight, mean, variance, log_weight, bias, gate, beta_use, beta_ignore, eps, window);
  const Geometry& g = call.geometry;
  PassArgs& a = call.args;
  Tensor counts = call.empty(numbers_shape(g)), means = call.empty(parents_shape(g));
  Tensor variances = call.empty(parents_shape(g));
  Tensor evidence = call.empty(beta_use ? numbers_shape(g) : std::vector<int64_t>{0});
  if (g.positions() == 0) return {counts, means, variances, evidence};

  const Cut c = call.cut_forward(options);
  call.take(c);
  const Tensor statistics = mean || log_weight ? call.collect(c, 2) : Tensor();
  if (c.chunks == 1) {
    a.counts = floats(counts), a.evidence = floats(evidence);
    a.means = floats(means), a.variances = floats(variances);
    call.launch(c, 0, c.parent_blocks);
    return {counts, means, variances, evidence};
  }
  const Tensor parts = call.empty(call.parts(c, false)), offsets = call.empty(call.parts(c, true));
  const Tensor spreads = call.empty(call.parts(c, true));
  const Tensor evidences = call.empty(beta_use ? call.parts(c, false) : std::vector<int64_t>{0});
  const Tensor bases = call.empty(mean ? std::vector<int64_t>{0} : call.parts(c, true));
  a.counts = floats(parts), a.evidence = floats(evidences);
  a.offsets = floats(offsets), a.spread = floats(spreads), a.base = floats(bases);
  call.launch(c, 0, c.parent_blocks);
  launch(&gaussian_join_kernel, blocks_for(means.numel()),
         JoinArgs{g.positions() * g.M, int(g.parent_pose()), c.chunks, a.eps, a.mean, floats(parts), floats(evidences),
                  floats(bases), floats(offsets), floats(spreads), floats(counts), floats(evidence), floats(means),
                  floats(variances)});
  return {counts, means, variances, evidence};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gaussian_pass_backward(
    const MaybeTensor grad_counts, const MaybeTensor grad_means, const MaybeTensor grad_variances,
    const MaybeTensor grad_evidence, const Tensor children, const Tensor weight, const MaybeTensor mean,
    const MaybeTensor variance, const MaybeTensor log_weight, const MaybeTensor bias, const MaybeTensor gate,
    const MaybeTensor beta_use, const MaybeTensor beta_ignore, const Tensor counts, const Tensor means,
    const Tensor variances, double eps, const std::vector<int64_t> window, int64_t needs, int64_t options) {
  const DeviceGuard guard(children);
  Call call =
      gaussian_call(children, weight, mean, variance, log_weight, bias, gate, beta_use, beta_ignore, eps, window);
  const Geometry& g = call.geometry;
  PassArgs& a = call.args;
  const auto check = [&](const MaybeTensor& x, const char* name, const std::vector<int64_t>& shape) {
    if (x) check_tensor(*x, name, shape, ScalarType::Float, children);
  };
  check(grad_counts, "grad_counts", numbers_shape(g)), check(grad_means, "grad_means", parents_shape(g));
  check(grad_variances, "grad_variances", parents_shape(g));
  if (beta_use) check(grad_evidence, "grad_evidence", numbers_shape(g));
  check(counts, "counts", numbers_shape(g)), check(means, "means", parents_shape(g));
  check(variances, "variances", parents_shape(g));
  const bool listens = beta_use && grad_evidence;
  const bool empty = g.positions() == 0 || (!grad_counts && !grad_means && !grad_variances && !listens);

  const auto wants = [&](int64_t bit, const MaybeTensor& given) { return given && (needs & bit) != 0; };
  const bool wants_mean = wants(kGaussianMean, mean), wants_variance = wants(kGaussianVariance, variance);
  const bool wants_log = wants(kGaussianLogWeight, log_weight);
  const bool wants_use = listens && wants(kGaussianBetaUse, beta_use);
  const bool wants_ignore = listens && wants(kGaussianBetaIgnore, beta_ignore);
  const int64_t every = g.children() * g.M;  // betas that every child has for itself; others are summed up by position
  Gradients gradients(call,
                      {wants(kGaussianChildren, children), wants(kGaussianWeight, weight), wants(kGaussianBias, bias),
                       wants(kGaussianGate, gate), wants_use && a.use_stride_i ? every : 0,
                       wants_ignore && a.ignore_stride_i ? every : 0},
                      weight, bias, options);
  const auto room = [&](bool wanted, bool poses) {
    if (!wanted) return call.empty({0});
    return empty ? call.zeros({1, g.positions() * g.M * (poses ? g.parent_pose() : 1)})
                 : call.empty(call.parts(gradients.cut, poses));
  };
  const Tensor dmean = room(wants_mean, true), dvariance = room(wants_variance, true);
  const Tensor dlog_weight = room(wants_log, false);
  const Tensor shared_use = room(wants_use && !a.use_stride_i, false);
  const Tensor shared_ignore = room(wants_ignore && !a.ignore_stride_i, false);
  if (!empty) {
    const int64_t count = g.positions() * g.M;
    const Tensor linear = call.empty({count * g.parent_pose()}), square = call.empty({count * g.parent_pose()});
    const Tensor constant = call.empty({count}), narrow = call.zeros({grad_variances ? g.positions() : 0});
    a.means = call.dense(means), a.counts = call.dense(counts);
    const float* spread = call.dense(variances);
    launch(&gaussian_prepare_kernel, blocks_for(count),
           PrepareArgs{count, a.M, a.C, a.E, a.Ho, a.Wo, a.eps, call.dense(grad_counts),
                       grad_means ? view_of(*grad_means) : View{}, grad_variances ? view_of(*grad_variances) : View{},
                       a.counts, a.means, spread, floats(constant), floats(linear), floats(square), floats(narrow)});
    a.dsums = floats(linear), a.dsquares = floats(square), a.dconstant = floats(constant);
    if (listens) a.devidence = call.dense(grad_evidence);
    a.dquery = floats(dmean), a.dvariance = floats(dvariance), a.dlog_weight = floats(dlog_weight);
    if (wants_use && !a.use_stride_i) a.duse = floats(shared_use);
    if (wants_ignore && !a.ignore_stride_i) a.dignore = floats(shared_ignore);
    if (grad_variances) gradients.measure(3, floats(linear), floats(narrow));
    gradients.run(3);
  }
  const auto summed = [&](bool wanted, const Tensor& x, const std::vector<int64_t>& shape) {
    return wanted ? torch::stable::view(over(x, 0), shape) : gradients.none();
  };
  // Betas [I or 1, M]: what every child has, or a row for each position; and then their columns, if they share one.
  const auto betas = [&](bool wanted, const MaybeTensor& beta, const Tensor& own, const Tensor& by_position) {
    if (!wanted) return gradients.none();
    const bool shared = beta->size(0) == 1;
    const Tensor rows = shared ? over(torch::stable::view(by_position, {by_position.numel() / g.M, g.M}), 0) : own;
    const Tensor all = torch::stable::view(rows, {beta->size(0), g.M});
    return torch::stable::view(beta->size(1) == g.M ? all : over(all, 1), {beta->size(0), beta->size(1)});
  };
  return {gradients.children(),
          gradients.weight(),
          summed(wants_mean, dmean, parents_shape(g)),
          summed(wants_variance, dvariance, parents_shape(g)),
          summed(wants_log, dlog_weight, numbers_shape(g)),
          gradients.bias(),
          gradients.gate(),
          betas(wants_use, beta_use, gradients.use(), shared_use),
          betas(wants_ignore, beta_ignore, gradients.ignore(), shared_ignore)};
}

}  // namespace fastcaps::gpu
