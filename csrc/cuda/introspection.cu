// Answers about calls, for fastcaps.backends, through ctypes, and in builds for experiments about schedules, for the
// bench and the tests. No device is needed: the caller passes all that an answer depends on. An answer is valid until
// the thread's next call.
//
// op: a stem in schedule.cu's table; for any other the answer says that it is unknown. sizes: B H W N C D Ho Wo M E G
// and the window's eight; G = 0 where votes are the children themselves. facts: whether it is the backward; the
// children's type (0 float32, 1 float64, 2 bfloat16, 3 float16); the bias (0 none, 1 one for all children, 2 one for
// each); whether the first iteration has parents; iterations; bits of Options; the device's multiprocessors; and a
// block's largest shared memory in bytes.
#include "schedule.h"

#define FASTCAPS_ANSWER extern "C" __attribute__((visibility("default"))) const char*

namespace fastcaps::gpu {
namespace {

const char* answer(std::string text) {
  static thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

std::string no_pass(const char* op) { return std::string("the CUDA kernels have no op ") + op; }

struct Question {
  const char* op;
  Votes v;
  Task task;
  Bias bias;
  Machine machine;
  int64_t iterations;
  bool has_bias, own_bias, starts;

  Question(const char* op_, const int64_t* n, const int64_t* facts)
      : op(op_),
        v(votes_of(n, Storage(facts[1]))),
        task(Task::of(pass_of(op), facts[0] != 0, facts[5], v.storage, n[10] == 0)),
        machine{facts[6], facts[7]},
        iterations(facts[4]),
        has_bias(facts[2] != 0),
        own_bias(facts[2] == 2),
        starts(facts[3] != 0) {
    if (task.backward && has_bias) bias = Bias::of(v, facts[2] == 1);
  }
  std::string routing_refusal() const {
    if (!task.pass) return no_pass(op);
    if (iterations > kMostIterations)
      return "its " + std::to_string(iterations) + " iterations are more than " + std::to_string(kMostIterations);
    return gpu::routing_refusal(task, v, machine);
  }
};

#ifdef FASTCAPS_EXPERIMENTS
std::string n(int64_t number) { return std::to_string(number); }

std::string name_of(const PassKernel& kernel, bool backward, bool lean) {
  std::string name = backward ? "backward " : "forward ";
  if (kernel.C)
    name += n(kernel.C) + "x" + n(kernel.D) + "->" + n(kernel.C) + "x" + n(kernel.E) + " " +
            n(kernel.parents * kernel.each) + " parents a warp";
  else
    name += "any " + n(kernel.patch_rows) + "x" + n(kernel.patch_columns) + " a lane";
  return name + (kernel.products == 3 ? " tensor 3xTF32" : kernel.products ? " tensor" : "") + (lean ? " lean" : "");
}
#endif

}  // namespace
}  // namespace fastcaps::gpu

using namespace fastcaps::gpu;

#ifdef FASTCAPS_CUDA_TOOLKIT  // else these are the tests' sources for the CPU
// The toolkit's version, e.g. "13.0.88"; and the kernels' architectures, separated by commas, as CMake writes them
// ("90-real" is code for 9.0, "90" code and PTX).
FASTCAPS_ANSWER fastcaps_cuda_toolkit(void) { return FASTCAPS_CUDA_TOOLKIT; }
FASTCAPS_ANSWER fastcaps_cuda_architectures(void) { return FASTCAPS_CUDA_ARCHITECTURES; }
#endif

// Why no kernel takes these poses; empty if one does.
FASTCAPS_ANSWER fastcaps_cuda_refusal(const char* op, int64_t C, int64_t D, int64_t E, int64_t has_weight) {
  const Pass* pass = pass_of(op);
  return answer(pass ? refusal(*pass, C, D, E, !has_weight) : no_pass(op));
}

// Why a routing should make each iteration in its own launch; empty if one launch should make all.
FASTCAPS_ANSWER fastcaps_cuda_routing_refusal(const char* op, const int64_t* sizes, const int64_t* facts) {
  return answer(Question(op, sizes, facts).routing_refusal());
}

#ifdef FASTCAPS_EXPERIMENTS
// A call's schedule: fields key=value, separated by semicolons; or text=, and why there is none.
FASTCAPS_ANSWER fastcaps_cuda_schedule(const char* op, const int64_t* sizes, const int64_t* facts) {
  Question question(op, sizes, facts);
  const fastcaps::Votes& v = question.v;
  const Pass* pass = question.task.pass;
  const std::string why_not = pass ? refusal(*pass, v.C, v.D, v.E, question.task.identity) : no_pass(op);
  if (!why_not.empty()) return answer("text=" + why_not);
  question.task.whole = question.iterations > 1 && !question.task.backward && question.routing_refusal().empty();
  std::string reason = fits_30_bits(v) ? "this device's shared memory does not hold these poses"
                                       : "the kernels count children and parents in 30 bits";
  const Schedule c = make_schedule(question.task, v, question.bias, question.machine, &reason);
  if (!c.kernel) return answer("text=" + reason);
  const bool lean = !question.task.whole &&
                    c.kernel->takes_lean(!question.task.identity, question.has_bias, question.own_bias, false,
                                         v.window.ph > 0 || v.window.pw > 0, question.starts, c.parent_blocks);
  return answer("kernel=" + name_of(*c.kernel, question.task.backward, lean) +
                ";instance=" + name_of_instance(*c.kernel) + ";iterations=" + (question.task.whole ? "fused" : "one") +
                ";parent_warps=" + n(c.warps_parents) + ";position_warps=" + n(c.warps_positions) +
                ";positions=" + n(c.tile_size) + ";threads=" + n(c.threads()) + ";ranges=" + n(c.chunks) +
                ";sweeps=" + n(c.parent_blocks) + ";stage=" + n(c.stage) +
                ";blocks=" + n(c.groups * c.chunks * c.parent_blocks) + ";groups=" + n(c.groups) +
                ";tiles=" + n(c.tiles) + ";shared_bytes=" + n(c.shared_bytes) + ";cost=" + n(int64_t(c.cost)));
}

// The kernels that can take a call, whatever its schedule, separated by semicolons: name_of_instance, parents of a
// warp, positions of a warp, warps of a block at most, separated by spaces.
FASTCAPS_ANSWER fastcaps_cuda_instances(const char* op, const int64_t* sizes, const int64_t* facts) {
  const Question question(op, sizes, facts);
  if (!question.task.pass) return answer("");
  const PassKernels kernels = question.task.pass->kernels(question.task.backward);
  std::string all;
  for (const PassKernel* kernel = kernels.begin; kernel != kernels.begin + kernels.count; ++kernel)
    if (kernel->C && takes(*kernel, question.v, question.task))
      all += (all.empty() ? "" : ";") + name_of_instance(*kernel) + " " + n(kernel->parents * kernel->each) + " " +
             n(kernel->positions * 32 / (kernel->columns * kernel->parents)) + " " + n(kernel->threads / 32);
  return answer(all);
}

// The names of all kernels that an op's schedules take by themselves, as `kernel` has them above, separated by
// semicolons.
FASTCAPS_ANSWER fastcaps_cuda_kernels(const char* op) {
  const Pass* pass = pass_of(op);
  if (!pass) return answer(no_pass(op));
  std::string names;
  for (const bool backward : {false, true}) {
    const PassKernels kernels = pass->kernels(backward);
    for (const PassKernel* kernel = kernels.begin; kernel != kernels.begin + kernels.count; ++kernel)
      for (const bool lean : {false, true})
        if (!kernel->by_name && (!lean || kernel->lean))
          names += (names.empty() ? "" : ";") + name_of(*kernel, backward, lean);
  }
  return answer(names);
}
#endif
