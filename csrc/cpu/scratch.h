// A thread's own memory for the length of a range of items. In builds for tests (FASTCAPS_GUARDS, CMakeLists.txt) guard
// pages lie behind every piece of it: an access beyond one ends the process.
#pragma once

#include <cstdint>

namespace fastcaps {

#if defined(FASTCAPS_GUARDS)
inline constexpr bool kGuards = true;
#else
inline constexpr bool kGuards = false;
#endif
inline constexpr int64_t kGuardBytes = 1 << 14;  // whole pages on every system
void guard(void* page);                          // defined in builds for tests only

class Scratch {
 public:
  explicit Scratch(int64_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  void* get() const { return data_; }  // null: there is no memory

 private:
  int64_t bytes_;
  void* data_;
};

// Hands out pieces of a thread's scratch memory; with a null base it only counts.
struct Arena {
  char* base;
  int64_t used = 0;

  template <class U>
  U* take(int64_t count) {
    const int64_t bytes = (count * int64_t(sizeof(U)) + 63) / 64 * 64;
    if constexpr (kGuards)
      used += (bytes + kGuardBytes - 1) / kGuardBytes * kGuardBytes - bytes;  // ends where a page does
    U* piece = base ? reinterpret_cast<U*>(base + used) : nullptr;
    used += bytes;
    if constexpr (kGuards) {
      if (base) guard(base + used);
      used += kGuardBytes;
    }
    return piece;
  }
};

}  // namespace fastcaps
