#include "call.h"

#include <algorithm>

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

// May rows of children be copied in vectors of so many floats?
bool copies_in_vectors(const Tensor& x, int floats_each, int64_t depth) {
  if (x.scalar_type() != ScalarType::Float || x.stride(5) != 1 || depth % floats_each != 0) return false;
  for (int64_t k = 0; k < 5; ++k)
    if (x.stride(k) % floats_each != 0) return false;
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % (4 * size_t(floats_each)) == 0;
}

// How many colours keep positions apart that see the same child, along one axis.
int colours(int64_t kernel, int64_t stride, int64_t dilation, int64_t positions) {
  const int64_t apart = ceil_div(dilation * (kernel - 1) + 1, stride);
  return int(apart < positions ? apart : positions);
}

}  // namespace

Tensor parameter(const Tensor& x) {
  const Tensor dense = in_compute_type(x, ScalarType::Float);
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : torch::stable::clone(dense);
}

Call::Call(Pass pass_, const VotesGiven& votes, int64_t options_)
    : pass(pass_),
      geometry(pass_geometry(votes.children, votes.weight, votes.parents, votes.bias, votes.gate, votes.window)),
      options(options_),
      children(votes.children) {
  const Geometry& g = geometry;
  STD_TORCH_CHECK(g.M == votes.parents, "fastcaps: weight is for ", g.M, " parents, not for ", votes.parents);
  STD_TORCH_CHECK(storage_of(children) != Storage::kFloat64, "fastcaps: the CUDA kernels take no float64");
  const std::string why_not = refusal(pass, g.C, g.D, g.E, !votes.weight);
  STD_TORCH_CHECK(why_not.empty(), "fastcaps: the CUDA kernels cannot take this call: ", why_not);
  for (const int64_t size : {g.children(), g.M, g.H * g.W, g.C * g.D * g.M, g.Ho * g.Wo})
    STD_TORCH_CHECK(size < (int64_t(1) << 30), "fastcaps: the CUDA kernels count children and parents in 30 bits");
  PassArgs& a = args;
  a.M = int(g.M), a.C = int(g.C), a.D = int(g.D), a.E = int(g.E), a.N = int(g.N), a.I = int(g.children());
  a.G = int(g.G), a.H = int(g.H), a.W = int(g.W), a.Ho = int(g.Ho), a.Wo = int(g.Wo);
  a.window = g.window;
  a.positions = g.positions();
  a.by_types = Divider(g.N), a.by_kernel_width = Divider(g.window.kw), a.by_group = Divider(g.children() / g.G);
  a.padded = g.window.ph > 0 || g.window.pw > 0;
  a.children = view_of(children);
  a.storage = storage_of(children);
  if (votes.gate) a.gate = view_of(*votes.gate);
  if (votes.weight) a.weight = floats(weight = parameter(*votes.weight));
  if (votes.bias) {
    a.bias = floats(bias = parameter(*votes.bias));
    a.bias_stride_m = bias.size(1) > 1 ? g.parent_pose() : 0;
    a.bias_stride_i = bias.size(0) > 1 ? bias.size(1) * g.parent_pose() : 0;
  }
}

float* Call::dense(const MaybeTensor& x) {
  if (!x) return nullptr;
  kept.push_back(parameter(*x));
  return floats(kept.back());
}

void Call::take_state(const MaybeTensor& mean, const MaybeTensor& variance, const MaybeTensor& log_weight) {
  check(mean, "mean", poses(), ScalarType::Float), check(variance, "variance", poses(), ScalarType::Float);
  check(log_weight, "log_weight", numbers(), ScalarType::Float);
  STD_TORCH_CHECK(mean || !variance, "fastcaps: a variance wants a mean");
  args.mean = dense(mean), args.variance = dense(variance), args.log_weight = dense(log_weight);
}

void Call::take_betas(const MaybeTensor& use, const MaybeTensor& ignore) {
  const auto stride = [](const MaybeTensor& x, int64_t dim) {  // of dense memory
    return x->size(dim) == 1 ? 0 : dim == 1 ? 1 : x->size(1);
  };
  STD_TORCH_CHECK(use && ignore, "fastcaps: beta_use and beta_ignore come together");
  for (const auto& [beta, name] : {std::pair{&*use, "beta_use"}, std::pair{&*ignore, "beta_ignore"}}) {
    STD_TORCH_CHECK(beta->dim() == 2, "fastcaps: ", name, " must be [I or 1, M or 1]");
    const int64_t i = beta->size(0) == 1 ? 1 : geometry.children(), m = beta->size(1) == 1 ? 1 : geometry.M;
    check(*beta, name, {i, m}, ScalarType::Float);
  }
  args.beta_use = dense(use), args.beta_ignore = dense(ignore);
  args.use_stride_i = stride(use, 0), args.use_stride_m = stride(use, 1);
  args.ignore_stride_i = stride(ignore, 0), args.ignore_stride_m = stride(ignore, 1);
}

