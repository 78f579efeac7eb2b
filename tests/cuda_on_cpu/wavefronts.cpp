// Wavefronts of shared memory: how often a warp's access must be repeated because its lanes want different words of one
// of the 32 banks. Lanes run one after another here; what each does for the n-th time at one place of the code, since
// the warp last met, is one instruction of the warp.
//
// Lanes that take another number of turns through a loop than their neighbours may be counted with the wrong partners.
// 16 bytes a lane go in four parts of 8 lanes, 8 bytes in two of 16, as the hardware has it where no two lanes ask for
// the same; that it may join parts whose lanes do is left out, of what is found and of the least alike.
#include "wavefronts.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "machine.h"

namespace cuda_on_cpu {
namespace {

constexpr int kBanks = 32;

struct Access {
  uint32_t lanes = 0, first[kWarp];  // the first word of each lane
  size_t bytes = 0;
  Shared what = Shared::kRead;
};
struct Site {
  int64_t accesses = 0, wavefronts = 0, least = 0;
};

bool counting;
using Key = std::pair<const void*, uint32_t>;  // where in the code, and for which time
std::map<Key, Access> pending[kWarps];
std::unordered_map<const void*, uint32_t> times[kThreads];
std::map<std::tuple<std::string, const void*, Shared>, Site> sites;
std::string told;

void settle(const std::string& kernel, const void* caller, const Access& access) {
  Site& site = sites[{kernel, caller, access.what}];
  const int words = std::max(1, int(access.bytes / 4)), together = kWarp / words;
  ++site.accesses;
  for (int begin = 0; begin < kWarp; begin += together) {
    std::vector<uint32_t> all;
    for (int lane = begin; lane < begin + together; ++lane)
      if (access.lanes >> lane & 1)
        for (int w = 0; w < words; ++w) all.push_back(access.first[lane] + uint32_t(w));
    if (all.empty()) continue;
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    int found[kBanks] = {};
    for (const uint32_t word : all) ++found[word % kBanks];
    site.wavefronts += *std::max_element(found, found + kBanks);
    site.least += int64_t(all.size() + kBanks - 1) / kBanks;
  }
}

}  // namespace

void count_shared(size_t first, size_t bytes, Shared what, const void* caller) {
  if (!counting) return;
  const uint32_t time = times[block.thread][caller]++;
  Access& access = pending[block.warp()][{caller, time}];
  access.lanes |= 1u << block.lane(), access.first[block.lane()] = uint32_t(first / 4);
  access.bytes = std::max(access.bytes, bytes), access.what = what;
}

void settle_wavefronts(uint32_t warps) {
  if (!counting) return;
  const std::string kernel = kernel_name();
  for (int w = 0; w < kWarps; ++w) {
    if (!(warps >> w & 1)) continue;
    for (const auto& [key, access] : pending[w]) settle(kernel, key.first, access);
    pending[w].clear();
    for (int lane = 0; lane < kWarp; ++lane) times[w * kWarp + lane].clear();
  }
}

extern "C" {

void cuda_on_cpu_count(bool on) {
  counting = on;
  if (on) sites.clear();
}

// A line for each place of the code: kernel, what is done there (0 reads, 1 writes, 2 copies), how often, wavefronts,
// the least there could be, and where it is.
const char* cuda_on_cpu_wavefronts() {
  told.clear();
  for (const auto& [key, site] : sites) {
    const auto& [kernel, caller, what] = key;
    told += kernel + ";" + std::to_string(int(what)) + ";" + std::to_string(site.accesses) + ";" +
            std::to_string(site.wavefronts) + ";" + std::to_string(site.least) + ";" + place_in_library(caller) + "\n";
  }
  return told.c_str();
}

}  // extern "C"

}  // namespace cuda_on_cpu
