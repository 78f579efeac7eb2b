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

// Weights to tf32, once a call, where that takes less time than in every block. Half precision fits into tf32.
FASTCAPS_KERNEL(256, 1)
round_kernel(const FASTCAPS_CONSTANT RoundArgs round) {
  for (int64_t k = block_x() * block_threads() + thread_index(); k < round.count; k += blocks_x() * block_threads())
    round.to[k] = bits_float(to_tf32(round.from[k]));
}

// Sums that kernels will add to, set to 0 by one launch: block y takes the y-th. They begin at multiples of 16 bytes.
struct ZeroArgs {
  float* sums[6];
  int64_t count[6];
};

FASTCAPS_KERNEL(256, 1)
zero_kernel(const FASTCAPS_CONSTANT ZeroArgs zero) {
  float* sums = zero.sums[block_y()];
  const int64_t count = zero.count[block_y()], step = blocks_x() * block_threads();
  const int64_t first = block_x() * block_threads() + thread_index();
  for (int64_t k = first; k < count / 4; k += step) store4(sums + 4 * k, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
  if (first < count % 4) sums[count - 1 - first] = 0.0f;
}

constexpr int kMostAlongY = 65535;  // blocks of a grid

// Whether rows of children can be copied in vectors of `each` values.
bool copies_in_vectors(const Votes& v, int each) {
  const View& x = v.children;
  if (x.stride[5] != 1 || v.D % each != 0) return false;
  for (int k = 0; k < 5; ++k)
    if (x.stride[k] % each != 0) return false;
  return reinterpret_cast<uintptr_t>(x.data) % (size_t(bytes_of(v.storage)) * size_t(each)) == 0;
}

// How many colours separate positions that see the same child, along one axis.
int colours(int64_t kernel, int64_t stride, int64_t dilation, int64_t positions) {
  const int64_t apart = ceil_div(dilation * (kernel - 1) + 1, stride);
  return int(apart < positions ? apart : positions);
}

}  // namespace

// Vectors are read from addresses that are multiples of 16.
Call::Call(const char* op, const VoteTensors& tensors, int64_t options_)
    : OpCall(tensors, 16), pass(*pass_of(op)), given_votes(votes), options(options_) {
  // Pooling has kernels for vectors of 16 values without weights. A matrix of 16 values is one, if its rows are dense.
  flat = op == std::string("pooling") && !given.weight && votes.C > 1 && votes.child_size() == 16 &&
         votes.children.stride[4] == votes.D * votes.children.stride[5];
  if (flat) votes.D = votes.E = 16, votes.C = 1;
  const Votes& v = votes;
  STD_TORCH_CHECK(v.storage != Storage::kFloat64, "fastcaps: the CUDA kernels take no float64");
  STD_TORCH_CHECK(fits_30_bits(v), "fastcaps: the CUDA kernels count children and parents in 30 bits");
  args.M = int(v.M), args.C = int(v.C), args.D = int(v.D), args.E = int(v.E), args.N = int(v.N), args.I = int(v.I);
  args.G = int(v.G), args.H = int(v.H), args.W = int(v.W), args.Ho = int(v.Ho), args.Wo = int(v.Wo);
  args.window = v.window;
  args.positions = v.positions();
  args.by_types = Divider(v.N), args.by_kernel_width = Divider(v.window.kw), args.by_group = Divider(v.I / v.G);
  args.padded = v.window.ph > 0 || v.window.pw > 0;
  args.children = v.children, args.gate = v.gate, args.storage = v.storage;
  if (given.weight) args.weight = data_of(dense(*given.weight, storage));
  args.bias = table(given.bias);
  args.bias_stride_m = v.bias_stride_m, args.bias_stride_i = v.bias_stride_i;
}

void Call::take_state(const MaybeTensor& mean, const MaybeTensor& variance, const MaybeTensor& log_weight) {
  args.mean = table(mean), args.variance = table(variance), args.log_weight = table(log_weight);
}

Schedule Call::cut(const Task& task, const Bias& bias) const {
  std::string why_not;
  const Schedule c = make_schedule(task, votes, bias, machine(), &why_not);
  if (c.kernel) return c;
  if (why_not.empty()) why_not = refusal(pass, votes.C, votes.D, votes.E, task.identity);
  STD_TORCH_CHECK(false, "fastcaps: the CUDA kernels cannot take this call: ",
                  why_not.empty() ? "this device's shared memory does not hold these poses" : why_not);
  return c;
}

