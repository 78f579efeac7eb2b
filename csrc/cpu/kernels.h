// The table of a pass's kernels for one instruction set: each source that includes this is compiled once for each
// (FASTCAPS_ISA, CMakeLists.txt).
#pragma once

#include <type_traits>
#include <utility>

#include "backward.h"
#include "folded.h"
#include "forward.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

template <class Operands>
Operands operands_of(const ForwardCall<Operands>&);
template <class Operands>
Operands operands_of(const BackwardCall<Operands>&);
template <class Call>
using OperandsOf = decltype(operands_of(std::declval<Call>()));

template <Lanes kLane>
using LanesAre = std::integral_constant<Lanes, kLane>;

// The portable build of x86 serves processors of before 2013: nothing there is worth the compiler's time.
#if defined(__x86_64__) && !defined(__AVX2__)
inline constexpr bool kOwnPoses = false;
#else
inline constexpr bool kOwnPoses = true;
#endif

// f(pose, compute type, what lanes are). The poses of the papers have code of their own in float, and only where it is
// worth the compiler's time: vector poses where weights are scalars, the larger ones with attention alone. All else
// takes the general pose; so does, with `own` = false, what is done once for a row, which makes few votes or none.
template <bool own, class Call, class F>
auto with_pose(const Call& call, bool is_double, F&& f) {
  using Operands = OperandsOf<Call>;
  constexpr bool kAttention = std::is_same_v<Operands, Attention>, kGaussian = std::is_same_v<Operands, Gaussian>;
  constexpr bool kOwn = own && kOwnPoses;
  const Votes& in = call.votes;
  const auto is = [&](int c, int d, int e) { return in.C == c && in.D == d && in.E == e; };
  const DynamicPose any{int(in.C), int(in.D), int(in.E)};
  const LanesAre<Lanes::kPositions> positions;
  const LanesAre<Lanes::kChildren> children;
  const LanesAre<Lanes::kSharing> sharing;
  const bool child_lanes = call.schedule.child_lanes;
  if (is_double) return child_lanes ? f(any, double{}, children) : f(any, double{}, positions);
  if constexpr (kAttention)
    if (call.schedule.folded) {
      const auto folded = [&](auto lanes) {
        if constexpr (kOwn) {
          if (in.C == 1 && in.D == 8) return f(SameStaticPose<1, 8>{}, float{}, lanes);
          if (in.C == 4 && in.D == 4) return f(SameStaticPose<4, 4>{}, float{}, lanes);
        }
        return f(SamePose{{int(in.C), int(in.D), int(in.D)}}, float{}, lanes);
      };
      return child_lanes ? folded(sharing) : folded(positions);
    }
  if constexpr (kOwn && std::is_same_v<Operands, Pooling>)
    if (!in.weight && is(1, 16, 16)) {
      const SameStaticPose<1, 16> pose;
      return !child_lanes                   ? f(pose, float{}, positions)
             : call.schedule.shared_weights ? f(pose, float{}, sharing)
                                            : f(pose, float{}, children);
    }
  if constexpr (kOwn)
    if (in.weight && !child_lanes) {
      if (is(4, 4, 4)) return f(StaticPose<4, 4, 4>{}, float{}, positions);
      if (is(1, 16, 16)) return f(StaticPose<1, 16, 16>{}, float{}, positions);
      if (is(1, 8, 16)) return f(StaticPose<1, 8, 16>{}, float{}, positions);
      if constexpr (kGaussian) {
        if (is(1, 64, 2)) return f(StaticPose<1, 64, 2>{}, float{}, positions);
        if (is(1, 2, 2)) return f(StaticPose<1, 2, 2>{}, float{}, positions);
      }
      if constexpr (kAttention) {
        if (is(6, 6, 6)) return f(StaticPose<6, 6, 6>{}, float{}, positions);
        if (is(8, 8, 8)) return f(StaticPose<8, 8, 8>{}, float{}, positions);
        if (is(1, 64, 64)) return f(StaticPose<1, 64, 64>{}, float{}, positions);
      }
    }
  if constexpr (kOwn && kGaussian)
    if (in.weight && call.schedule.shared_weights) {
      if (is(4, 4, 4)) return f(StaticPose<4, 4, 4>{}, float{}, sharing);
      if (is(1, 16, 16)) return f(StaticPose<1, 16, 16>{}, float{}, sharing);
      if (is(1, 8, 16)) return f(StaticPose<1, 8, 16>{}, float{}, sharing);
      if (is(1, 64, 2)) return f(StaticPose<1, 64, 2>{}, float{}, sharing);
      if (is(1, 2, 2)) return f(StaticPose<1, 2, 2>{}, float{}, sharing);
    }
  if constexpr (kOwn && kAttention)
    if (in.weight && child_lanes && !call.schedule.shared_weights) {
      if (is(4, 4, 4)) return f(StaticPose<4, 4, 4>{}, float{}, children);
      if (is(6, 6, 6)) return f(StaticPose<6, 6, 6>{}, float{}, children);
    }
  if (!child_lanes) return f(any, float{}, positions);
  return call.schedule.shared_weights ? f(any, float{}, sharing) : f(any, float{}, children);
}

template <class Call, class T, class Pose, Lanes kLane, template <class, class> class ForwardPolicy,
          template <class, class> class BackwardPolicy>
