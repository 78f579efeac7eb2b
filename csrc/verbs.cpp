// The ops of the verbs: scores of pairs, sums of votes, and the pull: gradients of children, weight and bias.
#include "cpu/verbs.h"

#include "cpu/call.h"
#include "cpu/levels.h"

namespace fastcaps {
namespace {

constexpr int64_t kItems = 32;                    // items of a call, if it can be cut into so many
constexpr int64_t kMatrixBytes = 1 << 16;         // matrices of one child for a tile of parents
constexpr int64_t kBlockBytes = 3 << 13;          // matrices of a block of children
constexpr int64_t kPoseBytes = 1 << 17;           // poses of an item's parents
constexpr int64_t kLongestRange = 4096;           // children whose votes one item adds up
constexpr int64_t kPartBytes = int64_t(1) << 26;  // all parts of a gradient

// A verb's call: its arguments made flat (cpu/verbs.h), and its items, which depend on shapes only.
struct VerbOp {
  CpuCall cpu;
  VerbCall call{};
  const VerbKernels& table = table_of<VerbKernels>(level_in_use());
  std::vector<Tensor> kept;

  VerbOp(const VoteTensors& given, VerbCall::Kind kind) : cpu(given) {
    call.votes = cpu.votes;
    STD_TORCH_CHECK(!given.gate, "fastcaps: gate must be None: multiply the coefficients by it");
    const Votes& in = call.votes;
    call.kind = kind;
    const int64_t lanes = in.is_double() ? table.lanes_double : table.lanes_float, number = in.is_double() ? 8 : 4;
    const int64_t each = (in.weight && in.D > in.C ? in.D : in.C) * in.E * number;
    call.tiles = std::min(in.M, ceil_div(in.M * each, kMatrixBytes));
    call.tile = ceil_div(in.M, call.tiles);
    if (call.tiles > 1 && call.tile > lanes) call.tile = ceil_div(call.tile, lanes) * lanes;
    call.tiles = ceil_div(in.M, call.tile);
    call.flat = ceil_div(call.tile * in.E, lanes) * lanes;
    call.block = std::clamp<int64_t>(kBlockBytes / ((in.weight ? in.D : in.C) * call.flat * number), 1, 8);
  }

  bool empty() const { return call.votes.positions() == 0; }

