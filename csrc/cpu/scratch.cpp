#include "scratch.h"

#include <sys/mman.h>

#include <cstdlib>

namespace fastcaps {

#if defined(FASTCAPS_GUARDS)

void guard(void* page) {
  if (mprotect(page, size_t(kGuardBytes), PROT_NONE) != 0) std::abort();
}

Scratch::Scratch(int64_t bytes) : bytes_((bytes + 63) / 64 * 64) {
  data_ = mmap(nullptr, size_t(bytes_ + kGuardBytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  if (data_ == MAP_FAILED) data_ = nullptr;
}

Scratch::~Scratch() {
  if (data_) munmap(data_, size_t(bytes_ + kGuardBytes));
}

#else

Scratch::Scratch(int64_t bytes) : bytes_((bytes + 63) / 64 * 64) {
  data_ = std::aligned_alloc(64, size_t(bytes_ > 0 ? bytes_ : 64));
}

Scratch::~Scratch() { std::free(data_); }

#endif

}  // namespace fastcaps
