// Op bodies of the attention pass on a GPU: check, cut, allocate, launch.
#include "../attention.h"

#include <algorithm>

#include "cut.h"
#include "launch.h"
#include "layer_norm.h"
#include "ops.h"
#include "pass.h"
#include "tensor.h"

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

Machine machine() { return {multiprocessors(), shared_limit()}; }

float* floats(const Tensor& x) { return x.numel() ? static_cast<float*>(data_of(x)) : nullptr; }

// May rows of children be copied in vectors of so many floats?
bool copies_in_vectors(const Tensor& x, int floats_each, int64_t depth) {
  if (x.scalar_type() != ScalarType::Float || x.stride(5) != 1 || depth % floats_each != 0) return false;
  for (int64_t k = 0; k < 5; ++k)
    if (x.stride(k) % floats_each != 0) return false;
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % (4 * size_t(floats_each)) == 0;
}

// In float, dense, and at an address that vectors may be read from.
Tensor parameter(const Tensor& x) {
  const Tensor dense = in_compute_type(x, ScalarType::Float);
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : torch::stable::clone(dense);
}

// One call of either op: its tensors as the kernels want them.
struct Call {
  Geometry geometry;
  PassArgs args{};
  LayerNormArgs norm{};
  Tensor weight, rounded, bias, norm_weight, norm_bias;  // kept alive here
  Tensor children;

  Call(const Tensor& children_, const Tensor& weight_, const MaybeTensor& query, const MaybeTensor& bias_,
       const MaybeTensor& gate, const MaybeTensor& norm_weight_, const MaybeTensor& norm_bias_, double scale,
       double eps, bool normalize, const std::vector<int64_t>& window)
      : geometry(attention_geometry(children_, weight_, query, bias_, gate, norm_weight_, norm_bias_, window)),
        children(children_) {
    const Geometry& g = geometry;
    STD_TORCH_CHECK(storage_of(children) != Storage::kFloat64, "fastcaps: the CUDA kernels take no float64");
    const std::string why_not = refusal(g.C, g.D, g.E);
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
    if (query) a.query = view_of(*query);
    if (gate) a.gate = view_of(*gate);
    a.weight = floats(weight = parameter(weight_));
    if (bias_) {
      a.bias = floats(bias = parameter(*bias_));
      a.bias_stride_m = bias.size(1) > 1 ? g.parent_pose() : 0;
      a.bias_stride_i = bias.size(0) > 1 ? bias.size(1) * g.parent_pose() : 0;
    }
    a.scale = float(scale);

    norm.M = a.M, norm.C = a.C, norm.E = a.E, norm.Ho = a.Ho, norm.Wo = a.Wo;
    norm.count = g.positions() * g.M;
    norm.normalize = normalize;
    norm.eps = float(eps);
    norm.storage = a.storage;
    norm.lanes = 1;
    while (norm.lanes < 32 && norm.lanes * 4 < g.parent_pose()) norm.lanes *= 2;
    if (norm_weight_) norm.norm_weight = data_of(norm_weight = torch::stable::contiguous(*norm_weight_));
    if (norm_bias_) norm.norm_bias = data_of(norm_bias = torch::stable::contiguous(*norm_bias_));
  }

  Tensor empty(const std::vector<int64_t>& shape) const {
    return torch::stable::new_empty(children, shape, ScalarType::Float);
  }
  Tensor zeros(const std::vector<int64_t>& shape) const {
    return torch::stable::new_zeros(children, shape, ScalarType::Float);
  }

  // May products be rounded to tf32? Half-precision numbers lose nothing by it; the gradients of votes, which backward
  // rounds too, lose what bfloat16 does not show and float16 would.
  bool rounds(int64_t options, Storage half) const {
    return (options & kTF32) || args.storage == Storage::kBFloat16 || args.storage == half;
  }

