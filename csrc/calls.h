// What the op bodies on the CPU share: describing tensors to the kernels, allocating, running items, adding up parts.
#pragma once

#include "cpu/cut.h"
#include "cpu/scratch.h"
#include "tensors.h"

namespace fastcaps {

template <class Run>
void run_items(int64_t items, int64_t scratch_bytes, Run&& run) {
  if (items == 0) return;
  torch::stable::parallel_for(0, items, 1, [&](int64_t begin, int64_t end) {
    const Scratch scratch(scratch_bytes);
    STD_TORCH_CHECK(scratch.get() != nullptr, "fastcaps: no memory for ", scratch_bytes, " bytes of scratch");
    run(begin, end, scratch.get());
  });
}

// A gradient of which every group, item or row makes a part of its own.
struct Partial {
  Tensor first, others;
  Parts parts;
  int64_t count;

  // The sum, in the order of the parts, in place of the first.
  Tensor sum() const {
    if (first.scalar_type() == ScalarType::Double)
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

// What every pass is given, as the kernels want it.
struct Given {
  Inputs in;
  ScalarType storage, compute;
  bool is_double;
  Tensor children, weight, bias;  // weight and bias in the compute type, contiguous: kept alive here
  bool has_bias;
  std::vector<int64_t> bias_shape;

  Given(const Tensor& children_, const MaybeTensor& weight_, const MaybeTensor& bias_, const MaybeTensor& gate,
        const Geometry& geometry)
      : storage(children_.scalar_type()),
        compute(accumulation_type(children_)),
        is_double(storage == ScalarType::Double),
        children(children_),
        has_bias(bias_.has_value()) {
    in.geometry = geometry;
    in.storage = storage_of(children);
    STD_TORCH_CHECK(in.storage != Storage::kFloat16, "fastcaps: the CPU kernels take no float16");
    in.children = view_of(children);
    if (gate) in.gate = view_of(*gate);
    if (weight_) in.weight = data_of(weight = in_compute_type(*weight_, compute));
    if (bias_) {
      in.bias = data_of(bias = in_compute_type(*bias_, compute));
      bias_shape = shape_of(bias);
      in.bias_stride_m = bias.size(1) > 1 ? geometry.parent_pose() : 0;
      in.bias_stride_i = bias.size(0) > 1 ? bias.size(1) * geometry.parent_pose() : 0;
    }
  }

  int64_t number() const { return is_double ? 8 : 4; }
  bool shared() const { return in.geometry.N % in.geometry.G == 0 && in.bias_stride_i == 0; }
  bool identity() const { return in.weight == nullptr; }
  template <class Operands>
  bool folded() const {
    return std::is_same_v<Operands, Attention> && folds(in.geometry, shared(), has_bias);
  }

  // A result in the compute type, its address in `data`; empty and null where it is not wanted.
  Tensor result(bool wanted, const std::vector<int64_t>& shape, void*& data, bool clear = false) const {
    Tensor out = fresh(torch::stable::new_empty(children, wanted ? shape : std::vector<int64_t>{0}, compute));
    if (clear) torch::stable::zero_(out);
    data = wanted ? data_of(out) : nullptr;
    return out;
  }
  // `count` parts of such a result, none of them where there is nothing to do.
  Partial partial(bool wanted, int64_t count, const std::vector<int64_t>& shape, bool clear = true) const {
    Parts parts;
    Tensor first = result(wanted, shape, parts.first, clear || count == 0);
    parts.numbers = first.numel();
    const bool more = wanted && count > 1;
    Tensor others = result(more, {count - 1, parts.numbers}, parts.others, clear);
    return {first, others, parts, count};
  }
  // `rows` rows of `numbers` numbers, as wide as the cut's rows are.
  Tensor rows(bool wanted, const Cut& cut, int64_t copies, int64_t numbers, int64_t lanes, void*& data) const {
    const int64_t count = copies * cut.rows() * numbers * (cut.child_lanes ? 1 : lanes) + 64 / number();
    Tensor out = fresh(torch::stable::new_empty(children, {wanted ? count : 0}, compute));
    data = wanted ? aligned(data_of(out)) : nullptr;
    return out;
  }
  Tensor stored(const Tensor& x) const { return x.scalar_type() == storage ? x : torch::stable::to(x, storage); }
  Tensor none() const { return torch::stable::new_empty(children, {0}); }  // one each: outputs must not alias
};

// The turns of a backward call: one, or as many as tensors that belong to parents have in their first dimension.
struct Turns {
  bool stacked;
  int64_t count;

  Turns(bool stacked_, const MaybeTensor& x) : stacked(stacked_), count(1) {
    if (!stacked) return;
    STD_TORCH_CHECK(x && x->dim() > 0 && x->size(0) > 0, "fastcaps: there must be a turn at least");
    count = x->size(0);
  }
  void check(const MaybeTensor& x, const char* name, bool may_lack_first = false) const {
    if (!stacked || !x) return;
    STD_TORCH_CHECK(x->dim() > 0 && (x->size(0) == count || (may_lack_first && x->size(0) == count - 1)),
                    "fastcaps: ", name, " has shape ", text(shape_of(*x)), ", expected ", count, " turns");
  }
  // Of turn k; nothing where the first turn has none.
  MaybeTensor at(const MaybeTensor& x, int64_t k) const {
    if (!stacked || !x) return x;
    const int64_t which = k - (count - x->size(0));
    return which < 0 ? MaybeTensor() : MaybeTensor(torch::stable::select(*x, 0, which));
  }
};

// A forward call whose operands and results are set: cut it and run it, all turns of it.
template <class Operands>
void run_forward(const Given& given, ForwardCall<Operands>& call) {
  const Geometry& g = call.in.geometry;
  const Kernels<Operands>& table = kernels<Operands>(g, given.is_double);
  const int64_t lanes = given.is_double ? table.lanes_double : table.lanes_float;
  call.cut.folded = given.template folded<Operands>();
  call.cut = cut_forward(g, {lanes, given.number(), table.forward_state(call), table.forward_results(call),
                             given.shared(), given.identity(), call.cut.folded, call.total});
  if (g.positions() == 0) return;
  const bool ranges = call.cut.chunks > 1;
  const Tensor partial =
      given.rows(ranges, call.cut, call.cut.chunks, table.forward_results(call), lanes, call.partial);
  const Tensor state = given.rows(ranges && call.total > 1, call.cut, 1, table.forward_state(call), lanes, call.state);
  const int64_t scratch = table.forward_scratch(call, given.is_double);
  call.turns = ranges ? 1 : call.total;  // where children are cut into ranges, turns wait for all of them
  for (call.turn = 0; call.turn < call.total; call.turn += call.turns) {
    run_items(call.cut.items(), scratch, [&](int64_t begin, int64_t end, void* memory) {
      table.forward(call, given.is_double, begin, end, memory);
    });
    if (ranges) {
      const int64_t rows = call.cut.child_lanes ? g.positions() : ceil_div(g.positions(), lanes);
      run_items(rows, scratch, [&](int64_t begin, int64_t end, void* memory) {
        table.forward_finish(call, given.is_double, begin, end, memory);
      });
    }
  }
}

// What a backward call makes of its own, besides the gradients of the parents.
struct Gradients {
  Tensor dchildren, dgate;
  Partial weights, biases;
};

// How a backward call is cut: known before its gradients are allocated. `dparents`: are there gradients of parents?
// `own`: numbers of gradients that every item has its own of, beside the bias.
template <class Operands>
void cut_call(const Given& given, BackwardCall<Operands>& call, bool dparents, int64_t own = 0) {
  call.in = given.in;
  const Kernels<Operands>& table = kernels<Operands>(call.in.geometry, given.is_double);
  const int64_t lanes = given.is_double ? table.lanes_double : table.lanes_float;
  const int64_t turns = int64_t(call.with.size());
  call.cut = cut_backward(call.in.geometry, {lanes, given.number(), turns * table.backward_state(call),
                                             dparents ? table.backward_results(call) : 0, given.shared(),
                                             given.identity(), given.template folded<Operands>(), turns,
                                             own + (given.has_bias ? int64_t(given.bias.numel()) : 0)});
}

// Run a backward call whose operands are set and which is cut. `empty`: nothing reaches it, or there is nothing.
template <class Operands>
Gradients run_backward(const Given& given, BackwardCall<Operands>& call, bool dchildren, bool dweight, bool dbias,
                       bool dgate, bool dparents, bool empty) {
  const Geometry& g = call.in.geometry;
  const Kernels<Operands>& table = kernels<Operands>(g, given.is_double);
  const int64_t lanes = given.is_double ? table.lanes_double : table.lanes_float;
  Gradients out{
      given.result(dchildren, {g.B, g.H, g.W, g.N, g.C, g.D}, call.dchildren, true),
      given.result(dgate, {g.B, g.H, g.W, g.N}, call.dgate, true),
      given.partial(dweight, call.cut.weight_parts, {g.G, g.M, g.D, g.E}, empty || g.G != g.children()),
      given.partial(dbias, call.cut.items(), given.bias_shape),
  };
  call.dweight = out.weights.parts, call.dbias = out.biases.parts;
  if (empty) return out;
  const Tensor state =
      given.rows(true, call.cut, int64_t(call.with.size()), table.backward_state(call), lanes, call.state);
  const Tensor partial =
      given.rows(dparents, call.cut, call.cut.chunks, table.backward_results(call), lanes, call.partial);
  const int64_t scratch = table.backward_scratch(call, given.is_double);
  run_items(call.cut.rows(), scratch, [&](int64_t begin, int64_t end, void* memory) {
    table.backward_prepare(call, given.is_double, begin, end, memory);
  });
  run_items(call.cut.items(), scratch, [&](int64_t begin, int64_t end, void* memory) {
    table.backward(call, given.is_double, begin, end, memory);
  });
  if (dparents)
    run_items(call.cut.rows(), scratch, [&](int64_t begin, int64_t end, void* memory) {
      table.backward_finish(call, given.is_double, begin, end, memory);
    });
  return out;
}

}  // namespace fastcaps
