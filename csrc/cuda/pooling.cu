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

}  // namespace

FASTCAPS_REGISTER(pooling_routing)

}  // namespace fastcaps::gpu
#endif
