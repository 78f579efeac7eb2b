#include "watch.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "machine.h"

namespace cuda_on_cpu {
namespace {

// Time: every warp counts the barriers it has passed. seen[w][v] is what warp w knows of warp v: all that v did at
// times before that is over and visible to w. Times only grow, over all blocks and launches, so nothing is ever
// cleared.
uint32_t seen[kWarps][kWarps];
uint32_t block_began, launch_began;  // a time; a block's serial

constexpr uint16_t kSeveral = 0xffff;  // several threads

struct Record {
  uint32_t time = 0;
  uint16_t thread = 0;
  uint8_t bytes = 0;     // which of the cell's four
  bool special = false;  // shared memory: a copy on its way; global memory: an atomic write, reads of several blocks
};

bool in_order(uint32_t time, int warp) { return time < seen[block.warp()][warp]; }
uint32_t now() { return seen[block.warp()][block.warp()]; }

// ---- shared memory: the last write, and the last read of every warp, for each four bytes ----------------------------
struct SharedCell {
  Record write;
  Record reads[kWarps];
};
SharedCell* shared_cells() {
  static const std::unique_ptr<SharedCell[]> cells(new SharedCell[kSharedLimit / 4 + 1]);
  return cells.get();
}

const char* called(Access access) {
  return access == Access::kRead ? "reads" : access == Access::kWrite ? "writes" : "adds to";
}

// Where the compiler's announcement came from, for addr2line.
std::string source(const void* caller) {
  const std::string place = place_in_library(caller);
  return place.empty() ? "" : " (addr2line -ife " + place + ")";
}

// Two threads may write the same value with no barrier in between. Whether it is the same shows only when the second
// one is written: with the thread's next access, or when it waits.
struct Doubt {
  const char* at = nullptr;
  size_t bytes = 0;
  char before[16];
  uint16_t other = 0;
  const void* caller = nullptr;
};
Doubt doubt;

[[noreturn]] void report(Access access, const std::string& what, const std::string& other, const void* caller) {
  fail(called(access) + (" " + what) + ", which " + other + source(caller));
}

void watch_shared(size_t first, size_t bytes, Access access, bool copy, const void* caller) {
  const int warp = block.warp();
  const uint16_t self = uint16_t(block.thread);
  for (size_t k = first / 4; k <= (first + bytes - 1) / 4; ++k) {
    const size_t begin = std::max(first, 4 * k) - 4 * k, end = std::min(first + bytes, 4 * k + 4) - 4 * k;
    const uint8_t mask = uint8_t((1 << end) - (1 << begin));
    SharedCell& cell = shared_cells()[k];
    const Record& write = cell.write;
    const auto what = [&] { return "byte " + std::to_string(4 * k + begin) + " of shared memory"; };
    if (write.time >= block_began && write.bytes & mask) {
      if (write.special)
        report(access, what(), "thread " + std::to_string(write.thread) + " copies to without having waited yet",
               caller);
      if (write.thread != self && !in_order(write.time, write.thread / kWarp)) {
        if (access != Access::kWrite || copy || bytes > sizeof(doubt.before))
          report(access, what(), "thread " + std::to_string(write.thread) + " writes with no barrier in between",
                 caller);
        doubt.at = block.shared + first;
        doubt.bytes = bytes;
        std::memcpy(doubt.before, doubt.at, bytes);
        doubt.other = write.thread;
        doubt.caller = caller;
      }
    }
    if (access == Access::kRead) {
      Record& read = cell.reads[warp];
      const bool same = read.time == now();
      read.thread = same && read.thread != self ? kSeveral : self;
      read.bytes = same ? read.bytes | mask : mask;
      read.time = now();
      continue;
    }
    for (int w = 0; w < block.threads / kWarp; ++w) {
      const Record& read = cell.reads[w];
      if (read.time < block_began || !(read.bytes & mask) || read.thread == self || in_order(read.time, w)) continue;
      const std::string reader = read.thread == kSeveral ? "its own warp" : "thread " + std::to_string(read.thread);
      report(access, what(),
             (w == warp ? reader : "a thread of warp " + std::to_string(w)) + " reads with no barrier in between",
             caller);
    }
    cell.write = {now(), self, mask, copy};
  }
}

// ---- global memory: the last write and one read of each four bytes that this launch touched -------------------------
// Of several reads with no order between them the first is kept: a later write that is in order with that one alone
// goes unnoticed.
struct GlobalCell {
  Record write, read;
  uint32_t write_block = 0, read_block = 0;
};
constexpr size_t kPage = 4096;

GlobalCell* global_cells(uintptr_t address) {
  static std::unordered_map<uintptr_t, std::unique_ptr<GlobalCell[]>> pages;
  static uintptr_t recent[64];
  static GlobalCell* recent_cells[64];
  const uintptr_t number = address / kPage;
  const size_t place = number % 64;
  if (recent[place] != number || !recent_cells[place]) {
    if (pages.size() > (size_t(1) << 15)) {  // some 4 GB: forget, and miss an error at worst
      pages.clear();
      std::fill(recent_cells, recent_cells + 64, nullptr);
    }
    std::unique_ptr<GlobalCell[]>& page = pages[number];
    if (!page) page.reset(new GlobalCell[kPage / 4]);
    recent[place] = number;
    recent_cells[place] = page.get();
  }
  return recent_cells[place] + address % kPage / 4;
}

// Does what was done then, by that block, collide with the running thread?
bool collides(const Record& then, uint32_t then_block, uint8_t mask) {
  if (then_block < launch_began || !(then.bytes & mask)) return false;
  if (then_block != block.serial) return true;  // blocks have no order
  return then.thread != block.thread && !in_order(then.time, then.thread / kWarp);
}

void watch_global(uintptr_t address, size_t bytes, Access access, const void* caller) {
  const uintptr_t last = address + bytes - 1;
  for (uintptr_t at = address / 4 * 4; at <= last; at += 4) {
    const uintptr_t begin = std::max(address, at) - at, end = std::min(last + 1, at + 4) - at;
    const uint8_t mask = uint8_t((1 << end) - (1 << begin));
    GlobalCell& cell = *global_cells(at);
    const bool both_add = access == Access::kAtomic && cell.write.special;
    if (!both_add && collides(cell.write, cell.write_block, mask)) {
      const bool own = cell.write_block == block.serial;
      report(access, "global memory",
             (own ? "thread " + std::to_string(cell.write.thread) : "another block") +
                 (cell.write.special ? " adds to" : " writes") + (own ? " with no barrier in between" : " too"),
             caller);
    }
    const uint16_t self = uint16_t(block.thread);
    if (access == Access::kRead) {
      const bool launch = cell.read_block >= launch_began;
      if (launch && (cell.read.special || cell.read_block != block.serial)) {
        cell.read.special = true;
        cell.read.bytes |= mask;
      } else if (!launch || !collides(cell.read, cell.read_block, 0xf)) {
        cell.read = {now(), self, uint8_t(launch && cell.read.thread == self ? cell.read.bytes | mask : mask), false};
        cell.read_block = block.serial;
      }
      continue;
    }
    if (collides(cell.read, cell.read_block, mask) ||
        (cell.read.special && cell.read_block >= launch_began && cell.read.bytes & mask)) {
      const bool own = cell.read_block == block.serial && !cell.read.special;
      report(access, "global memory", own ? "another thread reads with no barrier in between" : "another block reads",
             caller);
    }
    cell.write = {now(), self, mask, access == Access::kAtomic};
    cell.write_block = block.serial;
  }
}

}  // namespace

std::string place_in_library(const void* caller) {
  Dl_info info;
  if (!caller || !dladdr(caller, &info) || !info.dli_fname) return "";
  char text[32];
  snprintf(text, sizeof text, " %#zx",
           size_t(static_cast<const char*>(caller) - static_cast<char*>(info.dli_fbase)) - 1);
  return info.dli_fname + std::string(text);
}

void watch_launch() { launch_began = block.serial + 1; }

void watch_block() {
  uint32_t last = 0;
  for (const auto& row : seen) last = std::max(last, *std::max_element(row, row + kWarps));
  block_began = last + 1;
  doubt.at = nullptr;
  for (auto& row : seen) std::fill(row, row + kWarps, block_began);
}

void watch_barrier(uint32_t warps) {
  uint32_t all[kWarps];
  std::fill(all, all + kWarps, 0);
  for (int w = 0; w < kWarps; ++w)
    if (warps >> w & 1) {
      ++seen[w][w];
      for (int v = 0; v < kWarps; ++v) all[v] = std::max(all[v], seen[w][v]);
    }
  for (int w = 0; w < kWarps; ++w)
    if (warps >> w & 1) std::copy(all, all + kWarps, seen[w]);
}

void watch_settle() {
  if (!doubt.at) return;
  const char* at = std::exchange(doubt.at, nullptr);
  if (std::memcmp(at, doubt.before, doubt.bytes) != 0)
    report(Access::kWrite, "byte " + std::to_string(at - block.shared) + " of shared memory",
           "thread " + std::to_string(doubt.other) + " writes too, another number, with no barrier in between",
           doubt.caller);
}

void watch(const void* at, size_t bytes, Access access, const void* caller) {
  if (!block.running || bytes == 0) return;
  if (doubt.at) watch_settle();
  const uintptr_t address = reinterpret_cast<uintptr_t>(at);
  if (on_stacks(address)) return;
  const uintptr_t offset = address - reinterpret_cast<uintptr_t>(block.shared);
  constexpr uintptr_t kAround = 256 << 10;
  if (offset + kAround >= uintptr_t(kSharedLimit) + 2 * kAround) return watch_global(address, bytes, access, caller);
  if (offset >= uintptr_t(block.shared_bytes) || offset + bytes > uintptr_t(block.shared_bytes))
    fail(called(access) + (" byte " + std::to_string(int64_t(offset))) + " of shared memory, of which it has " +
         std::to_string(block.shared_bytes) + source(caller));
  watch_shared(offset, bytes, access, false, caller);
}

void watch_aligned(const void* at, size_t bytes, Access access, const void* caller) {
  if (block.running && reinterpret_cast<uintptr_t>(at) % bytes != 0)
    fail("accesses " + std::to_string(bytes) + " bytes at an address that is not a multiple of them" + source(caller));
  watch(at, bytes, access, caller);
}

void watch_copy_issued(const void* target, size_t bytes, const void* caller) {
  const size_t first = size_t(static_cast<const char*>(target) - block.shared);
  watch_shared(first, bytes, Access::kWrite, true, caller);
}

void watch_copy_landed(const void* target, size_t bytes) {
  const size_t first = size_t(static_cast<const char*>(target) - block.shared) / 4;
  for (size_t k = first; k < first + bytes / 4; ++k)
    shared_cells()[k].write = {now(), uint16_t(block.thread), 0xf, false};
}

}  // namespace cuda_on_cpu
