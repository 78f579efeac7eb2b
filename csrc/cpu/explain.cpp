// A call's kernel and schedule in words, for fastcaps.explain: the same decisions as the op's, and nothing computed.
#include <algorithm>
#include <string>

#include "capability.h"
#include "schedule.h"

namespace fastcaps {
namespace {

// The facts of a call, beside its sizes (capability.h).
struct Facts {
  bool backward, has_state;
  int64_t iterations, copied;
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
      facts.backward ? schedule_of(back, dparents, facts.copied, facts.iterations) : schedule_of(call);
  const Kernels<Operands>& table = kernels<Operands>(in);
  const auto n = [](int64_t x) { return std::to_string(x); };
  const auto pose = [&](int64_t columns) { return n(in.C) + "x" + n(columns); };
  std::string text = table.own_pose(call) ? "kernel " + pose(in.D) + "->" + pose(in.E) : "kernel for any pose";
  text += ", " + n(table.lanes(in)) + (schedule.child_lanes ? " children" : " positions") + " a vector, ";
  text +=
      n(schedule.block_rows) + (schedule.child_lanes ? " positions x " : " vectors x ") + n(schedule.block_children);
  text += (schedule.child_lanes ? " vectors at a time, " : " children at a time, ") + n(schedule.items()) + " items";
  if (schedule.ranges > 1) text += " (" + n(schedule.ranges) + " ranges of children)";
  if (schedule.stay) text += ", children stay from iteration to iteration";
  if (schedule.folded) return text + ", weights folded into the parents";
  return text + (schedule.keep_votes ? "" : ", votes made twice");
}

}  // namespace
}  // namespace fastcaps

extern "C" const char* fastcaps_cpu_schedule(const char* stem, const int64_t* n, const int64_t* facts) {
  using namespace fastcaps;
  static thread_local std::string text;
  Votes in = votes_of(n, Storage(facts[1]));
  if (!fastcaps_capability()) return "no kernels for this processor";
  if (!in.is_countable()) return "no memory for a call of this size";
  if (n[10] > 0) in.weight = &in;  // some weights
  if (facts[2] > 0) in.bias = &in;
  if (facts[2] > 1) in.bias_stride_i = in.parents_size();
  const Facts of_call{facts[0] != 0, facts[3] != 0, facts[4], facts[6]};
  const std::string op = stem;
  if (op == "attention")
    text = describe(in, of_call, &Attention::query);
  else if (op == "pooling")
    text = describe(in, of_call, &Pooling::query);
  else if (op == "gaussian")
    text = describe(in, of_call, &Gaussian::mean);
  else
    text = std::string("there is no op ") + stem;
  return text.c_str();
}
