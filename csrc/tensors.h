// Between torch's stable ABI and plain geometry: views, types, and the checks that keep a raw op call inside its
// memory.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "geometry.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fastcaps {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// A bit of the backward ops' argument `needs`: the coefficients are constants, no gradient flows through them.
inline constexpr int64_t kFrozen = int64_t(1) << 30;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline void* data_of(const Tensor& x) { return x.mutable_data_ptr(); }

inline void* aligned(void* p) { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64); }

// A new tensor's memory. Large ones come straight from the system, which hands it out page by page as it is touched; in
// pages of 2 MiB where it can, a gradient of 100 MB costs 50 page faults, not 25,000.
inline Tensor fresh(Tensor x) {
#if defined(__linux__)
  constexpr int64_t kPage = 2 << 20;
  const int64_t bytes = x.numel() * int64_t(x.element_size());
  if (bytes >= 2 * kPage) {
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data_of(x)) + kPage - 1) / kPage * kPage;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data_of(x)) + uintptr_t(bytes)) / kPage * kPage;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: whatever comes of it is right
  }
#endif
  return x;
}

inline std::string text(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t k = 0; k < shape.size(); ++k) out += (k ? ", " : "") + std::to_string(shape[k]);
  return out + "]";
}

inline std::vector<int64_t> shape_of(const Tensor& x) {
  std::vector<int64_t> out(size_t(x.dim()));
  for (size_t k = 0; k < out.size(); ++k) out[k] = x.size(int64_t(k));
  return out;
}

// A tensor of a call, which goes with the call's children: their device, a given dtype, a given shape.
inline void check_tensor(const Tensor& x, const char* name, const std::vector<int64_t>& shape, ScalarType type,
                         const Tensor& children) {
  STD_TORCH_CHECK(shape_of(x) == shape, "fastcaps: ", name, " has shape ", text(shape_of(x)), ", expected ",
                  text(shape));
  STD_TORCH_CHECK(x.scalar_type() == type, "fastcaps: ", name, " has another dtype than the call");
  STD_TORCH_CHECK(x.is_cpu() == children.is_cpu() && x.get_device_index() == children.get_device_index(),
                  "fastcaps: ", name, " is not on the device of children");
}

inline Storage storage_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return Storage::kFloat32;
    case ScalarType::Double: return Storage::kFloat64;
    case ScalarType::BFloat16: return Storage::kBFloat16;
    case ScalarType::Half: return Storage::kFloat16;
    default: STD_TORCH_CHECK(false, "fastcaps: children must be float32, float64, bfloat16 or float16");
  }
  return Storage::kFloat32;
}

// The type in which sums over a tensor's numbers are kept.
inline ScalarType accumulation_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline View view_of(const Tensor& x) {
  View view;
  view.data = x.const_data_ptr();
  for (int64_t k = 0; k < x.dim(); ++k) view.stride[k] = x.stride(k);
  return view;
}

// Parameters are read in the compute type and in one layout; for float32 and float64 they usually are there already.
inline Tensor in_compute_type(const Tensor& x, ScalarType type) {
  return torch::stable::contiguous(x.scalar_type() == type ? x : torch::stable::to(x, type));
}

// What every pass is given: children [B, H, W, N, C, D], weight [G, M, D, E], bias [I or 1, M or 1, C, E], gate
// [B, H, W, N], window [kh, kw, sh, sw, ph, pw, dh, dw]. Without weights the votes are the children's own poses, for
// each of `parents`. The Python layer says what is wrong in the user's own terms; this says it for direct calls of the
// ops.
inline Geometry pass_geometry(const Tensor& children, const MaybeTensor& weight, int64_t parents,
                              const MaybeTensor& bias, const MaybeTensor& gate, const std::vector<int64_t>& window) {
  STD_TORCH_CHECK(children.dim() == 6, "fastcaps: children must be [B, H, W, N, C, D], got ", text(shape_of(children)));
  STD_TORCH_CHECK(!weight || weight->dim() == 4, "fastcaps: weight must be [G, M, D, E], got ",
                  text(weight ? shape_of(*weight) : std::vector<int64_t>{}));
  STD_TORCH_CHECK(window.size() == 8, "fastcaps: window must be [kh, kw, sh, sw, ph, pw, dh, dw]");
  Geometry g{};
  g.B = children.size(0), g.H = children.size(1), g.W = children.size(2), g.N = children.size(3);
  g.C = children.size(4), g.D = children.size(5);
  g.G = weight ? weight->size(0) : 1, g.M = weight ? weight->size(1) : parents, g.E = weight ? weight->size(3) : g.D;
  g.window = {window[0], window[1], window[2], window[3], window[4], window[5], window[6], window[7]};
  const Window& w = g.window;
  STD_TORCH_CHECK(w.kh >= 1 && w.kw >= 1 && w.sh >= 1 && w.sw >= 1 && w.ph >= 0 && w.pw >= 0 && w.dh >= 1 && w.dw >= 1,
                  "fastcaps: window is not valid: ", text(window));
  STD_TORCH_CHECK(g.H >= 1 && g.W >= 1 && g.N >= 1 && g.C >= 1 && g.D >= 1 && g.G >= 1 && g.M >= 1 && g.E >= 1,
                  "fastcaps: children ", text(shape_of(children)), " and weight ",
                  weight ? text(shape_of(*weight)) : "None", " must not have empty dimensions but the batch");
  const int64_t y = g.H + 2 * w.ph - w.dh * (w.kh - 1) - 1, x = g.W + 2 * w.pw - w.dw * (w.kw - 1) - 1;
  STD_TORCH_CHECK(y >= 0 && x >= 0, "fastcaps: window ", text(window), " is larger than children ",
                  text(shape_of(children)));
  g.Ho = y / w.sh + 1, g.Wo = x / w.sw + 1;
  STD_TORCH_CHECK(g.children() % g.G == 0, "fastcaps: weight has ", g.G, " groups, which do not divide ", g.children(),
                  " children");
  const ScalarType type = children.scalar_type();
  if (weight) check_tensor(*weight, "weight", {g.G, g.M, g.D, g.E}, type, children);
  if (gate) check_tensor(*gate, "gate", {g.B, g.H, g.W, g.N}, type, children);
  if (bias) {
    STD_TORCH_CHECK(bias->dim() == 4, "fastcaps: bias must be [I or 1, M or 1, C, E]");
    const int64_t i = bias->size(0), m = bias->size(1);
    check_tensor(*bias, "bias", {i == 1 ? 1 : g.children(), m == 1 ? 1 : g.M, g.C, g.E}, type, children);
  }
  return g;
}

