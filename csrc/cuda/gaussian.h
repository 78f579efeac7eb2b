// What the Gaussian pass loads in both directions.
#pragma once

#include "../algebra/gaussian.h"
#include "make_votes.h"

namespace fastcaps::gpu {

// The betas of a child for the lane's parents: the benefit of using it, and the cost of ignoring it.
template <class Pose, int R>
struct LaneBetas {
  const Lane<Pose, R>& lane;
  float use[Pose::kEach], ignore[Pose::kEach];

  FASTCAPS_DEVICE explicit LaneBetas(const Lane<Pose, R>& lane_, bool loads = true) : lane(lane_) {
    if (loads) load(0);
  }
  FASTCAPS_DEVICE void load(int i) {
    const BetaTables& betas = lane.args.betas;
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) {
      const bool exists = betas.use && lane.alive(p);
      const float *uses = static_cast<const float*>(betas.use), *ignores = static_cast<const float*>(betas.ignore);
      use[p] = exists ? uses[i * betas.use_stride_i + lane.m(p) * betas.use_stride_m] : 0.0f;
      ignore[p] = exists ? ignores[i * betas.ignore_stride_i + lane.m(p) * betas.ignore_stride_m] : 0.0f;
    }
  }
  FASTCAPS_DEVICE void next(int t) {
    if (lane.args.betas.use_stride_i || lane.args.betas.ignore_stride_i) load(Child(lane.args, t).i);
  }
};

// p = 1 / (2 variance): without a variance 1, for a plain squared distance; without a mean 0.
template <class Pose, int R>
FASTCAPS_DEVICE void load_precision(const Lane<Pose, R>& lane, int r, int p, Patch<Pose>& to) {
  const PassArgs& args = lane.args;
  if (args.variance) load_parent(lane, args.variance, r, p, to);
  const bool exists = lane.alive(r, p);
  each_number<Pose>([&](int i, int j) {
    const bool inside = args.mean && exists && lane.inside(i, j);
    to[i][j] = !inside ? 0.0f : args.variance ? gaussian::precision(to[i][j]) : 1.0f;
  });
}

}  // namespace fastcaps::gpu