Schedule Call::schedule_forward(int64_t iterations) const {
  STD_TORCH_CHECK(iterations >= 1 && iterations <= kMostIterations, "fastcaps: one launch has 1 to ", kMostIterations,
                  " iterations, got ", iterations);
  const bool whole = iterations > 1;
  const Schedule c = cut({.pass = &pass,
                          .products = products(options, args.storage, Storage::kFloat16),
                          .identity = !args.weight,
                          .whole = whole},
                         {});
  STD_TORCH_CHECK(!whole || !pass.parents_compete || c.parent_blocks == 1,
                  "fastcaps: one launch cannot take this routing: its ", votes.M, " parents take several blocks");
  return c;
}

void Call::take(const Schedule& c) {
  static_cast<Cut&>(args) = c;
  args.by_tile = Divider(c.tile_size);
  args.by_rows = Divider(int64_t(c.rows) * c.kernel->patch_rows);
  args.by_depth = Divider(ceil_div(votes.D, c.kernel->vector));
  if ((c.kernel->rounded || args.rounds) && args.storage == Storage::kFloat32 && votes.positions() > 0) {
    rounded = empty({given.weight->numel()});
    gpu::launch(&round_kernel, Grid{ceil_div(rounded.numel(), 1024), 1, 256},
                RoundArgs{static_cast<const float*>(args.weight), floats(rounded), rounded.numel()});
    args.weight = floats(rounded);
  }
  args.children_copy = copies_in_vectors(votes, c.kernel->vector);
}

