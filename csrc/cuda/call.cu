#include <algorithm>

#include "ends.h"
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

// A thread adds up every shares-th part of four neighbours, then the block its threads' shares, pairwise.
FASTCAPS_KERNEL(256, 2)
add_up_kernel(const FASTCAPS_CONSTANT SumArgs args) {
  constexpr int kAtOnce = 4;  // parts on their way
  const Sum& sum = args.sums[block_y()];
  float4* meeting = reinterpret_cast<float4*>(shared_memory());  // [threads]
  const int width = block_threads() / sum.shares, share = thread_index() / width;
  const int64_t row_vectors = (sum.numbers + 3) / 4, count = sum.rows * row_vectors;
  for (int64_t first = block_x() * width; first < count; first += blocks_x() * width) {
    const int64_t k = first + thread_index() % width, row = sum.rows == 1 ? 0 : k / row_vectors;
    const int64_t number = (k - row * row_vectors) * 4;
    const int64_t begin = row * sum.columns * sum.numbers + number;
    const int inside = k >= count ? 0 : sum.numbers - number < 4 ? int(sum.numbers - number) : 4;
    float x[4] = {};
    for (int64_t part = share; part < sum.parts * sum.columns; part += kAtOnce * sum.shares) {
      float more[kAtOnce][4];
      FASTCAPS_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        const int64_t one = part + j * sum.shares;
        int64_t at = begin + one * sum.stride;
        if (sum.columns > 1) at = begin + one / sum.columns * sum.stride + one % sum.columns * sum.numbers;
        const int64_t left = one < sum.parts * sum.columns ? sum.limit - at : 0;
        load_four(sum.from + at, left < inside ? int(left) : inside, sum.vector, more[j]);
      }
      FASTCAPS_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        FASTCAPS_UNROLL
        for (int v = 0; v < 4; ++v) x[v] += more[j][v];
      }
    }
    for (int half = sum.shares / 2; half > 0; half /= 2) {
      float* mine = reinterpret_cast<float*>(meeting + thread_index());
      if (share < 2 * half) store4(mine, make_float4(x[0], x[1], x[2], x[3]));
      barrier();
      if (share < half) {
        const float4 other = load4(mine + 4 * half * width);
        x[0] += other.x, x[1] += other.y, x[2] += other.z, x[3] += other.w;
      }
      barrier();
    }
    if (share == 0) store_four(sum.to, row * sum.numbers + number, inside, sum.vector, x, sum.storage);
  }
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

bool Call::fuses(int64_t iterations) const {
  return iterations <= kMostIterations && routing_refusal(task(false), votes, machine()).empty();
}

