// Between torch's stable ABI and plain data: views, types, and the checks that keep a raw op call inside its memory.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "votes.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fastcaps {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Shape = std::vector<int64_t>;

inline constexpr double kMostBytes = 0x1p60;  // of a tensor: more than any machine has, and offsets do not overflow

inline void* data_of(const Tensor& x) { return x.mutable_data_ptr(); }

inline Shape shape_of(const Tensor& x) {
  Shape out(size_t(x.dim()));
  for (size_t k = 0; k < out.size(); ++k) out[k] = x.size(int64_t(k));
  return out;
}

// The strides of a dense tensor whose dimensions have an order in memory, the outermost first; by default their own.
// Garbage where they overflow, for shapes of more than kMostBytes.
inline Shape dense_strides(const Shape& shape, Shape order = {}) {
  for (size_t k = order.size(); k < shape.size(); ++k) order.push_back(int64_t(k));
  Shape strides(shape.size());
  uint64_t stride = 1;
  for (size_t at = shape.size(); at-- > 0;) {
    const size_t k = size_t(order[at]);
    strides[k] = int64_t(stride);
    stride *= uint64_t(std::max<int64_t>(shape[k], 1));
  }
  return strides;
}

// Whether a tensor has these strides, which are of no matter in dimensions of size 1.
inline bool has_strides(const Tensor& x, const Shape& strides) {
  for (int64_t k = 0; k < x.dim(); ++k)
    if (x.size(k) != 1 && x.stride(k) != strides[size_t(k)]) return false;
  return true;
}

// The strides of a weight's gradient, as in fastcaps/ops/signature.py: the weight's own if it is dense in some order of
// its dimensions. So a parameter that is stored in another order adopts its gradient without a copy.
inline Shape gradient_strides(const Tensor& weight) {
  const Shape shape = shape_of(weight), plain = dense_strides(shape);
  if (weight.is_contiguous()) return plain;
  Shape order(shape.size());
  for (size_t k = 0; k < order.size(); ++k) order[k] = int64_t(k);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return weight.stride(a) > weight.stride(b); });
  const Shape strides = dense_strides(shape, order);
  return has_strides(weight, strides) ? strides : plain;
}

inline Shape strides_of(const Tensor& x) {
  Shape out(size_t(x.dim()));
  for (size_t k = 0; k < out.size(); ++k) out[k] = x.stride(int64_t(k));
  return out;
}

// How the matrices of a weight [G, M, D, E] with some strides lie, if kernels can read them so.
inline std::optional<MatrixLayout> layout_of(const Shape& shape, const Shape& strides) {
  const int64_t D = shape[2], E = shape[3];
  if (E == 1 || strides[3] == 1) return MatrixLayout{strides[0], strides[1], D == 1 ? E : strides[2], 1};
  if ((D == 1 || strides[2] == 1) && strides[3] == D) return MatrixLayout{strides[0], strides[1], 1, D};
  return {};
}

// A new tensor's memory. The system allocates large tensors page by page on first use; with pages of 2 MiB a gradient
// of 100 MB costs 50 page faults, not 25,000.
inline Tensor fresh(Tensor x) {
#if defined(__linux__)
  constexpr int64_t kPage = 2 << 20;
  const int64_t bytes = x.numel() * int64_t(x.element_size());
  if (bytes >= 2 * kPage) {
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data_of(x)) + kPage - 1) / kPage * kPage;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data_of(x)) + uintptr_t(bytes)) / kPage * kPage;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // only advice, so errors do not matter
  }
#endif
  return x;
}

inline std::string text(const Shape& shape) {
  std::string out = "[";
  for (size_t k = 0; k < shape.size(); ++k) out += (k ? ", " : "") + std::to_string(shape[k]);
  return out + "]";
}

// Not STD_TORCH_CHECK, which shows files and lines: the caller made the error.
[[noreturn]] inline void throw_no_memory(const std::string& what) {
  throw std::runtime_error("fastcaps: no memory for " + what);
}

