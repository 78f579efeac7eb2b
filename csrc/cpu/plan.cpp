// A call's kernel and cut in words, for fastcaps.explain: the same decisions as the op's, and nothing computed.
#include <string>

#include "capability.h"
#include "cut.h"

namespace fastcaps {
namespace {

std::string describe(const Geometry& g, bool backward, bool is_double) {
  const AttentionKernels& kernels = attention_kernels();
  const int64_t lanes = is_double ? kernels.lanes_double : kernels.lanes_float;
  AttentionForward call;
  call.in.geometry = g;
  call.cut = (backward ? cut_backward : cut_forward)(g, lanes, is_double ? 8 : 4);
  const Cut& cut = call.cut;
  const auto n = [](int64_t x) { return std::to_string(x); };
  const auto pose = [&](int64_t columns) { return n(g.C) + "x" + n(columns); };
  std::string text =
      kernels.own_pose(call, is_double) ? "kernel " + pose(g.D) + "->" + pose(g.E) : "kernel for any pose";
  text += ", " + n(lanes) + (cut.child_lanes ? " children" : " positions") + " a vector, ";
  text += n(cut.block_tiles) + (cut.child_lanes ? " positions x " : " vectors x ") + n(cut.block_children);
  text += (cut.child_lanes ? " vectors at a time, " : " children at a time, ") + n(cut.items()) + " items";
  if (cut.chunks > 1) text += " (" + n(cut.chunks) + " ranges of children)";
  return text + (cut.keep_votes ? "" : ", votes made twice");
}

}  // namespace
}  // namespace fastcaps

extern "C" const char* fastcaps_cpu_plan(const int64_t* geometry, int64_t backward, int64_t is_double) {
  static thread_local std::string text;
  const int64_t* n = geometry;
  const fastcaps::Geometry g{n[0], n[1], n[2], n[3], n[4],  n[5],
                             n[6], n[7], n[8], n[9], n[10], {n[11], n[12], n[13], n[14], n[15], n[16], n[17], n[18]}};
  text = fastcaps::describe(g, backward != 0, is_double != 0);
  return text.c_str();
}
