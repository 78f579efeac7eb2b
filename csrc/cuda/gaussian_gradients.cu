// The backwards of routings whose parents are Gaussians: check, schedule, allocate, launch; and what comes before their
// kernel: what a vote's weight gains, as a parabola in the vote.
#include "../algebra/gaussian.h"
#include "ends.h"

namespace fastcaps::gpu {
namespace {

// The step between iterations, backwards. The next iteration's launch made the gradients of its state, a part for each
// range of children; this kernel adds them up.
struct StepArgs {
  const float* scores;  // [count], of this iteration; null where every iteration has its own gradients
  const float* dscore;  // the last iteration's, or null
  const float *dmeans, *dvariances, *dlog_weight;  // parts; null for the last iteration, variances for k-means, too
  int64_t parts;
  float* devidence;  // Heinsen: [count]
  // EM: [count], the gradients of its betas
  float *dcost, *dactivation;
  // The gradient of a bias that children share, see fastcaps/ops/gaussian.py: [count, C * E]; or null
  float* dbias;
  // the state this iteration started from, if not the first, made again from the results before it
  const float *earlier_variances, *earlier_scores;
  float *variance, *log_weight;
};

struct PrepareArgs {
  PassArgs pass;  // of the next launch, for which this one makes u, s and the constant
  Sharing by;
  int64_t count;
  const float* dcounts;  // [count] or null
  PosesView dmeans, dvariances;
  const float* variances;
  float *u, *s, *constant;
  float* tight;  // [positions], zeros: not 0 where a parent is tight (gaussian_backward.cu); or null
  Zeros zeros;
  StepArgs step;
};

// What a step backwards finds of a parent: the gradients of n and of the sum of ln sigma.
struct StepGradients {
  float dcount = 0.0f, dlog_sigma = 0.0f;
};

// The sum of ln sigma over a parent's pose, of variances without eps; stores them with eps, if wanted.
FASTCAPS_DEVICE float sum_log_sigma(const PrepareArgs& prepare, const float* variances, int64_t parent, bool exists,
                                    float* with_eps) {
  const PassArgs& args = prepare.pass;
  const int numbers = args.C * args.E;
  float sum = 0.0f;
  for (int number = prepare.by.first(); exists && number < numbers; number += prepare.by.lanes * 4) {
    float x[4];
    load_four(variances + parent * numbers + number, numbers - number, numbers % 4 == 0, x);
    FASTCAPS_UNROLL
    for (int v = 0; v < 4; ++v) {
      x[v] += args.eps;
      if (number + v < numbers) sum += gaussian::log_sigma(x[v]);
    }
    if (with_eps && prepare.by.share() == 0)
      store_four(with_eps, parent * numbers + number, numbers - number, numbers % 4 == 0, x, Storage::kFloat32);
  }
  prepare.by.add_lanes(sum);
  return sum;
}

FASTCAPS_DEVICE StepGradients step_back(const PrepareArgs& prepare, int64_t parent, bool exists, bool speaks) {
  const PassArgs& args = prepare.pass;
  const StepArgs& step = prepare.step;
  const bool kmeans = args.rule == Rule::kKMeans;
  if (step.earlier_scores) {
    const float log_sigma = sum_log_sigma(prepare, step.earlier_variances, parent, exists, step.variance);
    if (speaks)
      step.log_weight[parent] = Number<float>::log_sigmoid(step.earlier_scores[parent]) - (kmeans ? 0.0f : log_sigma);
  }
  StepGradients found;
  float dscore = exists && step.dscore ? step.dscore[parent] : 0.0f;
  if (step.dlog_weight) {
    float dlog_weight = 0.0f;
    for (int64_t part = prepare.by.share(); exists && part < step.parts; part += prepare.by.shares)
      dlog_weight += step.dlog_weight[part * prepare.count + parent];
    prepare.by.add_shares(dlog_weight);
    dscore = exists ? dlog_weight / (1.0f + expf(step.scores[parent])) : 0.0f;
    if (!kmeans) found.dlog_sigma = -dlog_weight;
  }
  if (args.rule == Rule::kEM) {
    const float log_sigma = sum_log_sigma(prepare, prepare.variances, parent, exists, nullptr);
    if (!exists) return found;
    const int m = int(parent % args.M);
    const float n = args.counts[parent], heat = -args.temperatures[0] * dscore, numbers = float(args.C * args.E);
    found.dcount = heat * (numbers * args.cost_of_numbers[m] + log_sigma);
    found.dlog_sigma += heat * n;
    if (speaks && step.dcost) step.dcost[parent] = numbers * heat * n;
    if (speaks && step.dactivation) step.dactivation[parent] = -heat;
  } else if (speaks) {
    step.devidence[parent] = dscore;
  }
  return found;
}

FASTCAPS_KERNEL(256, 1)
gaussian_prepare_kernel(const FASTCAPS_CONSTANT PrepareArgs prepare) {
  if (set_to_zero(prepare.zeros)) return;
  const PassArgs& args = prepare.pass;
  const StepArgs& step = prepare.step;
  const Sharing& by = prepare.by;
  const int numbers = args.C * args.E;
  const bool vector = numbers % 4 == 0;
  each_parent(prepare.count, by.lanes * by.shares, prepare.zeros.working, [&](int64_t parent, bool exists) {
    const int64_t from_means = offset_of_parent(prepare.dmeans, exists ? parent : 0, args.M, args.Ho, args.Wo);
    const int64_t from_variances = offset_of_parent(prepare.dvariances, exists ? parent : 0, args.M, args.Ho, args.Wo);
    const bool stores = exists && by.share() == 0, speaks = stores && by.first() == 0;
    StepGradients steps;
    if (step.scores) steps = step_back(prepare, parent, exists, speaks);
    const float whole = exists ? args.counts[parent] + args.eps : 0.0f, inverse = inverse_or_zero(whole);
    float constant = 0.0f, tight = 0.0f;
    FASTCAPS_NO_UNROLL
    for (int row = 0; row < numbers; row += by.lanes * 4) {  // all lanes of a warp add up shares
      const int number = row + by.first(), inside = exists ? numbers - number : 0;
      const int64_t at = parent * numbers + number;
      float mean[4], before[4], variance[4], u[4], s[4];
      load_four(args.means + at, inside, vector, mean);
      load_four((args.mean ? args.mean : args.means) + at, inside, vector, before);
      load_four(prepare.variances + at, inside, vector, variance);
      const auto gradient = [&](const PosesView& given, int64_t from, const float* parts, float* to) {
        if (!step.dmeans) {
          given.load(from, number, inside, to);
          return;
        }
        to[0] = to[1] = to[2] = to[3] = 0.0f;
        for (int64_t part = by.share(); parts && part < step.parts; part += by.shares) {
          float x[4];
          load_four(parts + part * prepare.count * numbers + at, inside, vector, x);
          FASTCAPS_UNROLL
          for (int v = 0; v < 4; ++v) to[v] += x[v];
        }
        FASTCAPS_UNROLL
        for (int v = 0; v < 4; ++v) by.add_shares(to[v]);
      };
      gradient(prepare.dmeans, from_means, step.dmeans, u);
      gradient(prepare.dvariances, from_variances, step.dvariances, s);
      float dbias[4];
      FASTCAPS_UNROLL
      for (int v = 0; v < 4; ++v) {
        if (step.scores && args.rule != Rule::kKMeans)
          s[v] += steps.dlog_sigma * gaussian::precision(variance[v] + args.eps);
        const float still = whole == 0.0f ? 1.0f : args.eps * inverse;
        dbias[v] = (step.dmeans ? 0.0f : u[v]) - still * u[v] + 2.0f * still * still * mean[v] * s[v];
        s[v] *= inverse;
        u[v] = u[v] * inverse - 2.0f * (args.eps * inverse) * mean[v] * s[v];
        constant -= s[v] * variance[v];
        const float way = mean[v] - before[v];
        if (64.0f * variance[v] < fmaxf(mean[v] * mean[v], way * way)) tight = 1.0f;
      }
      if (!stores) continue;
      store_four(prepare.s, at, inside, vector, s, Storage::kFloat32);
      store_four(prepare.u, at, inside, vector, u, Storage::kFloat32);
      if (step.dbias) store_four(step.dbias, at, inside, vector, dbias, Storage::kFloat32);
    }
    by.add_lanes(constant), by.add_lanes(tight);
    if (!speaks) return;
    prepare.constant[parent] = constant + steps.dcount + (prepare.dcounts ? prepare.dcounts[parent] : 0.0f);
    if (tight != 0.0f && prepare.tight) atomic_add(prepare.tight + parent / args.M, 1.0f);
  });
}

// The backward of a call through all its iterations, the first of which had no state, from the gradients of the last
// results. Its gradients are those of the op's backward.
struct GaussianReverse {
  Stack& from;
  MaybeTensor grad_scores = from.maybe(), grad_means = from.maybe(), grad_variances = from.maybe();
  VoteArguments votes{from};
  MaybeTensor beta_use = from.maybe(), beta_ignore = from.maybe();
  MaybeTensor counts = from.tensor(), means = from.tensor(), variances = from.tensor(), scores = from.tensor();
  std::vector<double> temperatures = from.reals();
  Rule rule = Rule(from.number());
  double eps = from.real();
  int64_t needs = from.number(), options = from.number();

