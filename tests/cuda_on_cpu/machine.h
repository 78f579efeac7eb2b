// The machine that runs kernels here: one block at a time, its threads as fibers that run until they wait for each
// other.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fiber.h"

namespace cuda_on_cpu {

constexpr int kWarp = 32, kThreads = 1024, kWarps = kThreads / kWarp, kBarriers = 16;
constexpr int64_t kSharedLimit = 227 << 10;

// Where and how large the running block is. Kernels read it through functions: their own accesses are watched.
struct Block {
  bool running = false;
  int threads = 0;
  int thread = 0;  // that runs now
  int64_t x = 0, y = 0, blocks_x = 0, blocks_y = 0;
  uint32_t serial = 0;  // counts the blocks of all launches; never 0 while one runs
  char* shared = nullptr;
  int64_t shared_bytes = 0;

  int warp() const { return thread / kWarp; }
  int lane() const { return thread % kWarp; }
};
extern Block block;

// Called by a thread: gives up the block and raises an error from the launch, which names kernel, block and thread.
[[noreturn]] void fail(const std::string& what);

std::string kernel_name();                         // of the current launch
std::string place_in_library(const void* caller);  // what addr2line wants to know of it; empty if nothing is known

// What all lanes of a warp do together: each passes a pointer to its part, and the last one finishes for all.
struct Collective {
  const char* name;
  void (*finish)(void* const* lanes);
};
void meet_warp(const Collective& what, void* part);

void wait_barrier(int id, int threads);  // 0: the whole block

struct Launch {
  const void* kernel;
  void (*call)(const void* kernel, const void* args);
  const void* args;
  int64_t x, y;
  int threads;
  int64_t shared_bytes;
};
void run(const Launch& launch);  // throws std::runtime_error

// The order in which blocks and threads come: 0 forward, 1 backward, 2 shuffled, anything else these three in
// alternation.
extern "C" __attribute__((visibility("default"))) void cuda_on_cpu_order(int order);

}  // namespace cuda_on_cpu
