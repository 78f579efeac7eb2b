#include "machine.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "watch.h"

namespace cuda_on_cpu {

Block block;

namespace {

enum class State : uint8_t { kReady, kWarp, kBarrier, kDone };

struct Thread {
  Fiber fiber;
  State state = State::kReady;
  int barrier = 0;
};

struct Warp {
  const Collective* what = nullptr;
  uint32_t arrived = 0, ready = 0, done = 0;  // lanes; `ready` in the order of the block, see Order
  void* parts[kWarp] = {};
};

struct Barrier {
  int expected = 0, arrived = 0;
  uint32_t lanes[kWarps] = {};
};

// Which lane and which warp comes first: place k of a block's order.
struct Order {
  uint8_t item[kWarp], place[kWarp];
  bool stay = true;  // with a warp, as long as one of its lanes can run

  void set(int order, uint32_t seed) {
    std::iota(item, item + kWarp, uint8_t(0));
    if (order == 1) std::reverse(item, item + kWarp);
    if (order == 2)
      for (int k = kWarp - 1; k > 0; --k) {
        seed = seed * 1664525u + 1013904223u;
        std::swap(item[k], item[(seed >> 8) % uint32_t(k + 1)]);
      }
    for (int k = 0; k < kWarp; ++k) place[item[k]] = uint8_t(k);
    stay = order != 2;
  }
};

Fiber host;
Thread threads[kThreads];
Warp warps[kWarps];
Barrier barriers[kBarriers];
Order lane_order, warp_order;
uint32_t ready_warps;  // places
int done, warp_at, chosen_order = -1;
uint32_t order_began;  // the serial of the block at which the order was chosen
const Launch* launch_now;
std::string failure;
char* shared_begin;  // of the region; its end is the end of what can be accessed
constexpr size_t kShared = 256 << 10, kGuard = 1 << 20;

void make_ready(int thread) {
  const int w = thread / kWarp;
  threads[thread].state = State::kReady;
  warps[w].ready |= 1u << lane_order.place[thread % kWarp];
  ready_warps |= 1u << warp_order.place[w];
}

// Run the next thread that can; the host where there is none. Returns when the calling thread is run again.
void run_next(Fiber& from) {
  if (ready_warps == 0) return switch_fiber(from, host);
  if (!lane_order.stay || !(ready_warps >> warp_at & 1)) {  // the next place after this one, in a circle
    const uint32_t later = warp_at == 31 ? 0 : ready_warps >> (warp_at + 1) << (warp_at + 1);
    warp_at = std::countr_zero(later ? later : ready_warps);
  }
  const int w = warp_order.item[warp_at];
  Warp& warp = warps[w];
  const int place = std::countr_zero(warp.ready);
  warp.ready &= warp.ready - 1;
  if (warp.ready == 0) ready_warps &= ~(1u << warp_at);
  const int next = w * kWarp + lane_order.item[place];
  Fiber& to = threads[next].fiber;
  block.thread = next;
  if (&to != &from) switch_fiber(from, to);
}

void wait(State state) {
  Thread& self = threads[block.thread];
  self.state = state;
  run_next(self.fiber);
}

void thread_main() {
  launch_now->call(launch_now->kernel, launch_now->args);
  watch_settle();
  const int self = block.thread;
  Warp& warp = warps[self / kWarp];
  warp.done |= 1u << (self % kWarp);
  threads[self].state = State::kDone;
  ++done;
  if (warp.arrived) fail("returned while other lanes of its warp wait for all 32 in " + std::string(warp.what->name));
  run_next(threads[self].fiber);
  std::abort();  // a thread that has returned does not run again
}

std::string where() {
  return kernel_name() + ", block (" + std::to_string(block.x) + ", " + std::to_string(block.y) + ")";
}

std::string doing(const Thread& thread, const Warp& warp) {
  switch (thread.state) {
    case State::kWarp: return std::string("wait for their warp in ") + warp.what->name;
    case State::kBarrier:
      return thread.barrier ? "wait at barrier_part " + std::to_string(thread.barrier) : "wait at barrier";
    case State::kDone: return "have returned";
    default: return "can run";
  }
}

std::string who_waits_for_whom() {
  std::string text;
  for (int first = 0, k = 1; k <= block.threads; ++k) {
    const std::string what = doing(threads[first], warps[first / kWarp]);
    if (k < block.threads && doing(threads[k], warps[k / kWarp]) == what) continue;
    text += (text.empty() ? "threads " : "; ") + std::to_string(first) + " to " + std::to_string(k - 1) + " " + what;
    first = k;
  }
  return text;
}

// A fault in a kernel becomes an error of the launch; any other goes to the handler that was there before.
struct sigaction before_segv, before_bus;

void on_fault(int signal, siginfo_t* info, void* context) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(info->si_addr);
  if (block.running) {
    const uintptr_t shared = reinterpret_cast<uintptr_t>(block.shared);
    if (on_stack_guard(at)) fail("its stack is used up");
    if (at - reinterpret_cast<uintptr_t>(shared_begin) + kGuard < kShared + 2 * kGuard)
      fail("accesses byte " + std::to_string(int64_t(at - shared)) + " of shared memory, of which it has " +
           std::to_string(block.shared_bytes));
    char text[32];
    snprintf(text, sizeof text, "%p", info->si_addr);
    fail(std::string("accesses memory that is not there, at ") + text);
  }
  const struct sigaction& before = signal == SIGSEGV ? before_segv : before_bus;
  if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(signal, info, context);
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(signal);
  sigaction(signal, &before, nullptr);  // the fault comes again, and then ends the process
}

// The handler leaves by a switch to the host. It has a separate stack: the fiber's may be used up.
struct FaultHandler {
  std::vector<char> stack = std::vector<char>(64 << 10);
  stack_t stack_before;