// Checks a tensor of a call: the children's device, a given dtype, a given shape.
inline void check_tensor(const Tensor& x, const char* name, const Shape& shape, ScalarType type,
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

// The type of sums over a tensor's values.
inline ScalarType accumulation_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// A tensor with positions, read as a grid's, [B, H, W, ...]; `iteration`: its index in a stack of iterations.
inline View view_of(const Tensor& x, bool is_set, int64_t iteration = -1) {
  View view;
  const int64_t first = iteration >= 0 ? 1 : 0;  // the dimension of the batch
  const int64_t begin = first ? iteration * x.stride(0) * int64_t(x.element_size()) : 0;
  view.data = static_cast<const char*>(x.const_data_ptr()) + begin;
  for (int64_t k = first; k < x.dim(); ++k) view.stride[k - first + (is_set && k > first ? 2 : 0)] = x.stride(k);
  return view;
}

// A new tensor on the device of another, dense unless strides are given; `what` names it in the error if there is no
// memory for it.
// torch::stable::new_empty calls the dispatcher, which takes several times as long.
inline Tensor new_tensor(const Tensor& beside, const Shape& shape, ScalarType type, const char* what,
                         Shape strides = {}) {
  double bytes = type == ScalarType::Double ? 8 : type == ScalarType::Float ? 4 : 2;
  for (const int64_t size : shape) bytes *= double(size);
  if (strides.empty()) strides = dense_strides(shape);
  int32_t device = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(beside.get(), &device));
  AtenTensorHandle made = nullptr;
  if (bytes > kMostBytes ||
      aoti_torch_empty_strided(int64_t(shape.size()), shape.data(), strides.data(),
                               torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)), device,
                               beside.get_device_index(), &made) != TORCH_SUCCESS)
    // a GPU's allocator also reports errors of earlier launches
    throw_no_memory(what + (" of shape " + text(shape)) + ": " +
                    std::to_string(int64_t(std::min(bytes, kMostBytes) / 1e6) + 1) + " MB" +
                    (device == aoti_torch_device_type_cpu()
                         ? ""
                         : " (or an earlier launch failed: CUDA_LAUNCH_BLOCKING=1 shows which)"));
  return Tensor(made);
}

// A copy in a type, dense unless strides are given.
inline Tensor copied(const Tensor& x, ScalarType type, const Shape& strides = {}) {
  Tensor out = fresh(new_tensor(x, shape_of(x), type, "a copy", strides));
  return torch::stable::copy_(out, x);
}

// Parameters are read in the compute type and in one layout, which float32 and float64 tensors usually have already.
inline Tensor dense_as(const Tensor& x, ScalarType type) {
  return x.scalar_type() == type && x.is_contiguous() ? x : copied(x, type);
}
inline Tensor as_dense(const Tensor& x) { return dense_as(x, x.scalar_type()); }

// One pose or one value for every parent at every position, and for every iteration if there are several.
inline Shape poses_shape(const Votes& votes, int64_t iterations = 0) {
  Shape shape = {votes.B, votes.Ho, votes.Wo, votes.M, votes.C, votes.E};
  if (votes.is_set) shape = {votes.B, votes.M, votes.C, votes.E};
  if (iterations > 0) shape.insert(shape.begin(), iterations);
  return shape;
}
inline Shape numbers_shape(const Votes& votes, int64_t iterations = 0) {
  Shape shape = poses_shape(votes, iterations);
  shape.resize(shape.size() - 2);
  return shape;
}

// Strides of a dense table between children (`i`) and between parents (`m`), with entries of `each` values; 0 if all
// share an entry.
inline void table_strides(const Tensor& x, int64_t each, int64_t& i, int64_t& m) {
  m = x.size(1) > 1 ? each : 0;
  i = x.size(0) > 1 ? x.size(1) * each : 0;
}

// The first six arguments of every op.
struct VoteTensors {
  Tensor children;           // [B, H, W, N, C, D], or [B, I, C, D] of a set
  MaybeTensor weight, bias;  // [G, M, D, E], [I or 1, M or 1, C, E]
  MaybeTensor gate;          // [B, H, W, N], [B, I]
  int64_t parents;
  Shape window;  // kh, kw, sh, sw, ph, pw, dh, dw

  ScalarType storage() const { return children.scalar_type(); }
  ScalarType wide() const { return accumulation_type(children); }

  void check_maybe(const MaybeTensor& x, const char* name, const Shape& shape, ScalarType type) const {
    if (x) check_tensor(*x, name, shape, type, children);
  }
  Shape gate_shape() const {
    Shape shape = shape_of(children);
    shape.resize(shape.size() - 2);
    return shape;
  }

  // A table with one row or a row for every child, and one column or a column for every parent.
  void check_table(const Tensor& x, const char* name, const Votes& votes, ScalarType type, Shape more = {}) const {
    STD_TORCH_CHECK(x.dim() == int64_t(more.size()) + 2, "fastcaps: ", name, " must be [I or 1, M or 1",
                    more.empty() ? "]" : ", C, E]");
    more.insert(more.begin(), {x.size(0) == 1 ? 1 : votes.I, x.size(1) == 1 ? 1 : votes.M});
    check_tensor(x, name, more, type, children);
  }