  void check(const MaybeTensor& x, const char* name, bool pairs = false) const {
    Shape shape = pairs ? cpu.numbers() : cpu.poses();
    if (pairs) shape.insert(shape.end() - 1, call.votes.I);
    cpu.given.check_maybe(x, name, shape, cpu.compute);
  }
  void* workspace(int64_t numbers) {
    void* data;
    kept.push_back(cpu.result("workspace", {numbers + 16}, data));
    return aligned(data);
  }
  // Returns flat poses and their step from row to row; without the tensor a single row of `otherwise`.
  const void* flat(const MaybeTensor& x, double otherwise, int64_t& step) {
    step = x ? call.flat : 0;
    void* data = workspace(x ? call.numbers() : call.flat);
    if (x)
      run_items(FlatPoses{call, cpu.view(x), data}, table.flatten, call.votes.positions(), 0);
    else
      for (int64_t k = 0; k < call.flat; ++k)
        call.votes.is_double() ? static_cast<double*>(data)[k] = otherwise : static_cast<float*>(data)[k] = otherwise;
    return data;
  }
  void cut() {
    const Votes& in = call.votes;
    const int64_t bytes = call.pose_numbers() * (in.is_double() ? 8 : 4);
    const int64_t most = std::max<int64_t>(4, kPoseBytes / bytes);
    call.place_ranges = ceil_div(in.positions(), most);
    const int64_t wanted = ceil_div(kItems, call.tiles * call.place_ranges);
    call.child_ranges = std::max(std::min(wanted, ceil_div(in.I, 2 * call.block)), ceil_div(in.I, kLongestRange));
  }
  void cut_pull(int64_t weight_numbers, int64_t bias_numbers, bool sums) {
    const Votes& in = call.votes;
    const int64_t numbers = std::max(call.own_weights() ? 0 : weight_numbers, call.own_bias() ? 0 : bias_numbers);
    const auto parts = [](int64_t n) { return std::max<int64_t>(1, kPartBytes / 4 / std::max<int64_t>(n, 1)); };
    call.child_ranges = std::min({in.N, kItems / 2, parts(numbers)});
    if (sums) {  // large blocks: each one adds to the sums of every position
      const int64_t blocks = std::max(ceil_div(in.N, call.block), kItems / 2 / std::max<int64_t>(in.B, 1));
      call.child_ranges = std::max(std::min({call.child_ranges, blocks, parts(call.numbers())}),
                                   std::min(in.N, ceil_div(in.I, kLongestRange)));
    }
    const int64_t most = parts(std::max({numbers * call.child_ranges, weight_numbers, bias_numbers}));
    call.place_ranges = std::min({in.B, ceil_div(kItems / 2, call.child_ranges), most});
    call.block = std::min(call.block, ceil_div(in.N, call.child_ranges));
  }
  // Adds up the sums of all ranges of children.
  void gather(void* sums, void* to) {
    if (sums) run_items(FlatPoses{call, {}, to, sums}, table.gather, call.votes.positions(), 0);
  }
  void run() { run_items(call, table.walk, call.items(), table.scratch(call)); }
};

std::vector<Tensor> vote_scores(Stack stack) {
  const VoteArguments given{stack};
  const Tensor targets = stack.tensor();
  const MaybeTensor precisions = stack.maybe();
  VerbOp op(given, stack.flag() ? VerbCall::kDistances : VerbCall::kDots);
  op.check(targets, "targets");
  op.check(precisions, "precisions");
  Shape shape = op.cpu.numbers();
  shape.insert(shape.end() - 1, op.call.votes.I);
  const Tensor scores = op.cpu.result("scores", shape, op.call.scores);
  if (op.empty()) return {scores};
  op.call.about = op.flat(targets, 0, op.call.about_step);
  if (op.call.kind == VerbCall::kDistances) op.call.precisions = op.flat(precisions, 1, op.call.precisions_step);
  op.cut();
  op.run();
  return {scores};
}

std::vector<Tensor> vote_sums(Stack stack) {
  const VoteArguments given{stack};
  const Tensor coefficients = stack.tensor();
  const MaybeTensor means = stack.maybe();
  const int64_t power = stack.number();
  STD_TORCH_CHECK(power == 1 || power == 2, "fastcaps: power must be 1 or 2, got ", power);
  VerbOp op(given, power == 2 ? VerbCall::kAddSquares : means ? VerbCall::kAddCentred : VerbCall::kAdd);
  op.check(coefficients, "coefficients", true);
  op.check(means, "means");
  void* data;
  const Tensor sums = op.cpu.result("sums", op.cpu.poses(), data);
  if (op.empty()) return {sums};
  op.call.coefficients = op.cpu.view(coefficients);
  if (op.call.kind != VerbCall::kAdd) op.call.about = op.flat(means, 0, op.call.about_step);
  op.cut();
  op.call.sums = op.workspace(op.call.child_ranges * op.call.numbers());
  op.run();
  op.gather(op.call.sums, data);
  return {sums};
}

std::vector<Tensor> vote_pull(Stack stack) {
  const VoteArguments given{stack};
  const Tensor coefficients = stack.tensor(), targets = stack.tensor();
  const MaybeTensor precisions = stack.maybe();
  VerbOp op(given, stack.flag() ? VerbCall::kPullSquared : VerbCall::kPull);
  const int64_t needs = stack.number();
  STD_TORCH_CHECK(op.call.kind == VerbCall::kPullSquared || !(needs & kSquares),
                  "fastcaps: linear votes have no squares");
  op.check(coefficients, "coefficients", true);
  op.check(targets, "targets");
  op.check(precisions, "precisions");
  VerbCall& call = op.call;
  const Votes& in = call.votes;
  const bool wants_weight = needs & kWeight && given.weight, wants_bias = needs & kBias && given.bias;
  op.cut_pull(wants_weight ? in.G * in.M * in.D * in.E : 0, wants_bias ? op.cpu.bias_numbers() : 0,
              needs & (kSums | kSquares));
  const MaybeTensor children = op.cpu.maybe("dchildren", needs & kChildren, shape_of(op.cpu.children), call.dchildren,
                                            op.empty() || !call.once());
  const int64_t count = op.empty() ? 0 : call.items();
  const Partial weights = op.cpu.partial(
      "dweight", wants_weight, call.own_weights() && count ? call.place_ranges : count, {in.G, in.M, in.D, in.E});
  const Partial biases = op.cpu.partial("dbias", wants_bias, call.own_bias() && count ? call.place_ranges : count,
                                        wants_bias ? shape_of(*given.bias) : Shape{});
  call.dweight = weights.parts, call.dbias = biases.parts;
  Shape pairs = op.cpu.numbers();
  pairs.insert(pairs.end() - 1, in.I);
  void *sums_data = nullptr, *squares_data = nullptr;
  const MaybeTensor scores = op.cpu.maybe("scores", needs & kPairs, pairs, call.scores, false);
  const MaybeTensor sums = op.cpu.maybe("sums", needs & kSums, op.cpu.poses(), sums_data, false);
  const MaybeTensor squares = op.cpu.maybe("squares", needs & kSquares, op.cpu.poses(), squares_data, false);
  if (!op.empty()) {
    call.coefficients = op.cpu.view(coefficients);
    call.about = op.flat(targets, 0, call.about_step);
    call.precisions = op.flat(precisions, 1, call.precisions_step);
    if (sums) call.sums = op.workspace(call.child_ranges * call.numbers());
    if (squares) call.squares = op.workspace(call.child_ranges * call.numbers());
    op.run();
    op.gather(call.sums, sums_data);
    op.gather(call.squares, squares_data);
  }
  return {op.cpu.stored(children), op.cpu.stored(weights.sum()), op.cpu.stored(biases.sum()),
          op.cpu.summed(scores),   op.cpu.summed(sums),          op.cpu.summed(squares)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(FASTCAPS_LIBRARY, FASTCAPS_KEY, m) {
  m.impl("vote_scores", &boxed<vote_scores>);
  m.impl("vote_sums", &boxed<vote_sums>);
  m.impl("vote_pull", &boxed<vote_pull>);
}

}  // namespace fastcaps
