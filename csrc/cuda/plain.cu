// Calls of attention without matrices on a GPU: whether its kernels take them, and their launches.
#include "plain.h"

namespace fastcaps::gpu {
namespace {

// Sums of many parts [parts, numbers], in a fixed order: a warp adds every eighth.
struct PartsArgs {
  const float* from;
  void* to;
  int64_t parts, numbers;
  Storage storage;
};
FASTCAPS_KERNEL(kWarp* kPlainWarps, 1)
sum_parts_kernel(const FASTCAPS_CONSTANT PartsArgs args) {
  float* meeting = reinterpret_cast<float*>(shared_memory());
  const int64_t number = block_x() * kWarp + thread_index() % kWarp;
  float sum = 0.0f;
  for (int64_t part = thread_index() / kWarp; part < args.parts && number < args.numbers; part += kPlainWarps)
    sum += args.from[part * args.numbers + number];
  meeting[thread_index()] = sum;
  barrier();
  if (thread_index() >= kWarp || number >= args.numbers) return;
  for (int warp = 1; warp < kPlainWarps; ++warp) sum += meeting[warp * kWarp + thread_index()];
  store_number(args.to, number, sum, args.storage);
}
void sum_parts(const float* from, void* to, int64_t parts, int64_t numbers, Storage storage) {
  const Grid grid{ceil_div(numbers, kWarp), 1, kWarp * kPlainWarps, kWarp * kPlainWarps * int64_t(sizeof(float))};
  launch(&sum_parts_kernel, grid, PartsArgs{from, to, parts, numbers, storage});
}

// Chooses the ring of a launch; returns how many warps a block has, 0 if shared memory does not hold one's.
int cut_plain(PlainArgs& args, int most_slots, int64_t (*shared_bytes)(const PlainArgs&, int warps)) {
  const int64_t units = ceil_div(args.I, kUnit);
  for (int warps = int(units < kPlainWarps ? units : kPlainWarps); warps > 0; --warps) {
    const int64_t slots = 2 * ceil_div(units, warps);
    for (const bool resident : {true, false}) {
      args.resident = resident, args.slots = resident ? int(slots) : most_slots;
      if (slots <= most_slots || !resident)
        if (shared_bytes(args, warps) <= shared_limit()) return warps;
    }
  }
  return 0;
}

}  // namespace

std::optional<PlainArgs> plain_args(Call& call, bool must) {
  const Votes& v = call.votes;
  const Window& w = v.window;
  const int64_t* stride = v.children.stride;
  const bool whole = v.Ho == 1 && v.Wo == 1 && w.kh == v.H && w.kw == v.W;  // one position sees all children
  const int most_parents = 2 * v.child_size() > kPlainValues ? kPlainParents / 2 : kPlainParents;
  if (call.given.weight || call.given.bias || v.M > most_parents || v.child_size() > kPlainValues) return {};
  if (v.positions() >= int64_t(1) << 31) return {};
  if (!w.is_of_set() && !(whole && w.ph == 0 && w.pw == 0 && w.dh == 1 && w.dw == 1)) return {};
  PlainArgs args{};
  static_cast<ParentArgs&>(args) = call.args;
  args.children = v.children, args.scale = call.args.scale;
  if (whole) {
    const int64_t child = v.N > 1 ? stride[3] : v.W > 1 ? stride[2] : stride[1];
    if ((v.W > 1 && stride[2] != v.N * child) || (v.H > 1 && stride[1] != v.W * v.N * child)) return {};
    args.children.stride[3] = child;
  }
  args.I = int(v.I), args.D = int(v.D), args.K = int(v.child_size());
  args.by_depth = Divider(v.D);
  args.positions = args.launched = v.positions();
  // a block has a sample: a few of them leave most of the chip alone
  if (!must && 4 * args.positions < multiprocessors() && args.I > 256) return {};
  const int64_t bytes = bytes_of(v.storage);
  const bool dense = (v.D == 1 || stride[5] == 1) && (v.C == 1 || stride[4] == v.D);
  args.vector = dense && args.K * bytes % 16 == 0 && reinterpret_cast<uintptr_t>(v.children.data) % 16 == 0;
  for (int k = 0; k < 4; ++k) args.vector = args.vector && args.children.stride[k] * bytes % 16 == 0;
  args.gate = call.as_given(call.given.gate);
  return args;
}

bool launch_plain(const PlainKernel* kernels, int count, PlainArgs args) {
  const int s = args.storage == Storage::kFloat32 ? 0 : args.storage == Storage::kBFloat16 ? 1 : 2;
  for (const PlainKernel* kernel = kernels; kernel < kernels + count; ++kernel) {
    if (kernel->K < args.K || kernel->parents < args.M) continue;
    const int warps = cut_plain(args, kernel->slots[s], kernel->shared_bytes[s]);
    if (warps > 0)
      launch(kernel->run[s], Grid{args.launched, 1, warps * kWarp, kernel->shared_bytes[s](args, warps)}, args);
    return warps > 0;
  }
  return false;
}

std::optional<PlainGradients> differentiate_plain(Call& call, PlainArgs args, const MaybeTensor& query, int64_t needs) {
  PlainGradients found;
  const ScalarType type = call.children.scalar_type();
  const bool narrow = args.storage != Storage::kFloat32;
  args.sums_up = args.iterations > 1 && !(args.chain && args.detach);
  float *children_sums, *gate_sums, *dnorm, *dprior;
  const auto make = [&](bool wanted, const Shape& shape, ScalarType of) {
    return new_tensor(call.children, wanted ? shape : Shape{0}, of, "a gradient");
  };
  const bool wants_gate = call.given.gate && (needs & kGate);
  const bool wants_norm = args.rule == Rule::kLayerNorm && (needs & (kNormWeight | kNormBias));
  found.children = make(needs & kChildren, shape_of(call.children), type);
  found.gate = make(wants_gate, wants_gate ? call.given.gate_shape() : Shape{}, type);
  found.query = make(query && (needs & kQuery), call.poses(), type);
  found.norm_weight = make(wants_norm && (needs & kNormWeight), {args.K}, type);
  found.norm_bias = make(wants_norm && (needs & kNormBias), {args.K}, type);
  const int64_t rows = args.prior_stride > 0 ? args.I : 1, pairs = int64_t(args.I) * args.M;
  found.prior = make(args.prior && (needs & kPrior), {rows, args.M}, ScalarType::Float);
  const bool wants_prior = found.prior.numel() > 0;
  // a part for each position of a launch, behind the sum of those before
  const int64_t most = std::max<int64_t>(1, parts_bytes() / (4 * pairs + 1));
  const int64_t at_once = wants_prior ? std::min(most, args.positions) : args.positions;
  const Tensor memory = call.workspace({
      {&children_sums, narrow && args.sums_up ? found.children.numel() : 0},
      {&gate_sums, narrow && args.sums_up ? found.gate.numel() : 0},
      {&dnorm, wants_norm ? 2 * args.positions * args.K + 2 * args.K : 0},
      {&dprior, wants_prior ? (at_once + 1) * pairs : 0},
  });
  const auto place = [](const Tensor& x) { return x.numel() ? data_of(x) : nullptr; };
  args.dchildren = place(found.children), args.dgate = place(found.gate), args.dquery = place(found.query);
  args.children_sums = narrow ? children_sums : static_cast<float*>(args.dchildren);
  args.gate_sums = narrow ? gate_sums : static_cast<float*>(args.dgate);
  args.dnorm = dnorm, args.dprior = wants_prior ? dprior + pairs : nullptr;
  if (args.positions == 0) {
    for (Tensor* x : {&found.norm_weight, &found.norm_bias, &found.prior}) torch::stable::zero_(*x);
    return found;
  }
  for (; args.first < args.positions; args.first += at_once) {
    args.launched = std::min(at_once, args.positions - args.first);
    if (!run_plain_backward(args)) return {};
    const bool alone = args.first == 0;
    if (wants_prior) sum_parts(alone ? args.dprior : dprior, dprior, args.launched + !alone, pairs, Storage::kFloat32);
  }
  if (wants_norm) {
    float* both = dnorm + 2 * args.positions * args.K;
    sum_parts(dnorm, both, args.positions, 2 * args.K, Storage::kFloat32);
    if (needs & kNormWeight) sum_parts(both, data_of(found.norm_weight), 1, args.K, args.storage);
    if (needs & kNormBias) sum_parts(both + args.K, data_of(found.norm_bias), 1, args.K, args.storage);
  }
  if (wants_prior) sum_parts(dprior, place(found.prior), rows == 1 ? args.I : 1, rows * args.M, Storage::kFloat32);
  return found;
}

namespace {

// Dynamic routing with a prior, and an eps under the root of squash. fastcaps/ops/products.py has it for other devices.
struct PlainVotes {
  Tensor children;
  MaybeTensor gate, prior, query;
  VoteTensors votes(int64_t parents) const {
    return {children, {}, {}, gate, parents, children.dim() == 4 ? Shape{1, 1, 1, 1, 0, 0, 1, 1} : Shape{}};
  }
  // The call, checked, but for what a pass has besides.
  PlainArgs args(Call& call, double scale, double eps, int64_t iterations) const {
    const Votes& v = call.votes;
    call.given.check_maybe(query, "query", poses_shape(v), call.storage);
    if (prior) {
      const ScalarType type = prior->scalar_type() == ScalarType::Float ? ScalarType::Float : call.storage;
      check_tensor(*prior, "prior", {prior->size(0) == 1 ? 1 : v.I, v.M}, type, children);
    }
    STD_TORCH_CHECK(iterations >= 1 && iterations < 1 << 20, "fastcaps: iterations must be at least 1");
    std::optional<PlainArgs> args = plain_args(call, true);
    STD_TORCH_CHECK(args, "fastcaps: no kernel takes poses of ", v.child_size(), " values for ", v.M, " parents");
    args->scale = float(scale), args->eps = float(eps), args->rule = Rule::kSquash;
    args->iterations = int(iterations);
    args->prior = call.table(prior), args->prior_stride = prior && prior->size(0) > 1 ? v.M : 0;
    return *args;
  }
};
void check_ran(bool ran) {
  STD_TORCH_CHECK(ran, "fastcaps: this device's shared memory does not hold these poses and parents");
}

std::vector<Tensor> plain_routing(Stack from) {
  const PlainVotes given{from.tensor(), from.maybe(), from.maybe(), from.maybe()};
  const VoteTensors votes = given.votes(from.number());
  const double scale = from.real(), eps = from.real();
  const int64_t iterations = from.number();
  const DeviceGuard guard(given.children);
  Call call("attention", votes, 0);
  const PlainArgs args = given.args(call, scale, eps, iterations);
  const Tensor result = new_tensor(given.children, call.poses(), call.storage, "parents");
  const Tensor sums = call.empty(call.poses(iterations));
  if (args.positions > 0) check_ran(run_plain_forward(call, args, given.query, iterations, result, sums));
  return {result, sums};
}

std::vector<Tensor> plain_routing_reverse(Stack from) {
  const Tensor grad = from.tensor();
  const PlainVotes given{from.tensor(), from.maybe(), from.maybe(), from.maybe()};
  const Tensor sums = from.tensor();
  STD_TORCH_CHECK(sums.dim() == 5, "fastcaps: sums must be [T, B, M, C, D]");
  const VoteTensors votes = given.votes(sums.size(2));
  const double scale = from.real(), eps = from.real();
  const int64_t wanted = from.number();
  const DeviceGuard guard(given.children);
  Call call("attention", votes, 0);
  PlainArgs args = given.args(call, scale, eps, sums.size(0));
  call.given.check_maybe(grad, "grad", call.poses(), ScalarType::Float);
  call.given.check_maybe(sums, "sums", call.poses(sums.size(0)), ScalarType::Float);
  args.chain = true, args.query = call.as_given(given.query), args.grad = call.view(grad);
  args.sums = call.table(sums), args.detach = wanted & kDetach;
  constexpr int64_t kBits[] = {kChildren, kGate, kPrior, kQuery};
  int64_t needs = 0;
  for (int k = 0; k < 4; ++k) needs |= wanted >> k & 1 ? kBits[k] : 0;
  const std::optional<PlainGradients> found = differentiate_plain(call, args, given.query, needs);
  check_ran(found.has_value());
  return {found->children, found->gate, found->prior, found->query};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(FASTCAPS_LIBRARY, FASTCAPS_KEY, plain) {
  plain.impl("plain_routing", &boxed<plain_routing>);
  plain.impl("plain_routing_reverse", &boxed<plain_routing_reverse>);
}

}  // namespace fastcaps::gpu