  // Checks everything, for direct calls of the ops; the Python layer has checks with the user's words. The backend sets
  // the addresses of `weight` and `bias`, which it may convert first.
  Votes check() const {
    const bool is_set = children.dim() == 4;
    STD_TORCH_CHECK(is_set || children.dim() == 6,
                    "fastcaps: children must be [B, H, W, N, C, D] or [B, I, C, D], got ", text(shape_of(children)));
    STD_TORCH_CHECK(!weight || weight->dim() == 4, "fastcaps: weight must be [G, M, D, E], got ",
                    text(weight ? shape_of(*weight) : Shape{}));
    STD_TORCH_CHECK(!weight || weight->size(1) == parents, "fastcaps: weight is not for ", parents,
                    " parents: ", text(weight ? shape_of(*weight) : Shape{}));
    STD_TORCH_CHECK(window.size() == 8, "fastcaps: window must be [kh, kw, sh, sw, ph, pw, dh, dw]");
    Votes v{};
    v.is_set = is_set;
    v.B = children.size(0), v.H = is_set ? 1 : children.size(1), v.W = is_set ? 1 : children.size(2);
    v.N = children.size(is_set ? 1 : 3), v.C = children.size(is_set ? 2 : 4), v.D = children.size(is_set ? 3 : 5);
    v.G = weight ? weight->size(0) : 1, v.M = parents, v.E = weight ? weight->size(3) : v.D;
    v.matrices = v.dense_matrices();
    v.window = {window[0], window[1], window[2], window[3], window[4], window[5], window[6], window[7]};
    const Window& w = v.window;
    STD_TORCH_CHECK(
        w.kh >= 1 && w.kw >= 1 && w.sh >= 1 && w.sw >= 1 && w.ph >= 0 && w.pw >= 0 && w.dh >= 1 && w.dw >= 1,
        "fastcaps: window is not valid: ", text(window));
    for (const int64_t number : window)
      STD_TORCH_CHECK(number <= int64_t(1) << 31, "fastcaps: window has numbers above 2**31: ", text(window));
    STD_TORCH_CHECK(!is_set || w.is_of_set(), "fastcaps: window must be 1 x 1 for a set, got ", text(window));
    STD_TORCH_CHECK(v.H >= 1 && v.W >= 1 && v.N >= 1 && v.C >= 1 && v.D >= 1 && v.G >= 1 && v.M >= 1 && v.E >= 1,
                    "fastcaps: children ", text(shape_of(children)), " and weight ",
                    weight ? text(shape_of(*weight)) : "None", " must not have empty dimensions but the batch");
    const int64_t y = v.H + 2 * w.ph - w.dh * (w.kh - 1) - 1, x = v.W + 2 * w.pw - w.dw * (w.kw - 1) - 1;
    STD_TORCH_CHECK(y >= 0 && x >= 0, "fastcaps: window ", text(window), " is larger than children ",
                    text(shape_of(children)));
    v.Ho = y / w.sh + 1, v.Wo = x / w.sw + 1;
    if (!v.is_countable())
      throw_no_memory("votes of children " + text(shape_of(children)) + " for " + std::to_string(parents) + " parents");
    v.I = w.kh * w.kw * v.N;
    STD_TORCH_CHECK(v.I % v.G == 0, "fastcaps: weight has ", v.G, " groups, which do not divide ", v.I, " children");
    const ScalarType type = children.scalar_type();
    v.storage = storage_of(children);
    v.children = view_of(children, is_set);
    if (weight) check_tensor(*weight, "weight", {v.G, v.M, v.D, v.E}, type, children);
    if (gate) {
      check_tensor(*gate, "gate", gate_shape(), type, children);
      v.gate = view_of(*gate, is_set);
    }
    if (bias) {
      check_table(*bias, "bias", v, type, {v.C, v.E});
      table_strides(*bias, v.parent_size(), v.bias_stride_i, v.bias_stride_m);
    }
    return v;
  }
};

// A call of an op: its checked votes, and the tensors that kernels read.
struct OpCall {
  const VoteTensors& given;
  Votes votes;
  Tensor children;
  ScalarType storage, compute;
  std::vector<Tensor> kept;  // copies, alive during the call

  explicit OpCall(const VoteTensors& tensors, uintptr_t alignment = 1)
      : given(tensors),
        votes(tensors.check()),
        children(tensors.children),
        storage(tensors.storage()),
        compute(tensors.wide()),
        alignment_(alignment) {}

  Shape poses(int64_t iterations = 0) const { return poses_shape(votes, iterations); }
  Shape numbers(int64_t iterations = 0) const { return numbers_shape(votes, iterations); }
  // A tensor in a type, dense and at an aligned address; a copy only if needed.
  const Tensor& dense(const Tensor& x, ScalarType type) {
    kept.push_back(dense_as(x, type));
    if (reinterpret_cast<uintptr_t>(kept.back().const_data_ptr()) % alignment_ != 0) kept.back() = copied(x, type);
    return kept.back();
  }
  // The memory of a dense tensor in the compute type; null without the tensor.
  void* table(const MaybeTensor& x) { return x ? data_of(dense(*x, compute)) : nullptr; }
  View view(const MaybeTensor& x) const { return x ? view_of(*x, votes.is_set) : View{}; }
  BetaTables betas(const MaybeTensor& use, const MaybeTensor& ignore) {
    BetaTables found{table(use), table(ignore)};
    if (use) table_strides(*use, 1, found.use_stride_i, found.use_stride_m);
    if (ignore) table_strides(*ignore, 1, found.ignore_stride_i, found.ignore_stride_m);
    return found;
  }

 private:
  uintptr_t alignment_;
};

}  // namespace fastcaps
