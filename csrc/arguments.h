// The arguments of the six ops, read from torch's stack, each list once and in the order of its schema (fastcaps/ops).
// Both native libraries implement the same schemas.
#pragma once

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

// Bits of `options` and of `needs`. The bits of the gradients follow the order of the results.
inline constexpr int64_t kDeterministic = 1, kTf32 = 2;
inline constexpr int64_t kChildren = 1, kWeight = 2, kBias = 4, kGate = 8;
inline constexpr int64_t kQuery = 16, kNormWeight = 32, kNormBias = 64;  // attention, pooling
inline constexpr int64_t kMean = 16, kVariance = 32, kLogWeight = 64, kBetaUse = 128, kBetaIgnore = 256;  // gaussian
inline constexpr int64_t kDetach = int64_t(1) << 30;  // the coefficients are constants: no gradient flows through them

struct VoteArguments : VoteTensors {
  explicit VoteArguments(Stack& s) : VoteTensors{s.tensor(), s.maybe(), s.maybe(), s.maybe(), s.number(), s.list()} {}
};

struct AttentionRouting {
  Stack& from;
  VoteArguments votes{from};
  MaybeTensor query = from.maybe(), norm_weight = from.maybe(), norm_bias = from.maybe();
  double scale = from.real(), eps = from.real();
  Rule rule = Rule(from.number());
  int64_t iterations = from.number(), options = from.number();
};

struct AttentionBackward {
  Stack& from;
  Tensor grad = from.tensor();
  VoteArguments votes{from};
  MaybeTensor query = from.maybe(), norm_weight = from.maybe(), sums = from.maybe();
  double scale = from.real(), eps = from.real();
  int64_t needs = from.number(), options = from.number();
};

struct PoolingRouting {
  Stack& from;
  VoteArguments votes{from};
  MaybeTensor query = from.maybe();
  double scale = from.real();
  bool normalize = from.flag();
  Rule rule = Rule(from.number());
  int64_t iterations = from.number(), options = from.number();
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
};

// Parents are Gaussians: mean, variance, log_weight. The betas of EM are a number a parent (beta_u and beta_a in the
// paper), those of Heinsen a table over children and parents.
struct GaussianRouting {
  Stack& from;
  VoteArguments votes{from};
  MaybeTensor mean = from.maybe(), variance = from.maybe(), log_weight = from.maybe();
  MaybeTensor beta_use = from.maybe(), beta_ignore = from.maybe();
  std::vector<double> schedule = from.reals();
  Rule rule = Rule(from.number());
  double eps = from.real();
  int64_t options = from.number();
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
};

// Turns of a backward call: tensors that belong to parents have them in their first dimension; what the first turn does
// not have (a query, a state) has one less.
class Turns {
 public:
  Turns(const VoteTensors& votes, int64_t count) : count(count), children_(votes.children) {
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
