// The arguments of the eight ops, read from torch's stack, each list once and in the order of its schema
// (fastcaps/ops). Both native libraries implement the same schemas.
#pragma once

#include "squash_sum.h"
#include "tensors.h"

namespace fastcaps {

// What torch hands over, taken one by one: members of an op's struct below, initialised in their order.
class Stack {
 public:
  Stack(StableIValue* values, uint64_t count) : values_(values), left_(count) {}

  Tensor tensor() { return take<Tensor>(); }
  MaybeTensor maybe() { return take<MaybeTensor>(); }
  Shape list() { return take<Shape>(); }
  std::vector<double> reals() { return take<std::vector<double>>(); }
  double real() { return take<double>(); }
  int64_t number() { return take<int64_t>(); }
  bool flag() { return take<bool>(); }

 private:
  template <class T>
  T take() {
    STD_TORCH_CHECK(left_ > 0, "fastcaps: the op's schema has fewer arguments than its kernel");
    --left_;
    return torch::stable::detail::to<T>(*values_++);
  }
  StableIValue* values_;
  uint64_t left_;
};

// Bits of `options` and of `needs`. The bits of the gradients follow the order of the results. kTf32x3 says something
// of calls that have kTf32 too.
inline constexpr int64_t kDeterministic = 1, kTf32 = 2, kTf32x3 = 4;
inline constexpr int64_t kChildren = 1, kWeight = 2, kBias = 4, kGate = 8;
inline constexpr int64_t kQuery = 16, kNormWeight = 32, kNormBias = 64;  // attention, pooling
inline constexpr int64_t kMean = 16, kVariance = 32, kLogWeight = 64, kBetaUse = 128, kBetaIgnore = 256;  // gaussian
inline constexpr int64_t kDetach = int64_t(1) << 30;  // the coefficients are constants: no gradient flows through them

struct VoteArguments : VoteTensors {
  explicit VoteArguments(Stack& s) : VoteTensors{s.tensor(), s.maybe(), s.maybe(), s.maybe(), s.number(), s.list()} {}
};

// Turns of a backward call: tensors that belong to parents have them in their first dimension; what the first turn does
// not have (a query, a state) has one less.
class Turns {
 public:
  // As many as a tensor has that every turn has one of.
  Turns(const VoteTensors& votes, const Tensor& x) : count(x.dim() > 0 ? x.size(0) : 0), children_(votes.children) {
    STD_TORCH_CHECK(count >= 1, "fastcaps: there must be a turn at least");
  }
  const int64_t count;

  // Check a tensor whose part of one turn has this shape. `first`: whether it must have one of the first turn.
  void check(const MaybeTensor& x, const char* name, const Shape& of_turn, ScalarType type, bool first = true) const {
    if (!x) return;
    Shape shape = of_turn;
    shape.insert(shape.begin(), !first && count > 1 && x->dim() > 0 && x->size(0) == count - 1 ? count - 1 : count);
    check_tensor(*x, name, shape, type, children_);
  }
  // The gradients of the parents that a turn started from: asked of one turn at a time.
  void check_single(bool wanted, const char* names) const {
    STD_TORCH_CHECK(!wanted || count == 1, "fastcaps: ", names, " is of one turn, got ", count);
  }
  // What turn k has of a tensor, read in place; no data where it has none.
  View view(const MaybeTensor& x, int64_t k) const {
    const int64_t which = x ? k - (count - x->size(0)) : -1;
    return which < 0 ? View{} : view_of(*x, children_.dim() == 4, which);
  }
  // The same as a tensor; nothing where it has none.
  MaybeTensor at(const MaybeTensor& x, int64_t k) const {
    const int64_t which = x ? k - (count - x->size(0)) : -1;
    return which < 0 ? MaybeTensor() : MaybeTensor(torch::stable::select(*x, 0, which));
  }

 private:
  const Tensor& children_;
};

// Every op's struct checks what the votes do not: `v` is what they were found to be.
struct AttentionRouting {
  Stack& from;
  VoteArguments votes{from};
  MaybeTensor query = from.maybe(), norm_weight = from.maybe(), norm_bias = from.maybe();
  double scale = from.real(), eps = from.real();
  Rule rule = Rule(from.number());
  int64_t iterations = from.number(), options = from.number();

  void check(const Votes& v) const {
    STD_TORCH_CHECK(rule >= Rule::kLayerNorm && rule <= Rule::kSquash, "fastcaps: attention_routing has no rule ",
                    int(rule));
    STD_TORCH_CHECK(rule == Rule::kLayerNorm || !(norm_weight || norm_bias), "fastcaps: only rule 0 has an affine");
    STD_TORCH_CHECK(iterations >= 1, "fastcaps: iterations must be at least 1, got ", iterations);
    votes.check_maybe(query, "query", poses_shape(v), votes.storage());
    votes.check_maybe(norm_weight, "norm_weight", {v.parent_size()}, votes.storage());
    votes.check_maybe(norm_bias, "norm_bias", {v.parent_size()}, votes.storage());
  }
};

struct AttentionBackward {
  Stack& from;
  Tensor grad = from.tensor();
  VoteArguments votes{from};
  MaybeTensor query = from.maybe(), norm_weight = from.maybe(), sums = from.maybe();
  double scale = from.real(), eps = from.real();
  int64_t needs = from.number(), options = from.number();

