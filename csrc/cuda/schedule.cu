#include "schedule.h"

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "softmax.h"

#ifdef FASTCAPS_EXPERIMENTS
#include "experiments.h"
#endif

namespace fastcaps::gpu {

PassKernels attention_forward_kernels(), attention_backward_kernels(), pooling_forward_kernels(),
    pooling_backward_kernels(), gaussian_forward_kernels(), gaussian_backward_kernels();

namespace {

const Pass kPasses[] = {
    {"attention", &attention_forward_kernels, &attention_backward_kernels, true, false},
    {"pooling", &pooling_forward_kernels, &pooling_backward_kernels, false, true},
    {"gaussian", &gaussian_forward_kernels, &gaussian_backward_kernels, true, true},
};

int64_t aligned(int64_t bytes, int64_t to = 16) { return ceil_div(bytes, to) * to; }

int64_t power_of_two(int64_t at_least) {
  int64_t power = 1;
  while (power < at_least) power *= 2;
  return power;
}

struct Lanes {
  int columns, rows;
  int parents;     // of a warp
  int64_t padded;  // values of a parent's pose that the lanes hold
};

// How a kernel's lanes would share these poses; no columns if they cannot.
Lanes lanes_of(const PassKernel& kernel, int64_t C, int64_t D, int64_t E, int64_t M) {
  if (kernel.C) {
    if (kernel.C != C || kernel.D != D || kernel.E != E) return {};
    return {kernel.columns, 1, kernel.parents * kernel.each, C * E};
  }
  const int64_t rows = power_of_two(ceil_div(C, kernel.patch_rows));
  const int64_t columns = power_of_two(ceil_div(E, kernel.patch_columns));
  if (rows * columns > 32) return {};
  const int64_t parents = std::min(32 / (rows * columns), power_of_two(M));
  return {int(columns), int(rows), int(parents), rows * kernel.patch_rows * columns * kernel.patch_columns};
}

std::string n(int64_t number) { return std::to_string(number); }

bool large(const PassKernel& kernel) { return kernel.D * kernel.E >= 16 * 64; }

// The kernel of a name that can take the call; null if there is none.
const PassKernel* named(const PassKernels& kernels, std::string_view name, const Votes& v, const Task& task) {
  for (int k = 0; k < kernels.count; ++k)
    if (name_of_instance(kernels.begin[k]) == name && takes(kernels.begin[k], v, task)) return &kernels.begin[k];
  return nullptr;
}

// A block for all parents first: several would make every vote twice. (Of large matrices they come anyway: see
// compute.) Then tensor cores, where values may be rounded; then a kernel for just this pose (free ones are last in the
// lists); then few parents should take few lanes, few positions few of a lane's, and a free kernel's tile should have
// little padding.
const PassKernel* choose(const PassKernels& kernels, const Votes& v, const Task& task) {
  const PassKernel* best = nullptr;
  Lanes best_lanes{};
  bool best_splits = false;
  for (int k = 0; k < kernels.count; ++k) {
    const PassKernel& kernel = kernels.begin[k];
    const Lanes lanes = lanes_of(kernel, v.C, v.D, v.E, v.M);
    if (kernel.by_name || !takes(kernel, v, task)) continue;
    const auto fits_better = [&] {
      if (!kernel.C) return !best->C && lanes.padded < best_lanes.padded;
      return best_lanes.parents < std::min<int64_t>(v.M, lanes.parents) ||
             (best_lanes.parents == lanes.parents && best->positions > v.positions());
    };
    const bool splits = !kernel.C || (!large(kernel) && task.pass->parents_compete &&
                                      v.M > int64_t(kernel.threads / kWarp) * lanes.parents);
    const bool better = !best || splits < best_splits ||
                        (splits == best_splits &&
                         (kernel.products > best->products || (kernel.products == best->products && fits_better())));
    if (better) best = &kernel, best_lanes = lanes, best_splits = splits;
  }
  return best;
}

constexpr int64_t kReserved = 1024;  // bytes of every block's shared memory that the system reserves
constexpr int64_t kLine = 128;  // bytes: where kernels change single bits of addresses, memory begins at a multiple
constexpr int kOffsetBytes = kOffsets * sizeof(Offset);

// Bytes of shared memory: a part for each child of a stage, and a fixed part. In half precision a stage has the values
// as they are stored; if the kernel needs float, one place for all stages has them widened.
struct Shared {
  int64_t child_rows, weight, seen, dchildren, dweight, dgate, exchange, fixed;
  bool narrow, widens, slots;

