// The Gaussian pass, backward: docs/algebra.md, ../algebra/gaussian.h. The gain from a vote's weight is a parabola in
// the vote, of which the kernel is given u_m, s_m and c_m = dcounts_m - <s_m, variances_m>:
//   t_im = c_m + <u_m + s_m d_im, d_im> + (beta_use_im + beta_ignore_im) devidence_m
//
// u holds -2 s rest / N with rest_m = sum_i w_im d_im. On paper that is eps means_m; but means are rounded, and where a
// parent's variance is nothing beside its mean, that rounding is large beside d, and must cancel in u + 2 s d. Nor are
// the weights made again quite those that were counted. So where it may show (at `tight` positions), a launch before
// the others measures the rest and n, and puts u and s right.
#pragma once

#include "backward.h"
#include "gaussian_forward.h"

namespace fastcaps::gpu {

template <class Pose, int R, bool PLAIN>
struct GaussianBackward {
  static constexpr bool kSilences = true, kIdentity = true, kGates = true, kMeasures = true;
  using Numbers = float[R][Pose::kEach];
  Patches<Pose, R> mean, precision, means, u, s;  // precision: p = 1 / (2 variance)
  Patches<Pose, R> first, second;                 // sums of da d' and of da d'^2
  Numbers log_weight, constant, devidence, dlog_weight, duse, dignore;
  LaneBetas<Pose> betas;

  FASTCAPS_DEVICE void load(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats) {
    each_tile<Pose, R>([&](int r, int p) {
      const Seat& seat = seats[lane.template seat<R>(r)];
      each_number<Pose>([&](int i, int j) { mean[r][p][i][j] = first[r][p][i][j] = second[r][p][i][j] = 0.0f; });
      if (a.mean) load_parent<Pose>(a, lane, a.mean, seat, p, mean[r][p]);
      load_precision<Pose>(a, lane, seat, p, precision[r][p]);
      load_parent<Pose>(a, lane, a.means, seat, p, means[r][p]);
      load_parent<Pose>(a, lane, a.dsums, seat, p, u[r][p]);
      load_parent<Pose>(a, lane, a.dsquares, seat, p, s[r][p]);
      log_weight[r][p] = load_scalar<Pose>(a, lane, a.log_weight, seat, p, 0.0f);
      constant[r][p] = load_scalar<Pose>(a, lane, a.dconstant, seat, p, 0.0f);
      devidence[r][p] = load_scalar<Pose>(a, lane, a.devidence, seat, p, 0.0f);
      dlog_weight[r][p] = duse[r][p] = dignore[r][p] = 0.0f;
    });
    betas.load(a, lane, 0);
  }

  // Shares r, gains t, and average = sum_m r_m t_m.
  FASTCAPS_DEVICE bool dscore(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage, const Seat* seats,
                              char* shared, const Patches<Pose, R>& votes, Numbers& share, Numbers& gain,
                              float (&average)[R]) {
    Numbers logit;
    betas.next(a, lane, stage.t);
    each_tile<Pose, R>([&](int r, int p) {
      float distance = 0.0f, sum = 0.0f;
      each_number<Pose>([&](int i, int j) {
        distance += gaussian::distance(votes[r][p][i][j] - mean[r][p][i][j], precision[r][p][i][j]);
        sum += gaussian::gain(u[r][p][i][j], s[r][p][i][j], votes[r][p][i][j] - means[r][p][i][j]);
      });
      logit[r][p] = kLog2E * (log_weight[r][p] - (a.mean ? sum_pose<Pose>(a, distance) : 0.0f));
      gain[r][p] = constant[r][p] + sum_pose<Pose>(a, sum) + (betas.use[p] + betas.ignore[p]) * devidence[r][p];
    });
    return compete<Pose, R, 1, PLAIN>(a, lane, stage, seats, shared, logit, gain, share, average);
  }

  FASTCAPS_DEVICE bool dvote(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage,
                             const Found<Pose>& found, const Seat* seats, char* shared, Patches<Pose, R>& votes) {
    const bool asks = a.mean || a.log_weight;  // else all shares are 1 / M
    Numbers gain, share, weight;
    float average[R];
    if (!dscore(a, lane, stage, seats, shared, votes, share, gain, average)) return false;
    if (a.measured) {
      each_tile<Pose, R>([&](int r, int p) {
        const Seen seen = stage.seen[lane.template seat<R>(r)];
        if (seen.exists == 0.0f || seen.gate == 0.0f || !lane.alive(a, p)) return;
        each_number<Pose>([&](int i, int j) {
          first[r][p][i][j] += share[r][p] * seen.gate * (votes[r][p][i][j] - means[r][p][i][j]);
        });
        dlog_weight[r][p] += share[r][p] * seen.gate;
      });
      return false;
    }
    FASTCAPS_UNROLL
    for (int r = 0; r < R; ++r) {
      const Seen seen = stage.seen[lane.template seat<R>(r)];
      const bool exists = seen.exists != 0.0f;
      float open = 0.0f;
      FASTCAPS_UNROLL
      for (int p = 0; p < Pose::kEach; ++p) {
        const bool counts = exists && seen.gate != 0.0f && lane.alive(a, p);
        const float w = counts ? share[r][p] * seen.gate : 0.0f;
        const float da = counts && asks ? w * (gain[r][p] - average[r]) : 0.0f;
        weight[r][p] = w;
        open += (lane.m(p) == 0 ? average[r] : 0.0f) - betas.ignore[p] * devidence[r][p];
        dlog_weight[r][p] += da;
        duse[r][p] += w * devidence[r][p];
        dignore[r][p] += exists ? (w - seen.gate) * devidence[r][p] : 0.0f;
        each_number<Pose>([&](int i, int j) {
          float& vote = votes[r][p][i][j];
          const float from_mean = vote - mean[r][p][i][j], d = vote - means[r][p][i][j];
          if (counts) first[r][p][i][j] += da * from_mean, second[r][p][i][j] += da * from_mean * from_mean;
          vote = !counts ? 0.0f
                         : gaussian::dvote(w, u[r][p][i][j], s[r][p][i][j], d, da, precision[r][p][i][j], from_mean);
        });
      }
      if (a.dgate) put_gate<Pose, R>(a, lane, found, r, open);
    }
    differentiate_betas(a, lane, stage, weight);
    return true;
  }

