// Signals during a long call. Python runs the handler of a signal such as Ctrl-C only if its main thread asks for it: a
// call on that thread asks ten times a second, and stops if the handler raised. Calls on other threads do not ask.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace fastcaps {

// Watches over a call whose items several threads run. Created on the calling thread, which alone asks Python.
class SignalWatch {
 public:
  // Whether a handler raised; the results are then incomplete.
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }

  // run(begin, end) of the items of one thread, in pieces that grow until they take a millisecond.
  template <class Run>
  void run_pieces(int64_t begin, int64_t end, Run&& run) {
    for (int64_t count = 1, until; begin < end && !stopped(); begin = until) {
      const auto before = Clock::now();
      until = std::min(end, begin + count);
      run(begin, until);
      if (end_piece(before)) count *= 2;
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  // A piece of work that began at `before` has ended: handlers of signals run now, if it is time and this is the
  // caller's thread. Returns whether the piece was short.
  bool end_piece(Clock::time_point before);

  std::atomic<bool> stopped_ = false;
  Clock::time_point asked_ = Clock::now();
  const std::thread::id caller_ = std::this_thread::get_id();
};

}  // namespace fastcaps
