#include "signals.h"

#include "capability.h"

namespace fastcaps {
namespace {

using namespace std::chrono_literals;

// What is used of Python: the library is not linked to it, so Python tells where it lies. Null where there is none.
struct Python {
  int (*take_gil)();                           // PyGILState_Ensure
  void (*leave_gil)(int);                      // PyGILState_Release
  int (*run_handlers)();                       // PyErr_CheckSignals
  void (*take_error)(void**, void**, void**);  // PyErr_Fetch
  void (*give_error)(void*, void*, void*);     // PyErr_Restore
};
const Python* python = nullptr;
void* raised[3] = {};  // by a handler, for fastcaps_cpu_raise; guarded by the GIL

bool handler_raised() {
  const int gil = python->take_gil();
  const bool found = python->run_handlers() != 0;  // 0 on all threads but Python's main one, where handlers run
  if (found) python->take_error(&raised[0], &raised[1], &raised[2]);
  python->leave_gil(gil);
  return found;
}

}  // namespace

bool SignalWatch::end_piece(Clock::time_point before) {
  const Clock::time_point now = Clock::now();
  if (python && std::this_thread::get_id() == caller_ && now - asked_ > 100ms) {
    asked_ = now;
    if (handler_raised()) stopped_.store(true, std::memory_order_relaxed);
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
