// The poses that kernels are compiled for; any other pose takes a free one.
#pragma once

#include "tensor.h"

namespace fastcaps::gpu {

// clang-format off
//                               C   D   E  TE  V  columns, parents, each, stride, swaps
using Pose4x4x32 = FixedPose    <4,  4,  4,  4, 4,  1,  8, 4,   20>;  // 32 parents a warp, four positions
using Pose4x4x32Two = FixedPose <4,  4,  4,  4, 4,  1, 16, 2,   20>;  // 32 parents a warp, two positions
using Pose4x4x16 = FixedPose    <4,  4,  4,  4, 4,  1,  8, 2,   20>;
using Pose4x4x12 = FixedPose    <4,  4,  4,  4, 4,  1,  4, 3,   20>;
using Pose4x4x8 = FixedPose     <4,  4,  4,  4, 4,  1,  4, 2,   20>;
template <int PARENTS>
using Pose4x4Swapped = Turned<FixedPose<4, 4, 4, 4, 4, 1, PARENTS, 2, 20, true>>;
using Pose4x4x8One = FixedPose  <4,  4,  4,  4, 4,  1,  8, 1,   20>;  // a parent a lane, for passes that keep much of it
using Pose4x4x16One = FixedPose <4,  4,  4,  4, 4,  1, 16, 1,   20>;
using Pose4x4x32One = FixedPose <4,  4,  4,  4, 4,  1, 32, 1,   20>;
using Pose4x4x64 = FixedPose    <4,  4,  4,  4, 4,  1, 32, 2,   20>;
using Pose4x4x8Turned = Turned<Pose4x4x8One>;
using Pose4x4x16Turned = Turned<Pose4x4x16One>;
using Pose4x4x32Turned = Turned<Pose4x4x32One>;
using Pose6x6 = FixedPose       <6,  6,  6,  3, 1,  2, 16, 2,   38>;
using Pose8x8 = FixedPose       <8,  8,  8,  4, 4,  2, 16, 1,   72>;
using Pose1x8x12 = FixedPose    <1,  8, 16,  8, 4,  2,  4, 3,  136>;  // forward only: see ChildSums
using Pose1x8 = FixedPose       <1,  8, 16,  8, 4,  2, 16, 1,  136>;
using Pose1x16 = FixedPose      <1, 16, 16,  8, 4,  2, 16, 1,  264>;
using Pose1x16InPlace = FixedPose<1, 16, 16, 8, 4, 2, 16, 1,   0>;  // forward only: see walk_in_rounds
using Pose1x64 = FixedPose      <1, 64, 64,  4, 4, 16,  2, 1, 4096>;
using Pose1x64InPlace = FixedPose<1, 64, 64, 4, 4, 16,  2, 1,    0>;
using Pose1x16x64 = FixedPose   <1, 16, 64,  4, 4, 16,  2, 1, 1024>;
using Pose1x16x64InPlace = FixedPose<1, 16, 64, 4, 4, 16, 2, 1,  0>;
// clang-format on

// A single parent: every lane has its own position, and no lane waits for another.
template <int VECTOR>
struct SinglePose1x16 : FixedPose<1, 16, 16, 16, VECTOR, 1, 1, 1, 256> {
  static constexpr int kRowStride = 20;  // lanes' own rows lie on different banks
};

// PRODUCTS: tf32 products that make one product.
template <int PRODUCTS>
using Tensor4x4x32 = TensorPose<4, 4, PRODUCTS>;
template <int PRODUCTS>
using Tensor4x4x16 = TensorPose<4, 2, PRODUCTS>;
using Tensor4x4x32Widened = TensorPose<4, 4, 1, false>;  // backward
using Tensor4x4x16Widened = TensorPose<4, 2, 1, false>;
using Tensor6x6Widened = TensorPose<6, 1, 1, false>;
using Tensor8x8Widened = TensorPose<8, 1, 1, false>;
using Tensor6x6 = TensorPose<6, 1, 1>;
using Tensor8x8 = TensorPose<8, 1, 1>;
using Tensor1x8 = TensorPose1x8<5>;
template <int PRODUCTS>
using Tensor1x64 = TensorPose1x64<PRODUCTS>;
template <int PRODUCTS>
using Tensor1x64InPlace = TensorPose1x64<PRODUCTS, false>;
using PoseMatrix = FreePose<4, 4>;
using PoseVector = FreePose<1, 8>;

}  // namespace fastcaps::gpu
