#include "schedule.h"

#include <algorithm>

namespace fastcaps {
namespace {

// Sizes that the figures in docs/performance.md were measured with. Votes of a block live in the second-level cache (1
// to 2 MiB a core on the machines measured), beside their weights and parents. If those of two children or more fit the
// first-level cache (32 to 48 KiB) beside the parents, a block has no more children.
constexpr int64_t kCloseBytes = 44 << 10;        // children, matrices, votes and parents of such a block
constexpr int64_t kVoteBytes = 384 << 10;        // votes kept at once, if a single child's do not need more
constexpr int64_t kVoteBytesMost = 1 << 20;      // beyond this a child's votes are computed twice instead
constexpr int64_t kStayBytes = 3 << 19;          // a row's children, with their votes, from iteration to iteration
constexpr int64_t kParentBytes = 1 << 20;        // parents of the tiles of a block
constexpr int64_t kWeightBytes = 64 << 10;       // a child's matrices beyond this are shared by several tiles
constexpr int64_t kPartialShare = 64;            // partial results of all items together: a part of all votes' bytes,
constexpr int64_t kPartialBytesLeast = 1 << 20;  // within these bounds
constexpr int64_t kPartialBytes = 32 << 20;
constexpr int64_t kWeightParts = 64 << 20;       // weight gradients of items that share their weights, all together
constexpr int64_t kItems = 64;                   // enough to keep the threads of a large machine busy
constexpr int64_t kOperationsPerItem = 1 << 17;  // less than this is not worth an item
// What a byte of a backward's partial results costs, in multiply-adds: it is allocated, cleared, added to and read.
constexpr double kOperationsPerByte = 12;

double votes_bytes(const Votes& in, const Task& task) {
  return double(in.positions()) * double(in.I) * double(in.parents_size()) * double(task.number);
}

// Bytes for partial results of a kind.
int64_t partial_bytes(const Votes& in, const Task& task) {
  return int64_t(std::clamp(votes_bytes(in, task) / kPartialShare, double(kPartialBytesLeast), double(kPartialBytes)));
}

void schedule_block(const Votes& in, const Task& task, int64_t rows, int64_t per_child, Schedule& schedule) {
  const int64_t vec = task.lanes * task.number, votes = in.parents_size() * vec;
  const int64_t weights = in.M * in.D * in.E * task.number;
  const int64_t parents = votes + (task.row.state + task.row.results) * vec;
  schedule.block_rows = weights > kWeightBytes ? std::clamp<int64_t>(kParentBytes / parents, 1, 4) : 1;
  schedule.block_rows = std::clamp<int64_t>(schedule.block_rows, 1, std::max<int64_t>(rows, 1));
  schedule.keep_votes = votes * schedule.block_rows <= kVoteBytesMost;
  const int64_t child = schedule.block_rows * (votes + per_child), least = child <= kVoteBytesMost / 4 ? 2 : 1;
  schedule.block_children = std::clamp<int64_t>(kVoteBytes / child, least, 16);
  if (!schedule.keep_votes) schedule.block_children = 4;
}

// Bytes of what is kept of a unit of children, one row of positions: poses, votes, logits.
int64_t unit_bytes(const Votes& in, const Task& task) {
  return task.lanes * task.number *
         (in.child_size() + (task.identity || task.folded ? 0 : in.parents_size()) + in.M + 2);
}

int64_t units(const Votes& in, const Task& task, bool child_lanes) {
  return child_lanes ? ceil_div(in.I, task.lanes) : in.I;
}

// Whether a row's children fit in cache, for all iterations.
bool fit(const Votes& in, const Task& task, bool child_lanes) {
  return task.iterations > 1 && units(in, task, child_lanes) * unit_bytes(in, task) <= kStayBytes;
}

// Children in the lanes that have all the same weights, which stay scalars: where positions are too few, or where the
// votes of one position's children fit in cache and those of a whole tile do not.
bool share_weights(const Votes& in, const Task& task) {
  if (!task.shared || task.number == 8 || in.I / in.G < task.lanes) return false;
  const bool stays = in.G == 1 && in.I >= 4 * task.lanes && fit(in, task, true) && !fit(in, task, false);
  return in.positions() * 2 <= task.lanes || stays;
}

// If positions are too few to fill the lanes, children do. If each child has its own weights, those are transposed
// first.
bool use_child_lanes(const Votes& in, const Task& task) {
  if (task.number == 8) return false;  // float64 has kernels for lanes of positions only
  return share_weights(in, task) || (!task.folded && in.positions() * 4 <= task.lanes && in.I >= task.lanes);
}

void schedule_block_of_child_lanes(const Votes& in, const Task& task, Schedule& schedule) {
  schedule.child_lanes = true;
  schedule.shared_weights = share_weights(in, task);
  schedule.row_groups = in.positions() > 0 ? 1 : 0;
  schedule.rows_per_group = schedule.block_rows = std::max<int64_t>(in.positions(), 1);
  const int64_t votes = in.parents_size() * task.lanes * task.number * schedule.block_rows;
  schedule.keep_votes = votes <= 2 * kVoteBytesMost;
  schedule.block_children = schedule.keep_votes ? std::clamp<int64_t>(kVoteBytesMost / 4 / votes, 1, 8) : 4;
}

// Children that share their weights: several rows at once save nothing, and each block ends with a sum over the lanes.
// So blocks should be long, if necessary too long for their votes to be kept.
void schedule_block_of_sharing_lanes(const Votes& in, const Task& task, Schedule& schedule) {
  schedule.child_lanes = schedule.shared_weights = true;
  schedule.block_rows = 1;
  const int64_t vec = task.lanes * task.number, votes = in.parents_size() * vec, least = task.row.results > 0 ? 4 : 1;
  schedule.keep_votes = least * votes <= kVoteBytesMost;
  schedule.block_children =
      std::clamp<int64_t>(schedule.keep_votes ? kVoteBytesMost / votes : kVoteBytes / (vec * in.M), least, 16);
}

// If all children of a row fit in cache, they are loaded once for all iterations. If votes are the children themselves
// (identity) or are never made (folded), none are kept, and blocks may be longer.
void let_children_stay(const Votes& in, const Task& task, Schedule& schedule) {
  if (task.identity || task.folded) {
    schedule.keep_votes = false;
    schedule.block_children =
        std::clamp<int64_t>(2 * kVoteBytes / std::max<int64_t>(schedule.block_rows * unit_bytes(in, task), 1), 1, 16);
  }
  schedule.stay = schedule.block_rows == 1 && fit(in, task, schedule.child_lanes) &&
                  (in.G == 1 || !(schedule.shared_weights || task.folded));
  if (!schedule.stay) return;
  schedule.keep_votes = !task.identity && !task.folded;
  schedule.block_children = units(in, task, schedule.child_lanes);
}

// Raises a cost for idle threads: by a sixteenth of the share by which a call takes longer because some threads finish
// their items early, on average over machines of 2 to 64 threads. Not by more: large machines are for larger calls, and
// no cut is worth much more work.
double with_idle_threads(double cost, int64_t items) {
  double longer = 0;
  for (const int64_t threads : {2, 8, 32, 64}) longer += double(threads * ceil_div(items, threads)) / 4;
  return cost * (1 + (longer / double(items) - 1) / 16);
}

// Calls f(ranges) for each count of ranges to compare: items just below a power of two leave few threads idle.
template <class F>
void each_number_of_ranges(int64_t row_groups, int64_t most, F&& f) {
  f(1);
  for (int64_t items = kItems / 8, last = 1; items <= 4 * kItems && last < most; items *= 2) {
    const int64_t ranges = std::min(items / std::max<int64_t>(row_groups, 1), most);
    if (ranges > last) f(last = ranges);
  }
}

int64_t operations(const Votes& in, int64_t positions, int64_t children) {
  return positions * children * in.M * (in.C * in.D * in.E + 2 * in.C * in.E);
}

}  // namespace

Schedule schedule_forward(const Votes& in, const Task& task) {
  Schedule schedule;
  schedule.folded = task.folded;
  const int64_t tiles = ceil_div(in.positions(), task.lanes), I = in.I;
  if (share_weights(in, task)) {
    schedule_block_of_sharing_lanes(in, task, schedule);
    // two positions read a group's matrices once, where there is more than one group
    schedule.rows_per_group = schedule.block_rows = task.folded && in.G > 1 ? std::min<int64_t>(in.positions(), 2) : 1;
    schedule.row_groups = ceil_div(in.positions(), std::max<int64_t>(schedule.block_rows, 1));
  } else if (use_child_lanes(in, task)) {
    schedule_block_of_child_lanes(in, task, schedule);
  } else {
    schedule_block(in, task, tiles, 0, schedule);
    const int64_t vec = task.lanes * task.number;
    const int64_t child = (in.parents_size() + in.child_size()) * vec + in.M * in.D * in.E * task.number;
    const int64_t close = (kCloseBytes - (task.row.state + task.row.results) * vec) / child;
    if (close >= 2) schedule.block_children = std::min(schedule.block_children, close);
    schedule.row_groups = ceil_div(tiles, schedule.block_rows);
    schedule.rows_per_group = schedule.block_rows = ceil_div(tiles, std::max<int64_t>(schedule.row_groups, 1));
  }
  let_children_stay(in, task, schedule);
  const int64_t positions = schedule.rows_per_group * (schedule.child_lanes ? 1 : task.lanes);
  const int64_t row_bytes = task.row.results * task.number * (schedule.child_lanes ? 1 : task.lanes);
  const bool by_group = (task.folded || schedule.shared_weights) && in.G >= kItems / 8;  // enough for many threads
  const int64_t most = std::min({
      by_group               ? in.G
      : schedule.child_lanes ? ceil_div(I, task.lanes)
                             : I / std::max<int64_t>(schedule.block_children, 2 * task.lanes),
      operations(in, positions, I) / kOperationsPerItem,
      partial_bytes(in, task) / std::max<int64_t>(schedule.rows() * row_bytes, 1),
  });
  const double work = double(operations(in, in.positions(), I));
  double best = 0;
  each_number_of_ranges(schedule.row_groups, most, [&](int64_t ranges) {
    const double parts = ranges > 1 ? double(ranges * schedule.rows() * row_bytes) : 0;  // a byte: 4 multiply-adds
    const double again = ranges > 1 && schedule.stay ? 2 : 1;  // votes that cannot stay are made in every iteration
    const double cost = with_idle_threads(work * again + 4 * parts, schedule.row_groups * ranges);
    if (best != 0 && cost >= best) return;
    best = cost;
    schedule.ranges = ranges;
  });
  if (schedule.ranges > 1) schedule.stay = false;
  return schedule;
}

// Groups of samples each need their own weight gradient, ranges of children their own parents' gradient: the cheapest
// mix of both that makes enough items and wastes few lanes.
Schedule schedule_backward(const Votes& in, const Task& task) {
  const int64_t L = in.Ho * in.Wo, lanes = task.lanes, number = task.number;
  const double weights = double(in.G * in.M * in.D * in.E) * double(number);
  const int64_t partials = std::min(2 * partial_bytes(in, task), kPartialBytes);
  const double copied = std::max(1.0, double(task.copied * number));
  const double work = 3.0 * double(operations(in, in.positions(), in.I));
  const double weight_parts = std::min(double(kWeightParts), votes_bytes(in, task) / 32);
  Schedule best;
  double best_cost = 0;
  Task once = task;
  once.iterations = 1;                                 // nothing stays from iteration to iteration
  const bool child_lanes = use_child_lanes(in, once);  // then all positions are one group
  const bool by_group = (task.folded || (child_lanes && share_weights(in, once))) && in.G > 1;
  const bool owned = in.G % in.N == 0 || by_group;  // no other range has a range's weights
  const int64_t most_ranges = by_group ? in.G : child_lanes ? ceil_div(in.N, lanes) : in.N;
  const int64_t most_groups = child_lanes ? 1 : std::clamp<int64_t>(in.B, 1, kItems);
  for (int64_t wanted = 1; wanted <= most_groups; wanted *= 2) {
    Schedule schedule;
    schedule.samples = ceil_div(in.B, wanted);
    schedule.row_groups = schedule.samples ? ceil_div(in.B, schedule.samples) : 0;
    schedule.rows_per_group = ceil_div(schedule.samples * L, lanes);
    const double filled =
        child_lanes ? 1 : double(in.positions()) / double(std::max<int64_t>(schedule.rows() * lanes, 1));
    if (child_lanes) {
      schedule_block_of_child_lanes(in, once, schedule);
      if (schedule.shared_weights) schedule_block_of_sharing_lanes(in, once, schedule);
    }
    const double row = double(task.row.results * number) * double(child_lanes ? 1 : lanes);
    const double room = std::max(1.0, row * double(schedule.rows()));
    const int64_t most = std::min<int64_t>(
        {most_ranges, int64_t(work / 3.0 / double(std::max<int64_t>(schedule.row_groups, 1) * kOperationsPerItem)),
         int64_t(double(partials) / room),
         int64_t(double(partials) / copied) / std::max<int64_t>(schedule.row_groups, 1),
         owned ? kItems : std::max<int64_t>(2, int64_t(weight_parts / weights))});
    each_number_of_ranges(schedule.row_groups, most, [&](int64_t ranges) {
      schedule.ranges = ranges;
      const double parts = double(owned ? schedule.row_groups : schedule.items());
      const double moved = 2 * parts * weights + double(schedule.items()) * copied + double(ranges) * room;
      const double cost = with_idle_threads(work / filled + kOperationsPerByte * moved, schedule.items());
      if (best_cost != 0 && cost >= best_cost) return;
      best_cost = cost;
      best = schedule;
    });
  }
  if (!child_lanes) {
    schedule_block(in, task, best.rows_per_group, in.M * in.D * in.E * number, best);
    const int64_t children = ceil_div(in.N, best.ranges) * in.window.kh * in.window.kw;  // of an item
    best.block_children = std::min(best.block_children, children);
  }
  if (task.identity) {  // nothing is kept, so longer blocks gain nothing
    best.keep_votes = false;
    best.block_children = std::min<int64_t>(best.block_children, 8);
  }
  if (task.folded) {  // row by row, without votes; of a unit of children only the shares are kept, of every iteration
    best.folded = true;
    best.keep_votes = false;
    best.block_rows = 1;
    best.block_children = std::clamp<int64_t>(kVoteBytesMost / (in.M * lanes * number * 2 * task.iterations), 1, 8);
  }
  best.weight_parts = owned ? best.row_groups : best.items();
  return best;
}

}  // namespace fastcaps
