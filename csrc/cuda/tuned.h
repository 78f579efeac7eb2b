// Choices that were faster on a device than what the schedule computes: data, found by measuring (bench/sweep.py).
//
// The first row of kTuned that a call matches is followed; a call that matches none, or cannot have the row's choice
// (its kernel is not built, shared memory is too small, sums must have one order), is cut as the schedule computes it.
// A device is known by what schedules depend on: its multiprocessors and a block's largest shared memory. To add a row:
// measure the variants of a call, and write down the winner's FASTCAPS_SCHEDULE with the ranges that it was measured
// in. A kernel that no schedule takes by itself is listed with Named instead of Built (forward.h).
#pragma once

#include <array>
#include <span>
#include <string_view>

#include "schedule.h"

namespace fastcaps::gpu {

struct Range {
  int64_t least = 0, most = int64_t(1) << 62;

  constexpr bool holds(int64_t number) const { return least <= number && number <= most; }
};

struct Tuned {
  int64_t shared_limit;   // bytes: 227 << 10 on sm_90 and sm_100, 163 << 10 on sm_80, 99 << 10 on sm_86, sm_89, sm_120
  Range multiprocessors;  // 132 on an H100 or H200
  std::string_view op;    // "attention", ...
  bool backward;
  int64_t C, D, E;
  Storage storage;
  int products;                        // see Task
  Range positions, children, parents;  // B * Ho * Wo; I; M
  Choice choice;
};

inline constexpr std::array<Tuned, 0> kTuned{};  // no figures yet

// The choice of the first row for a call; null if there is none. Rows are of votes with weights.
inline const Choice* tuned(std::span<const Tuned> rows, const Task& task, const Votes& v, const Machine& machine) {
  for (const Tuned& row : rows)
    if (!task.identity && row.shared_limit == machine.shared_limit &&
        row.multiprocessors.holds(machine.multiprocessors) && row.op == task.pass->op &&
        row.backward == task.backward && row.C == v.C && row.D == v.D && row.E == v.E && row.storage == v.storage &&
        row.products == task.products && row.positions.holds(v.positions()) && row.children.holds(v.I) &&
        row.parents.holds(v.M))
      return &row.choice;
  return nullptr;
}

}  // namespace fastcaps::gpu
