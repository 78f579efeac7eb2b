// Only in builds for experiments (FASTCAPS_EXPERIMENTS): schedules as the environment wants them, read at every call:
//   FASTCAPS_SCHEDULE="forward:kernel=16x2x1-384x1,warps_positions=4,stage=8 backward:chunks=2"
// A key that is absent is left to the schedule. An impossible setting raises an error.
#pragma once

#include <cstdlib>
#include <memory>
#include <sstream>

#include "schedule.h"

namespace fastcaps::gpu {

struct Forced {
  std::string text, kernels[2], error;  // `kernels`: what the choices' names point at
  Choice forward, backward;

  explicit Forced(const std::string& text_) : text(text_) {
    std::istringstream parts(text);
    for (std::string part; error.empty() && parts >> part;) {
      const size_t colon = part.find(':');
      const std::string direction = part.substr(0, colon);
      if (colon == std::string::npos || (direction != "forward" && direction != "backward")) {
        error = "wants forward:... or backward:..., got " + part;
        return;
      }
      std::istringstream pairs(part.substr(colon + 1));
      for (std::string pair; error.empty() && std::getline(pairs, pair, ',');) read(direction == "backward", pair);
    }
  }
  Forced(const Forced&) = delete;

  // Of this moment, for this thread.
  static const Forced& now() {
    static thread_local std::unique_ptr<const Forced> forced;
    const char* found = std::getenv("FASTCAPS_SCHEDULE");
    const std::string text = found ? found : "";
    if (!forced || forced->text != text) forced = std::make_unique<Forced>(text);
    return *forced;
  }

 private:
  void read(bool to_backward, const std::string& pair) {
    Choice& choice = to_backward ? backward : forward;
    const size_t equals = pair.find('=');
    const std::string key = pair.substr(0, equals), value = equals == std::string::npos ? "" : pair.substr(equals + 1);
    if (key == "kernel" && !value.empty()) {
      choice.kernel = kernels[to_backward] = value;
      return;
    }
    const struct {
      const char* name;
      int& to;
    } numbers[] = {{"warps_parents", choice.warps_parents},
                   {"warps_positions", choice.warps_positions},
                   {"stage", choice.stage},
                   {"chunks", choice.chunks},
                   {"groups", choice.groups}};
    for (const auto& number : numbers) {
      if (key != number.name) continue;
      const bool digits = !value.empty() && value.size() < 9 && value.find_first_not_of("0123456789") == value.npos;
      if (!digits || (number.to = std::atoi(value.c_str())) < 1) error = key + " must be a number from 1, got " + value;
      return;
    }
    error = "has kernel=NAME, warps_parents, warps_positions, stage, chunks and groups, got " + pair;
  }
};

}  // namespace fastcaps::gpu
