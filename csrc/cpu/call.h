// What the op bodies on the CPU share: describing tensors to the kernels, allocating, running items, adding up parts.
#pragma once

#include <cstring>

#include "../arguments.h"
#include "schedule.h"
#include "scratch.h"

namespace fastcaps {

inline void* aligned(void* p) { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64); }

// Runs one of a table's kernels over all items, or rows.
template <class Call>
void run_items(const Call& call, void (*kernel)(const Call&, int64_t, int64_t, void*), int64_t items,
               int64_t scratch_bytes) {
  if (items == 0) return;
  torch::stable::parallel_for(0, items, 1, [&](int64_t begin, int64_t end) {
    const Scratch scratch(scratch_bytes);
    if (!scratch.get()) throw_no_memory("workspace of a thread: " + std::to_string(scratch_bytes) + " bytes");
    kernel(call, begin, end, scratch.get());
  });
}

// A gradient in parts, one for each group, item or row.
struct Partial {
  MaybeTensor first, others;  // none if the gradient is not wanted; no others for one part
  Parts parts;
  int64_t count;

  // Adds the other parts to the first, in their order, and returns it.
  const MaybeTensor& sum() const {
    if (!others) return first;
    if (first->scalar_type() == ScalarType::Double)
      add<double>();
    else
      add<float>();
    return first;
  }

 private:
  template <class T>
  void add() const {
    torch::stable::parallel_for(0, parts.numbers, 1 << 15, [&](int64_t begin, int64_t end) {
      T* out = parts.part<T>(0);
      for (int64_t which = 1; which < count; ++which) {
        const T* part = parts.part<T>(which);
        for (int64_t k = begin; k < end; ++k) out[k] += part[k];
      }
    });
  }
};

// A call on the CPU, and the tensors that are allocated for it.
struct CpuCall : OpCall {
  explicit CpuCall(const VoteTensors& tensors) : OpCall(tensors) {
    STD_TORCH_CHECK(votes.storage != Storage::kFloat16, "fastcaps: the CPU kernels take no float16");
    const MaybeTensor& weight = given.weight;
    // If matrices are large and each child has its own, reading bfloat16 is faster than copying them to float.
    votes.narrow_weight = weight && weight->scalar_type() == ScalarType::BFloat16 && weight->is_contiguous() &&
                          votes.G == votes.I && votes.D * votes.E >= kLargeMatrix;
    const auto in_place = weight && votes.G == votes.I && weight->scalar_type() == compute
                              ? layout_of(shape_of(*weight), strides_of(*weight))
                              : std::nullopt;
    if (in_place) votes.matrices = *in_place;
    votes.weight = in_place || votes.narrow_weight ? data_of(*weight) : table(weight);
    votes.bias = table(given.bias);
  }

  void copy_matrices(Votes& in) {
    in.weight = table(given.weight);
    in.matrices = in.dense_matrices();
  }

  // Values in every item's part of the gradient of the bias.
  int64_t bias_numbers() const { return given.bias ? int64_t(given.bias->numel()) : 0; }

  // Returns a new result in the compute type, and its address in `data`.
  Tensor result(const char* what, const Shape& shape, void*& data, bool clear = false,
                const Shape& strides = {}) const {
    Tensor out = fresh(new_tensor(children, shape, compute, what, strides));
    data = data_of(out);
    const size_t bytes = size_t(out.numel()) * out.element_size();
    if (clear && bytes > 1 << 16) torch::stable::zero_(out);              // by all threads
    if (clear && bytes && bytes <= 1 << 16) std::memset(data, 0, bytes);  // an empty tensor has no address
    return out;
  }
  // `result`, if it is wanted.
  MaybeTensor maybe(const char* what, bool wanted, const Shape& shape, void*& data, bool clear = false,
                    const Shape& strides = {}) const {
    return wanted ? MaybeTensor(result(what, shape, data, clear, strides)) : MaybeTensor();
  }
  // `result` in the storage type.
  Tensor stored_result(const char* what, const Shape& shape, void*& data) const {
    Tensor out = new_tensor(children, shape, storage, what);
    data = data_of(out);
    return out;
  }
  // `count` parts of a result, all with the same layout; for a count of 0 it is zeros.
  Partial partial(const char* what, bool wanted, int64_t count, const Shape& shape, bool clear = true,
                  const Shape& strides = {}) const {
    Parts parts;
    MaybeTensor first = maybe(what, wanted, shape, parts.first, clear || count == 0, strides);
    parts.numbers = first ? first->numel() : 0;
    MaybeTensor others = maybe(what, wanted && count > 1, {count - 1, parts.numbers}, parts.others, clear);
    return {first, others, parts, count};
  }
  // Workspace for `numbers` values of each of the schedule's rows, `copies` times.
  MaybeTensor rows(bool wanted, const Schedule& schedule, int64_t copies, int64_t numbers, int64_t lanes,
                   void*& data) const {
    if (!wanted) return {};
    const int64_t number = votes.is_double() ? 8 : 4;
    const int64_t count = copies * schedule.rows() * numbers * (schedule.child_lanes ? 1 : lanes) + 64 / number;
    Tensor out = result("workspace", {count}, data);
    data = aligned(data);
    return out;
  }
  // A gradient as an op returns it: empty if it is not wanted.
  Tensor summed(const MaybeTensor& x) const { return x ? *x : new_tensor(children, {0}, compute, "an empty gradient"); }
  // The same in the storage type, with the given strides or else dense.
  Tensor stored(const MaybeTensor& x, const Shape& strides = {}) const {
    if (!x) return new_tensor(children, {0}, storage, "an empty gradient");  // one each: outputs must not alias
    if (strides.empty()) return dense_as(*x, storage);
    return x->scalar_type() == storage && has_strides(*x, strides) ? *x : copied(*x, storage, strides);
  }
  // A copy of an entry of the first dimension of a result. For a tiny call torch's select and copy_ take too long.
  Tensor entry(const Tensor& x, int64_t which) const {
    Shape shape = shape_of(x);
    shape.erase(shape.begin());
    void* data = nullptr;
    Tensor out = result("a copy", shape, data);
    const size_t bytes = size_t(out.numel()) * out.element_size();
    if (bytes) std::memcpy(data, static_cast<const char*>(data_of(x)) + size_t(which) * bytes, bytes);
    return out;
  }
};

