// One call of an op on a GPU: its tensors as the kernels want them, its schedule, its launches.
#pragma once

#include <array>
#include <initializer_list>
#include <utility>

#include "../arguments.h"
#include "launch.h"
#include "pass.h"
#include "schedule.h"

namespace fastcaps::gpu {

inline Machine machine() { return {multiprocessors(), shared_limit()}; }

inline float* floats(const Tensor& x) { return x.numel() ? static_cast<float*>(data_of(x)) : nullptr; }

// How values are made: `parts` of [rows, columns, numbers], which are added up over parts and columns.
struct Made {
  int64_t parts, numbers, rows = 1, columns = 1;

  int64_t part() const { return rows * columns * numbers; }
  int64_t all() const { return parts * part(); }
};

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
  // One piece of memory for several arrays, each at a multiple of 16 bytes: where each begins, and its size.
  Tensor workspace(std::initializer_list<std::pair<float**, int64_t>> arrays) const;
  Shape poses(int64_t iterations = 0) const { return poses_shape(given_votes, iterations); }
  // A tensor of poses, made dense if the kernels treat them as vectors.
  MaybeTensor posed(const MaybeTensor& x) { return x && flat ? MaybeTensor(as_dense(*x)) : x; }
  // The memory of a tensor in its own type, dense; null without one.
  const void* as_given(const MaybeTensor& x) { return x ? data_of(dense(*x, storage)) : nullptr; }
  float* table(const MaybeTensor& x) { return static_cast<float*>(OpCall::table(x)); }
  // A Gaussian iteration's state: mean and variance [B, Ho, Wo, M, C, E], log_weight [B, Ho, Wo, M], in float.
  void take_state(const MaybeTensor& mean, const MaybeTensor& variance, const MaybeTensor& log_weight);

  Task task(bool backward) const { return Task::of(&pass, backward, options, args.storage, !args.weight); }
  // How a task is cut, or an error that says why no kernel takes it.
  Schedule cut(const Task& task, const Bias& bias) const;
  // The schedule of a forward. `whole`: of all iterations in one launch, whose blocks see all children of their
  // positions.
  Schedule schedule_forward(bool whole) const;
  // Whether several iterations should be one launch.
  bool fuses(int64_t iterations) const;
  void take(const Schedule& c);

  // Whether a launch may walk lean (see LeanCall).
  bool is_lean(const Schedule& c) const;
  // One launch: the positions of one colour, `parent_blocks` blocks of parents from the first on.
  void launch(const Schedule& c, int first_block, int parent_blocks, int colours_y = 1, int colours_x = 1,
              int colour_y = 0, int colour_x = 0);
  // How many blocks of parents a launch takes if each stores `numbers` values of its own.
  int places(const Schedule& c, int64_t numbers) const;
  // Computes the softmax over parents that do not fit into one block, as `numbers` values for each position and child:
  // launches all blocks, or as many at a time as places() allows, then joins their parts.
  Tensor collect(const Schedule& c, int numbers);

  // What a launch makes for all parents, poses or single values: a part for each range of children.
  Made parts(const Schedule& c, bool poses = true) const {
    return {c.chunks, votes.positions() * votes.M * (poses ? votes.parent_size() : 1)};
  }
};

// Values that the first launch of a backward sets to 0, by blocks of its own, behind those that do the launch's work.
// They begin at multiples of 16 bytes.
struct Zeros {
  static constexpr int kMost = 8;
  float* values[kMost];
  int64_t count[kMost];
  int pieces;
  int64_t working;  // blocks in front

  // Adds the blocks: few, each with much to store, since starting thousands takes longer than what they store.
  void add_blocks(Grid& grid);
};

// What the last launch of a backward adds up, over parts and columns.
struct Sum {
  const float* from;  // [parts, rows, columns, numbers], `stride` from part to part
  void* to;           // [rows, numbers]
  int64_t parts, stride, rows, columns, numbers;
  int64_t limit;  // behind `from`, from where on there is nothing
  Storage storage = Storage::kFloat32;
  int shares = 1;       // threads that share the parts of four sums
  bool vector = false;  // whether these are always read at once
};
struct SumArgs {
  static constexpr int kMost = 9;  // gradients of an op
  Sum sums[kMost];
};

// The gradients of a call. Kernels add to them or make them in parts, which one last launch adds up, in a fixed order
// and in the type that the op returns. First every gradient is announced, then `allocate` finds room for all parts.
class VoteGradients {
 public:
  Schedule schedule;

  // Cuts the call, and announces the gradients that all routings have: of children, weight, bias and gate. They are
  // summed over iterations, and made in parts if the order of sums is fixed. `launches`: whether there will be
  // launches; else all gradients are 0. `betas`: how many betas want a gradient, if every child has its own.
  VoteGradients(Call& call, int64_t needs, bool launches, int64_t betas = 0);

  // That of a gradient [rows or 1, M or 1, ..., each], made in parts that have all rows and columns.
  Made table(int64_t parts, int64_t rows, int64_t each, const Shape& shape) const;
  // Parts of the gradients of matrices and tables.
  int64_t parts() const { return parts_; }
  // Announces a gradient and returns it, empty if it is not wanted; `allocate` sets `place`, where kernels make it.
  // `starts_at_zero`: they add to it.
  Tensor add(bool wanted, float*& place, const Made& made, const Shape& shape, ScalarType type,
             bool starts_at_zero = false);
  // The same of one that is made somewhere in reserved memory: `stride` from part to part, `offset` behind its
  // beginning.
  Tensor add_sum(bool wanted, float*& place, const Made& made, const Shape& shape, ScalarType type, int64_t offset,
                 int64_t stride);
  // Memory for other values; `allocate` sets `place`.
  void reserve(float*& place, int64_t numbers, bool starts_at_zero = false);
  // Returns what the first launch sets to 0.
  Zeros allocate();

  bool any() const { return any_; }

  // A launch before the others, only for tight positions: corrects `u` and `s` (see gaussian_backward.cu).
  void measure(int statistics, float* u, float* s, const float* tight);
  // Launches the backward. If parents take several blocks, the softmax is first collected, as `statistics` values.
  void run(int statistics, const float* tight = nullptr);
  // The last launch, if there is anything to add up.
  void add_up();

  Tensor children, weight, bias, gate;

 private:
  // Values that kernels make: in a gradient's own memory, or, without that, somewhere in the workspace.
  struct Piece {
    float** place;
    float* memory;
    int64_t offset, numbers;
    bool starts_at_zero;
  };
  Call& call_;
  bool ordered_, launches_, any_ = false;
  int places_;     // blocks of parents that add to children's gradients at a time, each to its own
  int64_t parts_;  // of the gradients of matrices and tables
  int64_t reserved_ = 0;
  std::vector<Piece> pieces_;
  Tensor workspace_;
  SumArgs sums_{};
  std::array<float**, SumArgs::kMost> parts_of_sums_{};
  std::array<int64_t, SumArgs::kMost> offsets_{};
  int count_ = 0;
};

}  // namespace fastcaps::gpu
