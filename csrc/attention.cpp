// Op bodies of the attention pass on the CPU: check, describe the tensors to the kernels, allocate, run the items.
#include "attention.h"

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "cpu/attention.h"
#include "cpu/cut.h"
#include "tensors.h"

namespace fastcaps {
namespace {

using ForwardCall = AttentionForward;
using BackwardCall = AttentionBackward;

// A thread's own memory for the length of a range of items.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : data_(std::aligned_alloc(64, size_t(bytes + 63) / 64 * 64 + 64), &std::free) {
    STD_TORCH_CHECK(data_ != nullptr, "fastcaps: no memory for ", bytes, " bytes of scratch");
  }
  void* get() const { return data_.get(); }

 private:
  std::unique_ptr<void, decltype(&std::free)> data_;
};

template <class Run>
void run_items(int64_t items, int64_t scratch_bytes, Run&& run) {
  if (items == 0) return;
  torch::stable::parallel_for(0, items, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(scratch_bytes);
    run(begin, end, scratch.get());
  });
}

struct Call {
  AttentionInputs in;
  ScalarType storage, compute;
  bool is_double;
  Tensor weight, bias, norm_weight, norm_bias;  // in the compute type, contiguous: kept alive here

  Call(const Tensor& children, const Tensor& weight_, const MaybeTensor& query, const MaybeTensor& bias_,
       const MaybeTensor& gate, const MaybeTensor& norm_weight_, const MaybeTensor& norm_bias_, double scale,
       double eps, bool normalize, const std::vector<int64_t>& window)
      : storage(children.scalar_type()) {
    in.geometry = attention_geometry(children, weight_, query, bias_, gate, norm_weight_, norm_bias_, window);
    in.storage = storage_of(children);
    STD_TORCH_CHECK(in.storage != Storage::kFloat16, "fastcaps: the CPU kernels take no float16");
    is_double = storage == ScalarType::Double;
    compute = is_double ? ScalarType::Double : ScalarType::Float;
    in.scale = scale;
    in.eps = eps;
    in.normalize = normalize;
    in.children = view_of(children);
    if (query) in.query = view_of(*query);
    if (gate) in.gate = view_of(*gate);
    in.weight = data_of(weight = in_compute_type(weight_, compute));
    if (bias_) {
      in.bias = data_of(bias = in_compute_type(*bias_, compute));
      const int64_t pose = in.geometry.parent_pose();
      in.bias_stride_m = bias.size(1) > 1 ? pose : 0;
      in.bias_stride_i = bias.size(0) > 1 ? bias.size(1) * pose : 0;
    }
    if (norm_weight_) in.norm_weight = data_of(norm_weight = in_compute_type(*norm_weight_, compute));
    if (norm_bias_) in.norm_bias = data_of(norm_bias = in_compute_type(*norm_bias_, compute));
  }

  int64_t number() const { return is_double ? 8 : 4; }
  int64_t lanes() const { return is_double ? attention_kernels().lanes_double : attention_kernels().lanes_float; }
};

// out[k] = sum over parts, in their order; parts lie one after another.
template <class T>
void add_parts(const T* parts, int64_t count, int64_t numbers, T* out) {
  torch::stable::parallel_for(0, numbers, 1 << 15, [&](int64_t begin, int64_t end) {
    std::copy(parts + begin, parts + end, out + begin);
    for (int64_t part = 1; part < count; ++part)
      for (int64_t k = begin; k < end; ++k) out[k] += parts[part * numbers + k];
  });
}

// A gradient of which every group or item makes a part of its own.
Tensor sum_of_parts(const Tensor& parts, int64_t count, const std::vector<int64_t>& shape, bool is_double) {
  if (count == 0) return torch::stable::new_zeros(parts, shape);
  if (count == 1) return torch::stable::view(parts, shape);
  Tensor out = torch::stable::new_empty(parts, shape);
  const int64_t numbers = out.numel();
  if (is_double)
    add_parts(static_cast<const double*>(data_of(parts)), count, numbers, static_cast<double*>(data_of(out)));
  else
    add_parts(static_cast<const float*>(data_of(parts)), count, numbers, static_cast<float*>(data_of(out)));
  return out;
}

}  // namespace