// One number or one pose for every parent at every position.
inline std::vector<int64_t> parents_shape(const Geometry& g) { return {g.B, g.Ho, g.Wo, g.M, g.C, g.E}; }
inline std::vector<int64_t> numbers_shape(const Geometry& g) { return {g.B, g.Ho, g.Wo, g.M}; }

// The attention pass has a query [B, Ho, Wo, M, C, E] and norm_* [C * E] besides.
inline Geometry attention_geometry(const Tensor& children, const Tensor& weight, const MaybeTensor& query,
                                   const MaybeTensor& bias, const MaybeTensor& gate, const MaybeTensor& norm_weight,
                                   const MaybeTensor& norm_bias, const std::vector<int64_t>& window) {
  const Geometry g = pass_geometry(children, weight, 0, bias, gate, window);
  const ScalarType type = children.scalar_type();
  if (query) check_tensor(*query, "query", parents_shape(g), type, children);
  if (norm_weight) check_tensor(*norm_weight, "norm_weight", {g.C * g.E}, type, children);
  if (norm_bias) check_tensor(*norm_bias, "norm_bias", {g.C * g.E}, type, children);
  return g;
}

// The pooling pass: identity votes have as many parents as the query, or else the bias, or else one.
inline Geometry pooling_geometry(const Tensor& children, const MaybeTensor& weight, const MaybeTensor& query,
                                 const MaybeTensor& bias, const MaybeTensor& gate, const std::vector<int64_t>& window) {
  STD_TORCH_CHECK(!query || query->dim() == 6, "fastcaps: query must be [B, Ho, Wo, M, C, E]");
  STD_TORCH_CHECK(!bias || bias->dim() == 4, "fastcaps: bias must be [I or 1, M or 1, C, E]");
  const int64_t parents = query ? query->size(3) : bias ? bias->size(1) : 1;
  const Geometry g = pass_geometry(children, weight, parents, bias, gate, window);
  if (query) check_tensor(*query, "query", parents_shape(g), children.scalar_type(), children);
  return g;
}

// The Gaussian pass: mean and variance [B, Ho, Wo, M, C, E], log_weight [B, Ho, Wo, M] and betas [I or 1, M or 1], all
// in the type in which sums are kept.
inline Geometry gaussian_geometry(const Tensor& children, const Tensor& weight, const MaybeTensor& mean,
                                  const MaybeTensor& variance, const MaybeTensor& log_weight, const MaybeTensor& bias,
                                  const MaybeTensor& gate, const MaybeTensor& beta_use, const MaybeTensor& beta_ignore,
                                  const std::vector<int64_t>& window) {
  const Geometry g = pass_geometry(children, weight, 0, bias, gate, window);
  const ScalarType type = accumulation_type(children);
  if (mean) check_tensor(*mean, "mean", parents_shape(g), type, children);
  STD_TORCH_CHECK(mean || !variance, "fastcaps: a variance wants a mean");
  if (variance) check_tensor(*variance, "variance", parents_shape(g), type, children);
  if (log_weight) check_tensor(*log_weight, "log_weight", numbers_shape(g), type, children);
  STD_TORCH_CHECK(beta_use.has_value() == beta_ignore.has_value(),
                  "fastcaps: beta_use and beta_ignore come together or not at all");
  for (const auto& [beta, name] : {std::pair{&beta_use, "beta_use"}, std::pair{&beta_ignore, "beta_ignore"}}) {
    if (!*beta) continue;
    STD_TORCH_CHECK((*beta)->dim() == 2, "fastcaps: ", name, " must be [I or 1, M or 1]");
    const int64_t i = (*beta)->size(0), m = (*beta)->size(1);
    check_tensor(**beta, name, {i == 1 ? 1 : g.children(), m == 1 ? 1 : g.M}, type, children);
  }
  return g;
}

}  // namespace fastcaps
