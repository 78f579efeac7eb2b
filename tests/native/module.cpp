// The module fastcaps_native: every formula of csrc/algebra in float and in double (fastcaps_native.float32, .float64),
// and the two schedules.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "algebra/attention.h"
#include "algebra/gaussian.h"
#include "algebra/layer_norm.h"
#include "algebra/pooling.h"
#include "algebra/pose.h"
#include "native.h"

namespace py = pybind11;
using namespace fastcaps;

namespace {

template <class X>
using Pose = std::vector<X>;
template <class X>
using Pair = std::pair<X, X>;

template <class X>
PoseInMemory<X> in_memory(Pose<X>& pose) {
  return {pose.data(), int64_t(pose.size())};
}
template <class X>
const X* or_null(const Pose<X>& values) {
  return values.empty() ? nullptr : values.data();
}

template <class X>
void add_formulas(py::module_ m) {
  m.def("sqrt", [](X x) { return Number<X>::sqrt(x); });
  m.def("log", [](X x) { return Number<X>::log(x); });
  m.def("log_sigmoid", [](X x) { return Number<X>::log_sigmoid(x); });
  m.def("inverse_or_zero", [](X x) { return inverse_or_zero(x); });
  // attention and pooling
  m.def("attention_dlogit", [](X w, X gain, X mean, X scale) { return attention::dlogit(w, gain, mean, scale); });
  m.def("attention_dvote", [](X w, X ds, X da, X q) { return attention::dvote(w, ds, da, q); });
  m.def("inverse_length", [](X square) { return pooling::inverse_length(square); });
  m.def("pooling_dvote", [](X r, X ds, X c, X q, X d, X vote) { return pooling::dvote(r, ds, c, q, d, vote); });
  // Gaussian
  m.def("distance", [](X from_mean, X p) { return gaussian::distance(from_mean, p); });
  m.def("add", [](X from_base, X moved, X counts, X mean, X square) {
    gaussian::add(from_base, moved, counts, mean, square);
    return Pair<X>(mean, square);
  });
  m.def("join", [](X other_mean, X other_square, X fraction, X counts, X mean, X square) {
    gaussian::join(other_mean, other_square, fraction, counts, mean, square);
    return Pair<X>(mean, square);
  });
  m.def("finish", [](X base, X n, X eps, X one, X mean, X square) {
    gaussian::finish(base, n, eps, one, mean, square);
    return Pair<X>(mean, square);
  });
  m.def("precision", [](X variance) { return gaussian::precision(variance); });
  m.def("log_sigma", [](X variance) { return gaussian::log_sigma(variance); });
  m.def("em_score",
        [](X heat, X beta, X cost, X log_sigma, X n) { return gaussian::em_score<X>(heat, beta, cost, log_sigma, n); });
  m.def("gaussian_gain", [](X u, X s, X d) { return gaussian::gain(u, s, d); });
  m.def("gaussian_dvote",
        [](X w, X u, X s, X d, X da, X p, X from_mean) { return gaussian::dvote(w, u, s, d, da, p, from_mean); });
  // poses
  m.def("length", [](Pose<X> pose) { return length(in_memory(pose)); });
  m.def("squash_factor", [](X size) { return squash_factor(size); });
  m.def("squash", [](Pose<X> pose) { return squash(in_memory(pose)), pose; });
  m.def("unit", [](Pose<X> pose) { return unit(in_memory(pose)), pose; });
  m.def("standardise", [](Pose<X> pose, X eps) {
    const X rstd = standardise(in_memory(pose), eps);
    return std::pair(pose, rstd);
  });
  m.def("standardise_backward", [](Pose<X> grad, X rstd, const Pose<X>& standard) {
    standardise_backward(in_memory(grad), rstd, [&](int64_t k) { return standard[size_t(k)]; });
    return grad;
  });
  m.def("layer_norm", [](Pose<X> S, X eps, const Pose<X>& weight, const Pose<X>& bias) {
    layer_norm(S.data(), int64_t(S.size()), eps, or_null(weight), or_null(bias));
    return S;
  });
  m.def("layer_norm_backward",
        [](const Pose<X>& S, X eps, const Pose<X>& weight, Pose<X> dY, Pose<X> dweight, Pose<X> dbias) {
          layer_norm_backward(S.data(), int64_t(S.size()), eps, or_null(weight), dY.data(),
                              dweight.empty() ? nullptr : dweight.data(), dbias.empty() ? nullptr : dbias.data());
          return std::tuple(dY, dweight, dbias);
        });
}

}  // namespace

PYBIND11_MODULE(fastcaps_native, m) {
  add_formulas<float>(m.def_submodule("float32"));
  add_formulas<double>(m.def_submodule("float64"));
  m.def("cpu_schedule", &native::cpu_schedule);
  m.def("cuda_schedule", &native::cuda_schedule);
  m.def("cuda_kernels", &native::cuda_kernels);
  m.def("cuda_refusal", &native::cuda_refusal);
  m.def("cuda_routing_refusal", &native::cuda_routing_refusal);
  m.def("cuda_experiment_refusal", &native::cuda_experiment_refusal);
  m.def("cuda_instances", &native::cuda_instances);
  m.def("cuda_countable", &native::cuda_countable);
  m.def("divided", &native::divided);
}