  bool wants(int64_t bit, const MaybeTensor& x) const { return x && (needs & bit); }
  void check(const Votes& v) const {
    const int64_t count = int64_t(temperatures.size());
    const auto check = [&](const MaybeTensor& x, const char* name, const Shape& shape) {
      votes.check_maybe(x, name, shape, votes.wide());
    };
    check(grad_scores, "grad_scores", numbers_shape(v)), check(grad_means, "grad_means", poses_shape(v));
    check(grad_variances, "grad_variances", poses_shape(v));
    check(counts, "counts", numbers_shape(v, count)), check(means, "means", poses_shape(v, count));
    check(variances, "variances", poses_shape(v, count)), check(scores, "scores", numbers_shape(v, count));
    STD_TORCH_CHECK(count > 0, "fastcaps: there must be an iteration at least");
    STD_TORCH_CHECK(rule >= Rule::kEM && rule <= Rule::kKMeans, "fastcaps: gaussian_routing has no rule ", int(rule));
    if (rule != Rule::kEM) return check_betas(votes, v, beta_use, beta_ignore);
    STD_TORCH_CHECK(beta_use && beta_ignore, "fastcaps: EM routing wants beta_use and beta_ignore");
    check(beta_use, "beta_use", {v.M}), check(beta_ignore, "beta_ignore", {v.M});
  }
};

// What lies between the launches of a backward through all iterations.
struct ReverseMemory {
  const GaussianReverse& op;
  const Made made, numbers;  // parts of the state's gradients
  const int64_t total, count, poses;
  float *const counts, *const means, *const variances, *const scores, *const dscore;  // results of all iterations
  float *u = nullptr, *s = nullptr, *constant = nullptr, *devidence = nullptr;
  float *variance = nullptr, *log_weight = nullptr;                        // of the state
  float *dmeans = nullptr, *dvariances = nullptr, *dlog_weight = nullptr;  // parts
  float *duse = nullptr, *dignore = nullptr,
        *dbias = nullptr;  // by the kernel; EM's, and of a shared bias, by gaussian_prepare_kernel

