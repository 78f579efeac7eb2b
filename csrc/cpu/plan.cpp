// A call's kernel and cut in words, for fastcaps.explain: the same decisions as the op's, and nothing computed.
#include <string>
#include <type_traits>

#include "capability.h"
#include "cut.h"

namespace fastcaps {
namespace {

template <class Operands>
std::string describe(const Geometry& g, bool backward, bool is_double, bool shared, Operands with) {
  const Kernels<Operands>& table = kernels<Operands>(g, is_double);
  const int64_t lanes = is_double ? table.lanes_double : table.lanes_float, number = is_double ? 8 : 4;
  ForwardCall<Operands> call;
  call.in.geometry = g;
  call.in.weight = &g;  // some weights
  call.with = with;
  const bool folded = std::is_same_v<Operands, Attention> && folds(g, shared, false);
  call.cut.folded = folded;
  BackwardCall<Operands> back;
  back.in = call.in;
  back.with = {with};
  if (backward)
    call.cut = cut_backward(
        g, {lanes, number, table.backward_state(back), table.backward_results(back), shared, false, folded, 1});
  else
    call.cut = cut_forward(
        g, {lanes, number, table.forward_state(call), table.forward_results(call), shared, false, folded, 1});
  const Cut& cut = call.cut;
  const auto n = [](int64_t x) { return std::to_string(x); };
  const auto pose = [&](int64_t columns) { return n(g.C) + "x" + n(columns); };
  std::string text = table.own_pose(call, is_double) ? "kernel " + pose(g.D) + "->" + pose(g.E) : "kernel for any pose";
  text += ", " + n(lanes) + (cut.child_lanes ? " children" : " positions") + " a vector, ";
  text += n(cut.block_rows) + (cut.child_lanes ? " positions x " : " vectors x ") + n(cut.block_children);
  text += (cut.child_lanes ? " vectors at a time, " : " children at a time, ") + n(cut.items()) + " items";
  if (cut.chunks > 1) text += " (" + n(cut.chunks) + " ranges of children)";
  if (cut.folded) return text + ", weights folded into the parents";
  return text + (cut.keep_votes ? "" : ", votes made twice");
}

// A query, or whatever parents a pass has: how many numbers they are is all that counts here.
std::string describe(const Geometry& g, const std::string& pass, bool backward, bool is_double) {
  const View some{&g, {}};
  const bool shared = g.N % g.G == 0;
  if (pass == "pooling") {
    Pooling with;
    with.query = some;
    return describe(g, backward, is_double, shared, with);
  }
  if (pass == "gaussian") {
    Gaussian with;
    with.mean = some;
    return describe(g, backward, is_double, shared, with);
  }
  Attention with;
  with.query = some;
  return describe(g, backward, is_double, shared, with);
}

}  // namespace
}  // namespace fastcaps

extern "C" const char* fastcaps_cpu_plan(const char* pass, const int64_t* geometry, int64_t backward,
                                         int64_t is_double) {
  static thread_local std::string text;
  const int64_t* n = geometry;
  const fastcaps::Geometry g{n[0], n[1], n[2], n[3], n[4],  n[5],
                             n[6], n[7], n[8], n[9], n[10], {n[11], n[12], n[13], n[14], n[15], n[16], n[17], n[18]}};
  text = fastcaps::describe(g, pass, backward != 0, is_double != 0);
  return text.c_str();
}
