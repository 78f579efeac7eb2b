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

// The portable x86 build is for processors from before 2013, where these kernels are not worth the compiler's time.
#if defined(__x86_64__) && !defined(__AVX2__)
inline constexpr bool kOwnPoses = false;
#else
inline constexpr bool kOwnPoses = true;
#endif

// The poses that have their own kernels, in float: the papers' (bench/workloads.py), for the lanes that the schedule
// gives them, and 1x16; of matrices as published layers store them, those of attention. All others share the general
// kernel: each takes two to four seconds of compiling.
template <class...>
struct Poses {};
template <class... Each>
using OwnPoses = std::conditional_t<kOwnPoses, Poses<Each...>, Poses<>>;
using P4x4 = StaticPose<4, 4, 4>;
using P6x6 = StaticPose<6, 6, 6>;
using P1x8 = StaticPose<1, 8, 16>;
using P1x16 = StaticPose<1, 16, 16>;
using OfAttention = OwnPoses<P4x4, P1x16, P1x8, P6x6, StaticPose<8, 8, 8>, StaticPose<1, 64, 64>>;
// CapsNet-Pytorch's DenseCapsule and its copies (transposed), Bielski's CapsLayer and Tsai et al.'s vectors (rows
// apart).
using OfTransposed = OwnPoses<TransposedPose<1, 8, 16>, TransposedPose<1, 16, 16>>;
using OfRowsApart = OwnPoses<RowsApartPose<1, 8, 16>, RowsApartPose<1, 64, 64>>;
using OfSharing = OwnPoses<P4x4, P1x16, P1x8, StaticPose<1, 64, 2>>;

Poses<> own_poses(...);
OfAttention own_poses(Attention, LanesAre<Lanes::kPositions>);
OwnPoses<P4x4, P6x6> own_poses(Attention, LanesAre<Lanes::kChildren>);
OwnPoses<P4x4, P1x8> own_poses(Pooling, LanesAre<Lanes::kPositions>);
OwnPoses<P4x4, P1x16, StaticPose<1, 2, 2>> own_poses(Gaussian, LanesAre<Lanes::kPositions>);
OfSharing own_poses(Gaussian, LanesAre<Lanes::kSharing>);

// Calls f(pose, compute type, what lanes are) with the first pose that has the call's sizes, or else `any`.
template <class Any, class Is, class F>
auto with_one_of(Poses<>, const Any& any, Is lanes, F&& f) {
  return f(any, float{}, lanes);
}
template <class First, class... Others, class Any, class Is, class F>
auto with_one_of(Poses<First, Others...>, const Any& any, Is lanes, F&& f) {
  if (any.C == First::C && any.D == First::D && any.E == First::E) {
    if constexpr (requires(First pose) { pose.row; })
      return f(First{{}, any.row}, float{}, lanes);
    else
      return f(First{}, float{}, lanes);
  }
  return with_one_of(Poses<Others...>{}, any, lanes, f);
}

// The same for a call. Work done once per row makes few votes, so it uses the general pose (`own` = false).
template <bool own, class Call, class F>
auto with_pose(const Call& call, F&& f) {
  using Operands = OperandsOf<Call>;
  const Votes& in = call.votes;
  const MatrixLayout& layout = in.matrices;
  DynamicPose any{int(in.C), int(in.D), int(in.E), layout.row};
  const auto with_lanes = [&](auto lanes) {
    constexpr Lanes kLane = decltype(lanes)::value;
    if constexpr (std::is_same_v<Operands, Attention> && kLane != Lanes::kChildren)
      if (kLane == Lanes::kSharing || call.schedule.folded) {  // sharing lanes are always folded
        using Own = OwnPoses<SameStaticPose<1, 8>, SameStaticPose<4, 4>>;
        const SamePose same{{int(in.C), int(in.D), int(in.D), in.D}};
        return with_one_of(std::conditional_t<own, Own, Poses<>>{}, same, lanes, f);
      }
    if constexpr (own && std::is_same_v<Operands, Pooling> && kLane != Lanes::kChildren)
      if (!in.weight) return with_one_of(OwnPoses<SameStaticPose<1, 16>>{}, any, lanes, f);
    if constexpr (!std::is_same_v<Operands, Attention> || kLane != Lanes::kSharing) {
      using Own = decltype(own_poses(Operands{}, lanes));
      // where lanes are children, matrices are gathered, and dense then
      const bool dense = in.has_dense_matrices() || kLane == Lanes::kChildren;
      if (dense) any.row = any.E;
      if constexpr (own && Operands::kReadsTransposed && kLane == Lanes::kPositions) {
        if (layout.transposed()) return with_one_of(OfTransposed{}, TransposedDynamicPose{any}, lanes, f);
        if (!dense) return with_one_of(OfRowsApart{}, any, lanes, f);
      }
      if (own && in.weight && dense) return with_one_of(Own{}, any, lanes, f);
      return f(any, float{}, lanes);
    }
  };
  const LanesAre<Lanes::kPositions> positions;
  const LanesAre<Lanes::kChildren> children;
  const bool child_lanes = call.schedule.child_lanes;
  if (in.is_double()) return f(any, double{}, positions);  // schedule.cpp gives doubles no lanes of children
  if (!child_lanes) return with_lanes(positions);
  return call.schedule.shared_weights ? with_lanes(LanesAre<Lanes::kSharing>{}) : with_lanes(children);
}