Schedule Call::schedule_forward(bool whole) const {
  Task one = task(false);
  one.whole = whole;
  return cut(one, {});
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

bool Call::is_lean(const Schedule& c) const {
  if (args.measured || (args.log_weight && !args.mean)) return false;
  return c.kernel->takes_lean({.weights = args.weight != nullptr,
                               .one_group = args.G == 1,
                               .bias = args.bias != nullptr,
                               .own_bias = args.bias && (args.bias_stride_i || args.dbias),
                               .own_betas = args.betas.use_stride_i || args.betas.ignore_stride_i,
                               .gates = args.gate.data != nullptr,
                               .padded = args.padded,
                               .query = args.query.data != nullptr,
                               .iterations = args.iterations,
                               .parent_blocks = c.parent_blocks});
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
  args.lean = is_lean(c);
  for (int block = 0; block < parent_blocks; block += kMostAlongY) {
    args.first_parent = (first_block + block) * c.warps_parents * c.parents;
    const int blocks = std::min(parent_blocks - block, kMostAlongY);
    const Grid grid{int64_t(args.groups) * c.chunks, blocks, c.threads(), c.shared_bytes, c.carveout};
    gpu::launch(args.lean ? c.kernel->run_lean : c.kernel->run, grid, args);
  }
}

int Call::places(const Schedule& c, int64_t numbers) const {
  const int64_t most = std::clamp<int64_t>(parts_bytes() / (4 * numbers + 1), 1, kMostAlongY);
  return int(ceil_div(c.parent_blocks, ceil_div(c.parent_blocks, most)));  // alike in every launch
}

Tensor Call::workspace(std::initializer_list<std::pair<float**, int64_t>> arrays) const {
  int64_t all = 0;
  for (const auto& [place, numbers] : arrays) all += ceil_div(numbers, 4) * 4;
  const Tensor memory = empty({all});
  float* next = floats(memory);
  for (const auto& [place, numbers] : arrays) *place = numbers ? next : nullptr, next += ceil_div(numbers, 4) * 4;
  return memory;
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
  const Grid joined{std::min<int64_t>(ceil_div(count, 256), 4096), 1, 256};
  if (at_a_time > 1) gpu::launch(numbers == 2 ? &join_kernel<0> : &join_kernel<1>, joined, args);
  args.collect = 0;
  return statistics;
}

void Zeros::add_blocks(Grid& grid) {
  working = grid.x;
  int64_t most = 0;
  for (int k = 0; k < pieces; ++k) most = std::max(most, count[k]);
  grid.x += std::min<int64_t>(ceil_div(most, 4 * grid.threads), 4 * multiprocessors());
}

VoteGradients::VoteGradients(Call& call, int64_t needs, bool launches, int64_t betas)
    : call_(call), ordered_(call.options & kDeterministic), launches_(launches) {
  const VoteTensors& given = call.given;
  const Votes& v = call.votes;
  PassArgs& args = call.args;
  const bool wants_bias = given.bias && (needs & kBias), shared = wants_bias && given.bias->size(0) == 1;
  Bias bias_parts = wants_bias ? Bias::of(v, shared) : Bias{};
  const int64_t biases = bias_parts.numbers, cells = v.B * v.H * v.W;
  const int64_t weights = args.weight ? v.G * v.M * v.D * v.E : 0;
  bias_parts.numbers += betas;
  const Task task = call.task(true);
  schedule = call.cut(task, bias_parts);
  args.rounds = schedule.kernel->products == 0 && forward_rounds(task, v);
  call.take(schedule);
  parts_ = !ordered_ ? 1 : schedule.parts_by_chunk ? schedule.groups * schedule.chunks : schedule.groups;
  const bool wants_children = needs & kChildren, wants_gate = given.gate && (needs & kGate);
  const int64_t numbers = call.children.numel(), gates = cells * v.N;
  places_ = ordered_ ? call.places(schedule, wants_children * numbers + wants_gate * gates) : 1;
  const auto add_one = [&](bool wanted, float*& place, const Made& made, const Shape& shape) {
    any_ = any_ || wanted;
    return add(wanted, place, made, wanted ? shape : Shape{}, call.storage, true);
  };
  children = add_one(wants_children, args.dchildren, {places_, numbers}, shape_of(call.children));
  gate = add_one(wants_gate, args.dgate, {places_, gates}, given.gate_shape());
  weight = add_one(given.weight && (needs & kWeight), args.dweight, {parts_, weights},
                   given.weight ? shape_of(*given.weight) : Shape{});
  const Shape bias_shape = wants_bias ? shape_of(*given.bias) : Shape{0, 0};
  bias = add_one(wants_bias, args.dbias,
                 table(parts_, shared ? std::min<int64_t>(kSharedSums, v.I) : v.I, v.parent_size(), bias_shape),
                 bias_shape);
  args.dweight_part = ordered_ ? weights : 0, args.dbias_part = ordered_ ? biases : 0;
  args.dbeta_part = ordered_ ? v.I * v.M : 0, args.cells_part = places_ > 1 ? cells : 0;
  args.alone_with_weights = ordered_;
}

Made VoteGradients::table(int64_t parts, int64_t rows, int64_t each, const Shape& shape) const {
  const int64_t M = call_.votes.M;
  const bool all_children = shape[0] == 1, all_parents = shape[1] == 1;
  return {all_children ? parts * rows : parts, all_parents ? each : M * each, all_children ? 1 : rows,
          all_parents ? M : 1};
}

void VoteGradients::reserve(float*& place, int64_t numbers, bool starts_at_zero) {
  if (!launches_ || numbers == 0) return;
  pieces_.push_back({&place, nullptr, reserved_, numbers, starts_at_zero});
  reserved_ += ceil_div(numbers, 4) * 4;
}

Tensor VoteGradients::add(bool wanted, float*& place, const Made& made, const Shape& shape, ScalarType type,
                          bool starts_at_zero) {
  if (!wanted || !launches_ || made.parts > 1 || made.columns > 1 || type != ScalarType::Float) {
    if (wanted) reserve(place, made.all(), starts_at_zero);
    return add_sum(wanted, place, made, shape, type, 0, made.part());
  }
  const Tensor out = new_tensor(call_.children, shape, type, "a gradient");
  pieces_.push_back({&place, floats(out), 0, made.part(), starts_at_zero});
  return out;
}

Tensor VoteGradients::add_sum(bool wanted, float*& place, const Made& made, const Shape& shape, ScalarType type,
                              int64_t offset, int64_t stride) {
  Tensor out = new_tensor(call_.children, wanted ? shape : Shape{0}, type, "a gradient");  // outputs must not alias
  if (!wanted || out.numel() == 0) return out;
  if (!launches_) return torch::stable::zero_(out);
  Sum sum{nullptr, data_of(out), made.parts, stride, made.rows, made.columns, made.numbers, 0, storage_of(out)};
  if (sum.columns == 1) sum.numbers *= sum.rows, sum.rows = 1;
  sum.limit = sum.parts * stride - offset % stride;
  parts_of_sums_[size_t(count_)] = &place, offsets_[size_t(count_)] = offset;
  sums_.sums[count_++] = sum;
  return out;
}

Zeros VoteGradients::allocate() {
  Zeros zeros{};
  if (reserved_ > 0) workspace_ = call_.empty({reserved_});
  for (const Piece& piece : pieces_) {
    *piece.place = piece.memory ? piece.memory : floats(workspace_) + piece.offset;
    if (!piece.starts_at_zero) continue;
    zeros.values[zeros.pieces] = *piece.place, zeros.count[zeros.pieces++] = piece.numbers;
  }
  for (int k = 0; k < count_; ++k) sums_.sums[k].from = *parts_of_sums_[size_t(k)] + offsets_[size_t(k)];
  return zeros;
}

namespace {

// How a sum is shared among threads: the fewer parts each adds one after the other, the shorter it takes.
void share(Sum& sum) {
  const int64_t parts = sum.parts * sum.columns;
  for (sum.shares = 1; sum.shares < 256 && 4 * sum.shares < parts; sum.shares *= 2) continue;
  sum.vector = sum.numbers % 4 == 0 && sum.stride % 4 == 0 && sum.limit % 4 == 0;
}
int64_t blocks_of(const Sum& sum) {
  return std::min<int64_t>(ceil_div(sum.rows * ceil_div(sum.numbers, 4), 256 / sum.shares), 8 * multiprocessors());
}
void launch_sums(SumArgs& args, int count) {
  Grid grid{0, count, 256, 256 * int64_t(sizeof(float4))};
  for (int k = 0; k < count; ++k) {
    share(args.sums[k]);
    grid.x = std::max(grid.x, blocks_of(args.sums[k]));
  }
  launch(&add_up_kernel, grid, args);
}

}  // namespace

void VoteGradients::add_up() {
  constexpr int64_t kMany = 4096, kFewer = 256;  // so many parts are first added up to fewer by a launch of its own
  SumArgs first{};
  int many = 0;
  Tensor fewer[SumArgs::kMost];
  for (int k = 0; k < count_; ++k) {
    Sum& sum = sums_.sums[k];
    if (sum.parts < kMany) continue;
    const int64_t slice = kFewer * sum.stride;
    fewer[many] = call_.empty({slice});
    first.sums[many] = {sum.from, data_of(fewer[many]), ceil_div(sum.parts, kFewer), slice, 1, 1, slice, sum.limit};
    sum.from = floats(fewer[many++]), sum.parts = kFewer, sum.limit = slice;
  }
  if (many > 0) launch_sums(first, many);
  if (count_ > 0) launch_sums(sums_, count_);
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

void VoteGradients::run(int statistics, const float* tight) {
  const Votes& v = call_.votes;
  const Tensor kept = statistics ? call_.collect(schedule, statistics) : Tensor();
  const Window& w = v.window;
  const int colours_y = colours(w.kh, w.sh, w.dh, v.Ho), colours_x = colours(w.kw, w.sw, w.dw, v.Wo);
  call_.args.alone_with_children = ordered_ || (colours_y * colours_x == 1 && schedule.parent_blocks == 1);
  call_.args.tight = tight;
  if (!ordered_) call_.launch(schedule, 0, schedule.parent_blocks);
  for (int y = 0; ordered_ && y < colours_y; ++y)
    for (int x = 0; x < colours_x; ++x)
      for (int block = 0; block < schedule.parent_blocks; block += places_)
        call_.launch(schedule, block, std::min(places_, schedule.parent_blocks - block), colours_y, colours_x, y, x);
  call_.args.tight = nullptr;
}

}  // namespace fastcaps::gpu