Schedule Call::schedule_forward(int64_t turns) const {
  STD_TORCH_CHECK(turns >= 1 && turns <= kMostTurns, "fastcaps: one launch has 1 to ", kMostTurns, " turns, got ",
                  turns);
  const bool whole = turns > 1;
  const Schedule c = make_schedule({.pass = pass,
                                    .tensor = rounds(options, args.storage, Storage::kFloat16),
                                    .identity = !args.weight,
                                    .whole = whole},
                                   geometry, {}, machine());
  STD_TORCH_CHECK(!whole || pass == Pass::kPooling || c.parent_blocks == 1,
                  "fastcaps: one launch cannot take this routing: its ", geometry.M, " parents take several blocks");
  return c;
}

void Call::take_ranges(const Schedule& c) {
  args.chunks = c.chunks, args.chunk_children = c.chunk_children;
  args.by_chunk = Divider(c.chunks);
}

void Call::take(const Schedule& c) {
  STD_TORCH_CHECK(c.kernel, "fastcaps: this device's shared memory does not hold these poses");
  take_ranges(c);
  PassArgs& a = args;
  a.columns = c.columns, a.rows = c.rows, a.parents = c.parents;
  a.warps_parents = c.warps_parents;
  a.tile = c.tile, a.stage = c.stage, a.parts_by_chunk = c.parts_by_chunk;
  a.by_tile = Divider(c.tile);
  a.by_rows = Divider(int64_t(c.rows) * c.kernel->tile_rows);
  a.by_depth = Divider(ceil_div(geometry.D, c.kernel->vector));
  if (c.kernel->tensor && a.storage == Storage::kFloat32) {  // half-precision numbers are round already
    rounded = empty({weight.numel()});
    gpu::launch(&round_kernel, Grid{ceil_div(weight.numel(), 1024), 1, 256},
                RoundArgs{a.weight, floats(rounded), weight.numel()});
    a.weight = floats(rounded);
  }
  a.children_copy = copies_in_vectors(children, c.kernel->vector, geometry.D);
  a.shared_weight = c.shared_weight, a.shared_seen = c.shared_seen, a.shared_seat = c.shared_seat;
  a.shared_offset = c.shared_offset, a.shared_exchange = c.shared_exchange, a.shared_dchildren = c.shared_dchildren;
  a.shared_dweight = c.shared_dweight, a.shared_dgate = c.shared_dgate, a.shared_stage = c.shared_stage;
}

void Call::launch(const Schedule& c, int first_block, int parent_blocks, int colours_y, int colours_x, int colour_y,
                  int colour_x) {
  PassArgs& a = args;
  const int64_t rows = ceil_div(geometry.Ho - colour_y, colours_y),
                columns = ceil_div(geometry.Wo - colour_x, colours_x);
  if (rows <= 0 || columns <= 0) return;
  a.colours_y = colours_y, a.colours_x = colours_x, a.colour_y = colour_y, a.colour_x = colour_x;
  a.by_sample = Divider(rows * columns), a.by_row = Divider(columns);
  a.seats = geometry.B * rows * columns;
  STD_TORCH_CHECK(ceil_div(a.seats, c.tile) * c.chunks < (int64_t(1) << 31),
                  "fastcaps: too many positions for one launch");
  a.tiles = int(ceil_div(a.seats, c.tile));
  a.groups = c.groups < a.tiles ? int(c.groups) : a.tiles;
  const bool plain = a.weight && !a.bias && !a.padded && a.query.data && c.parent_blocks == 1 && a.turns == 0;
  constexpr int kMost = 65535;  // blocks along y
  for (int block = 0; block < parent_blocks; block += kMost) {
    a.first_parent = (first_block + block) * c.warps_parents * c.parents;
    const Grid grid{int64_t(a.groups) * c.chunks, std::min(parent_blocks - block, kMost), c.threads(), c.shared_bytes};
    gpu::launch(plain ? c.kernel->run_plain : c.kernel->run, grid, a);
  }
}

Tensor Call::collect(const Schedule& c, int numbers) {
  Tensor statistics = empty({c.parent_blocks > 1 ? geometry.positions() * geometry.children() * numbers : 0});
  if (c.parent_blocks == 1) return statistics;
  args.statistics = floats(statistics);
  args.collect = true;
  Schedule all = c;  // nothing is summed over children: they may be spread over as many blocks as there is room for
  all.groups = c.tiles;
  const int64_t ranges = std::max<int64_t>(c.chunks, ceil_div(2 * multiprocessors(), c.tiles));
  all.chunk_children = int(ceil_div(ceil_div(geometry.children(), ranges), c.stage) * c.stage);
  all.chunks = int(ceil_div(geometry.children(), all.chunk_children));
  take_ranges(all);
  for (int block = 0; block < c.parent_blocks; ++block) launch(all, block, 1);
  args.collect = false;
  take_ranges(c);
  return statistics;
}

