// How the CPU's kernels would cut a call up: the same decisions as the op's, and nothing computed. Test builds of the
// CPU library (FASTCAPS_GUARDS) have it, for tests/test_kernels.py: fields key=value, separated by semicolons.
#include <string>

#include "cpu/capability.h"
#include "cpu/schedule.h"

namespace fastcaps {
namespace {

// The facts of a call, beside its sizes.
struct Facts {
  bool backward, has_state;
  int64_t iterations;
};

// `start`: the operand with the parents that a call starts from; only whether it is set matters here. Of a backward of
// several iterations this describes the last kernel call, which computes what is summed over iterations.
template <class Operands>
std::string describe(const Votes& in, const Facts& facts, View Operands::* start) {
  ForwardCall<Operands> call{in};
  if (facts.has_state) (call.with.*start).data = &in;
  call.total = facts.iterations;
  const BackwardCall<Operands> back{in, {call.with}};
  const bool dparents = facts.iterations == 1 && facts.has_state;
  const Schedule schedule = call.schedule =
      facts.backward ? schedule_of(back, dparents, 0, facts.iterations) : schedule_of(call);
  const Kernels<Operands>& table = kernels<Operands>(in);
  const auto n = [](int64_t x) { return std::to_string(x); };
  const std::string pose = n(in.C) + "x" + n(in.D) + "->" + n(in.C) + "x" + n(in.E);
  return "kernel=" + (table.own_pose(call) ? pose : "any") + ";width=" + n(table.lanes(in)) +
         ";lanes=" + (schedule.child_lanes ? "children" : "positions") + ";rows=" + n(schedule.block_rows) +
         ";ranges=" + n(schedule.ranges) + ";stay=" + n(schedule.stay) + ";votes=" +
         (schedule.folded       ? "folded"
          : schedule.keep_votes ? "kept"
                                : "twice");
}

}  // namespace
}  // namespace fastcaps

// `sizes`: csrc/votes.h. `facts`: whether it is the backward; the children's Storage; the bias (0 none, 1 one for all
// children, 2 one for each); whether the call starts from parents; iterations.
extern "C" FASTCAPS_EXPORT const char* fastcaps_cpu_schedule(const char* stem, const int64_t* sizes,
                                                             const int64_t* facts) {
  using namespace fastcaps;
  static thread_local std::string text;
  Votes in = votes_of(sizes, Storage(facts[1]));
  if (sizes[10] > 0) in.weight = &in;  // some weights
  if (facts[2] > 0) in.bias = &in;
  if (facts[2] > 1) in.bias_stride_i = in.parents_size();
  const Facts of_call{facts[0] != 0, facts[3] != 0, facts[4]};
  const std::string op = stem;
  text = op == "attention" ? describe(in, of_call, &Attention::query)
         : op == "pooling" ? describe(in, of_call, &Pooling::query)
                           : describe(in, of_call, &Gaussian::mean);
  return text.c_str();
}
