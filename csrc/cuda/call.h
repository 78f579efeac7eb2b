// One call of an op on a GPU: its tensors as the kernels want them, how it is cut, its launches.
#pragma once

#include "../tensors.h"
#include "cut.h"
#include "launch.h"
#include "pass.h"

namespace fastcaps::gpu {

inline Machine machine() { return {multiprocessors(), shared_limit()}; }

inline float* floats(const Tensor& x) { return x.numel() ? static_cast<float*>(data_of(x)) : nullptr; }

// Blocks for a kernel whose threads each take a few of `count` things.
inline Grid blocks_for(int64_t count) {
  const int64_t blocks = ceil_div(count, 256);
  return {blocks < 4096 ? blocks : 4096, 1, 256};
}

// In float, dense, and at an address that vectors may be read from.
Tensor parameter(const Tensor& x);

// Summed over a dimension; one part is the sum already.
inline Tensor over(const Tensor& x, int64_t dim) {
  if (x.size(dim) == 1) return x;
  const int64_t dims[] = {dim};
  return torch::stable::sum(x, torch::headeronly::IntHeaderOnlyArrayRef(dims, 1));
}

struct Call {
  Pass pass;
  Geometry geometry;
  PassArgs args{};
  Tensor children, weight, rounded, bias;  // kept alive here, like the following
  std::vector<Tensor> kept;

  Call(Pass pass, const Geometry& geometry, const Tensor& children, const MaybeTensor& weight, const MaybeTensor& bias,
       const MaybeTensor& gate);

  Tensor empty(const std::vector<int64_t>& shape) const {
    return torch::stable::new_empty(children, shape, ScalarType::Float);
  }
  Tensor zeros(const std::vector<int64_t>& shape) const {
    return torch::stable::new_zeros(children, shape, ScalarType::Float);
  }
  // A tensor in float, where it lies if it is dense.
  float* dense(const MaybeTensor& x);
  // Those of the Gaussian pass, [I or 1, M or 1].
  void take_betas(const MaybeTensor& use, const MaybeTensor& ignore);

  // May products be rounded to tf32? Half-precision numbers lose nothing by it; the gradients of votes, which backward
  // rounds too, lose what bfloat16 does not show and float16 would.
  bool rounds(int64_t options, Storage half) const;

  Cut cut_forward(int64_t options) const;
  void take(const Cut& c);

  // One launch: the positions of one colour, `parent_blocks` blocks of parents from the first on.
  void launch(const Cut& c, int first_block, int parent_blocks, int colours_y = 1, int colours_x = 1, int colour_y = 0,
              int colour_x = 0);
  // The softmax over parents that do not fit into one block: a launch for each blockful of them, one after another.
  Tensor collect(const Cut& c, int numbers);

  // How many ranges' results there are for every parent, and one of them: numbers of a pose, or a single one.
  std::vector<int64_t> parts(const Cut& c, bool poses) const {
    return {c.chunks, geometry.positions() * geometry.M * (poses ? geometry.parent_pose() : 1)};
  }

  void take_ranges(const Cut& c);
};

// Which gradients a backward call is asked for, of those that every pass has.
struct Wanted {
  bool children, weight, bias, gate;
  int64_t use = 0, ignore = 0;  // numbers of betas, where every child has its own
};

// What every pass's backward makes alike: these gradients, in parts where an order must be kept.
class Gradients {
 public:
  Cut cut;

  // Cuts the call. `bias` and `weight` are those of the op.
  Gradients(Call& call, const Wanted& wanted, const MaybeTensor& weight, const MaybeTensor& bias, int64_t options);

  // A launch before the others, for narrow positions alone: puts `linear` right (see gaussian_backward.h).
  void measure(int statistics, float* linear, const float* narrow);
  // Launches; where parents take several blocks, `statistics` numbers for each position and child are found first.
  void run(int statistics);

  Tensor children() const { return finished(wanted_.children, dchildren_, shape_of(call_.children)); }
  Tensor gate() const;
  Tensor weight() const;
  Tensor bias() const;
  Tensor use() const { return wanted_.use ? over(duse_, 0) : none(); }  // [I * M]
  Tensor ignore() const { return wanted_.ignore ? over(dignore_, 0) : none(); }

  // A gradient as the op returns it: in the children's type, empty if it is not wanted.
  Tensor finished(bool wanted, const Tensor& x, const std::vector<int64_t>& shape) const;
  Tensor none() const { return torch::stable::new_empty(call_.children, {0}, ScalarType::Float); }

 private:
  Call& call_;
  Wanted wanted_;
  bool ordered_;
  std::vector<int64_t> weight_shape_, bias_shape_;
  Tensor dchildren_, dgate_, dweight_, dbias_, duse_, dignore_;
};

}  // namespace fastcaps::gpu