Gradients::Gradients(Call& call, const VotesGiven& votes, int64_t needs, int64_t use, int64_t ignore)
    : call_(call),
      wanted_{(needs & kChildren) != 0,
              votes.weight && (needs & kWeight),
              votes.bias && (needs & kBias),
              votes.gate && (needs & kGate),
              use,
              ignore},
      ordered_(call.options & kDeterministic) {
  const auto& wanted = wanted_;
  if (votes.weight) weight_shape_ = shape_of(*votes.weight);
  if (votes.bias) bias_shape_ = shape_of(*votes.bias);
  const MaybeTensor& bias = votes.bias;
  const Geometry& g = call.geometry;
  const bool identity = !call.args.weight;
  const int64_t weights = identity ? 0 : g.G * g.M * g.D * g.E;
  const int64_t biases = wanted.bias ? bias->size(0) * g.parents() : 0;
  const Bias parts_of{biases + wanted.use + wanted.ignore, wanted.bias && bias->size(0) == 1};
  schedule =
      make_schedule({call.pass, true, rounds(call.options, call.args.storage, Storage::kBFloat16), ordered_, identity},
                    g, parts_of, machine());
  call.take(schedule);
  const int64_t parts = !ordered_ ? 1 : schedule.parts_by_chunk ? schedule.groups * schedule.chunks : schedule.groups;
  dchildren_ = call.zeros({wanted.children ? call.children.numel() : 0});
  dgate_ = call.zeros({wanted.gate ? g.B * g.H * g.W * g.N : 0});
  dweight_ = call.zeros({parts, wanted.weight ? weights : 0});
  dbias_ = call.zeros({parts, biases});
  duse_ = call.zeros({parts, wanted.use});
  dignore_ = call.zeros({parts, wanted.ignore});
  PassArgs& a = call.args;
  a.dchildren = floats(dchildren_), a.dgate = floats(dgate_), a.dweight = floats(dweight_), a.dbias = floats(dbias_);
  if (wanted.use) a.duse = floats(duse_);
  if (wanted.ignore) a.dignore = floats(dignore_);
  a.dweight_part = ordered_ ? weights : 0, a.dbias_part = ordered_ ? biases : 0;
  a.dbeta_part = ordered_ ? g.children() * g.M : 0;
  a.alone_with_weights = ordered_;
}

void Gradients::measure(int statistics, float* linear, const float* narrow) {
  PassArgs& a = call_.args;
  a.narrow = narrow;
  const Tensor kept = call_.collect(schedule, statistics);
  a.measured = linear;
  Schedule whole = schedule;  // a sum over all children, made by one block
  whole.groups = schedule.tiles;
  whole.chunks = 1, whole.chunk_children = int(ceil_div(call_.geometry.children(), schedule.stage) * schedule.stage);
  call_.take_ranges(whole);
  call_.launch(whole, 0, schedule.parent_blocks);
  call_.take_ranges(schedule);
  a.measured = nullptr, a.narrow = nullptr;
}

void Gradients::run(int statistics) {
  const Geometry& g = call_.geometry;
  const Tensor kept = statistics ? call_.collect(schedule, statistics) : Tensor();
  const Window& w = g.window;
  const int colours_y = colours(w.kh, w.sh, w.dh, g.Ho), colours_x = colours(w.kw, w.sw, w.dw, g.Wo);
  call_.args.alone_with_children = ordered_ || (colours_y * colours_x == 1 && schedule.parent_blocks == 1);
  if (!ordered_) {
    call_.launch(schedule, 0, schedule.parent_blocks);
    return;
  }
  for (int y = 0; y < colours_y; ++y)
    for (int x = 0; x < colours_x; ++x)
      for (int block = 0; block < schedule.parent_blocks; ++block)
        call_.launch(schedule, block, 1, colours_y, colours_x, y, x);
}

Tensor Gradients::finished(bool wanted, const Tensor& x, const std::vector<int64_t>& shape) const {
  const ScalarType type = call_.children.scalar_type();
  if (!wanted) return torch::stable::new_empty(call_.children, {0});  // one each: outputs must not alias
  const Tensor shaped = torch::stable::view(x, shape);
  return type == ScalarType::Float ? shaped : torch::stable::to(shaped, type);
}

Tensor Gradients::gate() const {
  const Geometry& g = call_.geometry;
  return finished(wanted_.gate, dgate_, {g.B, g.H, g.W, g.N});
}

Tensor Gradients::weight() const {
  return finished(wanted_.weight, wanted_.weight ? over(dweight_, 0) : dweight_, weight_shape_);
}

Tensor Gradients::bias() const {
  if (!wanted_.bias) return finished(false, dbias_, {});
  const Geometry& g = call_.geometry;
  const Tensor all = torch::stable::view(over(dbias_, 0), {bias_shape_[0], g.M, g.C, g.E});
  return finished(true, bias_shape_[1] == g.M ? all : over(all, 1), bias_shape_);
}

}  // namespace fastcaps::gpu