  FaultHandler() {
    stack_t own = {};
    own.ss_sp = stack.data();
    own.ss_size = stack.size();
    sigaltstack(&own, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &before_segv);
    sigaction(SIGBUS, &action, &before_bus);
  }
  ~FaultHandler() {
    sigaction(SIGSEGV, &before_segv, nullptr);
    sigaction(SIGBUS, &before_bus, nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};

void make_shared_memory() {
  if (shared_begin) return;
  void* found = mmap(nullptr, kShared + 2 * kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
  shared_begin = static_cast<char*>(found) + kGuard;
  mprotect(shared_begin, kShared, PROT_READ | PROT_WRITE);
}

int order_of(uint32_t seed) { return chosen_order >= 0 && chosen_order <= 2 ? chosen_order : int(seed % 3); }

void run_block(const Launch& launch) {
  const uint32_t seed = block.serial - order_began;
  lane_order.set(order_of(seed), seed);
  warp_order.set(order_of(seed), seed + 1);
  done = warp_at = 0;
  ready_warps = 0;
  std::fill(warps, warps + kWarps, Warp());
  std::fill(barriers, barriers + kBarriers, Barrier());
  // Shared memory ends where access does, rounded up to the 16 bytes that a vector may be aligned to; all bits set are
  // a NaN in every type.
  block.shared = shared_begin + kShared - (launch.shared_bytes + 15) / 16 * 16;
  block.shared_bytes = launch.shared_bytes;
  std::memset(block.shared, 0xff, size_t(launch.shared_bytes));
  watch_block();
  for (int k = 0; k < launch.threads; ++k) {
    threads[k].fiber.start(k, thread_main);
    make_ready(k);
  }
  block.running = true;
  warp_at = std::countr_zero(ready_warps);
  run_next(host);
  block.running = false;
  if (!failure.empty()) throw std::runtime_error(std::exchange(failure, {}));
  if (done < launch.threads) throw std::runtime_error(where() + " never ends: " + who_waits_for_whom());
}

int64_t permuted(int64_t k, int64_t count, int order, uint32_t seed) {
  if (order == 1) return count - 1 - k;
  if (order != 2) return k;
  int64_t step = 1 + int64_t(seed * 2654435761u) % count;
  while (std::gcd(step, count) != 1) ++step;
  return (k * step + seed) % count;
}

}  // namespace

std::string kernel_name() {
  Dl_info info;
  if (!dladdr(launch_now->kernel, &info) || !info.dli_sname) return "a kernel";
  int status = 1;
  char* text = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string name = status == 0 ? text : info.dli_sname;
  std::free(text);
  return name.substr(0, name.rfind('('));
}

void fail(const std::string& what) {
  failure = where() + ", thread " + std::to_string(block.thread) + " " + what;
  Fiber abandoned;
  switch_fiber(abandoned, host);
  std::abort();
}

void meet_warp(const Collective& what, void* part) {
  watch_settle();
  Warp& warp = warps[block.warp()];
  const int lane = block.lane();
  if (warp.arrived == 0) {
    warp.what = &what;
  } else if (warp.what != &what) {
    fail(std::string("is in ") + what.name + " while other lanes of its warp wait for all 32 in " + warp.what->name);
  }
  if (warp.done) fail(std::string("waits for all 32 lanes in ") + what.name + ", of which some have returned");
  warp.parts[lane] = part;
  warp.arrived |= 1u << lane;
  if (warp.arrived != ~0u) return wait(State::kWarp);
  warp.arrived = 0;
  what.finish(warp.parts);
  for (int k = 0; k < kWarp; ++k)
    if (k != lane) make_ready(block.warp() * kWarp + k);
}

void wait_barrier(int id, int expected) {
  watch_settle();
  const std::string name = id ? "barrier_part" : "barrier";
  if (id < 0 || id >= kBarriers) fail("waits at barrier_part " + std::to_string(id) + "; there are 1 to 15");
  if (expected % kWarp != 0 || expected < kWarp || expected > block.threads)
    fail("waits at " + name + " for " + std::to_string(expected) +
         " threads: wants a multiple of 32, at most the block's");
  if (id == 0 && done) fail("waits at barrier, and " + std::to_string(done) + " threads of the block have returned");
  Barrier& barrier = barriers[id];
  if (barrier.arrived == 0) barrier.expected = expected;
  if (barrier.expected != expected)
    fail("waits at barrier_part " + std::to_string(id) + " for " + std::to_string(expected) + " threads, others for " +
         std::to_string(barrier.expected));
  barrier.lanes[block.warp()] |= 1u << block.lane();
  threads[block.thread].barrier = id;
  if (++barrier.arrived < expected) return wait(State::kBarrier);
  uint32_t met = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (barrier.lanes[w] == 0) continue;
    if (barrier.lanes[w] != ~0u)
      fail("meets " + std::to_string(expected - 1) + " others at " + name + ", among them a part of warp " +
           std::to_string(w));
    met |= 1u << w;
  }
  watch_barrier(met);
  for (int w = 0; w < kWarps; ++w)
    if (met >> w & 1)
      for (int k = 0; k < kWarp; ++k)
        if (w * kWarp + k != block.thread) make_ready(w * kWarp + k);
  barrier = Barrier();
}

void run(const Launch& launch) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  launch_now = &launch;
  const auto require = [&](bool good, const std::string& what) {
    if (!good) throw std::runtime_error("launch of " + kernel_name() + ": " + what);
  };
  require(launch.threads % kWarp == 0 && launch.threads >= kWarp && launch.threads <= kThreads,
          std::to_string(launch.threads) + " threads a block; wants a multiple of 32, at most 1024");
  require(launch.shared_bytes >= 0 && launch.shared_bytes <= kSharedLimit,
          std::to_string(launch.shared_bytes) + " bytes of shared memory; a block can have " +
              std::to_string(kSharedLimit));
  require(launch.x >= 0 && launch.x < (int64_t(1) << 31) && launch.y >= 0 && launch.y < (1 << 16),
          "a grid of " + std::to_string(launch.x) + " x " + std::to_string(launch.y) + " blocks");
  make_stacks();
  make_shared_memory();
  watch_launch();
  const FaultHandler handler;
  block.threads = launch.threads;
  block.blocks_x = launch.x;
  block.blocks_y = launch.y;
  const int64_t count = launch.x * launch.y;
  const uint32_t seed = block.serial - order_began;
  const int order = order_of(seed);
  for (int64_t k = 0; k < count; ++k) {
    const int64_t index = permuted(k, count, order, seed);
    block.x = index % launch.x;
    block.y = index / launch.x;
    ++block.serial;
    run_block(launch);
  }
}

extern "C" void cuda_on_cpu_order(int order) {
  chosen_order = order;
  order_began = block.serial;
}

}  // namespace cuda_on_cpu
