#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace cuda_on_cpu {

uintptr_t stacks_begin = 0;

namespace {

size_t page() { return size_t(sysconf(_SC_PAGESIZE)); }

// Tops are staggered: at equal distances all stacks would fall into the same few sets of the caches.
char* top_of(int index) {
  return reinterpret_cast<char*>(stacks_begin) + size_t(index + 1) * kStack - 64 - size_t(index % 32) * 576;
}

}  // namespace

void make_stacks() {
  if (stacks_begin != 0) return;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
  flags |= MAP_NORESERVE;
#endif
  void* found = mmap(nullptr, kStack * kFibers, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
  for (int k = 0; k < kFibers; ++k) mprotect(static_cast<char*>(found) + k * kStack, page(), PROT_NONE);
  stacks_begin = reinterpret_cast<uintptr_t>(found);
}

bool on_stack_guard(uintptr_t address) { return on_stacks(address) && (address - stacks_begin) % kStack < page(); }

// A switch saves what a called function must keep, on the stack that is left, and loads the same from the other.
extern "C" __attribute__((visibility("hidden"))) void cuda_on_cpu_switch(void** from, void* to);
asm(R"(
.text
.hidden cuda_on_cpu_switch
.globl cuda_on_cpu_switch
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
  endbr64
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_cpu_switch, .-cuda_on_cpu_switch
)");
void switch_fiber(Fiber& from, Fiber& to) { cuda_on_cpu_switch(&from.context, to.context); }
void Fiber::start(int index, Entry entry) {
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top_of(index)) / 16 * 16);
  *--top = nullptr;  // the return address of entry, which so finds its stack as after a call
  *--top = reinterpret_cast<void*>(entry);
  for (int k = 0; k < 6; ++k) *--top = nullptr;
  context = top;
}

}  // namespace cuda_on_cpu