  // Betas of every child; those that all children share are summed up in the lane.
  FASTCAPS_DEVICE void differentiate_betas(const PassArgs& a, const Lane<Pose>& lane, const Stage<Pose>& stage,
                                           const Numbers& weight) const {
    const bool uses = a.duse && a.use_stride_i, ignores = a.dignore && a.ignore_stride_i;
    if (!uses && !ignores) return;
    const int64_t row = int64_t(Child(a, stage.t).i) * a.M;
    FASTCAPS_UNROLL
    for (int p = 0; p < Pose::kEach; ++p) {
      float used = 0.0f, ignored = 0.0f;
      FASTCAPS_UNROLL
      for (int r = 0; r < R; ++r) {
        const Seen seen = stage.seen[lane.template seat<R>(r)];
        used += weight[r][p] * devidence[r][p];
        if (seen.exists != 0.0f) ignored += (weight[r][p] - seen.gate) * devidence[r][p];
      }
      used = sum_positions<Pose>(a, used);
      ignored = sum_positions<Pose>(a, ignored);
      if (lane.position != 0 || !lane.speaks_for_pose() || !lane.alive(a, p)) continue;
      if (uses) add(part_of(a, a.duse, a.dbeta_part) + row + lane.m(p), used, a.alone_with_weights);
      if (ignores) add(part_of(a, a.dignore, a.dbeta_part) + row + lane.m(p), ignored, a.alone_with_weights);
    }
  }

  // Put u and s right by the rest and n that were measured (n in dlog_weight).
  FASTCAPS_DEVICE void correct(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats) {
    each_tile<Pose, R>([&](int r, int p) {
      const Seat& seat = seats[lane.template seat<R>(r)];
      const float given = load_scalar<Pose>(a, lane, a.counts, seat, p, 0.0f) + a.eps;
      const float one = inverse_or_zero(dlog_weight[r][p] + a.eps), change = given * one;
      const bool tight = seat.position >= 0 && a.tight[seat.position] != 0.0f;  // not for its neighbours' sake
      each_number<Pose>([&](int i, int j) {
        if (!tight) return;
        const float more = a.eps * inverse_or_zero(given) * means[r][p][i][j] - one * first[r][p][i][j];
        u[r][p][i][j] = change * (u[r][p][i][j] + 2.0f * s[r][p][i][j] * more);
        s[r][p][i][j] *= change;
      });
      store_parent<Pose>(a, lane, a.measured, seat, p, u[r][p]);
      store_parent<Pose>(a, lane, a.measured_squares, seat, p, s[r][p]);
    });
  }

  FASTCAPS_DEVICE void store(const PassArgs& a, const Lane<Pose>& lane, const Seat* seats, int chunk) {
    if (a.measured) {
      correct(a, lane, seats);
      return;
    }
    const int64_t parents = chunk * a.positions * a.M, numbers = parents * Pose::C_(a) * Pose::E_(a);
    each_tile<Pose, R>([&](int r, int p) {
      const Seat& seat = seats[lane.template seat<R>(r)];
      each_number<Pose>([&](int i, int j) {
        const float two = 2.0f * precision[r][p][i][j];
        first[r][p][i][j] *= two;
        second[r][p][i][j] *= 0.5f * two * two;
      });
      if (a.dquery) store_parent<Pose>(a, lane, a.dquery + numbers, seat, p, first[r][p]);
      if (a.dvariance) store_parent<Pose>(a, lane, a.dvariance + numbers, seat, p, second[r][p]);
      if (a.dlog_weight) store_scalar<Pose>(a, lane, a.dlog_weight + parents, seat, p, dlog_weight[r][p]);
      if (a.duse && !a.use_stride_i) store_scalar<Pose>(a, lane, a.duse + parents, seat, p, duse[r][p]);
      if (a.dignore && !a.ignore_stride_i) store_scalar<Pose>(a, lane, a.dignore + parents, seat, p, dignore[r][p]);
    });
  }
};

}  // namespace fastcaps::gpu