struct WorkerOf {
  static constexpr bool kForward = std::is_same_v<Call, ForwardCall<typename ForwardPolicy<T, T>::Operands>>;
  static constexpr bool kFolded = Pose::kIdentity && std::is_same_v<OperandsOf<Call>, Attention>;
  template <class T_, class X>
  using Forward = std::conditional_t<kFolded, FoldedForward<T_, X>, ForwardPolicy<T_, X>>;
  template <class T_, class X>
  using Backward = std::conditional_t<kFolded, FoldedBackward<T_, X>, BackwardPolicy<T_, X>>;
  using type =
      std::conditional_t<kForward, ForwardItem<T, Pose, kLane, Forward>, BackwardItem<T, Pose, kLane, Backward>>;
};

// The functions of a table: a worker lives in the thread's scratch memory while it goes through its range.
template <template <class, class> class ForwardPolicy, template <class, class> class BackwardPolicy>
struct Functions {
  using Operands = typename ForwardPolicy<float, float>::Operands;
  using Forward = ForwardCall<Operands>;
  using Backward = BackwardCall<Operands>;

  template <class Call, class T, class Pose, Lanes kLane>
  using Worker = typename WorkerOf<Call, T, Pose, kLane, ForwardPolicy, BackwardPolicy>::type;

  template <bool own, class Call, class Work>
  static void run(const Call& call, bool is_double, int64_t begin, int64_t end, void* scratch, Work&& work) {
    with_pose<own>(call, is_double, [&](auto pose, auto type, auto lanes) {
      Arena arena{static_cast<char*>(scratch)};
      Worker<Call, decltype(type), decltype(pose), decltype(lanes)::value> worker(call, pose, arena);
      for (int64_t k = begin; k < end; ++k) work(worker, k);
    });
  }
  template <bool own, class Call>
  static int64_t used(const Call& call, bool is_double) {
    return with_pose<own>(call, is_double, [&](auto pose, auto type, auto lanes) {
      Arena counter{nullptr};
      Worker<Call, decltype(type), decltype(pose), decltype(lanes)::value>(call, pose, counter);
      return counter.used;
    });
  }
  template <class Call>
  static int64_t scratch_bytes(const Call& call, bool is_double) {
    const int64_t of_items = used<true>(call, is_double), of_rows = used<false>(call, is_double);
    return of_items > of_rows ? of_items : of_rows;
  }

  static void forward(const Forward& call, bool is_double, int64_t begin, int64_t end, void* scratch) {
    run<true>(call, is_double, begin, end, scratch, [](auto& worker, int64_t item) { worker.run(item); });
  }
  static void forward_finish(const Forward& call, bool is_double, int64_t begin, int64_t end, void* scratch) {
    run<false>(call, is_double, begin, end, scratch, [](auto& worker, int64_t row) { worker.finish_row(row); });
  }
  static void backward_prepare(const Backward& call, bool is_double, int64_t begin, int64_t end, void* scratch) {
    run<false>(call, is_double, begin, end, scratch, [](auto& worker, int64_t row) { worker.prepare(row); });
  }
  static void backward(const Backward& call, bool is_double, int64_t begin, int64_t end, void* scratch) {
    run<true>(call, is_double, begin, end, scratch, [](auto& worker, int64_t item) { worker.run(item); });
  }
  static void backward_finish(const Backward& call, bool is_double, int64_t begin, int64_t end, void* scratch) {
    run<false>(call, is_double, begin, end, scratch, [](auto& worker, int64_t row) { worker.finish_row(row); });
  }
  static int64_t forward_scratch(const Forward& call, bool is_double) { return scratch_bytes(call, is_double); }
  static int64_t backward_scratch(const Backward& call, bool is_double) { return scratch_bytes(call, is_double); }
  static int64_t forward_state(const Forward& call) {
    if constexpr (std::is_same_v<Operands, Attention>)
      if (call.schedule.folded) return FoldedForward<float, float>::state_numbers(call);
    return ForwardPolicy<float, float>::state_numbers(call);
  }
  template <class Policy>
  static int64_t row_numbers(const Votes& in) {
    return Policy::numbers_before(in) + Policy::result_numbers(in, in.M);
  }
  static int64_t forward_results(const Forward& call) {
    if constexpr (std::is_same_v<Operands, Attention>)
      if (call.schedule.folded) return row_numbers<FoldedForward<float, float>>(call.votes);
    return row_numbers<ForwardPolicy<float, float>>(call.votes);
  }
  static int64_t backward_state(const Backward& call) { return BackwardPolicy<float, float>::state_numbers(call); }
  static int64_t backward_results(const Backward& call) {
    return BackwardPolicy<float, float>::result_numbers(call.votes, call.votes.M);
  }
  static bool own_pose(const Forward& call, bool is_double) {
    return with_pose<true>(call, is_double,
                           [](auto pose, auto, auto) { return !std::is_same_v<decltype(pose), DynamicPose>; });
  }

  static constexpr Kernels<Operands> table() {
    return {kLanes<float>,    kLanes<double>,   &forward,          &forward_finish,   &backward_prepare,
            &backward,        &backward_finish, &forward_scratch,  &backward_scratch, &forward_state,
            &forward_results, &backward_state,  &backward_results, &own_pose};
  }
};

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