  ReverseMemory(const GaussianReverse& op_, Call& call, const Schedule& schedule)
      : op(op_),
        made(call.parts(schedule)),
        numbers(call.parts(schedule, false)),
        total(int64_t(op.temperatures.size())),
        count(call.votes.positions() * call.votes.M),
        poses(count * call.votes.parent_size()),
        counts(call.table(op.counts)),
        means(call.table(op.means)),
        variances(call.table(op.variances)),
        scores(call.table(op.scores)),
        dscore(call.table(op.grad_scores)) {}

  void reserve(VoteGradients& gradients) {
    const bool several = total > 1, sharpens = several && op.rule != Rule::kKMeans;
    gradients.reserve(u, poses), gradients.reserve(s, poses), gradients.reserve(constant, count);
    gradients.reserve(devidence, op.rule == Rule::kEM ? 0 : count);
    gradients.reserve(variance, sharpens ? poses : 0), gradients.reserve(log_weight, several ? count : 0);
    gradients.reserve(dmeans, several ? made.all() : 0), gradients.reserve(dvariances, sharpens ? made.all() : 0);
    gradients.reserve(dlog_weight, several ? numbers.all() : 0);
  }

  StepArgs step(int64_t k) const {
    StepArgs step{};
    step.scores = scores + k * count, step.parts = made.parts, step.devidence = devidence;
    step.dbias = dbias ? dbias + k * poses : nullptr;
    if (k + 1 == total)
      step.dscore = dscore;
    else
      step.dmeans = dmeans, step.dvariances = dvariances, step.dlog_weight = dlog_weight;
    if (op.rule == Rule::kEM)
      step.dcost = duse ? duse + k * count : nullptr, step.dactivation = dignore ? dignore + k * count : nullptr;
    if (k > 0) {
      step.earlier_scores = scores + (k - 1) * count, step.earlier_variances = variances + (k - 1) * poses;
      step.variance = variance, step.log_weight = log_weight;
    }
    return step;
  }

