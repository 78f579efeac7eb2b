// The pooling pass, backward: docs/algebra.md. Of t_im the kernel is given what does not depend on the child;
// c_im = scale r_im t_im / |V_im| (without normalised keys: without |V|).
#pragma once

#include "backward.h"
#include "pooling_forward.h"

namespace fastcaps::gpu {

template <class Pose, int R, bool PLAIN>
struct PoolingBackward {
  static constexpr bool kSilences = true, kIdentity = true, kGates = true, kMeasures = false;
  Patches<Pose, R> query, dsums, dquery;
  float constant[R][Pose::kEach], shift[R][Pose::kEach];  // shift: the log-sum-exp, in units of log2

  FASTCAPS_DEVICE void load(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats) {
    each_tile<Pose, R>([&](int r, int p) {
      const Seat& seat = seats[lane.template seat<R>(r)];
      load_query<Pose>(a, lane, seat, p, 1.0f, query[r][p]);
      load_parent<Pose>(a, lane, a.dsums, seat, p, dsums[r][p]);
      each_number<Pose>([&](int i, int j) { dquery[r][p][i][j] = 0.0f; });
      constant[r][p] = load_scalar<Pose>(a, lane, a.dconstant, seat, p, 0.0f);
      const float logsumexp = load_scalar<Pose>(a, lane, a.logsumexp, seat, p, -INFINITY);
      shift[r][p] = logsumexp == -INFINITY ? INFINITY : logsumexp * kLog2E;  // nobody there: all shares are 0
    });
  }

  FASTCAPS_DEVICE bool dvote(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage,
                             const Found<Pose>& found, const Seat*, char*, Patches<Pose, R>& votes) {
    const bool asks = a.query.data;
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      const Seen seen = stage.seen[lane.template seat<R>(r)];
      float gain = 0.0f;
      FASTCAPS_UNROLL
      for (int p = 0; p < Pose::kEach; ++p) {
        const bool exists = seen.exists != 0.0f && lane.alive(a, p), counts = exists && seen.gate != 0.0f;
        const float t = dot<Pose>(a, dsums[r][p], votes[r][p]) + constant[r][p];
        float along = 0.0f, inverse = 1.0f;
        if (asks) {
          along = dot<Pose>(a, query[r][p], votes[r][p]);
          if (a.normalize) along *= inverse = inverse_length<Pose>(a, votes[r][p], exists);
        }
        const float free = exists ? exp2_fast(a.scale * kLog2E * along - shift[r][p]) : 0.0f;
        const float share = counts ? seen.gate * free : 0.0f;
        if (exists) gain += free * t;
        const float c = counts && asks && !a.detach ? a.scale * share * t * inverse : 0.0f;
        const float d = a.normalize ? c * along * inverse : 0.0f;
        each_number<Pose>([&](int i, int j) {
          float& vote = votes[r][p][i][j];
          if (counts) dquery[r][p][i][j] += c * vote;
          vote = counts ? pooling::dvote(share, dsums[r][p][i][j], c, query[r][p][i][j], d, vote) : 0.0f;
        });
      }
      if (a.dgate) put_gate<Pose, R>(a, lane, found, r, gain);
    }
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
