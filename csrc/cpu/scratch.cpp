#include "scratch.h"

#include <sys/mman.h>

#include <cstdlib>

namespace fastcaps {

bool guards_scratch() {
  static const bool guards = std::getenv("FASTCAPS_GUARD_SCRATCH") != nullptr;
  return guards;
}

void guard(void* page) {
  if (mprotect(page, size_t(kGuardBytes), PROT_NONE) != 0) std::abort();
}

Scratch::Scratch(int64_t bytes) : bytes_((bytes + 63) / 64 * 64) {
  if (!guards_scratch()) {
    data_ = std::aligned_alloc(64, size_t(bytes_ > 0 ? bytes_ : 64));
    return;
  }
  data_ = mmap(nullptr, size_t(bytes_ + kGuardBytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  if (data_ == MAP_FAILED) data_ = nullptr;
}

Scratch::~Scratch() {
  if (!guards_scratch())
    std::free(data_);
  else if (data_)
    munmap(data_, size_t(bytes_ + kGuardBytes));
}

}  // namespace fastcaps
