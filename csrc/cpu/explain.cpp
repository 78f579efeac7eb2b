// A call's kernel and schedule in words, for fastcaps.explain: the same decisions as the op's, and nothing computed.
#include <algorithm>
#include <string>

#include "capability.h"
#include "schedule.h"

namespace fastcaps {
namespace {

// `with` has a query, or whatever parents its pass has: how many numbers they are is all that counts here.
template <class Operands>
std::string describe(const Votes& in, bool backward, bool is_double, const Operands& with) {
  ForwardCall<Operands> call{in, with};
  BackwardCall<Operands> back{in, {with}};
  const Schedule schedule = call.schedule =
      backward ? schedule_of(back, is_double, true) : schedule_of(call, is_double);
  const Kernels<Operands>& table = kernels<Operands>(in, is_double);
  const auto n = [](int64_t x) { return std::to_string(x); };
  const auto pose = [&](int64_t columns) { return n(in.C) + "x" + n(columns); };
  std::string text =
      table.own_pose(call, is_double) ? "kernel " + pose(in.D) + "->" + pose(in.E) : "kernel for any pose";
  text += ", " + n(lanes_of(table, is_double)) + (schedule.child_lanes ? " children" : " positions") + " a vector, ";
  text +=
      n(schedule.block_rows) + (schedule.child_lanes ? " positions x " : " vectors x ") + n(schedule.block_children);
  text += (schedule.child_lanes ? " vectors at a time, " : " children at a time, ") + n(schedule.items()) + " items";
  if (schedule.chunks > 1) text += " (" + n(schedule.chunks) + " ranges of children)";
  if (schedule.folded) return text + ", weights folded into the parents";
  return text + (schedule.keep_votes ? "" : ", votes made twice");
}

}  // namespace
}  // namespace fastcaps

extern "C" const char* fastcaps_cpu_schedule(const char* stem, const int64_t* n, int64_t backward, int64_t is_double) {
  using namespace fastcaps;
  static thread_local std::string text;
  Votes in{n[0],
           n[1],
           n[2],
           n[3],
           n[4],
           n[5],
           n[6],
           n[7],
           n[11] * n[12] * n[3],
           n[8],
           n[9],
           std::max<int64_t>(n[10], 1),
           {n[11], n[12], n[13], n[14], n[15], n[16], n[17], n[18]}};
  if (n[10] > 0) in.weight = &in;  // some weights
  const View some{&in, {}};
  const std::string pass = stem;
  Attention attention;
  Pooling pooling;
  Gaussian gaussian;
  attention.query = pooling.query = gaussian.mean = some;
  text = pass == "attention" ? describe(in, backward, is_double, attention)
         : pass == "pooling" ? describe(in, backward, is_double, pooling)
                             : describe(in, backward, is_double, gaussian);
  return text.c_str();
}
