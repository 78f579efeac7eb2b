// One call of an op on a GPU: its tensors as the kernels want them, its schedule, its launches.
#pragma once

#include "../arguments.h"
#include "launch.h"
#include "pass.h"
#include "schedule.h"

namespace fastcaps::gpu {

// How many tf32 products make one product (see tensor.h): 1 if values may be rounded to tf32, 3 if the user wants about
// float32's precision, 0 if nothing may be rounded. Half-precision values lose nothing by rounding. The backward also
// rounds the gradients of votes, which is too coarse for float16. So `half`, the half precision that may be rounded
// besides bfloat16, is float16 in a forward and bfloat16 in a backward.
inline int products(int64_t options, Storage storage, Storage half) {
  const bool rounds = (options & kTf32) || storage == Storage::kBFloat16 || storage == half;
  return !rounds ? 0 : (options & kTf32x3) && storage == Storage::kFloat32 ? 3 : 1;
}

inline Machine machine() { return {multiprocessors(), shared_limit()}; }

inline float* floats(const Tensor& x) { return x.numel() ? static_cast<float*>(data_of(x)) : nullptr; }

// Blocks for a kernel whose threads take a few of `count` elements each.
inline Grid blocks_for(int64_t count) {
  const int64_t blocks = ceil_div(count, 256);
  return {blocks < 4096 ? blocks : 4096, 1, 256};
}

// Summed over a dimension; one part is the sum already.
inline Tensor over(const Tensor& x, int64_t dim) {
  if (x.size(dim) == 1) return x;
  const int64_t dims[] = {dim};
  Shape shape = shape_of(x);
  shape.erase(shape.begin() + dim);
  Tensor out = new_tensor(x, shape, x.scalar_type(), "a sum");
  if (out.numel() == 0) return out;
  return torch::stable::sum_out(out, x, torch::headeronly::IntHeaderOnlyArrayRef(dims, 1));
}

struct Call : OpCall {
  const Pass& pass;
  const Votes given_votes;
  bool flat;  // the kernels treat matrix poses as vectors, as `votes` does
  int64_t options;
  PassArgs args{};
  Tensor rounded;  // weights, kept alive

  Call(const char* op, const VoteTensors& given, int64_t options);

  Tensor empty(const Shape& shape) const {
    return new_tensor(children, shape, ScalarType::Float, "results and workspace");
  }
  Tensor zeros(const Shape& shape) const {  // torch takes as long for an empty tensor as for a small one
    Tensor x = empty(shape);
    return x.numel() == 0 ? x : torch::stable::zero_(x);
  }
  Shape poses(int64_t iterations = 0) const { return poses_shape(given_votes, iterations); }
  // A tensor of poses, made dense if the kernels treat them as vectors.
  MaybeTensor posed(const MaybeTensor& x) { return x && flat ? MaybeTensor(as_dense(*x)) : x; }
  // The memory of a tensor in its own type, dense; null without one.
  const void* as_given(const MaybeTensor& x) { return x ? data_of(dense(*x, storage)) : nullptr; }
  float* table(const MaybeTensor& x) { return static_cast<float*>(OpCall::table(x)); }
  // A Gaussian iteration's state: mean and variance [B, Ho, Wo, M, C, E], log_weight [B, Ho, Wo, M], in float.
  void take_state(const MaybeTensor& mean, const MaybeTensor& variance, const MaybeTensor& log_weight);

  // How a task is cut, or an error that says why no kernel takes it.
  Schedule cut(const Task& task, const Bias& bias) const;
  // The schedule of a forward. Several iterations are one launch, whose blocks see all children of their positions.
  Schedule schedule_forward(int64_t iterations) const;
  void take(const Schedule& c);

  // One launch: the positions of one colour, `parent_blocks` blocks of parents from the first on.
  void launch(const Schedule& c, int first_block, int parent_blocks, int colours_y = 1, int colours_x = 1,
              int colour_y = 0, int colour_x = 0);
  // How many blocks of parents a launch takes if each stores `numbers` values of its own.
  int places(const Schedule& c, int64_t numbers) const;
  // Computes the softmax over parents that do not fit into one block, as `numbers` values for each position and child:
  // launches all blocks, or as many at a time as places() allows, then joins their parts.
  Tensor collect(const Schedule& c, int numbers);

  // The shape of the results of all ranges of children: for every parent a pose, or a single value.
  Shape parts(const Schedule& c, bool poses) const {
    return {c.chunks, votes.positions() * votes.M * (poses ? votes.parent_size() : 1)};
  }
};

// The gradients that all routings have, of children, weight, bias and gate, and those of betas if every child has its
// own. They are summed over iterations, and made in parts if the order of sums is fixed.
class VoteGradients {
 public:
  Schedule schedule;

  // Cuts the call. `use`, `ignore`: how many betas want a gradient, if every child has its own.
  VoteGradients(Call& call, int64_t needs, int64_t use = 0, int64_t ignore = 0);

  bool any() const { return wanted_.children || wanted_.weight || wanted_.bias || wanted_.gate; }

  // A launch before the others, only for tight positions: corrects `u` and `s` (see gaussian_backward.cu).
  void measure(int statistics, float* u, float* s, const float* tight);
  // Launches the backward. If parents take several blocks, the softmax is first collected, as `statistics` values.
  void run(int statistics);

  Tensor children() const { return finished(wanted_.children, over(dchildren_, 0), shape_of(call_.children)); }
  Tensor gate() const { return finished(wanted_.gate, over(dgate_, 0), call_.given.gate_shape()); }
  Tensor weight() const { return finished(wanted_.weight, over(dweight_, 0), weight_shape_); }
  Tensor bias() const {
    return finished(wanted_.bias, wanted_.bias ? table(dbias_, bias_shape_) : dbias_, bias_shape_);
  }
  const Tensor& use() const { return duse_; }  // in parts, [I * M]
  const Tensor& ignore() const { return dignore_; }

  // A gradient as the op returns it: in the children's type, empty if it is not wanted.
  Tensor finished(bool wanted, const Tensor& x, const Shape& shape) const;
  // The gradient of a table [I or 1, M or 1, ...], from parts that have all columns.
  Tensor table(const Tensor& parts, const Shape& shape) const;
  Tensor none() const { return call_.empty({0}); }

 private:
  Call& call_;
  struct {
    bool children, weight, bias, gate;
    int64_t use, ignore;
  } wanted_;
  bool ordered_;
  int places_;  // blocks of parents that add to children's gradients at a time, each to its own
  Shape weight_shape_, bias_shape_;
  Tensor dchildren_, dgate_, dweight_, dbias_, duse_, dignore_;
};

}  // namespace fastcaps::gpu
