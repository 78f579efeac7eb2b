// The ops of routings whose parents compete: check, schedule, allocate, launch.
#ifndef __CUDA_ARCH__  // no kernels here: the compiler for the device has nothing to read
#include "ends.h"
#include "plain.h"

namespace fastcaps::gpu {
namespace {

std::vector<Tensor> attention_routing(Stack stack) {
  const AttentionRouting op{stack};
  const Tensor& children = op.votes.children;
  const DeviceGuard guard(children);
  Call call("attention", op.votes, op.options);
  const Votes& v = call.votes;
  op.check(v);
  PassArgs& args = call.args;
  args.query = call.view(op.query);
  args.scale = float(op.scale), args.eps = float(op.eps), args.rule = op.rule;
  args.norm_weight = call.as_given(op.norm_weight), args.norm_bias = call.as_given(op.norm_bias);
  const Tensor result = new_tensor(children, call.poses(), children.scalar_type(), "parents");
  const Tensor sums = call.empty(call.poses(op.iterations));
  if (v.positions() == 0) return {result, sums};
  if (std::optional<PlainArgs> plain = plain_args(call)) {
    plain->eps = op.rule == Rule::kSquash ? 0.0f : args.eps;
    if (run_plain_forward(call, *plain, op.query, op.iterations, result, sums)) return {result, sums};
  }
  const bool fused = op.iterations > 1 && call.fuses(op.iterations);
  const Schedule c = call.schedule_forward(fused);
  call.take(c);
  args.result = data_of(result);
  if (fused) {
    args.iterations = int(op.iterations), args.sums = floats(sums);
    call.launch(c, 0, c.parent_blocks);
    return {result, sums};
  }
  EndArgs end = end_args(call, c.chunks);
  const int64_t poses = end.count * v.parent_size();
  const bool adds = op.rule == Rule::kSquash && op.iterations > 1;
  float *parts, *queries;
  const Tensor memory =
      call.workspace({{&parts, c.chunks > 1 ? call.parts(c).all() : 0}, {&queries, adds ? poses : 0}});
  end.query = adds ? call.as_given(op.query) : nullptr, end.parents = args.result;
  for (int64_t k = 0; k < op.iterations; ++k) {
    float* found = floats(sums) + k * poses;
    args.iterations = 0;
    const Tensor statistics = args.query.data ? call.collect(c, 2) : Tensor();
    const bool whole = c.chunks == 1 && !adds && !call.is_lean(c);  // a lean walk makes no parents
    args.sums = c.chunks == 1 ? found : parts, args.iterations = whole;
    call.launch(c, 0, c.parent_blocks);
    end.parts = args.sums, end.sums = c.chunks == 1 ? nullptr : found;
    end.queries = k + 1 == op.iterations ? nullptr : queries;
    if (!whole) finish(end);
    end.query = queries;
    args.query = dense_poses(adds ? queries : args.result, v);
  }
  return {result, sums};
}

// The backward of a call through all its iterations, from the gradient of the last parents. Its gradients are those of
// the op's backward, which has the gradient of every iteration's sums.
struct AttentionReverse {
  Stack& from;
  Tensor grad = from.tensor();
  VoteArguments votes{from};
  MaybeTensor query = from.maybe(), norm_weight = from.maybe(), norm_bias = from.maybe(), sums = from.tensor();
  double scale = from.real(), eps = from.real();
  Rule rule = Rule(from.number());
  int64_t needs = from.number(), options = from.number();