  void take_ranges(const Cut& c) {
    args.chunks = c.chunks, args.chunk_children = c.chunk_children;
    args.by_chunk = Divider(c.chunks);
  }

  void take(const Cut& c) {
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
    a.shared_dweight = c.shared_dweight, a.shared_stage = c.shared_stage;
  }

  // One launch: the positions of one colour, `parent_blocks` blocks of parents from the first on.
  void launch(const Cut& c, int first_block, int parent_blocks, int colours_y = 1, int colours_x = 1, int colour_y = 0,
              int colour_x = 0) {
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
    const bool plain = !a.bias && !a.padded && a.query.data && c.parent_blocks == 1;
    constexpr int kMost = 65535;  // blocks along y
    for (int block = 0; block < parent_blocks; block += kMost) {
      a.first_parent = (first_block + block) * c.warps_parents * c.parents;
      const Grid grid{int64_t(a.groups) * c.chunks, std::min(parent_blocks - block, kMost), c.threads(),
                      c.shared_bytes};
      gpu::launch(plain ? c.kernel->run_plain : c.kernel->run, grid, a);
    }
  }

  // The softmax over parents that do not fit into one block: a launch for each blockful of them, one after another.
  Tensor collect(const Cut& c, int numbers) {
    Tensor statistics = empty({c.parent_blocks > 1 ? geometry.positions() * geometry.children() * numbers : 0});
    if (c.parent_blocks == 1) return statistics;
    args.statistics = floats(statistics);
    args.collect = true;
    Cut all = c;  // nothing is summed over children: they may be spread over as many blocks as there is room for
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

  template <class Kernel>
  void run_norm(Kernel&& few, Kernel&& many, int64_t blocks, int64_t shared_bytes) {
    gpu::launch(geometry.parent_pose() <= 4 * norm.lanes ? few : many, Grid{blocks, 1, 256, shared_bytes}, norm);
  }
  int64_t norm_blocks(int64_t most) const {
    const int64_t blocks = ceil_div(norm.count, 256 / norm.lanes);
    return blocks < most ? blocks : most;
  }

  // parts [chunks, count, C * E], added up in their order, become `out`.
  void add_up(const Tensor& parts, int chunks, const Tensor& out) {
    const LayerNormArgs before = norm;
    norm.normalize = false;
    norm.norm_weight = norm.norm_bias = nullptr;
    norm.parts = floats(parts), norm.chunks = chunks, norm.sums = nullptr;
    norm.parents = data_of(out);
    run_norm(&finish_kernel<4>, &finish_kernel<16>, norm_blocks(1 << 20), 0);
    norm = before;
  }
};

// How many colours keep positions apart that see the same child, along one axis.
int colours(int64_t kernel, int64_t stride, int64_t dilation, int64_t positions) {
  const int64_t apart = ceil_div(dilation * (kernel - 1) + 1, stride);
  return int(apart < positions ? apart : positions);
}

}  // namespace

