// The ops of routings whose children compete: check, schedule, allocate, launch.
#ifndef __CUDA_ARCH__  // no kernels here: the compiler for the device has nothing to read
#include "ends.h"

namespace fastcaps::gpu {
namespace {

std::vector<Tensor> pooling_routing(Stack stack) {
  const PoolingRouting op{stack};
  const Tensor& children = op.votes.children;
  const DeviceGuard guard(children);
  Call call("pooling", op.votes, op.options);
  op.check(call.given_votes);
  PassArgs& args = call.args;
  const MaybeTensor query = call.posed(op.query);
  args.query = call.view(query);
  args.scale = float(op.scale), args.normalize = op.normalize, args.rule = op.rule;
  const bool fused = op.iterations > 1 && call.fuses(op.iterations);
  const Schedule c = call.schedule_forward(fused);
  const Tensor result = new_tensor(children, call.poses(), call.storage, "parents");
  const Tensor sums = new_tensor(children, call.poses(op.iterations), call.storage, "sums");
  const Tensor logsumexp = call.empty(call.numbers(op.iterations));
  const std::vector<Tensor> results{result, sums, logsumexp};
  if (call.votes.positions() == 0) return results;
  call.take(c);
  if (fused || (op.iterations == 1 && c.chunks == 1)) {
    args.iterations = int(op.iterations);
    args.history = data_of(sums), args.logsumexp = floats(logsumexp), args.result = data_of(result);
    call.launch(c, 0, c.parent_blocks);
    return results;
  }
  EndArgs end = end_args(call, c.chunks);
  const int64_t poses = end.count * call.votes.parent_size();
  float* queries;
  const Tensor memory = call.workspace({{&args.sums, call.parts(c).all()},
                                        {&args.logsumexp, call.parts(c, false).all()},
                                        {&queries, op.iterations > 1 ? poses : 0}});
  end.parts = args.sums, end.logsumexps = args.logsumexp, end.parents = data_of(result);
  end.query = call.as_given(query);
  for (int64_t k = 0; k < op.iterations; ++k) {
    call.launch(c, 0, c.parent_blocks);
    end.stored = static_cast<char*>(data_of(sums)) + k * poses * bytes_of(call.args.storage);
    end.logsumexp = floats(logsumexp) + k * end.count;
    end.queries = k + 1 == op.iterations ? nullptr : queries;
    finish(end);
    end.query = queries;
    args.query = dense_poses(queries, call.votes);
  }
  return results;
}

std::vector<Tensor> pooling_routing_backward(Stack stack) {
  const PoolingBackward op{stack};
  const DeviceGuard guard(op.votes.children);
  Call call("pooling", op.votes, op.options);
  const Votes& v = call.votes;
  const Iterations iterations = op.check(call.given_votes);
  const MaybeTensor grad = call.posed(op.grad), query = call.posed(op.query);
  const bool wants_query = op.wants_query(), empty = v.positions() == 0;

  PassArgs& args = call.args;
  args.scale = float(op.scale), args.normalize = op.normalize, args.detach = op.needs & kDetach;
  VoteGradients gradients(call, op.needs, !empty);
  EndArgs end = end_args(call);
  float *dsums = nullptr, *dconstant = nullptr;
  gradients.reserve(dsums, v.positions() * v.parents_size());
  gradients.reserve(dconstant, end.count);
  const Tensor dquery =
      gradients.add(wants_query, args.dquery, call.parts(gradients.schedule), call.poses(), call.storage);
  end.zeros = gradients.allocate();
  if (args.detach) args.dgate = nullptr;  // and stays 0
  args.dsums = end.dsums = dsums, args.dconstant = end.dconstant = dconstant;
  for (int64_t k = 0; k < iterations.count && !empty; ++k) {
    const Tensor stored = as_dense(*iterations.at(op.sums, k)), shift = as_dense(*iterations.at(op.logsumexp, k));
    args.query = iterations.view(query, k);
    args.logsumexp = floats(shift);
    end.grad = PosesView(iterations.view(grad, k), args.C, args.E), end.stored = data_of(stored);
    prepare(end);
    gradients.run(0);
  }
  gradients.add_up();
  return {gradients.children, gradients.weight, gradients.bias, gradients.gate, dquery};
}

// The backward of a call through all its iterations, from the gradient of the last parents. Its gradients are those of
// the op's backward, which has the gradient of every iteration's sums.
struct PoolingReverse {
  Stack& from;
  Tensor grad = from.tensor();
  VoteArguments votes{from};
  MaybeTensor query = from.maybe();
  Tensor sums = from.tensor(), logsumexp = from.tensor();
  double scale = from.real();
  bool normalize = from.flag();
  Rule rule = Rule(from.number());
  int64_t needs = from.number(), options = from.number();