  bool wants_query() const { return query && (needs & kQuery); }
  bool wants_norm() const { return sums && (needs & (kNormWeight | kNormBias)); }
  Turns check(const Votes& v) const {
    const Turns turns(votes, grad);
    turns.check(grad, "grad", poses_shape(v), votes.wide());
    turns.check(query, "query", poses_shape(v), votes.storage(), false);
    turns.check(sums, "sums", poses_shape(v), votes.wide());
    turns.check_single(wants_query(), "dquery");
    votes.check_maybe(norm_weight, "norm_weight", {v.parent_size()}, votes.storage());
    return turns;
  }
};

struct PoolingRouting {
  Stack& from;
  VoteArguments votes{from};
  MaybeTensor query = from.maybe();
  double scale = from.real();
  bool normalize = from.flag();
  Rule rule = Rule(from.number());
  int64_t iterations = from.number(), options = from.number();

  void check(const Votes& v) const {
    STD_TORCH_CHECK(rule == Rule::kUnit || rule == Rule::kSquash, "fastcaps: pooling_routing has no rule ", int(rule));
    STD_TORCH_CHECK(iterations >= 1, "fastcaps: iterations must be at least 1, got ", iterations);
    votes.check_maybe(query, "query", poses_shape(v), votes.storage());
  }
};

struct PoolingBackward {
  Stack& from;
  Tensor grad = from.tensor();
  VoteArguments votes{from};
  MaybeTensor query = from.maybe();
  Tensor sums = from.tensor(), logsumexp = from.tensor();
  double scale = from.real();
  bool normalize = from.flag();
  int64_t needs = from.number(), options = from.number();

  bool wants_query() const { return query && (needs & kQuery); }
  Turns check(const Votes& v) const {
    const Turns turns(votes, grad);
    turns.check(grad, "grad", poses_shape(v), votes.wide());
    turns.check(query, "query", poses_shape(v), votes.storage(), false);
    turns.check(sums, "sums", poses_shape(v), votes.storage());
    turns.check(logsumexp, "logsumexp", numbers_shape(v), votes.wide());
    turns.check_single(wants_query(), "dquery");
    return turns;
  }
};

// Tables over children and parents that come together or not at all.
inline void check_betas(const VoteTensors& votes, const Votes& v, const MaybeTensor& use, const MaybeTensor& ignore) {
  STD_TORCH_CHECK(use.has_value() == ignore.has_value(), "fastcaps: beta_use and beta_ignore come together");
  if (!use) return;
  votes.check_table(*use, "beta_use", v, votes.wide());
  votes.check_table(*ignore, "beta_ignore", v, votes.wide());
}

// Parents are Gaussians: mean, variance, log_weight. The betas of EM are a number a parent (beta_u and beta_a in the
// paper), those of Heinsen a table over children and parents.
struct GaussianRouting {
  Stack& from;
  VoteArguments votes{from};
  MaybeTensor mean = from.maybe(), variance = from.maybe(), log_weight = from.maybe();
  MaybeTensor beta_use = from.maybe(), beta_ignore = from.maybe();
  std::vector<double> temperatures = from.reals();  // inverse ones of EM: as many as there are turns
  Rule rule = Rule(from.number());
  double eps = from.real();
  int64_t options = from.number();

  void check(const Votes& v) const {
    const ScalarType wide = votes.wide();
    STD_TORCH_CHECK(rule >= Rule::kEM && rule <= Rule::kKMeans, "fastcaps: gaussian_routing has no rule ", int(rule));
    STD_TORCH_CHECK(!temperatures.empty(), "fastcaps: temperatures must have a number for every turn");
    STD_TORCH_CHECK(mean || !variance, "fastcaps: a variance wants a mean");
    votes.check_maybe(mean, "mean", poses_shape(v), wide);
    votes.check_maybe(variance, "variance", poses_shape(v), wide);
    votes.check_maybe(log_weight, "log_weight", numbers_shape(v), wide);
    if (rule != Rule::kEM) return check_betas(votes, v, beta_use, beta_ignore);
    STD_TORCH_CHECK(beta_use && beta_ignore, "fastcaps: EM routing wants beta_use and beta_ignore");
    votes.check_maybe(beta_use, "beta_use", {v.M}, wide);
    votes.check_maybe(beta_ignore, "beta_ignore", {v.M}, wide);
  }
};

struct GaussianBackward {
  Stack& from;
  MaybeTensor grad_counts = from.maybe(), grad_means = from.maybe(), grad_variances = from.maybe(),
              grad_evidence = from.maybe();
  VoteArguments votes{from};
  MaybeTensor mean = from.maybe(), variance = from.maybe(), log_weight = from.maybe();
  MaybeTensor beta_use = from.maybe(), beta_ignore = from.maybe();
  Tensor counts = from.tensor(), means = from.tensor(), variances = from.tensor();
  double eps = from.real();
  int64_t needs = from.number(), options = from.number();

