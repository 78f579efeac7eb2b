// Registration of the CUDA kernels: ops of their own, which fastcaps/backends.py chooses for a call. The tests build
// the same sources for the CPU, under another name.
#include "ops.h"

#include "cut.h"

#ifndef FASTCAPS_CUDA_NAMESPACE
#define FASTCAPS_CUDA_NAMESPACE fastcaps_cuda
#define FASTCAPS_CUDA_KEY CUDA
#endif

STABLE_TORCH_LIBRARY(FASTCAPS_CUDA_NAMESPACE, m) {
  m.def(
      "attention_pass(Tensor children, Tensor weight, Tensor? query, Tensor? bias, Tensor? gate, Tensor? norm_weight, "
      "Tensor? norm_bias, float scale, float eps, bool normalize, int[] window, int options) -> (Tensor, Tensor)");
  m.def(
      "attention_pass_backward(Tensor? grad_parents, Tensor? grad_sums, Tensor children, Tensor weight, Tensor? query, "
      "Tensor? bias, Tensor? gate, Tensor? norm_weight, Tensor sums, float scale, float eps, bool normalize, "
      "int[] window, int needs, int options) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "pooling_pass(Tensor children, Tensor? weight, Tensor? query, Tensor? bias, Tensor? gate, float scale, "
      "bool normalize, int[] window, int options) -> (Tensor, Tensor)");
  m.def(
      "pooling_pass_backward(Tensor? grad_parents, Tensor? grad_logsumexp, Tensor children, Tensor? weight, "
      "Tensor? query, Tensor? bias, Tensor? gate, Tensor parents, Tensor logsumexp, float scale, bool normalize, "
      "int[] window, int needs, int options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "gaussian_pass(Tensor children, Tensor weight, Tensor? mean, Tensor? variance, Tensor? log_weight, "
      "Tensor? bias, Tensor? gate, Tensor? beta_use, Tensor? beta_ignore, float eps, int[] window, int options) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "gaussian_pass_backward(Tensor? grad_counts, Tensor? grad_means, Tensor? grad_variances, "
      "Tensor? grad_evidence, Tensor children, Tensor weight, Tensor? mean, Tensor? variance, Tensor? log_weight, "
      "Tensor? bias, Tensor? gate, Tensor? beta_use, Tensor? beta_ignore, Tensor counts, Tensor means, "
      "Tensor variances, float eps, int[] window, int needs, int options) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "attention_routing(Tensor children, Tensor weight, Tensor? query, Tensor? bias, Tensor? gate, "
      "Tensor? norm_weight, Tensor? norm_bias, float scale, float eps, bool normalize, int rule, int iterations, "
      "bool frozen, int[] window, int options) -> (Tensor, Tensor)");
  m.def(
      "pooling_routing(Tensor children, Tensor? weight, Tensor? bias, Tensor? gate, float scale, bool normalize, "
      "int parents, int rule, int iterations, bool frozen, int[] window, int options) -> (Tensor, Tensor, Tensor)");
  m.def(
      "gaussian_routing(Tensor children, Tensor weight, Tensor? bias, Tensor? gate, Tensor beta_a, Tensor beta_b, "
      "float[] schedule, int model, float eps, int[] window, int options) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(FASTCAPS_CUDA_NAMESPACE, FASTCAPS_CUDA_KEY, m) {
  m.impl("attention_pass", TORCH_BOX(&fastcaps::gpu::attention_pass));
  m.impl("attention_pass_backward", TORCH_BOX(&fastcaps::gpu::attention_pass_backward));
  m.impl("attention_routing", TORCH_BOX(&fastcaps::gpu::attention_routing));
  m.impl("pooling_routing", TORCH_BOX(&fastcaps::gpu::pooling_routing));
  m.impl("gaussian_routing", TORCH_BOX(&fastcaps::gpu::gaussian_routing));
  m.impl("pooling_pass", TORCH_BOX(&fastcaps::gpu::pooling_pass));
  m.impl("pooling_pass_backward", TORCH_BOX(&fastcaps::gpu::pooling_pass_backward));
  m.impl("gaussian_pass", TORCH_BOX(&fastcaps::gpu::gaussian_pass));
  m.impl("gaussian_pass_backward", TORCH_BOX(&fastcaps::gpu::gaussian_pass_backward));
}

namespace {

const char* refusal_of(fastcaps::gpu::Pass pass, int64_t C, int64_t D, int64_t E) {
  static thread_local std::string text;
  text = fastcaps::gpu::refusal(pass, C, D, E);
  return text.c_str();
}

fastcaps::Geometry geometry_of(const int64_t* n) {
  return {n[0], n[1], n[2], n[3], n[4],  n[5],
          n[6], n[7], n[8], n[9], n[10], {n[11], n[12], n[13], n[14], n[15], n[16], n[17], n[18]}};
}

const char* plan_of(fastcaps::gpu::Pass pass, const int64_t* n, bool backward, int64_t options, bool half,
                    int64_t multiprocessors, int64_t shared_limit) {
  using namespace fastcaps;
  static thread_local std::string text;
  const Geometry g = geometry_of(n);
  text = gpu::refusal(pass, g.C, g.D, g.E);
  if (text.empty())
    text = gpu::describe(gpu::cut({.pass = pass,
                                   .backward = backward,
                                   .tensor = half || (options & gpu::kTF32),
                                   .ordered = (options & gpu::kDeterministic) != 0},
                                  g, {}, {multiprocessors, shared_limit}));
  return text.c_str();
}

}  // namespace

// For fastcaps.explain, which calls them through ctypes. The texts live until the thread's next call. A plan is asked
// for with the geometry as 19 numbers: B H W N C D Ho Wo M E G and the window's 8; then multiprocessors and a block's
// largest shared memory in bytes.
#define FASTCAPS_EXPLAIN(name, pass)                                                                                \
  extern "C" __attribute__((visibility("default"))) const char* fastcaps_cuda##name##_refusal(int64_t C, int64_t D, \
                                                                                              int64_t E) {          \
    return refusal_of(fastcaps::gpu::Pass::pass, C, D, E);                                                          \
  }                                                                                                                 \
  extern "C" __attribute__((visibility("default"))) const char* fastcaps_cuda##name##_plan(                         \
      const int64_t* geometry, bool backward, int64_t options, bool half, int64_t multiprocessors,                  \
      int64_t shared_limit) {                                                                                       \
    return plan_of(fastcaps::gpu::Pass::pass, geometry, backward, options, half, multiprocessors, shared_limit);    \
  }

FASTCAPS_EXPLAIN(, kAttention)
FASTCAPS_EXPLAIN(_pooling, kPooling)
FASTCAPS_EXPLAIN(_gaussian, kGaussian)

// Why the loop of passes serves a routing better than one launch (see ops.h); empty if it does not. Asked with all that
// the launch depends on: the geometry as above, the pass (0 attention, 1 pooling, 2 Gaussian), whether votes are the
// children themselves, turns, bits of Options, whether children are in half precision; and the device's
// multiprocessors and a block's largest shared memory in bytes, for no device is asked here.
extern "C" __attribute__((visibility("default"))) const char* fastcaps_cuda_routing_refusal(
    const int64_t* geometry, int64_t pass, int64_t identity, int64_t turns, int64_t options, int64_t half,
    int64_t multiprocessors, int64_t shared_limit) {
  using namespace fastcaps;
  static thread_local std::string text;
  if (turns > gpu::kMostTurns)
    text = "its " + std::to_string(turns) + " turns are more than " + std::to_string(gpu::kMostTurns);
  else
    text = gpu::routing_refusal(gpu::Pass(pass), geometry_of(geometry), half || (options & gpu::kTF32), identity != 0,
                                {multiprocessors, shared_limit});
  return text.c_str();
}
