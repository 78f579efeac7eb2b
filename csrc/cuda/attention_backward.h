// The attention pass, backward: docs/algebra.md. Votes are made again; h_im = <dS_m, V_im>.
#pragma once

#include "../algebra/attention.h"
#include "backward.h"
#include "softmax.h"

namespace fastcaps::gpu {

template <class Pose, int R, bool PLAIN>
struct AttentionBackward {
  static constexpr bool kSilences = true, kIdentity = !PLAIN, kGates = false, kMeasures = false;
  using Numbers = float[R][Pose::kEach];
  Patches<Pose, R> query, dsums, dquery;

  FASTCAPS_DEVICE void load(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats) {
    each_tile<Pose, R>([&](int r, int p) {
      const Seat& seat = seats[lane.template seat<R>(r)];
      load_query<Pose>(a, lane, seat, p, 1.0f, query[r][p]);
      load_parent<Pose>(a, lane, a.dsums, seat, p, dsums[r][p]);
      each_number<Pose>([&](int i, int j) { dquery[r][p][i][j] = 0.0f; });
    });
  }

  // Shares r, h, and mean = sum_m r_m h_m.
  FASTCAPS_DEVICE bool dscore(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, const Seat* seats,
                              char* shared, const Patches<Pose, R>& votes, Numbers& share, Numbers& h,
                              float (&mean)[R]) {
    Numbers logit;
    each_tile<Pose, R>([&](int r, int p) {
      logit[r][p] = PLAIN || a.query.data ? a.scale * kLog2E * dot<Pose>(a, query[r][p], votes[r][p]) : 0.0f;
      h[r][p] = dot<Pose>(a, dsums[r][p], votes[r][p]);
    });
    return compete<Pose, R, 1, PLAIN>(a, lane, stage, seats, shared, logit, h, share, mean);
  }

  FASTCAPS_DEVICE bool dvote(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, const Found<Pose>&,
                             const Seat* seats, char* shared, Patches<Pose, R>& votes) {
    const bool asks = PLAIN || a.query.data;  // else all shares are 1 / M
    Numbers share, h;
    float mean[R];
    if (!dscore(a, lane, stage, seats, shared, votes, share, h, mean)) return false;
    each_tile<Pose, R>([&](int r, int p) {
      const int at = lane.template seat<R>(r);
      const Seen seen = stage.seen[at];
      const bool open = seen.gate != 0.0f, counts = open && lane.alive(a, p);  // padding has a gate of 0
      const bool learns = seen.exists != 0.0f && (open || fabsf(mean[r]) < INFINITY);
      if (a.dgate && learns && lane.m(p) == 0 && lane.speaks_for_pose())
        add(a.dgate + Child(a, stage.t).cell(a, seats[at]), mean[r], a.alone_with_children);
      const float weight = counts ? share[r][p] * seen.gate : 0.0f;
      const bool pulls = counts && asks && !a.detach;
      const float da = pulls ? attention::dlogit(weight, h[r][p], mean[r], a.scale) : 0.0f;
      each_number<Pose>([&](int i, int j) {
        float& vote = votes[r][p][i][j];
        if (counts) dquery[r][p][i][j] += da * vote;
        vote = counts ? attention::dvote(weight, dsums[r][p][i][j], da, query[r][p][i][j]) : 0.0f;
      });
    });
    return true;
  }

  FASTCAPS_DEVICE void store(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats, int chunk) const {
    if (!a.dquery) return;
    float* to = a.dquery + chunk * a.positions * a.M * Pose::C_(a) * Pose::E_(a);
    each_tile<Pose, R>(
        [&](int r, int p) { store_parent<Pose>(a, lane, to, seats[lane.template seat<R>(r)], p, dquery[r][p]); });
  }
};

}  // namespace fastcaps::gpu