  Shared(const Schedule& c, const Votes& v, const Task& task) {
    const bool backward = task.backward;
    const PassKernel& kernel = *c.kernel;
    narrow = v.storage != Storage::kFloat32, widens = narrow && !kernel.stored;
    const int64_t any = int64_t(c.rows) * kernel.patch_rows * ceil_div(v.D, kernel.vector) * kernel.vector;
    child_rows = c.tile_size * (kernel.C ? kernel.child_stride : any) * 4;
    weight = task.identity ? 0 : int64_t(c.warps_parents) * kernel.each * kernel.group_stride * 4;
    seen = c.tile_size * int64_t(sizeof(Seen));
    const int64_t block_parents = int64_t(c.warps_parents) * c.parents;
    const bool meets_gradients =
        backward && (c.warps_parents > 1 || kernel.weight_stride == 0);  // else lanes add to memory themselves
    dchildren = meets_gradients ? child_rows * c.warps_parents : 0;
    dgate = meets_gradients && task.pass->collects_gates ? int64_t(c.tile_size) * c.warps_parents * 4 : 0;
    const bool weighs = backward && kernel.C && !task.identity;
    slots = weighs && kernel.slot_stride > 0;  // parts of dW; else dL/dV
    dweight = slots    ? c.warps_positions * block_parents * kernel.slot_stride * 4
              : weighs ? block_parents * c.tile_size * (kernel.products ? kVoteRow : v.E) * 4
                       : 0;
    const bool meets = c.warps_parents > 1 && task.pass->parents_compete;
    exchange = meets ? 2 * int64_t(c.warps_parents) * c.tile_size *
                           int64_t(backward ? sizeof(SoftmaxPart<1>) : sizeof(SoftmaxPart<0>))
                     : 4 * kernel.threads / kWarp;  // a word for each warp: see any_thread
    const int64_t turn = slots && kernel.products ? c.threads() / kWarp * kTurn * 4 : 0;
    fixed = c.tile_size * int64_t(sizeof(Position)) + kOffsetBytes + aligned(exchange) + turn + 2 * kLine;
  }
  int64_t children(int64_t stage) const { return ceil_div(stage * child_rows, 32) * 32; }  // half of it is aligned too
  int64_t floats(int64_t stage) const { return children(stage) + ceil_div(stage * weight, 32) * 32; }
  int64_t stored(int64_t stage) const { return floats(stage) / (narrow ? 2 : 1); }
  int64_t bytes(int64_t stage, int64_t stages, bool late_weights) const {
    return stages * (stored(stage) + aligned(stage * seen)) + (widens ? floats(stage) : 0) +
           aligned(stage * dchildren) + (late_weights ? 2 : 1) * aligned(stage * dweight) + aligned(stage * dgate) +
           fixed;
  }
};

// Places in shared memory for `stage` children at a time.
void place(Schedule& c, const Shared& shared) {
  c.shared_weight = int(shared.children(c.stage));
  c.shared_seen = int(shared.stored(c.stage));
  c.shared_stage = c.shared_seen + int(aligned(c.stage * shared.seen));
  c.shared_float = shared.widens ? c.stages * c.shared_stage : 0;
  c.float_stage = shared.widens ? 0 : c.shared_stage;
  c.shared_dchildren = c.stages * c.shared_stage + (shared.widens ? int(shared.floats(c.stage)) : 0);
  c.shared_dweight = int(aligned(c.shared_dchildren + aligned(c.stage * shared.dchildren), kLine));
  c.shared_dgate = c.shared_dweight + (c.late_weights ? 2 : 1) * int(aligned(c.stage * shared.dweight));
  c.shared_tile = c.shared_dgate + int(aligned(c.stage * shared.dgate));
  c.shared_offset = c.shared_tile + int(aligned(c.tile_size * int64_t(sizeof(Position))));
  c.shared_exchange = c.shared_offset + kOffsetBytes;
  c.shared_turn = int(aligned(c.shared_exchange + aligned(shared.exchange), kLine));
  c.shared_bytes = shared.bytes(c.stage, c.stages, c.late_weights);
}

constexpr int64_t kParts = 64 * (1 << 20);  // bytes of all parts of dW, about

// If the order of sums is fixed, every group of tiles (and every range of children, if ranges share weights or a bias)
// has its own part of the gradients of weights and bias. This limits the size of all parts. Ranges that share nothing
// only cost parts of dQ, so there are enough of them to keep the multiprocessors busy.
void keep_parts_small(Schedule& c, const Votes& v, const Bias& bias, int64_t wanted, int64_t least) {
  const int64_t bytes = 4 * (v.G * v.M * v.D * v.E + bias.numbers);
  const int64_t parts = std::max<int64_t>(bytes > kParts / 4 ? 4 : 1, kParts / bytes);
  c.parts_by_chunk = v.G < v.I || bias.shared;
  if (!c.parts_by_chunk) {
    c.groups = std::min(c.tiles, parts);
    const int64_t most = std::min(v.I / least, kParts / (4 * v.positions() * v.parents_size() + 1));
    c.chunks = int(std::clamp<int64_t>(wanted / c.groups, 1, std::max<int64_t>(1, most)));
  } else {
    c.chunks = int(std::min<int64_t>(c.chunks, parts));
  }
  c.chunk_children = int(ceil_div(ceil_div(v.I, c.chunks), c.stage) * c.stage);
  c.chunks = int(ceil_div(v.I, c.chunk_children));
  if (c.parts_by_chunk) c.groups = std::min(c.tiles, std::max<int64_t>(1, parts / c.chunks));
}

// How long a multiprocessor takes for some blocks, `fitting` of them at a time; a warp takes 1 for one child. Four
// schedulers share the warps as evenly as possible; one with a single warp often waits for it.
double time(int64_t blocks, int64_t fitting, int64_t warps) {
  const auto round = [&](int64_t together) {
    const int64_t each = ceil_div(together * warps, 4);
    return each == 1 ? 1.4 : each == 2 ? 2.2 : double(each);
  };
  return double(blocks / fitting) * round(fitting) + (blocks % fitting ? round(blocks % fitting) : 0.0);
}

// Issue slots that a warp takes for one child, about: multiply-adds of its lanes, and a fifth for all else.
double work(const PassKernel& kernel, int64_t D, bool backward) {
  const double votes = double(kernel.positions) * kernel.each * kernel.patch_rows * kernel.patch_columns;
  return votes * double(backward ? 3 * D + 5 : D + 2) * 1.2;
}

// What bringing a child to shared memory takes of each of the block's warps: some slots for every copy of 16 bytes.
double staging(const Schedule& c, const Votes& v, bool identity) {
  const double weights = identity || c.kernel->weight_stride == 0 ? 0 : double(c.warps_parents) * c.parents * v.D * v.E;
  return (weights + double(c.tile_size * v.child_size())) / 4 * 8 / c.threads();
}

constexpr double kStart = 2000;          // cycles until a block's first child is there
constexpr double kBytesOfACycle = 1600;  // of device memory

// Chooses the fastest number of warps on positions; among equals the largest, since they share the weights. Returns
// false if not even one warp fits into shared memory, or if what was chosen cannot be: then `why_not` says what.
bool spread(Schedule& c, const Votes& v, const Task& task, const Bias& bias, int most, const Machine& machine,
            const Choice& choice, std::string& why_not) {
  const PassKernel& kernel = *c.kernel;
  const int positions_of_warp = kernel.positions * (32 * kernel.each / (c.columns * c.rows * c.parents));
  double best = -1;
  if (choice.warps_positions > most) why_not = "it has at most " + n(most) + " warps on positions";
  for (int warps = most; warps >= 1; --warps) {
    if (choice.warps_positions && warps != choice.warps_positions) continue;
    Schedule trial = c;
    trial.warps_positions = warps;
    trial.tile_size = warps * positions_of_warp;
    trial.tiles = ceil_div(std::max<int64_t>(v.positions(), 1), trial.tile_size);
    if (warps > 1 && (warps - 1) * positions_of_warp >= v.positions()) {
      why_not = "of " + n(warps) + " warps on positions one would have nothing to do";
      continue;
    }
    const Shared shared(trial, v, task);
    const int64_t least = shared.bytes(std::max(1, choice.stage), 2, false);
    if (least > machine.shared_limit) {
      why_not = "it takes " + n(least) + " bytes of shared memory";
      continue;
    }
    const int64_t resident = std::max<int64_t>(1, kernel.threads * kernel.blocks / trial.threads());
    int64_t stage = choice.stage ? choice.stage : kMostChildren, stages = kMostStages;
    bool late = false;
    const auto bytes = [&] { return shared.bytes(stage, stages, late) + kReserved; };
    const auto fits = [&] {
      // Three stages, then two; with dW added up a stage later, then at once.
      for (int way = shared.slots ? 0 : 2; way < 4; ++way) {
        stages = kMostStages - way % 2, late = way < 2;
        if (bytes() * resident <= machine.shared_limit * 3 / 4) return true;  // the rest is a cache
      }
      return false;
    };
    while (!fits() && stage > 1 && !choice.stage) stage /= 2;
    const int64_t fitting = std::min(resident, std::max<int64_t>(1, (machine.shared_limit + kReserved) / bytes()));
    trial.stage = int(stage), trial.stages = int(stages), trial.late_weights = late;
    trial.carveout = int(ceil_div(100 * fitting * bytes(), machine.shared_limit + kReserved));
    trial.groups = choice.groups ? choice.groups : trial.tiles;
    if (trial.groups > trial.tiles) {
      why_not = "it has " + n(trial.tiles) + " tiles, fewer than groups";
      continue;
    }
    // One range of children, or several where that fills the last round better or positions are few.
    const int64_t blocks = trial.tiles * trial.parent_blocks, wanted = 2 * machine.multiprocessors * fitting;
    const int64_t worth = std::max<int64_t>(2 * stage, 8);  // children that are worth a block
    const int64_t most = choice.chunks ? choice.chunks : std::max<int64_t>(1, v.I / worth);
    std::vector<int64_t> candidates{1, 2, 3, 4, wanted / 2 / blocks, wanted / blocks};
    if (choice.chunks) candidates = {choice.chunks};
    for (const int64_t chunks : candidates) {
      trial.chunk_children = int(ceil_div(ceil_div(v.I, std::clamp<int64_t>(chunks, 1, most)), stage) * stage);
      trial.chunks = int(ceil_div(v.I, trial.chunk_children));
      const int64_t each = ceil_div(blocks * trial.chunks, machine.multiprocessors);
      const double slots = work(kernel, v.D, task.backward), staged = staging(trial, v, task.identity);
      // Sums of ranges are stored, read again and added up.
      const double parts = 8.0 * (trial.chunks - 1) * double(v.positions() * v.parents_size()) / kBytesOfACycle;
      const double cost =
          time(each, fitting, trial.threads() / 32) * (trial.chunk_children * (1 + staged / slots) + kStart / slots) +
          parts / slots;
      if (choice.chunks && trial.chunks != chunks) {
        why_not = "its " + n(v.I) + " children make no " + n(chunks) + " ranges of whole stages";
        continue;
      }
      if (task.whole && trial.chunks > 1) {
        why_not = "one block sees all children where one launch makes all iterations";
        continue;
      }
      if (best >= 0 && cost >= best) continue;
      best = trial.cost = cost;
      c = trial;
      if (task.backward && task.ordered) keep_parts_small(c, v, bias, wanted, worth);
      place(c, shared);
    }
  }
  return best >= 0;
}

// Shared memory of a block on the smallest of the GPUs that the kernels are built for.
constexpr int64_t kLeastShared = 99 * 1024;

// The fastest schedule, by estimate, that has what was chosen; without a kernel if there is none.
Schedule compute(const Task& task, const Votes& v, const Bias& bias, const Machine& machine, const Choice& choice,
                 std::string& why_not) {
  Schedule c{};
  if (!fits_30_bits(v)) return c;
  const PassKernels kernels = task.pass->kernels(task.backward);
  c.kernel = choice.kernel.empty() ? choose(kernels, v, task) : named(kernels, choice.kernel, v, task);
  if (!c.kernel && !choice.kernel.empty()) why_not = "no kernel " + std::string(choice.kernel) + " takes this call";
  if (!c.kernel) return c;
  const PassKernel& kernel = *c.kernel;
  const Lanes lanes = lanes_of(kernel, v.C, v.D, v.E, v.M);
  c.columns = lanes.columns, c.rows = lanes.rows, c.parents = lanes.parents;
  const int most_warps = kernel.threads / 32;
  // Large weights are read for every tile: better many positions than many parents, though the softmax then
  // takes separate launches.
  const bool few_parents = large(kernel) && v.positions() > 32;
  // If the order of sums is fixed, only one warp may add to memory by itself.
  const bool ordered = task.backward && task.ordered, single = ordered && (!kernel.C || bias.numbers > 0);
  if (ordered && (choice.chunks || choice.groups))
    why_not = "ranges of children and groups of tiles follow from the order of sums";
  else if (choice.warps_parents > most_warps || choice.warps_parents > ceil_div(v.M, c.parents))
    why_not = "it has at most " + n(std::min<int64_t>(most_warps, ceil_div(v.M, c.parents))) + " warps on parents";
  else if (choice.stage > kMostChildren || choice.stage != (choice.stage & -choice.stage))
    why_not = "a stage has 1, 2, 4 or 8 children";
  else
    for (int64_t together = few_parents ? 1 : most_warps; together >= 1; together /= 2) {
      // Large children may leave room for few positions: then a free pose's lanes all take parents, some of them none.
      if (together == 1 && !kernel.C) c.parents = 32 / (c.columns * c.rows);
      const int64_t warps = ceil_div(v.M, c.parents);
      c.warps_parents = choice.warps_parents ? choice.warps_parents : int(ceil_div(warps, ceil_div(warps, together)));
      c.parent_blocks = int(ceil_div(warps, c.warps_parents));
      const int barriers = c.warps_parents > 1 ? 15 : most_warps;  // warps that share parents meet at one
      const int most = single ? 1 : std::min(most_warps / c.warps_parents, barriers);
      if (spread(c, v, task, bias, most, machine, choice, why_not)) return c;
      if (choice.warps_parents) break;
    }
  c.kernel = nullptr;
  return c;
}

}  // namespace

const Pass* pass_of(const std::string& op) {
  for (const Pass& pass : kPasses)
    if (op == pass.op) return &pass;
  return nullptr;
}

std::string refusal(const Pass& pass, int64_t C, int64_t D, int64_t E, bool identity) {
  const auto pose = [&] { return n(C) + " x " + n(D) + " children and " + n(C) + " x " + n(E) + " parents"; };
  const Votes one{1, 1, 1, 1, C, D, 1, 1, 1, 32, E, 1, {1, 1, 1, 1, 0, 0, 1, 1}};
  if (!choose(pass.forward(), one, {.pass = &pass, .identity = identity}))
    return "its 32 lanes hold a parent's pose of at most 512 numbers (16 a lane, or 8 of one row), got " + pose();
  std::string ignored;
  const Task backward{.pass = &pass, .backward = true, .identity = identity};
  if (!compute(backward, one, {}, {1, kLeastShared}, {}, ignored).kernel)
    return "its shared memory does not hold so large a pose, got " + pose();
  return "";
}

bool fits_30_bits(const Votes& v) {
  constexpr int64_t most = int64_t(1) << 30;
  if (!v.is_countable()) return false;  // the products below would overflow
  return v.I < most && v.M < most && v.H * v.W < most && v.C * v.D * v.M < most && v.Ho * v.Wo < most;
}

std::string name_of_instance(const PassKernel& kernel) {
  const std::string free = kernel.C ? "" : "any" + n(kernel.patch_rows) + "x" + n(kernel.patch_columns) + "-";
  const std::string lanes = kernel.C ? n(kernel.parents) + "x" + n(kernel.each) + "x" : "";
  return free + lanes + n(kernel.positions) + "-" + n(kernel.threads) + "x" + n(kernel.blocks) +
         (kernel.products == 3 ? "-3xtf32"
          : kernel.products    ? "-tf32"
                               : "");
}

bool takes(const PassKernel& kernel, const Votes& v, const Task& task) {
  return lanes_of(kernel, v.C, v.D, v.E, v.M).columns &&
         (!kernel.products || (kernel.products == task.products && !task.identity));
}

bool forward_rounds(Task task, const Votes& v) {
  task.backward = false;
  const PassKernel* kernel = choose(task.pass->kernels(false), v, task);
  return v.storage == Storage::kFloat32 && kernel && kernel->products == 1;
}

Schedule make_schedule(const Task& task, const Votes& v, const Bias& bias, const Machine& machine,
                       std::string* why_not) {
  // All that a schedule depends on.
  using Key = std::array<int64_t, 25>;
  const Key key{reinterpret_cast<intptr_t>(task.pass),
                task.backward,
                task.products,
                task.ordered,
                task.identity,
                task.whole,
                v.B,
                v.H,
                v.W,
                v.N,
                v.C,
                v.D,
                v.Ho,
                v.Wo,
                v.I,
                v.M,
                v.E,
                v.G,
                int64_t(v.storage),
                v.window.kh,
                v.window.kw,
                bias.numbers,
                bias.shared,
                machine.multiprocessors,
                machine.shared_limit};
  constexpr size_t kMost = 256;
  static thread_local std::map<Key, Schedule> kept;
#ifdef FASTCAPS_EXPERIMENTS
  const Forced& forced = Forced::now();
  static thread_local std::string kept_with;
  if (kept_with != forced.text) kept.clear(), kept_with = forced.text;
#endif
  if (const auto found = kept.find(key); found != kept.end()) return found->second;
  std::string reason;
  Choice choice;
#ifdef FASTCAPS_EXPERIMENTS
  choice = task.backward ? forced.backward : forced.forward;
  reason = forced.error;
#endif
  Schedule c{};
  if (reason.empty()) c = compute(task, v, bias, machine, choice, reason);
#ifdef FASTCAPS_EXPERIMENTS
  if (!c.kernel && !forced.text.empty() && why_not) *why_not = "FASTCAPS_SCHEDULE: " + reason;
#endif
  if (!c.kernel) return c;
  if (kept.size() >= kMost) kept.clear();
  return kept[key] = c;
}

std::string routing_refusal(Task task, const Votes& v, const Machine& machine) {
  const std::string why_not = refusal(*task.pass, v.C, v.D, v.E, task.identity);
  if (!why_not.empty()) return why_not;
  std::string reason = "its poses do not fit into shared memory";
  const Schedule split = make_schedule(task, v, {}, machine, &reason);
  task.whole = true;
  const Schedule whole = make_schedule(task, v, {}, machine, &reason);
  if (!whole.kernel || !split.kernel) return reason;
  if (task.pass->parents_compete && whole.parent_blocks > 1)
    return "its " + std::to_string(v.M) + " parents take " + std::to_string(whole.parent_blocks) + " blocks";
  // The time between two launches is about that of 300 children.
  constexpr double kBetween = 300;
  if (whole.cost > split.cost + kBetween)
    return "its " + std::to_string(v.I) + " children are better split over blocks";
  return "";
}

}  // namespace fastcaps::gpu