  bool wants_query() const { return query && (needs & kQuery); }
  bool wants_norm() const { return rule == Rule::kLayerNorm && (needs & (kNormWeight | kNormBias)); }
  void check(const Votes& v) const {
    Iterations(votes, *sums).check(sums, "sums", poses_shape(v), votes.wide());
    votes.check_maybe(grad, "grad", poses_shape(v), votes.wide());
    votes.check_maybe(query, "query", poses_shape(v), votes.storage());
    votes.check_maybe(norm_weight, "norm_weight", {v.parent_size()}, votes.storage());
    votes.check_maybe(norm_bias, "norm_bias", {v.parent_size()}, votes.storage());
  }
};

// Differentiates iterations, a launch of the pass for each; at(n, end) sets the n-th's query, gradient and sums. In a
// `chain` the gradient of the n-th's parents is dQ of the one before, or, where steps add up, of all before.
template <class Op, class At>
std::vector<Tensor> differentiate(const Op& op, Call& call, EndArgs& end, VoteGradients& gradients, int64_t launched,
                                  bool chain, At&& at) {
  PassArgs& args = call.args;
  const bool wants_query = op.wants_query(), wants_norm = op.wants_norm(), adds = end.rule == Rule::kSquash;
  const int64_t values = args.C * args.E, part = 2 * values;
  const Made made = call.parts(gradients.schedule);
  const auto share = [&](int64_t n) {  // returns the blocks that prepare the n-th
    const int64_t parts = !chain || n == 0 ? 1 : adds ? n * made.parts : made.parts;
    end.chunks = int(parts), end.by = Sharing(values, parts);
    return prepare_grid(end).x;
  };
  int64_t blocks = 0;
  for (int64_t n = 0; n < launched; ++n) blocks += share(n);
  float *dsums = nullptr, *dqueries = nullptr, *dnorm = nullptr;
  gradients.reserve(dsums, made.numbers);
  if (wants_norm) gradients.reserve(dnorm, blocks * part);
  if (chain && launched > 1) gradients.reserve(dqueries, launched * made.all());
  const int64_t others = adds ? 0 : launched - 1;  // all but the last, whose parts are not in the gradient
  const Tensor dquery = launched == 1
                            ? gradients.add(wants_query, dqueries, made, call.poses(), call.storage)
                            : gradients.add_sum(wants_query, dqueries, {(launched - others) * made.parts, made.numbers},
                                                call.poses(), call.storage, others * made.all(), made.numbers);
  const auto affine = [&](int64_t bit, int64_t row) {
    return gradients.add_sum(wants_norm && (op.needs & bit), dnorm, {blocks, values}, {values}, call.storage,
                             row * values, part);
  };
  const Tensor dnorm_weight = affine(kNormWeight, 0), dnorm_bias = affine(kNormBias, 1);
  end.zeros = gradients.allocate();
  args.dsums = end.dsums = dsums;
  for (int64_t n = 0; n < launched && call.votes.positions() > 0; ++n) {
    at(n, end);
    end.dnorm = dnorm;
    const int64_t parts = share(n);
    if (dnorm) dnorm += parts * part;
    end.parts = chain && n > 0 ? dqueries + (adds ? 0 : n - 1) * made.all() : nullptr;
    args.dquery = wants_query || (chain && n + 1 < launched) ? dqueries + n * made.all() : nullptr;
    prepare(end);
    if (gradients.any() || args.dquery) gradients.run(3);  // else the LayerNorm is all there is to differentiate
  }
  gradients.add_up();
  return {gradients.children, gradients.weight, gradients.bias, gradients.gate, dquery, dnorm_weight, dnorm_bias};
}

// The gradients of a call that the kernels of attention without matrices take, or nothing.
template <class Op>
std::optional<std::vector<Tensor>> differentiate_plain(const Op& op, Call& call, PlainArgs args) {
  args.scale = float(op.scale), args.detach = op.needs & kDetach;
  args.query = call.as_given(op.query), args.norm_weight = call.as_given(op.norm_weight);
  args.sums = call.table(op.sums);
  const auto found = differentiate_plain(call, args, op.query, op.needs);
  if (!found) return {};
  const auto none = [&] { return new_tensor(call.children, {0}, call.storage, "a gradient"); };
  return std::vector<Tensor>{found->children,    none(),          none(), found->gate, found->query,
                             found->norm_weight, found->norm_bias};
}

// What both backwards begin with.
template <class Op>
EndArgs begin(const Op& op, Call& call) {
  call.args.scale = float(op.scale), call.args.eps = float(op.eps), call.args.detach = op.needs & kDetach;
  EndArgs end = end_args(call);
  end.norm_weight = call.as_given(op.norm_weight);
  return end;
}

std::vector<Tensor> attention_routing_backward(Stack stack) {
  const AttentionBackward op{stack};
  const DeviceGuard guard(op.votes.children);
  Call call("attention", op.votes, op.options);
  const Iterations iterations = op.check(call.votes);
  if (std::optional<PlainArgs> plain = plain_args(call)) {
    plain->rule = op.sums ? Rule::kLayerNorm : Rule::kPlain, plain->eps = float(op.eps);
    plain->iterations = int(iterations.count);
    plain->without_query = int(iterations.count - (op.query ? op.query->size(0) : 0));
    plain->grad = iterations.view(op.grad, 0), plain->grad_iteration = op.grad.stride(0);
    if (const auto found = differentiate_plain(op, call, *plain)) return *found;
  }
  EndArgs end = begin(op, call);
  end.rule = Rule::kLayerNorm;  // sums are given only where that made parents of them
  VoteGradients gradients(call, op.needs, call.votes.positions() > 0);
  const float* sums = call.table(op.sums);
  return differentiate(op, call, end, gradients, iterations.count, false, [&](int64_t n, EndArgs& one) {
    call.args.query = iterations.view(op.query, n);
    one.grad = PosesView(iterations.view(op.grad, n), one.C, one.E);
    one.given_sums = sums ? sums + n * one.count * one.C * one.E : nullptr;
  });
}

std::vector<Tensor> attention_routing_reverse(Stack stack) {
  const AttentionReverse op{stack};
  const DeviceGuard guard(op.votes.children);
  Call call("attention", op.votes, op.options);
  op.check(call.votes);
  if (std::optional<PlainArgs> plain = plain_args(call)) {
    plain->rule = op.rule, plain->eps = op.rule == Rule::kSquash ? 0.0f : float(op.eps), plain->chain = true;
    plain->norm_bias = call.as_given(op.norm_bias), plain->grad = call.view(op.grad);
    plain->iterations = int(op.sums->size(0));
    if (const auto found = differentiate_plain(op, call, *plain)) return *found;
  }
  EndArgs end = begin(op, call);
  end.rule = op.rule, end.norm_bias = call.as_given(op.norm_bias);
  VoteGradients gradients(call, op.needs, call.votes.positions() > 0);
  const int64_t count = op.sums->size(0), poses = end.count * call.votes.parent_size();
  const float* sums = call.table(op.sums);
  float* queries = nullptr;
  gradients.reserve(queries, (count - 1) * poses);
  end.query = count > 1 && op.rule == Rule::kSquash ? call.as_given(op.query) : nullptr;
  end.grad = PosesView(call.view(op.grad), end.C, end.E);
  end.earlier_sums = sums, end.steps = int(count - 1);
  return differentiate(op, call, end, gradients, call.args.detach ? 1 : count, true, [&](int64_t n, EndArgs& one) {
    const int64_t k = count - 1 - n, bytes = poses * bytes_of(call.args.storage);
    const void* query = k == 0 ? nullptr : reinterpret_cast<const char*>(queries) + (k - 1) * bytes;
    call.args.query = query ? dense_poses(query, call.votes) : call.view(op.query);
    one.given_sums = op.rule == Rule::kPlain ? nullptr : sums + k * poses;
    one.queries = queries;
    if (n > 0) one.steps = 0;
  });
}

}  // namespace

FASTCAPS_REGISTER(attention_routing)
STABLE_TORCH_LIBRARY_IMPL(FASTCAPS_LIBRARY, FASTCAPS_KEY, reverse) {
  reverse.impl("attention_routing_reverse", &fastcaps::boxed<attention_routing_reverse>);
}

}  // namespace fastcaps::gpu
#endif