// Runs all iterations of a forward call whose operands and results are set.
template <class Operands>
void run_forward(CpuCall& cpu, ForwardCall<Operands>& call) {
  const Votes& in = call.votes;
  const Kernels<Operands>& table = kernels<Operands>(in);
  const int64_t lanes = table.lanes(in);
  call.schedule = schedule_of(call);
  if (in.positions() == 0) return;
  if (!in.has_dense_matrices() && table.forward_wants_dense(call)) cpu.copy_matrices(call.votes);
  const bool cut = call.schedule.ranges > 1;
  const RowNumbers row = table.forward_row(call);
  const MaybeTensor partial = cpu.rows(cut, call.schedule, call.schedule.ranges, row.results, lanes, call.partial);
  const MaybeTensor state = cpu.rows(cut && call.total > 1, call.schedule, 1, row.state, lanes, call.state);
  const int64_t scratch = table.forward_scratch(call);
  call.iterations = cut ? 1 : call.total;  // an iteration needs the sums over all ranges of the one before
  for (call.iteration = 0; call.iteration < call.total; call.iteration += call.iterations) {
    run_items(call, table.forward, call.schedule.items(), scratch);
    if (!cut) continue;
    const int64_t rows = call.schedule.child_lanes ? in.positions() : ceil_div(in.positions(), lanes);
    run_items(call, table.forward_finish, rows, scratch);
  }
}

// A backward's gradients except those of the parents, as the op returns them.
struct Gradients {
  Tensor children, weight, bias, gate;
};

// Runs a backward call whose operands and schedule are set. `empty`: no result has a gradient, or no position exists.
template <class Operands>
Gradients run_backward(CpuCall& cpu, BackwardCall<Operands>& call, int64_t needs, bool dparents, bool empty) {
  const Votes& in = call.votes;
  const Kernels<Operands>& table = kernels<Operands>(in);
  const int64_t lanes = table.lanes(in);
  const bool dbias = needs & kBias && cpu.given.bias;
  const MaybeTensor children = cpu.maybe("dchildren", needs & kChildren, shape_of(cpu.children), call.dchildren, true);
  const MaybeTensor gate =
      cpu.maybe("dgate", needs & kGate && cpu.given.gate, cpu.given.gate_shape(), call.dgate, true);
  const bool dweight = needs & kWeight && cpu.given.weight;
  const Shape shape{in.G, in.M, in.D, in.E}, strides = dweight ? gradient_strides(*cpu.given.weight) : Shape{};
  const auto in_place = dweight && in.G == in.I ? layout_of(shape, strides) : std::nullopt;
  call.dmatrices = in_place ? *in_place : in.dense_matrices();
  const Partial weights = cpu.partial("dweight", dweight, call.schedule.weight_parts, shape, empty || in.G != in.I,
                                      in_place ? strides : Shape{});
  const Partial biases =
      cpu.partial("dbias", dbias, call.schedule.items(), dbias ? shape_of(*cpu.given.bias) : Shape{});
  call.dweight = weights.parts, call.dbias = biases.parts;
  if (!empty) {
    if (!in.has_dense_matrices() && table.backward_wants_dense(call)) cpu.copy_matrices(call.votes);
    const RowNumbers row = table.backward_row(call);
    const MaybeTensor state = cpu.rows(true, call.schedule, int64_t(call.with.size()), row.state, lanes, call.state);
    const MaybeTensor partial =
        cpu.rows(dparents, call.schedule, call.schedule.ranges, row.results, lanes, call.partial);
    const int64_t scratch = table.backward_scratch(call);
    run_items(call, table.backward_prepare, call.schedule.rows(), scratch);
    run_items(call, table.backward, call.schedule.items(), scratch);
    if (dparents) run_items(call, table.backward_finish, call.schedule.rows(), scratch);
  }
  return {cpu.stored(children), cpu.stored(weights.sum(), strides), cpu.stored(biases.sum()), cpu.stored(gate)};
}

}  // namespace fastcaps
