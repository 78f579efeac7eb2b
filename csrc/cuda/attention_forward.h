// The attention pass, forward: S_m = sum_i g_i r_im V_im with r_im = softmax over m of scale <Q_m, V_im>.
#pragma once

#include "forward.h"
#include "softmax.h"

namespace fastcaps::gpu {

template <class Pose, int R, bool PLAIN>
struct AttentionForward {
  static constexpr bool kHushes = false, kIdentity = false;
  Tiles<Pose, R> query, sums;

  FASTCAPS_DEVICE void load(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats) {
    each_tile<Pose, R>([&](int r, int p) {
      load_query<Pose>(a, lane, seats[lane.template seat<R>(r)], p, a.scale * kLog2E, query[r][p]);
      each_number<Pose>([&](int i, int j) { sums[r][p][i][j] = 0.0f; });
    });
  }

  FASTCAPS_DEVICE void hear(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, const Seat* seats,
                            char* shared, const Tiles<Pose, R>& votes) {
    float share[R][Pose::kEach];
    if (PLAIN || a.query.data) {
      float logit[R][Pose::kEach], none[R];
      each_tile<Pose, R>([&](int r, int p) { logit[r][p] = dot<Pose>(a, query[r][p], votes[r][p]); });
      if (!compete<Pose, R, 0, PLAIN>(a, lane, stage, seats, shared, logit, logit, share, none)) return;
    } else {
      each_tile<Pose, R>([&](int r, int p) { share[r][p] = 1.0f / float(a.M); });
    }
    each_tile<Pose, R>([&](int r, int p) {
      const Seen seen = stage.seen[lane.template seat<R>(r)];
      const float weight = share[r][p] * seen.gate;
      if (PLAIN || seen.exists != 0.0f)
        each_number<Pose>([&](int i, int j) { sums[r][p][i][j] += weight * votes[r][p][i][j]; });
    });
  }

  FASTCAPS_DEVICE void store(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats, int chunk) const {
    float* to = a.sums + chunk * a.positions * a.M * Pose::C_(a) * Pose::E_(a);
    each_tile<Pose, R>(
        [&](int r, int p) { store_parent<Pose>(a, lane, to, seats[lane.template seat<R>(r)], p, sums[r][p], 1.0f); });
  }
};

}  // namespace fastcaps::gpu
