#include "call.h"

#include <algorithm>

#include "softmax.h"

namespace fastcaps::gpu {
namespace {

struct RoundArgs {
  const float* from;
  float* to;
  int64_t count;
};

// Weights to tf32, once a call.
FASTCAPS_KERNEL(256, 1)
round_kernel(const FASTCAPS_CONSTANT RoundArgs a) {
  for (int64_t k = block_x() * block_threads() + thread_index(); k < a.count; k += blocks_x() * block_threads())
    a.to[k] = bits_float(to_tf32(a.from[k]));
}

constexpr int kMostAlongY = 65535;  // blocks of a grid

// May rows of children be copied in vectors of so many numbers?
bool copies_in_vectors(const Votes& v, int each) {
  const View& x = v.children;
  if (x.stride[5] != 1 || v.D % each != 0) return false;
  for (int k = 0; k < 5; ++k)
    if (x.stride[k] % each != 0) return false;
  return reinterpret_cast<uintptr_t>(x.data) % (size_t(bytes_of(v.storage)) * size_t(each)) == 0;
}

// How many colours keep positions apart that see the same child, along one axis.
int colours(int64_t kernel, int64_t stride, int64_t dilation, int64_t positions) {
  const int64_t apart = ceil_div(dilation * (kernel - 1) + 1, stride);
  return int(apart < positions ? apart : positions);
}

}  // namespace

Tensor parameter(const Tensor& x, ScalarType type) {
  const Tensor dense = dense_as(x, type);
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : copied(dense, type);
}

Call::Call(Pass pass_, const VoteTensors& given, int64_t options_)
    : pass(pass_), votes(given.check()), options(options_), children(given.children) {
  const Votes& v = votes;
  STD_TORCH_CHECK(v.storage != Storage::kFloat64, "fastcaps: the CUDA kernels take no float64");
  STD_TORCH_CHECK(fits_30_bits(v), "fastcaps: the CUDA kernels count children and parents in 30 bits");
  PassArgs& a = args;
  a.M = int(v.M), a.C = int(v.C), a.D = int(v.D), a.E = int(v.E), a.N = int(v.N), a.I = int(v.I);
  a.G = int(v.G), a.H = int(v.H), a.W = int(v.W), a.Ho = int(v.Ho), a.Wo = int(v.Wo);
  a.window = v.window;
  a.positions = v.positions();
  a.by_types = Divider(v.N), a.by_kernel_width = Divider(v.window.kw), a.by_group = Divider(v.I / v.G);
  a.padded = v.window.ph > 0 || v.window.pw > 0;
  a.children = v.children, a.gate = v.gate, a.storage = v.storage;
  if (given.weight) a.weight = data_of(weight = parameter(*given.weight, children.scalar_type()));
  if (given.bias) a.bias = floats(bias = parameter(*given.bias));
  a.bias_stride_m = v.bias_stride_m, a.bias_stride_i = v.bias_stride_i;
}

float* Call::dense(const MaybeTensor& x) {
  if (!x) return nullptr;
  kept.push_back(parameter(*x));
  return floats(kept.back());
}

void Call::take_state(const MaybeTensor& mean, const MaybeTensor& variance, const MaybeTensor& log_weight) {
  args.mean = dense(mean), args.variance = dense(variance), args.log_weight = dense(log_weight);
}

void Call::take_betas(const MaybeTensor& use, const MaybeTensor& ignore) {
  if (!use) return;
  args.beta_use = dense(use), args.beta_ignore = dense(ignore);
  table_strides(*use, 1, args.use_stride_i, args.use_stride_m);
  table_strides(*ignore, 1, args.ignore_stride_i, args.ignore_stride_m);
}

Schedule Call::cut(const Task& task, const Bias& bias) const {
  const Schedule c = make_schedule(task, votes, bias, machine());
  if (c.kernel) return c;
  const std::string why_not = refusal(pass, votes.C, votes.D, votes.E, task.identity);
  STD_TORCH_CHECK(false, "fastcaps: the CUDA kernels cannot take this call: ",
                  why_not.empty() ? "this device's shared memory does not hold these poses" : why_not);
  return c;
}

Schedule Call::schedule_forward(int64_t turns) const {
  STD_TORCH_CHECK(turns >= 1 && turns <= kMostTurns, "fastcaps: one launch has 1 to ", kMostTurns, " turns, got ",
                  turns);
  const bool whole = turns > 1;
  const Schedule c = cut({.pass = pass,
                          .products = products(options, args.storage, Storage::kFloat16),
                          .identity = !args.weight,
                          .whole = whole},
                         {});
  STD_TORCH_CHECK(!whole || pass == Pass::kPooling || c.parent_blocks == 1,
                  "fastcaps: one launch cannot take this routing: its ", votes.M, " parents take several blocks");
  return c;
}

void Call::take(const Schedule& c) {
  PassArgs& a = args;
  static_cast<Cut&>(a) = c;
  a.by_tile = Divider(c.tile);
  a.by_rows = Divider(int64_t(c.rows) * c.kernel->patch_rows);
  a.by_depth = Divider(ceil_div(votes.D, c.kernel->vector));
  // Half precision fits into tf32, and of three products each takes its own part of a weight.
  if (c.kernel->products == 1 && a.storage == Storage::kFloat32 && votes.positions() > 0) {
    rounded = empty({weight.numel()});
    gpu::launch(&round_kernel, Grid{ceil_div(weight.numel(), 1024), 1, 256},
                RoundArgs{floats(weight), floats(rounded), weight.numel()});
    a.weight = floats(rounded);
  }
  a.children_copy = copies_in_vectors(votes, c.kernel->vector);
}

void Call::launch(const Schedule& c, int first_block, int parent_blocks, int colours_y, int colours_x, int colour_y,
                  int colour_x) {
  PassArgs& a = args;
  const int64_t rows = ceil_div(votes.Ho - colour_y, colours_y), columns = ceil_div(votes.Wo - colour_x, colours_x);
  if (rows <= 0 || columns <= 0) return;
  a.colours_y = colours_y, a.colours_x = colours_x, a.colour_y = colour_y, a.colour_x = colour_x;
  a.by_sample = Divider(rows * columns), a.by_row = Divider(columns);
  a.seats = votes.B * rows * columns;
  STD_TORCH_CHECK(ceil_div(a.seats, c.tile) * c.chunks < (int64_t(1) << 31),
                  "fastcaps: too many positions for one launch");
  a.tiles = int(ceil_div(a.seats, c.tile));
  a.chunks = c.chunks, a.chunk_children = c.chunk_children, a.by_chunk = Divider(c.chunks);
  a.groups = c.groups < a.tiles ? int(c.groups) : a.tiles;
  const bool plain = a.weight && !a.bias && !a.padded && a.query.data && c.parent_blocks == 1 && a.turns == 0;
  for (int block = 0; block < parent_blocks; block += kMostAlongY) {
    a.first_parent = (first_block + block) * c.warps_parents * c.parents;
    const int blocks = std::min(parent_blocks - block, kMostAlongY);
    const Grid grid{int64_t(a.groups) * c.chunks, blocks, c.threads(), c.shared_bytes};
    gpu::launch(plain ? c.kernel->run_plain : c.kernel->run, grid, a);
  }
}

int Call::places(const Schedule& c, int64_t numbers) const {
  const int64_t most = std::clamp<int64_t>(parts_bytes() / (4 * numbers + 1), 1, kMostAlongY);
  return int(ceil_div(c.parent_blocks, ceil_div(c.parent_blocks, most)));  // alike in every launch
}

Tensor Call::collect(const Schedule& c, int numbers) {
  if (c.parent_blocks == 1) return Tensor();
  const int64_t count = votes.positions() * votes.I;
  const int at_a_time = places(c, numbers * count);
  const Tensor statistics = empty({at_a_time, count, numbers});
  args.statistics = floats(statistics), args.collect = at_a_time;
  Schedule all = c;  // nothing is added up: no sums are to be kept few
  all.groups = c.tiles;
  for (int block = 0; block < c.parent_blocks; block += at_a_time)
    launch(all, block, std::min(at_a_time, c.parent_blocks - block));
  if (at_a_time > 1) gpu::launch(numbers == 2 ? &join_kernel<0> : &join_kernel<1>, blocks_for(count), args);
  args.collect = 0;
  return statistics;
}

VoteGradients::VoteGradients(Call& call, const VoteTensors& given, int64_t needs, int64_t use, int64_t ignore)
    : call_(call),
      wanted_{(needs & kChildren) != 0,
              given.weight && (needs & kWeight),
              given.bias && (needs & kBias),
              given.gate && (needs & kGate),
              use,
              ignore},
      ordered_(call.options & kDeterministic) {
  const auto& wanted = wanted_;
  if (given.weight) weight_shape_ = shape_of(*given.weight);
  if (given.bias) bias_shape_ = shape_of(*given.bias);
  const Votes& v = call.votes;
  const bool identity = !call.args.weight;
  const int64_t weights = identity ? 0 : v.G * v.M * v.D * v.E;
  Bias parts_of = wanted.bias ? Bias::of(v, given.bias->size(0) == 1) : Bias{};
  const int64_t biases = parts_of.numbers;
  parts_of.numbers += wanted.use + wanted.ignore;
  schedule = call.cut(
      {call.pass, true, products(call.options, call.args.storage, Storage::kBFloat16), ordered_, identity}, parts_of);
  call.take(schedule);
  const int64_t parts = !ordered_ ? 1 : schedule.parts_by_chunk ? schedule.groups * schedule.chunks : schedule.groups;
  const int64_t cells = v.B * v.H * v.W, numbers = wanted.children ? call.children.numel() : 0;
  const int64_t gates = wanted.gate ? cells * v.N : 0;
  places_ = ordered_ ? call.places(schedule, numbers + gates) : 1;
  dchildren_ = call.zeros({places_, numbers});
  dgate_ = call.zeros({places_, gates});
  dweight_ = call.zeros({parts, wanted.weight ? weights : 0});
  dbias_ = call.zeros({parts, biases});
  duse_ = call.zeros({parts, wanted.use});
  dignore_ = call.zeros({parts, wanted.ignore});
  PassArgs& a = call.args;
  a.dchildren = floats(dchildren_), a.dgate = floats(dgate_), a.dweight = floats(dweight_), a.dbias = floats(dbias_);
  if (wanted.use) a.duse = floats(duse_);
  if (wanted.ignore) a.dignore = floats(dignore_);
  a.dweight_part = ordered_ ? weights : 0, a.dbias_part = ordered_ ? biases : 0;
  a.dbeta_part = ordered_ ? v.I * v.M : 0, a.cells_part = places_ > 1 ? cells : 0;
  a.alone_with_weights = ordered_;
}

void VoteGradients::measure(int statistics, float* u, float* s, const float* tight) {
  PassArgs& a = call_.args;
  a.tight = tight;
  const Tensor kept = call_.collect(schedule, statistics);
  a.measured = u, a.measured_squares = s;
  Schedule whole = schedule;  // a sum over all children, made by one block
  whole.groups = schedule.tiles;
  whole.chunks = 1, whole.chunk_children = int(ceil_div(call_.votes.I, schedule.stage) * schedule.stage);
  call_.launch(whole, 0, schedule.parent_blocks);
  a.measured = a.measured_squares = nullptr, a.tight = nullptr;
}

void VoteGradients::run(int statistics) {
  const Votes& v = call_.votes;
  const Tensor kept = statistics ? call_.collect(schedule, statistics) : Tensor();
  const Window& w = v.window;
  const int colours_y = colours(w.kh, w.sh, w.dh, v.Ho), colours_x = colours(w.kw, w.sw, w.dw, v.Wo);
  call_.args.alone_with_children = ordered_ || (colours_y * colours_x == 1 && schedule.parent_blocks == 1);
  if (!ordered_) {
    call_.launch(schedule, 0, schedule.parent_blocks);
    return;
  }
  for (int y = 0; y < colours_y; ++y)
    for (int x = 0; x < colours_x; ++x)
      for (int block = 0; block < schedule.parent_blocks; block += places_)
        call_.launch(schedule, block, std::min(places_, schedule.parent_blocks - block), colours_y, colours_x, y, x);
}

Tensor VoteGradients::finished(bool wanted, const Tensor& x, const Shape& shape) const {
  const ScalarType type = call_.children.scalar_type();
  if (!wanted) return new_tensor(call_.children, {0}, type, "an empty gradient");  // one each: outputs must not alias
  const Tensor shaped = torch::stable::view(x, shape);
  return dense_as(shaped, type);
}

Tensor VoteGradients::gate() const {
  Shape shape = shape_of(call_.children);
  shape.resize(shape.size() - 2);
  return finished(wanted_.gate, over(dgate_, 0), shape);
}

Tensor VoteGradients::weight() const {
  return finished(wanted_.weight, wanted_.weight ? over(dweight_, 0) : dweight_, weight_shape_);
}

Tensor VoteGradients::bias() const {
  if (!wanted_.bias) return finished(false, dbias_, {});
  const Votes& v = call_.votes;
  const int64_t rows = bias_shape_[0], sums = dbias_.numel() / (rows * v.parents_size());
  const Tensor all =
      torch::stable::view(over(torch::stable::view(dbias_, {sums, rows * v.parents_size()}), 0), {rows, v.M, v.C, v.E});
  return finished(true, bias_shape_[1] == v.M ? all : over(all, 1), bias_shape_);
}

}  // namespace fastcaps::gpu