std::tuple<Tensor, Tensor> attention_pass(const Tensor children, const Tensor weight, const MaybeTensor query,
                                          const MaybeTensor bias, const MaybeTensor gate, const MaybeTensor norm_weight,
                                          const MaybeTensor norm_bias, double scale, double eps, bool normalize,
                                          const std::vector<int64_t> window, int64_t options) {
  const DeviceGuard guard(children);
  Call call(children, weight, query, bias, gate, norm_weight, norm_bias, scale, eps, normalize, window);
  const Geometry& g = call.geometry;
  const std::vector<int64_t> shape{g.B, g.Ho, g.Wo, g.M, g.C, g.E};
  Tensor parents = torch::stable::new_empty(children, shape);
  Tensor sums = call.empty(normalize ? shape : std::vector<int64_t>{0});
  if (g.positions() == 0) return {parents, sums};

  const Cut c = cut(g, false, call.rounds(options, Storage::kFloat16), false, {}, machine());
  call.take(c);
  const Tensor statistics = query ? call.collect(c, 2) : Tensor();
  const bool direct = c.chunks == 1 && (normalize || call.args.storage == Storage::kFloat32);
  const Tensor parts = direct ? (normalize ? sums : parents) : call.empty({c.chunks * g.positions() * g.parents()});
  call.args.sums = floats(parts);
  call.launch(c, 0, c.parent_blocks);
  if (!direct || normalize) {
    call.norm.parts = floats(parts), call.norm.chunks = c.chunks;
    call.norm.sums = normalize && !direct ? floats(sums) : nullptr;
    call.norm.parents = data_of(parents);
    call.run_norm(&finish_kernel<4>, &finish_kernel<16>, call.norm_blocks(1 << 20), 0);
  }
  return {parents, sums};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_pass_backward(
    const MaybeTensor grad_parents, const MaybeTensor grad_sums, const Tensor children, const Tensor weight,
    const MaybeTensor query, const MaybeTensor bias, const MaybeTensor gate, const MaybeTensor norm_weight,
    const Tensor sums, double scale, double eps, bool normalize, const std::vector<int64_t> window, int64_t needs,
    int64_t options) {
  const DeviceGuard guard(children);
  Call call(children, weight, query, bias, gate, norm_weight, std::nullopt, scale, eps, normalize, window);
  const Geometry& g = call.geometry;
  const ScalarType storage = children.scalar_type();
  const std::vector<int64_t> shape{g.B, g.Ho, g.Wo, g.M, g.C, g.E};
  if (grad_parents) check_tensor(*grad_parents, "grad_parents", shape, storage, children);
  if (grad_sums) check_tensor(*grad_sums, "grad_sums", shape, ScalarType::Float, children);
  if (normalize) check_tensor(sums, "sums", shape, ScalarType::Float, children);
  if (!query) needs &= ~kQuery;
  if (!bias) needs &= ~kBias;
  if (!gate) needs &= ~kGate;
  if (!normalize || !grad_parents) needs &= ~(kNormWeight | kNormBias);
  const bool ordered = options & kDeterministic, empty = g.positions() == 0 || (!grad_parents && !grad_sums);

  PassArgs& a = call.args;
  const int64_t weights = g.G * g.M * g.D * g.E, biases = (bias ? bias->size(0) : 0) * g.parents();
  const Bias wanted_bias{needs & kBias ? biases : 0, (needs & kBias) && bias->size(0) == 1};
  const Cut c = cut(g, true, call.rounds(options, Storage::kBFloat16), ordered, wanted_bias, machine());
  call.take(c);
  const int64_t parts = !ordered ? 1 : c.parts_by_chunk ? c.groups * c.chunks : c.groups;
  const auto wanted = [&](int64_t bit, int64_t numbers) { return needs & bit ? numbers : 0; };
  const Tensor dchildren = call.zeros({wanted(kChildren, children.numel())});
  const Tensor dgate = call.zeros({wanted(kGate, g.B * g.H * g.W * g.N)});
  const Tensor dweights = call.zeros({parts, wanted(kWeight, weights)});
  const Tensor dbiases = call.zeros({parts, wanted(kBias, biases)});
  const int64_t norm_blocks = call.norm_blocks(1024);
  const Tensor dnorms = call.empty({norm_blocks, 2, wanted(kNormWeight | kNormBias, g.parent_pose())});
  Tensor dquery = torch::stable::new_empty(children, needs & kQuery ? shape : std::vector<int64_t>{0});
  if (empty) torch::stable::zero_(dquery);
  const bool direct = c.chunks == 1 && storage == ScalarType::Float;
  const Tensor dqueries =
      direct || empty ? dquery : call.empty({c.chunks, wanted(kQuery, g.positions() * g.parents())});

  if (!empty) {
    const Tensor dsums = call.empty({g.positions() * g.parents()});
    const Tensor given = normalize ? torch::stable::contiguous(sums) : sums;
    if (grad_parents) call.norm.grad_parents = view_of(*grad_parents);
    if (grad_sums) call.norm.grad_sums = view_of(*grad_sums);
    call.norm.given_sums = floats(given);
    call.norm.dsums = floats(dsums);
    call.norm.dnorm = floats(dnorms);
    call.run_norm(&prepare_kernel<4>, &prepare_kernel<16>, norm_blocks,
                  256 / call.norm.lanes * 2 * g.parent_pose() * int64_t(sizeof(float)));

    a.dsums = floats(dsums), a.dquery = floats(dqueries), a.dchildren = floats(dchildren), a.dgate = floats(dgate);
    a.dweight = floats(dweights), a.dbias = floats(dbiases);
    a.dweight_part = ordered ? weights : 0, a.dbias_part = ordered ? biases : 0;
    const bool affine_only = !(needs & ~(kNormWeight | kNormBias));
    const Tensor statistics = affine_only ? Tensor() : call.collect(c, 3);
    const Window& w = g.window;
    const int colours_y = colours(w.kh, w.sh, w.dh, g.Ho), colours_x = colours(w.kw, w.sw, w.dw, g.Wo);
    a.alone_with_weights = ordered;
    a.alone_with_children = ordered || (colours_y * colours_x == 1 && c.parent_blocks == 1);
    if (affine_only) {
      // the LayerNorm is all there was to differentiate
    } else if (!ordered) {
      call.launch(c, 0, c.parent_blocks);
    } else {
      for (int y = 0; y < colours_y; ++y)
        for (int x = 0; x < colours_x; ++x)
          for (int block = 0; block < c.parent_blocks; ++block) call.launch(c, block, 1, colours_y, colours_x, y, x);
    }
    if ((needs & kQuery) && !direct) call.add_up(dqueries, c.chunks, dquery);
  }

  const auto none = [&] { return torch::stable::new_empty(children, {0}); };  // one each: outputs must not alias
  const auto finished = [&](int64_t bit, const Tensor& x, const std::vector<int64_t>& to) {
    if (!(needs & bit)) return none();
    const Tensor shaped = torch::stable::view(x, to);
    return storage == ScalarType::Float ? shaped : torch::stable::to(shaped, storage);
  };
  const auto over = [](const Tensor& x, int64_t dim) {  // one part is the sum already
    if (x.size(dim) == 1) return x;
    const int64_t dims[] = {dim};
    return torch::stable::sum(x, torch::headeronly::IntHeaderOnlyArrayRef(dims, 1));
  };
  Tensor dbias = none(), dnorm_weight = none(), dnorm_bias = none();
  if (needs & kBias) {
    const Tensor all = torch::stable::view(over(dbiases, 0), {bias->size(0), g.M, g.C, g.E});
    const std::vector<int64_t> to{bias->size(0), bias->size(1), g.C, g.E};
    dbias = finished(kBias, bias->size(1) == g.M ? all : over(all, 1), to);
  }
  if (needs & (kNormWeight | kNormBias)) {
    const Tensor both = empty ? call.zeros({2, g.C * g.E}) : torch::stable::view(over(dnorms, 0), {2, g.C * g.E});
    dnorm_weight = finished(kNormWeight, torch::stable::clone(torch::stable::select(both, 0, 0)), {g.C * g.E});
    dnorm_bias = finished(kNormBias, torch::stable::clone(torch::stable::select(both, 0, 1)), {g.C * g.E});
  }
  return {finished(kChildren, dchildren, shape_of(children)),
          finished(kWeight, needs & kWeight ? over(dweights, 0) : dweights, shape_of(weight)),
          needs & kQuery ? dquery : none(),
          dbias,
          finished(kGate, dgate, {g.B, g.H, g.W, g.N}),
          dnorm_weight,
          dnorm_bias};
}

}  // namespace fastcaps::gpu
