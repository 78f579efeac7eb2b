#include "signals.h"

#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include <pthread.h>
#include <unistd.h>

#include "capability.h"

namespace fastcaps {
namespace {

using namespace std::chrono_literals;

// Python's functions. The library is not linked to Python, so Python passes their addresses. Null without Python.
struct Python {
  int (*take_gil)();                           // PyGILState_Ensure
  void (*leave_gil)(int);                      // PyGILState_Release
  int (*run_handlers)();                       // PyErr_CheckSignals
  void (*take_error)(void**, void**, void**);  // PyErr_Fetch
  void (*give_error)(void*, void*, void*);     // PyErr_Restore
};
const Python* python = nullptr;
thread_local void* raised[3] = {};  // by a handler that this thread's last call ran, for fastcaps_cpu_raise

// The process's first thread, or the one that called fork. If Python's main thread is another, as in a program that
// embeds Python, calls are not interrupted.
bool on_main_thread() {
#if defined(__linux__)
  return syscall(SYS_gettid) == getpid();
#else
  return pthread_main_np() != 0;
#endif
}

bool handler_raised() {
  const int gil = python->take_gil();
  const bool found = python->run_handlers() != 0;
  if (found) python->take_error(&raised[0], &raised[1], &raised[2]);
  python->leave_gil(gil);
  return found;
}

}  // namespace

bool SignalWatch::end_piece(Clock::time_point before) {
  const Clock::time_point now = Clock::now();
  if (python && std::this_thread::get_id() == caller_ && now - asked_ > 100ms) {
    asked_ = now;
    if (on_main_thread() && handler_raised()) stopped_.store(true, std::memory_order_relaxed);
  }
  return now - before < 1ms;
}

}  // namespace fastcaps

void fastcaps_cpu_python(void* const* functions) {
  static fastcaps::Python found;
  found = *reinterpret_cast<const fastcaps::Python*>(functions);
  fastcaps::python = &found;
}

void fastcaps_cpu_raise() {
  using fastcaps::raised;
  if (!raised[0]) return;
  fastcaps::python->give_error(raised[0], raised[1], raised[2]);
  raised[0] = raised[1] = raised[2] = nullptr;
}