  bool wants_query() const { return query && (needs & kQuery) && !(needs & kDetach); }
  int64_t check(const Votes& v) const {
    const Iterations all(votes, sums);
    all.check(sums, "sums", poses_shape(v), votes.storage());
    all.check(logsumexp, "logsumexp", numbers_shape(v), votes.wide());
    STD_TORCH_CHECK(rule == Rule::kUnit || rule == Rule::kSquash, "fastcaps: pooling_routing has no rule ", int(rule));
    votes.check_maybe(grad, "grad", poses_shape(v), votes.wide());
    votes.check_maybe(query, "query", poses_shape(v), votes.storage());
    return all.count;
  }
};

std::vector<Tensor> pooling_routing_reverse(Stack stack) {
  const PoolingReverse op{stack};
  const DeviceGuard guard(op.votes.children);
  Call call("pooling", op.votes, op.options);
  const int64_t count = op.check(call.given_votes);
  const MaybeTensor grad = call.posed(op.grad), query = call.posed(op.query);
  const bool wants_query = op.wants_query(), empty = call.votes.positions() == 0;
  PassArgs& args = call.args;
  args.scale = float(op.scale), args.normalize = op.normalize, args.detach = op.needs & kDetach, args.rule = op.rule;
  VoteGradients gradients(call, op.needs, !empty);
  EndArgs end = end_args(call);
  const int64_t launched = args.detach ? 1 : count, poses = end.count * call.votes.parent_size();
  const int64_t bytes = poses * bytes_of(call.args.storage);
  const Made made = call.parts(gradients.schedule);
  float *dsums = nullptr, *dconstant = nullptr, *dqueries = nullptr, *queries = nullptr;
  gradients.reserve(dsums, poses), gradients.reserve(dconstant, end.count);
  gradients.reserve(queries, (count - 1) * poses);
  if (launched > 1) gradients.reserve(dqueries, launched * made.all());
  const Tensor dquery = launched == 1 ? gradients.add(wants_query, dqueries, made, call.poses(), call.storage)
                                      : gradients.add_sum(wants_query, dqueries, {launched * made.parts, made.numbers},
                                                          call.poses(), call.storage, 0, made.numbers);
  end.zeros = gradients.allocate();
  if (args.detach) args.dgate = nullptr;  // and stays 0
  args.dsums = end.dsums = dsums, args.dconstant = end.dconstant = dconstant;
  const Tensor stored = as_dense(op.sums), shift = as_dense(op.logsumexp);
  end.earlier_sums = data_of(stored), end.steps = int(count - 1);
  end.query = count > 1 ? call.as_given(query) : nullptr, end.queries = queries;
  end.grad = PosesView(call.view(grad), args.C, args.E);
  for (int64_t n = 0; n < launched && !empty; ++n) {
    const int64_t k = count - 1 - n;
    const char* before = reinterpret_cast<const char*>(queries) + (k - 1) * bytes;
    args.query = k == 0 ? call.view(query) : dense_poses(before, call.votes);
    args.logsumexp = floats(shift) + k * end.count;
    end.stored = static_cast<char*>(data_of(stored)) + k * bytes;
    end.given_sums = op.rule == Rule::kUnit && n == 0 ? nullptr : end.stored;  // then the parents are the sums
    // steps add up: the gradient of parents is that of all queries behind
    end.parts = n > 0 ? dqueries : nullptr, end.chunks = int(n > 0 ? n * made.parts : 1);
    end.by = Sharing(args.C * args.E, end.chunks);
    args.dquery = wants_query || n + 1 < launched ? dqueries + n * made.all() : nullptr;
    prepare(end);
    gradients.run(0);
    end.steps = 0;
  }
  gradients.add_up();
  return {gradients.children, gradients.weight, gradients.bias, gradients.gate, dquery};
}

}  // namespace

FASTCAPS_REGISTER(pooling_routing)
STABLE_TORCH_LIBRARY_IMPL(FASTCAPS_LIBRARY, FASTCAPS_KEY, pooling_reverse) {
  pooling_reverse.impl("pooling_routing_reverse", &fastcaps::boxed<pooling_routing_reverse>);
}

}  // namespace fastcaps::gpu
#endif
