// The ops' arguments, read from torch's stack in the order of their schemas (fastcaps/ops), for both native libraries.
#pragma once

#include "tensors.h"

namespace fastcaps {

// Torch's arguments, read one by one: members of an op's struct below are initialised in their order.
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

// Bits of `needs`. The bits of the gradients follow the order of the results.
inline constexpr int64_t kChildren = 1, kWeight = 2, kBias = 4, kGate = 8;
inline constexpr int64_t kPairs = 8, kSums = 16, kSquares = 32;          // pull: scores, sums, squares
inline constexpr int64_t kQuery = 16, kNormWeight = 32, kNormBias = 64;  // attention, pooling
inline constexpr int64_t kMean = 16, kVariance = 32, kLogWeight = 64, kBetaUse = 128, kBetaIgnore = 256;  // gaussian
inline constexpr int64_t kDetach = int64_t(1) << 30;  // the coefficients are constants: no gradient flows through them

struct VoteArguments : VoteTensors {
  explicit VoteArguments(Stack& s) : VoteTensors{s.tensor(), s.maybe(), s.maybe(), s.maybe(), s.number(), s.list()} {}
};

// The iterations of a backward call: the first dimension of the parents' tensors. Tensors that the first iteration may
// lack (a query, a state) may be one shorter.
class Iterations {
 public:
  // `x`: a tensor with an entry for every iteration.
  Iterations(const VoteTensors& votes, const Tensor& x)
      : count(x.dim() > 0 ? x.size(0) : 0), children_(votes.children) {
    STD_TORCH_CHECK(count >= 1, "fastcaps: there must be an iteration at least");
  }
  const int64_t count;

  // Checks a tensor whose entry for one iteration has this shape. `first`: whether the first iteration must have an
  // entry.
  void check(const MaybeTensor& x, const char* name, Shape shape, ScalarType type, bool first = true) const {
    if (!x) return;
    shape.insert(shape.begin(), !first && count > 1 && x->dim() > 0 && x->size(0) == count - 1 ? count - 1 : count);
    check_tensor(*x, name, shape, type, children_);
  }
  // Only calls of one iteration have gradients of the parents that an iteration started from.
  void check_single(bool wanted, const char* names) const {
    STD_TORCH_CHECK(!wanted || count == 1, "fastcaps: ", names, " is of one iteration, got ", count);
  }
  // Iteration k's entry, read in place; without data if there is none.
  View view(const MaybeTensor& x, int64_t k) const {
    const int64_t which = x ? k - (count - x->size(0)) : -1;
    return which < 0 ? View{} : view_of(*x, children_.dim() == 4, which);
  }
  // The same as a tensor; nothing if there is none.
  MaybeTensor at(const MaybeTensor& x, int64_t k) const {
    const int64_t which = x ? k - (count - x->size(0)) : -1;
    return which < 0 ? MaybeTensor() : MaybeTensor(torch::stable::select(*x, 0, which));
  }

 private:
  const Tensor& children_;
};

// Every op's struct checks its other arguments against the checked votes `v`.
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
  Iterations check(const Votes& v) const {
    const Iterations all(votes, grad);
    all.check(grad, "grad", poses_shape(v), votes.wide());
    all.check(query, "query", poses_shape(v), votes.storage(), false);
    all.check(sums, "sums", poses_shape(v), votes.wide());
    all.check_single(wants_query(), "dquery");
    votes.check_maybe(norm_weight, "norm_weight", {v.parent_size()}, votes.storage());
    return all;
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
  Iterations check(const Votes& v) const {
    const Iterations all(votes, grad);
    all.check(grad, "grad", poses_shape(v), votes.wide());
    all.check(query, "query", poses_shape(v), votes.storage(), false);
    all.check(sums, "sums", poses_shape(v), votes.storage());
    all.check(logsumexp, "logsumexp", numbers_shape(v), votes.wide());
    all.check_single(wants_query(), "dquery");
    return all;
  }
};

// Tables over children and parents, both or neither.
inline void check_betas(const VoteTensors& votes, const Votes& v, const MaybeTensor& use, const MaybeTensor& ignore) {
  STD_TORCH_CHECK(use.has_value() == ignore.has_value(), "fastcaps: beta_use and beta_ignore come together");
  if (!use) return;
  votes.check_table(*use, "beta_use", v, votes.wide());
  votes.check_table(*ignore, "beta_ignore", v, votes.wide());
}

// Parents are Gaussians: mean, variance, log_weight. The betas of EM have a value for each parent (beta_u and beta_a in
// the paper), those of Heinsen are tables over children and parents.
struct GaussianRouting {
  Stack& from;
  VoteArguments votes{from};
  MaybeTensor mean = from.maybe(), variance = from.maybe(), log_weight = from.maybe();
  MaybeTensor beta_use = from.maybe(), beta_ignore = from.maybe();
  std::vector<double> temperatures = from.reals();  // EM's inverse temperatures, one for each iteration
  Rule rule = Rule(from.number());
  double eps = from.real();
  int64_t options = from.number();

  void check(const Votes& v) const {
    const ScalarType wide = votes.wide();
    STD_TORCH_CHECK(rule >= Rule::kEM && rule <= Rule::kKMeans, "fastcaps: gaussian_routing has no rule ", int(rule));
    STD_TORCH_CHECK(!temperatures.empty(), "fastcaps: temperatures must have a number for every iteration");
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
  // Whether any result has a gradient.
  bool any() const { return grad_counts || grad_means || grad_variances || has_evidence(); }
  Iterations check(const Votes& v) const {
    const Iterations all(votes, counts);
    const auto poses = [&](const MaybeTensor& x, const char* name, bool first = true) {
      all.check(x, name, poses_shape(v), votes.wide(), first);
    };
    const auto numbers = [&](const MaybeTensor& x, const char* name, bool first = true) {
      all.check(x, name, numbers_shape(v), votes.wide(), first);
    };
    numbers(grad_counts, "grad_counts"), poses(grad_means, "grad_means"), poses(grad_variances, "grad_variances");
    numbers(grad_evidence, "grad_evidence");
    STD_TORCH_CHECK(mean || !variance, "fastcaps: a variance wants a mean");
    poses(mean, "mean", false), poses(variance, "variance", false), numbers(log_weight, "log_weight", false);
    numbers(counts, "counts"), poses(means, "means"), poses(variances, "variances");
    check_betas(votes, v, beta_use, beta_ignore);
    all.check_single(wants_state(), "the gradient of a state");
    return all;
  }
};

// An op as torch calls it: reads its arguments from the stack and pushes its results.
using Op = std::vector<Tensor> (*)(Stack);
template <Op op>
void boxed(StableIValue* values, uint64_t arguments, uint64_t results) {
  std::vector<Tensor> found = op(Stack(values, arguments));
  STD_TORCH_CHECK(found.size() == results, "fastcaps: the op's schema has ", results, " results, its kernel ",
                  found.size());
  for (size_t k = 0; k < found.size(); ++k) values[k] = torch::stable::detail::from(found[k]);
}

// Registers an op and its backward under the library's name; fastcaps/ops defines the schemas.
#define FASTCAPS_REGISTER(op)                                    \
  STABLE_TORCH_LIBRARY_IMPL(FASTCAPS_LIBRARY, FASTCAPS_KEY, m) { \
    m.impl(#op, &fastcaps::boxed<op>);                           \
    m.impl(#op "_backward", &fastcaps::boxed<op##_backward>);    \
  }

}  // namespace fastcaps
