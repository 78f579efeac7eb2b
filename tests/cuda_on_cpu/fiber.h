// Fibers: threads that hand on the processor themselves. A switch costs a few nanoseconds, so that a warp's 32 lanes
// can wait for each other at every shuffle.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_on_cpu {

using Entry = void (*)();  // never returns

struct Fiber {
  void* context = nullptr;  // where it goes on; on the fiber's own stack

  void start(int index, Entry entry);  // afterwards a switch to it calls entry on the stack of that index
};

void switch_fiber(Fiber& from, Fiber& to);

constexpr int kFibers = 1024;

constexpr size_t kStack = 256 << 10;
extern uintptr_t stacks_begin;  // of all fibers, one after another

void make_stacks();  // once, before the first start
inline bool on_stacks(uintptr_t address) { return address - stacks_begin < kStack * kFibers; }
bool on_stack_guard(uintptr_t address);  // below a stack: it is used up

}  // namespace cuda_on_cpu