// The functions of a table: a worker lives in the thread's scratch memory while it goes through its range.
template <template <class, class> class ForwardPolicy, template <class, class> class BackwardPolicy>
struct Functions {
  using Operands = typename ForwardPolicy<float, float>::Operands;
  using Forward = ForwardCall<Operands>;
  using Backward = BackwardCall<Operands>;

  template <class Call, class T, class Pose, Lanes kLane>
  struct WorkerOf {
    static constexpr bool kFolded = Pose::kIdentity && std::is_same_v<Operands, Attention>;
    template <class T_, class X>
    using ForwardOf = std::conditional_t<kFolded, FoldedForward<T_, X>, ForwardPolicy<T_, X>>;
    template <class T_, class X>
    using BackwardOf = std::conditional_t<kFolded, FoldedBackward<T_, X>, BackwardPolicy<T_, X>>;
    using type = std::conditional_t<std::is_same_v<Call, Forward>, ForwardItem<T, Pose, kLane, ForwardOf>,
                                    BackwardItem<T, Pose, kLane, BackwardOf>>;
  };
  template <bool own, class Call, class Work>
  static void with_worker(const Call& call, Arena arena, Work&& work) {
    with_pose<own>(call, [&](auto pose, auto type, auto lanes) {
      typename WorkerOf<Call, decltype(type), decltype(pose), decltype(lanes)::value>::type worker(call, pose, arena);
      work(worker, arena);
    });
  }
  // work(worker, k) for all k of a range.
  template <bool own, class Call, auto work>
  static void run(const Call& call, int64_t begin, int64_t end, void* scratch) {
    with_worker<own>(call, Arena{static_cast<char*>(scratch)}, [&](auto& worker, const Arena&) {
      for (int64_t k = begin; k < end; ++k) work(worker, k);
    });
  }
  static constexpr auto item = [](auto& worker, int64_t item) { worker.run(item); };
  static constexpr auto prepare = [](auto& worker, int64_t row) { worker.prepare(row); };
  static constexpr auto finish = [](auto& worker, int64_t row) { worker.finish_row(row); };

  template <class Call>
  static int64_t scratch_bytes(const Call& call) {
    int64_t of_items = 0, of_rows = 0;
    with_worker<true>(call, Arena{nullptr}, [&](auto&, const Arena& arena) { of_items = arena.used; });
    with_worker<false>(call, Arena{nullptr}, [&](auto&, const Arena& arena) { of_rows = arena.used; });
    return of_items > of_rows ? of_items : of_rows;
  }

  static RowNumbers forward_row(const Forward& call) {
    const auto row = [&]<class Policy>(std::type_identity<Policy>) -> RowNumbers {
      const Votes& in = call.votes;
      return {Policy::state_numbers(call), Policy::numbers_before(in) + summed_numbers<Policy>(in, in.M)};
    };
    if constexpr (std::is_same_v<Operands, Attention>)
      if (call.schedule.folded) return row(std::type_identity<FoldedForward<float, float>>{});
    return row(std::type_identity<ForwardPolicy<float, float>>{});
  }
  static RowNumbers backward_row(const Backward& call) {
    using Policy = BackwardPolicy<float, float>;
    return {Policy::state_numbers(call), summed_numbers<Policy>(call.votes, call.votes.M)};
  }
  template <class Call>
  static bool own_pose(const Call& call) {
    return with_pose<true>(call, [](auto pose, auto, auto) { return !decltype(pose)::kGeneral; });
  }
  template <class Call>
  static bool wants_dense(const Call& call) {
    if (call.schedule.child_lanes || own_pose(call)) return false;
    Call other = call;
    other.votes.matrices = other.votes.dense_matrices();
    return own_pose(other) ||
           (call.votes.matrices.transposed() && !(Operands::kReadsTransposed && !other.votes.is_double()));
  }

  static constexpr Kernels<Operands> kTable = {kLanes<float>,
                                               kLanes<double>,
                                               &run<true, Forward, item>,
                                               &run<false, Forward, finish>,
                                               &run<false, Backward, prepare>,
                                               &run<true, Backward, item>,
                                               &run<false, Backward, finish>,
                                               &scratch_bytes<Forward>,
                                               &scratch_bytes<Backward>,
                                               &forward_row,
                                               &backward_row,
#ifdef FASTCAPS_GUARDS
                                               &own_pose<Forward>,
#endif
                                               &wants_dense<Forward>,
                                               &wants_dense<Backward>};
};

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
