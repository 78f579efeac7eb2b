// The attention pass, forward: S_m = sum_i g_i r_im V_im with r_im = softmax over m of scale <Q_m, V_im>.
#pragma once

#include "forward.h"
#include "softmax.h"
#include "turns.h"

namespace fastcaps::gpu {

template <class Pose, int R, bool PLAIN>
struct AttentionForward {
  static constexpr bool kSilences = false, kIdentity = !PLAIN;
  Patches<Pose, R> query, sums;
  bool asks;  // there is a query; else all shares are 1 / M

  FASTCAPS_DEVICE void load(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats) {
    asks = PLAIN || a.query.data;
    each_tile<Pose, R>([&](int r, int p) {  // one call brings the scale with it, the turns of a routing do not
      load_query<Pose>(a, lane, seats[lane.template seat<R>(r)], p, PLAIN ? a.scale * kLog2E : 1.0f, query[r][p]);
      each_number<Pose>([&](int i, int j) { sums[r][p][i][j] = 0.0f; });
    });
  }

  FASTCAPS_DEVICE bool score(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, const Seat* seats,
                             char* shared, const Patches<Pose, R>& votes, float (&share)[R][Pose::kEach]) {
    if (!PLAIN && !asks) {
      each_tile<Pose, R>([&](int r, int p) { share[r][p] = 1.0f / float(a.M); });
      return true;
    }
    float logit[R][Pose::kEach], none[R];
    each_tile<Pose, R>([&](int r, int p) {
      logit[r][p] = dot<Pose>(a, query[r][p], votes[r][p]);
      if constexpr (!PLAIN) logit[r][p] *= a.scale * kLog2E;
    });
    return compete<Pose, R, 0, PLAIN>(a, lane, stage, seats, shared, logit, logit, share, none);
  }

  FASTCAPS_DEVICE void add(const PassArgs&, const Lane<Pose>& lane, const Stage<Pose>& stage,
                           const Patches<Pose, R>& votes, const float (&share)[R][Pose::kEach]) {
    each_tile<Pose, R>([&](int r, int p) {
      const Seen seen = stage.seen[lane.template seat<R>(r)];
      const float weight = share[r][p] * seen.gate;
      if (seen.gate != 0.0f)  // else it leaves no trace, whatever it is; nor does padding, whose gate is 0
        each_number<Pose>([&](int i, int j) { sums[r][p][i][j] += weight * votes[r][p][i][j]; });
    });
  }

  FASTCAPS_DEVICE void store(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats, int chunk) const {
    float* to = a.sums + chunk * a.positions * a.M * Pose::C_(a) * Pose::E_(a);
    each_tile<Pose, R>(
        [&](int r, int p) { store_parent<Pose>(a, lane, to, seats[lane.template seat<R>(r)], p, sums[r][p]); });
  }

  FASTCAPS_DEVICE void finish(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats, int turn) {
    each_tile<Pose, R>([&](int r, int p) {
      take_turn<Pose, false>(a, lane, seats[lane.template seat<R>(r)], p, turn, !asks, sums[r][p], query[r][p]);
    });
    asks = true;
  }
};

}  // namespace fastcaps::gpu
