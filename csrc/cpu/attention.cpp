// The attention kernels of one instruction set: this file is compiled once for each (FASTCAPS_ISA, CMakeLists.txt).
#include "attention.h"

#include <type_traits>

#include "attention_backward.h"
#include "attention_forward.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

// f(pose, compute type, whether lanes are children). The poses of the papers have code of their own in float, vector
// poses only where lanes are positions; everything else takes the general pose.
template <class Call, class F>
auto with_pose(const Call& call, bool is_double, F&& f) {
  const Geometry& g = call.in.geometry;
  const auto is = [&](int c, int d, int e) { return g.C == c && g.D == d && g.E == e; };
  const DynamicPose any{int(g.C), int(g.D), int(g.E)};
  const std::false_type positions;
  const std::true_type children;
  if (call.cut.child_lanes) {
    if (is_double) return f(any, double{}, children);
    if (is(4, 4, 4)) return f(StaticPose<4, 4, 4>{}, float{}, children);
    if (is(6, 6, 6)) return f(StaticPose<6, 6, 6>{}, float{}, children);
    return f(any, float{}, children);
  }
  if (is_double) return f(any, double{}, positions);
  if (is(4, 4, 4)) return f(StaticPose<4, 4, 4>{}, float{}, positions);
  if (is(6, 6, 6)) return f(StaticPose<6, 6, 6>{}, float{}, positions);
  if (is(8, 8, 8)) return f(StaticPose<8, 8, 8>{}, float{}, positions);
  if (is(1, 8, 16)) return f(StaticPose<1, 8, 16>{}, float{}, positions);
  if (is(1, 16, 16)) return f(StaticPose<1, 16, 16>{}, float{}, positions);
  if (is(1, 64, 64)) return f(StaticPose<1, 64, 64>{}, float{}, positions);
  return f(any, float{}, positions);
}

// Run `work` for [begin, end) on a worker that lives in the thread's scratch memory.
template <template <class, class, bool> class Worker, class Call, class Work>
void run(const Call& call, bool is_double, int64_t begin, int64_t end, void* scratch, Work&& work) {
  with_pose(call, is_double, [&](auto pose, auto type, auto child_lanes) {
    Arena arena{static_cast<char*>(scratch)};
    Worker<decltype(type), decltype(pose), child_lanes> worker(call, pose, arena);
    for (int64_t k = begin; k < end; ++k) work(worker, k);
  });
}

template <template <class, class, bool> class Worker, class Call>
int64_t scratch_bytes(const Call& call, bool is_double) {
  return with_pose(call, is_double, [&](auto pose, auto type, auto child_lanes) {
    Arena counter{nullptr};
    Worker<decltype(type), decltype(pose), child_lanes>(call, pose, counter);
    return counter.used;
  });
}

void forward(const AttentionForward& call, bool is_double, int64_t begin, int64_t end, void* scratch) {
  run<ForwardItem>(call, is_double, begin, end, scratch, [](auto& worker, int64_t item) { worker.run(item); });
}

void forward_finish(const AttentionForward& call, bool is_double, int64_t begin, int64_t end, void* scratch) {
  run<ForwardItem>(call, is_double, begin, end, scratch, [](auto& worker, int64_t tile) { worker.finish_tile(tile); });
}

void backward_prepare(const AttentionBackward& call, bool is_double, int64_t begin, int64_t end, void* scratch) {
  run<BackwardItem>(call, is_double, begin, end, scratch, [](auto& worker, int64_t tile) { worker.prepare(tile); });
}

void backward(const AttentionBackward& call, bool is_double, int64_t begin, int64_t end, void* scratch) {
  run<BackwardItem>(call, is_double, begin, end, scratch, [](auto& worker, int64_t item) { worker.run(item); });
}

void backward_finish(const AttentionBackward& call, bool is_double, int64_t begin, int64_t end, void*) {
  if (is_double)
    finish_query_gradient<double>(call, begin, end);
  else
    finish_query_gradient<float>(call, begin, end);
}

int64_t forward_scratch(const AttentionForward& call, bool is_double) {
  return scratch_bytes<ForwardItem>(call, is_double);
}

int64_t backward_scratch(const AttentionBackward& call, bool is_double) {
  return scratch_bytes<BackwardItem>(call, is_double);
}

bool own_pose(const AttentionForward& call, bool is_double) {
  return with_pose(call, is_double, [](auto pose, auto, auto) { return !std::is_same_v<decltype(pose), DynamicPose>; });
}

}  // namespace FASTCAPS_NAMESPACE

extern const AttentionKernels FASTCAPS_CONCAT(attention_kernels, FASTCAPS_ISA);
const AttentionKernels FASTCAPS_CONCAT(attention_kernels, FASTCAPS_ISA) = {
    FASTCAPS_NAMESPACE::kLanes<float>,   FASTCAPS_NAMESPACE::kLanes<double>,   FASTCAPS_NAMESPACE::forward,
    FASTCAPS_NAMESPACE::forward_finish,  FASTCAPS_NAMESPACE::backward_prepare, FASTCAPS_NAMESPACE::backward,
    FASTCAPS_NAMESPACE::backward_finish, FASTCAPS_NAMESPACE::forward_scratch,  FASTCAPS_NAMESPACE::backward_scratch,
    FASTCAPS_NAMESPACE::own_pose,
};

}  // namespace fastcaps