std::tuple<Tensor, Tensor> attention_pass(const Tensor children, const Tensor weight, const MaybeTensor query,
                                          const MaybeTensor bias, const MaybeTensor gate, const MaybeTensor norm_weight,
                                          const MaybeTensor norm_bias, double scale, double eps, bool normalize,
                                          const std::vector<int64_t> window) {
  const Call with(children, weight, query, bias, gate, norm_weight, norm_bias, scale, eps, normalize, window);
  const Geometry& g = with.in.geometry;
  const std::vector<int64_t> shape{g.B, g.Ho, g.Wo, g.M, g.C, g.E};
  Tensor parents = torch::stable::new_empty(children, shape);
  Tensor sums = torch::stable::new_empty(children, normalize ? shape : std::vector<int64_t>{0}, with.compute);

  ForwardCall call;
  call.in = with.in;
  call.cut = cut_forward(g, with.lanes(), with.number());
  call.parents = data_of(parents);
  call.sums = normalize ? data_of(sums) : nullptr;
  Tensor partial;
  if (call.cut.chunks > 1) {
    partial = torch::stable::new_empty(
        children, {call.cut.chunks * call.cut.tiles() * g.parents() * with.lanes() + 64 / with.number()}, with.compute);
    call.partial = aligned(data_of(partial));
  }
  const AttentionKernels& kernels = attention_kernels();
  const int64_t scratch = kernels.forward_scratch(call, with.is_double);
  run_items(g.positions() ? call.cut.items() : 0, scratch, [&](int64_t begin, int64_t end, void* memory) {
    kernels.forward(call, with.is_double, begin, end, memory);
  });
  if (call.partial)
    run_items(ceil_div(g.positions(), with.lanes()), scratch, [&](int64_t begin, int64_t end, void* memory) {
      kernels.forward_finish(call, with.is_double, begin, end, memory);
    });
  return {parents, sums};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_pass_backward(
    const MaybeTensor grad_parents, const MaybeTensor grad_sums, const Tensor children, const Tensor weight,
    const MaybeTensor query, const MaybeTensor bias, const MaybeTensor gate, const MaybeTensor norm_weight,
    const Tensor sums, double scale, double eps, bool normalize, const std::vector<int64_t> window, int64_t needs) {
  const Call with(children, weight, query, bias, gate, norm_weight, std::nullopt, scale, eps, normalize, window);
  const Geometry& g = with.in.geometry;
  const std::vector<int64_t> parents_shape{g.B, g.Ho, g.Wo, g.M, g.C, g.E}, pose_shape{g.C * g.E};
  if (grad_parents) check_tensor(*grad_parents, "grad_parents", parents_shape, with.storage, children);
  if (grad_sums) check_tensor(*grad_sums, "grad_sums", parents_shape, with.compute, children);
  if (normalize) check_tensor(sums, "sums", parents_shape, with.compute, children);
  if (!query) needs &= ~kQuery;
  if (!bias) needs &= ~kBias;
  if (!gate) needs &= ~kGate;
  if (!normalize || !grad_parents) needs &= ~(kNormWeight | kNormBias);

  BackwardCall call;
  call.in = with.in;
  call.cut = cut_backward(g, with.lanes(), with.number());
  if (grad_parents) call.grad_parents = view_of(*grad_parents);
  if (grad_sums) call.grad_sums = view_of(*grad_sums);
  const Tensor sums_row = normalize ? in_compute_type(sums, with.compute) : sums;
  call.sums = normalize ? data_of(sums_row) : nullptr;
  call.weight_parts = g.G % g.N == 0 ? call.cut.groups : call.cut.items();
  call.bias_numbers = bias ? with.bias.numel() : 0;

  const bool empty = g.positions() == 0 || (!grad_parents && !grad_sums);
  const auto zeros = [&](bool wanted, std::vector<int64_t> shape, void*& data, bool clear = true) {
    Tensor out = fresh(torch::stable::new_empty(children, wanted ? shape : std::vector<int64_t>{0}, with.compute));
    if (clear) torch::stable::zero_(out);
    data = wanted ? data_of(out) : nullptr;
    return out;
  };
  const std::vector<int64_t> weight_shape{g.G, g.M, g.D, g.E};
  Tensor dchildren = zeros(needs & kChildren, {g.B, g.H, g.W, g.N, g.C, g.D}, call.dchildren);
  Tensor dgate = zeros(needs & kGate, {g.B, g.H, g.W, g.N}, call.dgate);
  Tensor weights =
      zeros(needs & kWeight, {call.weight_parts, g.G, g.M, g.D, g.E}, call.dweight, empty || g.G != g.children());
  Tensor biases = zeros(needs & kBias, {call.cut.items(), call.bias_numbers}, call.dbias);
  Tensor norms = zeros(needs & (kNormWeight | kNormBias), {call.cut.tiles(), 2, g.C * g.E}, call.dnorm);
  Tensor dquery =
      torch::stable::new_empty(children, needs & kQuery ? parents_shape : std::vector<int64_t>{0}, with.compute);
  const auto lanes = [&](bool wanted, int64_t copies, void*& data) {  // parents of all tiles, turned to lanes
    const int64_t numbers = copies * call.cut.tiles() * g.parents() * with.lanes() + 64 / with.number();
    Tensor out = fresh(torch::stable::new_empty(children, {wanted ? numbers : 0}, with.compute));
    data = wanted ? aligned(data_of(out)) : nullptr;
    return out;
  };
  const Tensor query_lanes = lanes(query.has_value(), 1, call.query_lanes);
  const Tensor dsums_lanes = lanes(true, 1, call.dsums_lanes);
  const Tensor partial = lanes(needs & kQuery, call.cut.chunks, call.partial);
  call.dquery = needs & kQuery ? data_of(dquery) : nullptr;

  const AttentionKernels& kernels = attention_kernels();
  const int64_t scratch = kernels.backward_scratch(call, with.is_double);
  if (!empty) {
    run_items(call.cut.tiles(), scratch, [&](int64_t begin, int64_t end, void* memory) {
      kernels.backward_prepare(call, with.is_double, begin, end, memory);
    });
    run_items(call.cut.items(), scratch, [&](int64_t begin, int64_t end, void* memory) {
      kernels.backward(call, with.is_double, begin, end, memory);
    });
    if (call.partial)
      run_items(call.cut.tiles(), 64, [&](int64_t begin, int64_t end, void* memory) {
        kernels.backward_finish(call, with.is_double, begin, end, memory);
      });
  } else if (call.partial) {
    torch::stable::zero_(dquery);
  }

  const auto stored = [&](const Tensor& x) {
    return x.scalar_type() == with.storage ? x : torch::stable::to(x, with.storage);
  };
  const auto none = [&] { return torch::stable::new_empty(children, {0}); };  // one each: outputs must not alias
  Tensor dweight = none(), dbias = none(), dnorm_weight = none(), dnorm_bias = none();
  if (needs & kWeight) dweight = stored(sum_of_parts(weights, call.weight_parts, weight_shape, with.is_double));
  if (needs & kBias)
    dbias = stored(sum_of_parts(biases, call.cut.items(), {bias->size(0), bias->size(1), g.C, g.E}, with.is_double));
  if (needs & (kNormWeight | kNormBias)) {
    const Tensor both = sum_of_parts(norms, call.cut.tiles(), {2, g.C * g.E}, with.is_double);
    if (needs & kNormWeight) dnorm_weight = stored(torch::stable::clone(torch::stable::select(both, 0, 0)));
    if (needs & kNormBias) dnorm_bias = stored(torch::stable::clone(torch::stable::select(both, 0, 1)));
  }
  return {needs & kChildren ? stored(dchildren) : none(),
          dweight,
          needs & kQuery ? stored(dquery) : none(),
          dbias,
          needs & kGate ? stored(dgate) : none(),
          dnorm_weight,
          dnorm_bias};
}

}  // namespace fastcaps
