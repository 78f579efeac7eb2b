// The poses that kernels are compiled for, in order of preference; whatever is none of them takes a free one.
#pragma once

#include "lanes.h"

namespace fastcaps::gpu {

//                            C   D   E  TE  V  columns parents stride
using Pose4x4 = FixedPose<4, 4, 4, 4, 4, 1, 32, 20>;
using Pose4x4Few = FixedPose<4, 4, 4, 4, 4, 1, 16, 20>;   // parents: two positions a warp
using Pose4x4Fewer = FixedPose<4, 4, 4, 4, 4, 1, 8, 20>;  // four
using Pose6x6 = FixedPose<6, 6, 6, 3, 1, 2, 16, 38>;
using Pose8x8 = FixedPose<8, 8, 8, 4, 4, 2, 16, 72>;
using Pose1x8 = FixedPose<1, 8, 16, 8, 4, 2, 16, 136>;
using Pose1x16 = FixedPose<1, 16, 16, 8, 4, 2, 16, 264>;
using Pose1x64 = FixedPose<1, 64, 64, 4, 4, 16, 2, 0>;
using PoseMatrix = FreePose<4, 4>;
using PoseVector = FreePose<1, 8>;

template <class Pose>
constexpr AttentionKernel describe(int positions, int threads, int blocks, void (*run)(const AttentionArgs)) {
  return {Pose::kC,
          Pose::kD,
          Pose::kE,
          Pose::kTileRows,
          Pose::kTileColumns,
          Pose::kColumns,
          Pose::kParents,
          Pose::kVector,
          Pose::kWeightCopy,
          Pose::kWeightStride,
          positions,
          threads,
          blocks,
          run};
}

}  // namespace fastcaps::gpu
