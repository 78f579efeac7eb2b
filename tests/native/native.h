// What the module shows of the two schedules: their fields by name.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fastcaps::native {

using Fields = std::map<std::string, int64_t>;
using Numbers = std::vector<int64_t>;

// `sizes`: those of votes_of in csrc/votes.h. `facts`: what csrc/cpu/schedule.h's Task has, and the call's bias.
Fields cpu_schedule(bool backward, const Numbers& sizes, const Fields& facts);

// `facts`: what csrc/cuda/schedule.h's Task and Machine have; `kernel` in the result is the place in the pass's table.
// Empty if no kernel takes the call.
Fields cuda_schedule(const std::string& op, const Numbers& sizes, const Fields& facts);
std::vector<Fields> cuda_kernels(const std::string& op, bool backward);
std::string cuda_refusal(const std::string& op, int64_t C, int64_t D, int64_t E, bool identity);
std::string cuda_routing_refusal(const std::string& op, const Numbers& sizes, const Fields& facts);
std::string cuda_experiment_refusal(const std::string& op, const Numbers& sizes, const Fields& facts);
std::vector<std::string> cuda_instances(const std::string& op, bool backward);
bool cuda_countable(const Numbers& sizes);
Numbers divided(int64_t number, int64_t divisor);

}  // namespace fastcaps::native