void Call::launch(const Schedule& c, int first_block, int parent_blocks, int colours_y, int colours_x, int colour_y,
                  int colour_x) {
  const int64_t rows = ceil_div(votes.Ho - colour_y, colours_y), columns = ceil_div(votes.Wo - colour_x, colours_x);
  if (rows <= 0 || columns <= 0) return;
  args.colours_y = colours_y, args.colours_x = colours_x, args.colour_y = colour_y, args.colour_x = colour_x;
  args.by_sample = Divider(rows * columns), args.by_row = Divider(columns);
  args.launched = votes.B * rows * columns;
  STD_TORCH_CHECK(ceil_div(args.launched, c.tile_size) * c.chunks < (int64_t(1) << 31),
                  "fastcaps: too many positions for one launch");
  args.tiles = int(ceil_div(args.launched, c.tile_size));
  args.chunks = c.chunks, args.chunk_children = c.chunk_children, args.by_chunk = Divider(c.chunks);
  args.groups = c.groups < args.tiles ? int(c.groups) : args.tiles;
  const bool lean = args.weight && !args.bias && !args.gate.data && !args.padded && args.query.data &&
                    c.parent_blocks == 1 && args.iterations == 0;
  for (int block = 0; block < parent_blocks; block += kMostAlongY) {
    args.first_parent = (first_block + block) * c.warps_parents * c.parents;
    const int blocks = std::min(parent_blocks - block, kMostAlongY);
    const Grid grid{int64_t(args.groups) * c.chunks, blocks, c.threads(), c.shared_bytes, c.carveout};
    gpu::launch(lean ? c.kernel->run_lean : c.kernel->run, grid, args);
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
  Schedule all = c;  // no sums are made, so groups need not be few
  all.groups = c.tiles;
  for (int block = 0; block < c.parent_blocks; block += at_a_time)
    launch(all, block, std::min(at_a_time, c.parent_blocks - block));
  if (at_a_time > 1) gpu::launch(numbers == 2 ? &join_kernel<0> : &join_kernel<1>, blocks_for(count), args);
  args.collect = 0;
  return statistics;
}

VoteGradients::VoteGradients(Call& call, int64_t needs, int64_t use, int64_t ignore)
    : call_(call),
      wanted_{(needs & kChildren) != 0,
              call.given.weight && (needs & kWeight),
              call.given.bias && (needs & kBias),
              call.given.gate && (needs & kGate),
              use,
              ignore},
      ordered_(call.options & kDeterministic) {
  const auto& wanted = wanted_;
  const VoteTensors& given = call.given;
  if (given.weight) weight_shape_ = shape_of(*given.weight);
  if (given.bias) bias_shape_ = shape_of(*given.bias);
  const Votes& v = call.votes;
  const bool identity = !call.args.weight;
  const int64_t weights = identity ? 0 : v.G * v.M * v.D * v.E;
  Bias parts_of = wanted.bias ? Bias::of(v, given.bias->size(0) == 1) : Bias{};
  const int64_t biases = parts_of.numbers;
  parts_of.numbers += wanted.use + wanted.ignore;
  const Task task{&call.pass, true, products(call.options, call.args.storage, Storage::kBFloat16), ordered_, identity};
  schedule = call.cut(task, parts_of);
  call.args.rounds = schedule.kernel->products == 0 && forward_rounds(task, v);
  call.take(schedule);
  const int64_t parts = !ordered_ ? 1 : schedule.parts_by_chunk ? schedule.groups * schedule.chunks : schedule.groups;
  const int64_t cells = v.B * v.H * v.W, numbers = wanted.children ? call.children.numel() : 0;
  const int64_t gates = wanted.gate ? cells * v.N : 0;
  places_ = ordered_ ? call.places(schedule, numbers + gates) : 1;
  PassArgs& args = call.args;
  const struct {
    Tensor& sums;
    int64_t parts, numbers;
    float*& place;
  } made[] = {{dchildren_, places_, numbers, args.dchildren},
              {dgate_, places_, gates, args.dgate},
              {dweight_, parts, wanted.weight ? weights : 0, args.dweight},
              {dbias_, parts, biases, args.dbias},
              {duse_, parts, wanted.use, args.duse},
              {dignore_, parts, wanted.ignore, args.dignore}};
  ZeroArgs zero{};       // not one piece of memory for all: who keeps a gradient would keep the others
  Grid grid{1, 0, 256};  // few blocks, each with much to store: starting thousands takes longer than what they store
  for (auto& one : made) {
    const Shape shape{one.parts, one.numbers};
    one.sums = v.positions() == 0 ? call.zeros(shape) : call.empty(shape);  // an empty batch launches nothing
    one.place = floats(one.sums);
    const int64_t count = one.sums.numel();
    if (v.positions() == 0 || count == 0) continue;
    zero.sums[grid.y] = one.place, zero.count[grid.y++] = count;
    grid.x = std::clamp<int64_t>(ceil_div(count, 4 * grid.threads), grid.x, 4 * multiprocessors());
  }
  gpu::launch(&zero_kernel, grid, zero);
  args.dweight_part = ordered_ ? weights : 0, args.dbias_part = ordered_ ? biases : 0;
  args.dbeta_part = ordered_ ? v.I * v.M : 0, args.cells_part = places_ > 1 ? cells : 0;
  args.alone_with_weights = ordered_;
}

void VoteGradients::measure(int statistics, float* u, float* s, const float* tight) {
  PassArgs& args = call_.args;
  args.tight = tight;
  const Tensor kept = call_.collect(schedule, statistics);
  args.measured = u, args.measured_squares = s;
  Schedule whole = schedule;  // a sum over all children, made by one block
  whole.groups = schedule.tiles;
  whole.chunks = 1, whole.chunk_children = int(ceil_div(call_.votes.I, schedule.stage) * schedule.stage);
  call_.launch(whole, 0, schedule.parent_blocks);
  args.measured = args.measured_squares = nullptr, args.tight = nullptr;
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
  // one each: outputs must not alias
  return wanted ? dense_as(torch::stable::view(x, shape), call_.storage)
                : new_tensor(call_.children, {0}, call_.storage, "an empty gradient");
}

Tensor VoteGradients::table(const Tensor& parts, const Shape& shape) const {
  Shape all = shape;
  all[1] = call_.votes.M;
  int64_t numbers = 1;
  for (const int64_t size : all) numbers *= size;
  const Tensor sum = torch::stable::view(over(torch::stable::view(parts, {parts.numel() / numbers, numbers}), 0), all);
  return torch::stable::view(shape == all ? sum : over(sum, 1), shape);
}

}  // namespace fastcaps::gpu