  // What iteration k's launches take: its results; and then its state, and where they leave its gradients.
  void take_results(PassArgs& args, int64_t k) const {
    args.counts = counts + k * count, args.means = means + k * poses;
    args.temperatures[0] = float(op.temperatures[size_t(k)]);
  }
  void take_state(PassArgs& args, int64_t k) const {
    const auto of_iteration = [&](float* of_betas, bool own) {
      return of_betas && !own ? of_betas + k * numbers.all() : of_betas;
    };
    if (op.rule != Rule::kEM) {
      args.duse = of_iteration(duse, args.betas.use_stride_i);
      args.dignore = of_iteration(dignore, args.betas.ignore_stride_i);
    }
    args.mean = k == 0 ? nullptr : means + (k - 1) * poses;
    args.variance = k == 0 ? nullptr : variance, args.log_weight = k == 0 ? nullptr : log_weight;
    args.dquery = k == 0 ? nullptr : dmeans, args.dvariance = k == 0 ? nullptr : dvariances;
    args.dlog_weight = k == 0 ? nullptr : dlog_weight;
  }
};

std::vector<Tensor> gaussian_routing_reverse(Stack stack) {
  const GaussianReverse op{stack};
  const DeviceGuard guard(op.votes.children);
  Call call("gaussian", op.votes, op.options);
  const Votes& v = call.votes;
  PassArgs& args = call.args;
  op.check(v);
  const bool em = op.rule == Rule::kEM, empty = v.positions() == 0;
  args.eps = float(op.eps), args.rule = op.rule;
  if (em)
    args.cost_of_numbers = call.table(op.beta_use), args.activation = call.table(op.beta_ignore);
  else
    args.betas = call.betas(op.beta_use, op.beta_ignore);
  const bool wants_use = op.wants(kBetaUse, op.beta_use), wants_ignore = op.wants(kBetaIgnore, op.beta_ignore);
  const bool own_use = args.betas.use_stride_i, own_ignore = args.betas.ignore_stride_i;  // every child has its own
  const bool shared_bias = op.votes.bias && op.votes.bias->size(0) == 1, wants_bias = shared_bias && (op.needs & kBias);
  VoteGradients gradients(call, shared_bias ? op.needs & ~kBias : op.needs, !empty,
                          v.I * v.M * ((wants_use && own_use) + (wants_ignore && own_ignore)));
  ReverseMemory memory(op, call, gradients.schedule);
  const int64_t steps = memory.total * v.positions();
  const auto add_betas = [&](bool wanted, const MaybeTensor& beta, bool own, float*& place) {
    const Shape shape = wanted ? shape_of(*beta) : Shape{0, 0};
    if (em) return gradients.add(wanted, place, {steps, v.M}, shape, call.compute);
    const int64_t parts = own ? gradients.parts() : steps * memory.numbers.parts;
    return gradients.add(wanted, place, gradients.table(parts, own ? v.I : 1, 1, shape), shape, call.compute, own);
  };
  const Tensor dbeta_use = add_betas(wants_use, op.beta_use, own_use, memory.duse);
  const Tensor dbeta_ignore = add_betas(wants_ignore, op.beta_ignore, own_ignore, memory.dignore);
  const Shape bias_shape = wants_bias ? shape_of(*op.votes.bias) : Shape{0, 0};
  const Tensor of_steps = gradients.add(
      wants_bias, memory.dbias, gradients.table(steps, 1, v.parent_size(), bias_shape), bias_shape, call.storage);
  memory.reserve(gradients);
  Zeros zeros = gradients.allocate();
  args.dsums = memory.u, args.dsquares = memory.s, args.dconstant = memory.constant, args.devidence = memory.devidence;
  Tensor tights = call.empty({empty ? 0 : steps});
  if (tights.numel() > 0) torch::stable::zero_(tights);  // before the launches that count in it
  for (int64_t k = memory.total - 1; k >= 0 && !empty; --k) {
    const bool last = k + 1 == memory.total, measures = !last || op.grad_means || op.grad_variances || em;
    const Sharing by(v.parent_size(), last ? 1 : memory.made.parts);
    memory.take_results(args, k), memory.take_state(args, k);
    Grid grid = by.grid(memory.count);
    zeros.add_blocks(grid);
    float* tight = measures ? floats(tights) + k * v.positions() : nullptr;
    const auto given = [&](const MaybeTensor& x) { return PosesView(last ? call.view(x) : View{}, args.C, args.E); };
    launch(&gaussian_prepare_kernel, grid,
           PrepareArgs{args, by, memory.count, nullptr, given(op.grad_means), given(op.grad_variances),
                       memory.variances + k * memory.poses, memory.u, memory.s, memory.constant, tight, zeros,
                       memory.step(k)});
    zeros.pieces = 0;
    if (measures) gradients.measure(3, memory.u, memory.s, tight);
    gradients.run(3, tight);
  }
  gradients.add_up();
  return {gradients.children, gradients.weight, wants_bias ? of_steps : gradients.bias,
          gradients.gate,     call.empty({0}),  call.empty({0}),
          call.empty({0}),    dbeta_use,        dbeta_ignore};
}

}  // namespace

std::vector<Tensor> gaussian_routing_backward(Stack stack) {
  const GaussianBackward op{stack};
  const Tensor& children = op.votes.children;
  const DeviceGuard guard(children);
  Call call("gaussian", op.votes, op.options);
  const Votes& v = call.votes;
  PassArgs& args = call.args;
  const Iterations all = op.check(v);
  const bool listens = op.has_evidence(), empty = v.positions() == 0 || !op.any();
  args.betas = call.betas(op.beta_use, op.beta_ignore);
  const bool wants_mean = op.wants_mean(), wants_variance = op.wants_variance(), wants_log = op.wants_log_weight();
  const bool wants_use = listens && op.wants(kBetaUse, op.beta_use);
  const bool wants_ignore = listens && op.wants(kBetaIgnore, op.beta_ignore);
  const bool own_use = args.betas.use_stride_i, own_ignore = args.betas.ignore_stride_i;  // every child has its own
  args.eps = float(op.eps);
  VoteGradients gradients(call, op.needs, !empty, v.I * v.M * ((wants_use && own_use) + (wants_ignore && own_ignore)));
  const Made poses_made = call.parts(gradients.schedule), numbers_made = call.parts(gradients.schedule, false);
  const ScalarType wide = call.compute;
  const Tensor dmean = gradients.add(wants_mean, args.dquery, poses_made, call.poses(), wide);
  const Tensor dvariance = gradients.add(wants_variance, args.dvariance, poses_made, call.poses(), wide);
  const Tensor dlog_weight = gradients.add(wants_log, args.dlog_weight, numbers_made, call.numbers(), wide);
  float *duse = nullptr, *dignore = nullptr;  // of children, or, where these share a beta, of positions
  const auto add_betas = [&](bool wanted, const MaybeTensor& beta, bool own, float*& place) {
    const Shape shape = wanted ? shape_of(*beta) : Shape{0, 0};
    const int64_t parts = own ? gradients.parts() : all.count * numbers_made.parts * v.positions();
    return gradients.add(wanted, place, gradients.table(parts, own ? v.I : 1, 1, shape), shape, wide, own);
  };
  const Tensor dbeta_use = add_betas(wants_use, op.beta_use, own_use, duse);
  const Tensor dbeta_ignore = add_betas(wants_ignore, op.beta_ignore, own_ignore, dignore);
  const int64_t count = v.positions() * v.M, slots = numbers_made.all();
  float *u = nullptr, *s = nullptr, *constant = nullptr;
  gradients.reserve(u, count * v.parent_size()), gradients.reserve(s, count * v.parent_size());
  gradients.reserve(constant, count);
  Zeros zeros = gradients.allocate();
  args.dsums = u, args.dsquares = s, args.dconstant = constant;
  const size_t kept = call.kept.size();
  const bool measures = op.grad_means || op.grad_variances;
  Tensor tights = call.empty({measures && !empty ? all.count * v.positions() : 0});
  if (tights.numel() > 0) torch::stable::zero_(tights);  // before the launches that count in it
  for (int64_t k = 0; k < all.count && !empty; ++k) {
    const auto of = [&](const MaybeTensor& x) { return all.at(x, k); };
    float* tight = measures ? floats(tights) + k * v.positions() : nullptr;
    call.take_state(of(op.mean), of(op.variance), of(op.log_weight));
    args.means = call.table(of(op.means)), args.counts = call.table(of(op.counts));
    const float *spread = call.table(of(op.variances)), *dcounts = call.table(of(op.grad_counts));
    const auto poses = [&](const MaybeTensor& x) { return PosesView(all.view(x, k), args.C, args.E); };
    const Sharing by(v.parent_size());
    Grid grid = by.grid(count);
    zeros.add_blocks(grid);
    launch(&gaussian_prepare_kernel, grid,
           PrepareArgs{args,
                       by,
                       count,
                       dcounts,
                       poses(op.grad_means),
                       poses(op.grad_variances),
                       spread,
                       u,
                       s,
                       constant,
                       tight,
                       zeros,
                       {}});
    zeros.pieces = 0;
    if (listens) args.devidence = call.table(of(op.grad_evidence));
    args.duse = duse && !own_use ? duse + k * slots : duse;
    args.dignore = dignore && !own_ignore ? dignore + k * slots : dignore;
    if (measures) gradients.measure(3, u, s, tight);
    gradients.run(3, tight);
    call.kept.resize(kept);
  }
  gradients.add_up();
  return {gradients.children, gradients.weight, gradients.bias, gradients.gate, dmean,
          dvariance,          dlog_weight,      dbeta_use,      dbeta_ignore};
}

STABLE_TORCH_LIBRARY_IMPL(FASTCAPS_LIBRARY, FASTCAPS_KEY, gaussian_reverse) {
  gaussian_reverse.impl("gaussian_routing_reverse", &fastcaps::boxed<gaussian_routing_reverse>);
}

}  // namespace fastcaps::gpu