  bool wants(int64_t bit, const MaybeTensor& x) const { return x && (needs & bit); }
  bool wants_mean() const { return wants(kMean, mean); }
  bool wants_variance() const { return wants(kVariance, variance); }
  bool wants_log_weight() const { return wants(kLogWeight, log_weight); }
  bool wants_state() const { return wants_mean() || wants_variance() || wants_log_weight(); }
  bool has_evidence() const { return beta_use && grad_evidence; }
  // Whether any gradient comes in.
  bool any() const { return grad_counts || grad_means || grad_variances || has_evidence(); }
  Turns check(const Votes& v) const {
    const Turns turns(votes, counts);
    const auto poses = [&](const MaybeTensor& x, const char* name, bool first = true) {
      turns.check(x, name, poses_shape(v), votes.wide(), first);
    };
    const auto numbers = [&](const MaybeTensor& x, const char* name, bool first = true) {
      turns.check(x, name, numbers_shape(v), votes.wide(), first);
    };
    numbers(grad_counts, "grad_counts"), poses(grad_means, "grad_means"), poses(grad_variances, "grad_variances");
    numbers(grad_evidence, "grad_evidence");
    STD_TORCH_CHECK(mean || !variance, "fastcaps: a variance wants a mean");
    poses(mean, "mean", false), poses(variance, "variance", false), numbers(log_weight, "log_weight", false);
    numbers(counts, "counts"), poses(means, "means"), poses(variances, "variances");
    check_betas(votes, v, beta_use, beta_ignore);
    turns.check_single(wants_state(), "the gradient of a state");
    return turns;
  }
};

// Capsules in channels, and no votes. What is not dense is copied, and kept here.
struct SquashSumArguments {
  Stack& from;
  Tensor x = from.tensor();
  MaybeTensor a = from.maybe(), y = from.maybe(), b = from.maybe();
  int64_t types = from.number();
  bool relu = from.flag();

  SquashSum check() {
    STD_TORCH_CHECK(x.dim() == 4, "fastcaps: x must be [B, types * dim, H, W], got ", text(shape_of(x)));
    STD_TORCH_CHECK(types >= 1 && x.size(1) >= types && x.size(1) % types == 0, "fastcaps: x has ", x.size(1),
                    " channels, which are not those of ", types, " types");
    STD_TORCH_CHECK(y || !b, "fastcaps: b must be None without y");
    SquashSum call{};
    call.storage = storage_of(x);
    call.rows = x.size(0) * types, call.dim = x.size(1) / types, call.positions = x.size(2) * x.size(3);
    call.relu = relu;
    call.count = y ? 2 : 1;
    const Shape numbers = {x.size(0), types, x.size(2), x.size(3)}, shape = shape_of(x);
    call.parts[0] = {dense(x, "x", shape), dense(a, "a", numbers)};
    call.parts[1] = {dense(y, "y", shape), dense(b, "b", numbers)};
    return call;
  }
  void* dense(Tensor& tensor, const char* name, const Shape& shape) const {
    check_tensor(tensor, name, shape, x.scalar_type(), x);
    tensor = dense_as(tensor, x.scalar_type());
    return data_of(tensor);
  }
  void* dense(MaybeTensor& tensor, const char* name, const Shape& shape) const {
    return tensor ? dense(*tensor, name, shape) : nullptr;
  }
};

struct SquashSumBackward {
  Stack& from;
  Tensor grad = from.tensor();
  SquashSumArguments given{from};
  int64_t needs = from.number();  // a bit for each of x, a, y and b

  SquashSum check() {
    SquashSum call = given.check();
    call.grad = given.dense(grad, "grad", shape_of(given.x));
    return call;
  }
  // Gradients from `make(shape)`, empty where they are not wanted; the call gets their addresses.
  template <class Make>
  std::vector<Tensor> gradients(SquashSum& call, Make&& make) const {
    const MaybeTensor inputs[] = {given.x, given.a, given.y, given.b};
    void** places[] = {&call.parts[0].dcapsules, &call.parts[0].dcoefficient, &call.parts[1].dcapsules,
                       &call.parts[1].dcoefficient};
    std::vector<Tensor> found;
    for (int k = 0; k < 4; ++k) {
      const bool wanted = needs >> k & 1 && inputs[k];
      found.push_back(make(wanted ? shape_of(*inputs[k]) : Shape{0}));
      if (wanted) *places[k] = data_of(found.back());
    }
    return found;
  }
};

// An op as torch calls it: reads its arguments off the stack and leaves its results there.
using Op = std::vector<Tensor> (*)(Stack);
template <Op op>
void boxed(StableIValue* values, uint64_t arguments, uint64_t results) {
  std::vector<Tensor> found = op(Stack(values, arguments));
  STD_TORCH_CHECK(found.size() == results, "fastcaps: the op's schema has ", results, " results, its kernel ",
                  found.size());
  for (size_t k = 0; k < found.size(); ++k) values[k] = torch::stable::detail::from(found[k]);
}

}  // namespace fastcaps
