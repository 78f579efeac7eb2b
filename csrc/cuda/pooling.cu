// Op bodies of the pooling pass on a GPU: check, cut, allocate, launch.
#include "../pooling.h"

#include "call.h"
#include "flat.h"
#include "ops.h"
#include "stage.h"

namespace fastcaps::gpu {
namespace {

// ---- behind the forward kernel: ranges of children joined, and the parents in their own type ------------------------
struct JoinArgs {
  int64_t count;  // parents in all: B * Ho * Wo * M
  int numbers, chunks;
  const float* parts;       // [chunks, count, numbers]
  const float* logsumexps;  // [chunks, count]
  Storage storage;
  void* parents;     // [count, numbers]
  float* logsumexp;  // [count]
};

FASTCAPS_KERNEL(256, 1)
pooling_join_kernel(const FASTCAPS_CONSTANT JoinArgs a) {
  const int64_t all = a.count * a.numbers;
  for (int64_t k = block_x() * block_threads() + thread_index(); k < all; k += blocks_x() * block_threads()) {
    const int64_t parent = k / a.numbers;
    float top = -INFINITY;
    for (int chunk = 0; chunk < a.chunks; ++chunk) top = fmaxf(top, a.logsumexps[chunk * a.count + parent]);
    const float shift = top == -INFINITY ? 0.0f : top;
    float total = 0.0f, sum = 0.0f;
    for (int chunk = 0; chunk < a.chunks; ++chunk) {
      const float share = expf(a.logsumexps[chunk * a.count + parent] - shift);
      total += share;
      sum += share * a.parts[chunk * all + k];
    }
    store_number(a.parents, k, total == 0.0f ? 0.0f : sum / total, a.storage);
    if (k == parent * a.numbers) a.logsumexp[parent] = total == 0.0f ? -INFINITY : shift + logf(total);
  }
}

// ---- before the backward kernel: dL/dS in float, and what a vote gains in any case ----------------------------------
struct PrepareArgs {
  int64_t count;
  int M, C, E, Ho, Wo;
  View grad;  // [B, Ho, Wo, M, C, E] or null
  Storage storage;
  const void* parents;      // [count, C * E]
  const float* dlogsumexp;  // [count] or null
  float* dsums;             // [count, C * E]
  float* dconstant;         // [count]: dlogsumexp - <dS, S>
};

FASTCAPS_KERNEL(256, 1)
pooling_prepare_kernel(const FASTCAPS_CONSTANT PrepareArgs a) {
  for (int64_t parent = block_x() * block_threads() + thread_index(); parent < a.count;
       parent += blocks_x() * block_threads()) {
    const int64_t from = offset_of_parent(a.grad, parent, a.M, a.Ho, a.Wo);
    float along = 0.0f;
    for (int c = 0; c < a.C; ++c)
      for (int e = 0; e < a.E; ++e) {
        const int64_t at = (parent * a.C + c) * a.E + e;
        const float grad = a.grad.data
                               ? load_number(a.grad.data, from + c * a.grad.stride[4] + e * a.grad.stride[5], a.storage)
                               : 0.0f;
        a.dsums[at] = grad;
        along += grad == 0.0f ? 0.0f : grad * load_number(a.parents, at, a.storage);
      }
    a.dconstant[parent] = (a.dlogsumexp ? a.dlogsumexp[parent] : 0.0f) - along;
  }
}

Call pooling_call(const Tensor& children, const MaybeTensor& weight, const MaybeTensor& query, const MaybeTensor& bias,
                  const MaybeTensor& gate, double scale, bool normalize, const std::vector<int64_t>& window) {
  Call call(Pass::kPooling, pooling_geometry(children, weight, query, bias, gate, window), children, weight, bias,
            gate);
  if (query) call.args.query = view_of(*query);
  call.args.scale = float(scale);
  call.args.normalize = normalize;
  return call;
}

}  // namespace

std::tuple<Tensor, Tensor> pooling_pass(const Tensor children, const MaybeTensor weight, const MaybeTensor query,
                                        const MaybeTensor bias, const MaybeTensor gate, double scale, bool normalize,
                                        const std::vector<int64_t> window, int64_t options) {
  if (flattens(children, weight) && (!query || query->dim() == 6) && (!bias || bias->dim() == 4)) {
    const auto [parents, logsumexp] =
        pooling_pass(flat(children), weight, flat(query), flat(bias), gate, scale, normalize, window, options);
    std::vector<int64_t> shape = shape_of(parents);
    shape[4] = children.size(4), shape[5] = children.size(5);
    return {torch::stable::view(parents, shape), logsumexp};
  }
  const DeviceGuard guard(children);
  Call call = pooling_call(children, weight, query, bias, gate, scale, normalize, window);
  const Geometry& g = call.geometry;
  Tensor parents = torch::stable::new_empty(children, parents_shape(g));
  Tensor logsumexp = call.empty(numbers_shape(g));
  if (g.positions() == 0) return {parents, logsumexp};

  const Cut c = call.cut_forward(options);
  call.take(c);
  const bool direct = c.chunks == 1 && call.args.storage == Storage::kFloat32;
  const Tensor parts = direct ? parents : call.empty(call.parts(c, true));
  const Tensor logsumexps = direct ? logsumexp : call.empty(call.parts(c, false));
  call.args.sums = floats(parts);
  call.args.logsumexp = floats(logsumexps);
  call.launch(c, 0, c.parent_blocks);
  if (!direct) {
    const int64_t count = g.positions() * g.M;
    launch(&pooling_join_kernel, blocks_for(parents.numel()),
           JoinArgs{count, int(g.parent_pose()), c.chunks, floats(parts), floats(logsumexps), call.args.storage,
                    data_of(parents), floats(logsumexp)});
  }
  return {parents, logsumexp};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pooling_pass_backward(
    const MaybeTensor grad_parents, const MaybeTensor grad_logsumexp, const Tensor children, const MaybeTensor weight,
    const MaybeTensor query, const MaybeTensor bias, const MaybeTensor gate, const Tensor parents,
    const Tensor logsumexp, double scale, bool normalize, const std::vector<int64_t> window, int64_t needs,
    int64_t options) {
  const auto fits = [](const MaybeTensor& x, int64_t dims) { return !x || x->dim() == dims; };
  if (flattens(children, weight) && fits(query, 6) && fits(bias, 4) && fits(grad_parents, 6) && parents.dim() == 6) {
    const auto [dchildren, dweight, dquery, dbias, dgate] =
        pooling_pass_backward(flat(grad_parents), grad_logsumexp, flat(children), weight, flat(query), flat(bias), gate,
                              flat(parents), logsumexp, scale, normalize, window, needs, options);
    const auto like = [](const Tensor& x, const MaybeTensor& to) {
      return x.dim() == 1 ? x : torch::stable::view(x, shape_of(*to));
    };
    return {like(dchildren, children), dweight, like(dquery, query), like(dbias, bias), dgate};
  }
  const DeviceGuard guard(children);
  Call call = pooling_call(children, weight, query, bias, gate, scale, normalize, window);
  const Geometry& g = call.geometry;
  const ScalarType storage = children.scalar_type();
  if (grad_parents) check_tensor(*grad_parents, "grad_parents", parents_shape(g), storage, children);
  if (grad_logsumexp) check_tensor(*grad_logsumexp, "grad_logsumexp", numbers_shape(g), ScalarType::Float, children);
  check_tensor(parents, "parents", parents_shape(g), storage, children);
  check_tensor(logsumexp, "logsumexp", numbers_shape(g), ScalarType::Float, children);
  const bool empty = g.positions() == 0 || (!grad_parents && !grad_logsumexp);

  PassArgs& a = call.args;
  a.frozen = needs & kFrozen;
  const auto wants = [&](int64_t bit, bool given) { return given && (needs & bit) != 0; };
  const bool wants_query = wants(kPoolingQuery, query.has_value());
  Gradients gradients(call,
                      {wants(kPoolingChildren, true), wants(kPoolingWeight, weight.has_value()),
                       wants(kPoolingBias, bias.has_value()), wants(kPoolingGate, gate.has_value())},
                      weight, bias, options);
  if (a.frozen) a.dgate = nullptr;  // and stays 0
  Tensor dquery = call.zeros({wants_query && empty ? g.positions() * g.parents() : 0});
  if (!empty) {
    const int64_t count = g.positions() * g.M;
    const Tensor dsums = call.empty({count * g.parent_pose()}), dconstant = call.empty({count});
    const Tensor dense = torch::stable::contiguous(parents);
    if (wants_query) dquery = call.empty(call.parts(gradients.cut, true));
    a.dsums = floats(dsums), a.dconstant = floats(dconstant), a.dquery = floats(dquery);
    a.logsumexp = call.dense(logsumexp);
    launch(&pooling_prepare_kernel, blocks_for(count),
           PrepareArgs{count, a.M, a.C, a.E, a.Ho, a.Wo, grad_parents ? view_of(*grad_parents) : View{}, a.storage,
                       data_of(dense), call.dense(grad_logsumexp), floats(dsums), floats(dconstant)});
    gradients.run(0);
    if (wants_query) dquery = over(dquery, 0);
  }
  return {gradients.children(), gradients.weight(), gradients.finished(wants_query, dquery, parents_shape(g)),
          gradients.bias(), gradients.gate()};
}

}  // namespace fastcaps::gpu
