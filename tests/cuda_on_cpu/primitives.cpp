// The built-ins of csrc/cuda/device.h, each as its documentation has it.
#include <torch/headeronly/util/Half.h>

#include <bit>
#include <cfloat>
#include <cstring>
#include <deque>
#include <limits>

#include "cuda_on_cpu.h"
#include "machine.h"
#include "watch.h"

namespace fastcaps::gpu {
namespace {

using cuda_on_cpu::Access;
using cuda_on_cpu::block;
using cuda_on_cpu::Collective;
using cuda_on_cpu::fail;
using cuda_on_cpu::meet_warp;

// ---- copies ---------------------------------------------------------------------------------------------------------
struct Copy {
  char* to;
  const void* from;
  bool valid;
  int bytes;
  int64_t group;  // counts what the thread has committed
};

struct Copies {
  uint32_t block = 0;  // whose copies these are
  int64_t committed = 0;
  std::deque<Copy> waiting;
};

Copies& copies() {
  static Copies all[cuda_on_cpu::kThreads];
  Copies& own = all[block.thread];
  if (own.block != block.serial) own = {block.serial, 0, {}};
  return own;
}

// ---- exchanges ------------------------------------------------------------------------------------------------------
template <class T>
struct Exchange {
  T value;
  int with;
  T result;
};

template <class T>
T& of(void* part) {
  return *static_cast<T*>(part);
}

void finish_xor(void* const* parts) {
  for (int k = 0; k < kWarp; ++k) {
    auto& own = of<Exchange<double>>(parts[k]);
    own.result = of<Exchange<double>>(parts[k ^ own.with]).value;
  }
}
void finish_any(void* const* parts) {
  bool result = false;
  for (int k = 0; k < kWarp; ++k) result = result || of<Exchange<bool>>(parts[k]).value;
  for (int k = 0; k < kWarp; ++k) of<Exchange<bool>>(parts[k]).result = result;
}
void finish_barrier(void* const*) { cuda_on_cpu::watch_barrier(1u << block.warp()); }

struct Rows {
  const float* row;
  uint32_t* to;
};
void finish_fragments(void* const* parts) {
  for (int lane = 0; lane < kWarp; ++lane)
    for (int m = 0; m < 4; ++m)
      std::memcpy(of<Rows>(parts[lane]).to + m, of<Rows>(parts[8 * m + lane / 4]).row + lane % 4, 4);
}

constexpr Collective kFragments{"load_fragments", finish_fragments};
constexpr Collective kXor{"shuffle_xor", finish_xor}, kAny{"any_lane", finish_any},
    kBarrier{"barrier_warp", finish_barrier};

// ---- tensor cores ---------------------------------------------------------------------------------------------------
struct Fragments {
  float* d;
  const uint32_t *a, *b;
};

// tf32 is a float of which the last 13 bits are not looked at.
double tf32(uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000u); }

// D[16, 8] += A[16, K] B[K, 8]. Lane 4 g + t holds of A the rows g and g + 8, columns t (and t + 4); of B the rows t
// (and t + 4), column g; of D the rows g and g + 8, columns 2 t and 2 t + 1. A register of a fragment has EACH
// neighbours of the depth; `number(bits)` is the lowest that remains in `bits`.
template <int K, int EACH, double (*number)(uint32_t)>
void finish_mma(void* const* parts) {
  double a[16][K], b[K][8];
  for (int lane = 0; lane < kWarp; ++lane) {
    const auto& own = of<Fragments>(parts[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int x = 0; x < K / 4; ++x) {
      const int part = x / EACH, k = part * 4 * EACH + t * EACH + x % EACH, shift = x % EACH * 16;
      a[g][k] = number(own.a[2 * part] >> shift);
      a[g + 8][k] = number(own.a[2 * part + 1] >> shift);
      b[k][g] = number(own.b[part] >> shift);
    }
  }
  for (int lane = 0; lane < kWarp; ++lane)
    for (int k = 0; k < 4; ++k) {
      const int row = lane / 4 + k / 2 * 8, column = lane % 4 * 2 + k % 2;
      double sum = 0;  // of products that are exact in double
      for (int x = 0; x < K; ++x) sum += a[row][x] * b[x][column];
      float& d = of<Fragments>(parts[lane]).d[k];
      d = float(d + sum);
    }
}
double bf16(uint32_t bits) { return bfloat16_to_float(uint16_t(bits)); }
double f16(uint32_t bits) { return float16_to_float(uint16_t(bits)); }
constexpr Collective kTf32x4{"mma_tf32_16x8x4", finish_mma<4, 1, tf32>};
constexpr Collective kTf32x8{"mma_tf32_16x8x8", finish_mma<8, 1, tf32>};
constexpr Collective kBf16x8{"mma_bf16_16x8x8", finish_mma<8, 2, bf16>};
constexpr Collective kF16x8{"mma_f16_16x8x8", finish_mma<8, 2, f16>};
constexpr Collective kBf16x16{"mma_bf16_16x8x16", finish_mma<16, 2, bf16>};
constexpr Collective kF16x16{"mma_f16_16x8x16", finish_mma<16, 2, f16>};

bool aligned(const void* at, int bytes) { return reinterpret_cast<uintptr_t>(at) % unsigned(bytes) == 0; }

}  // namespace

int thread_index() { return block.thread; }
int block_threads() { return block.threads; }
int64_t block_x() { return block.x; }
int64_t block_y() { return block.y; }
int64_t blocks_x() { return block.blocks_x; }
char* shared_memory() { return block.shared; }

namespace {

template <class T>
T load(const float* at, const void* caller) {
  if (!aligned(at, sizeof(T)))
    fail("reads " + std::to_string(sizeof(T)) + " bytes at an address that is not a multiple of them");
  cuda_on_cpu::watch(at, sizeof(T), Access::kRead, caller);
  T x;
  std::memcpy(&x, at, sizeof(T));
  return x;
}
template <class T>
void store(float* at, const T& x, const void* caller) {
  if (!aligned(at, sizeof(T)))
    fail("writes " + std::to_string(sizeof(T)) + " bytes at an address that is not a multiple of them");
  cuda_on_cpu::watch(at, sizeof(T), Access::kWrite, caller);
  std::memcpy(at, &x, sizeof(T));
}

}  // namespace

float2 load2(const float* at) { return load<float2>(at, __builtin_return_address(0)); }
float4 load4(const float* at) { return load<float4>(at, __builtin_return_address(0)); }
void store2(float* at, float2 x) { store(at, x, __builtin_return_address(0)); }
void store4(float* at, float4 x) { store(at, x, __builtin_return_address(0)); }

void load_fragments(uint32_t (&to)[4], const float* row) {
  if (!aligned(row, 16)) fail("loads a matrix whose row is not at a multiple of 16 bytes");
  const char* at = reinterpret_cast<const char*>(row);
  if (at < block.shared || at + 16 > block.shared + block.shared_bytes) fail("loads a matrix outside shared memory");
  cuda_on_cpu::watch(row, 16, Access::kRead, __builtin_return_address(0));
  Rows own{row, to};
  meet_warp(kFragments, &own);
}

void barrier() { cuda_on_cpu::wait_barrier(0, block.threads); }
void barrier_part(int id, int threads) {
  if (id == 0) fail("waits at barrier_part 0, which is the whole block's");
  cuda_on_cpu::wait_barrier(id, threads);
}
void barrier_warp() { meet_warp(kBarrier, nullptr); }

double shuffle_xor(double x, int mask) {
  if (mask < 0 || mask >= kWarp) fail("calls shuffle_xor with mask " + std::to_string(mask));
  Exchange<double> own{x, mask, 0};
  meet_warp(kXor, &own);
  return own.result;
}
float shuffle_xor(float x, int mask) { return float(shuffle_xor(double(x), mask)); }
bool any_lane(bool x) {
  Exchange<bool> own{x, 0, false};
  meet_warp(kAny, &own);
  return own.result;
}

// Until its copy lands the target holds NaN, so a read that comes too early shows even if it is not detected.
void copy_async_bytes(void* shared, const void* global, bool valid, int bytes) {
  const void* caller = __builtin_return_address(0);
  char* to = static_cast<char*>(shared);
  if (to < block.shared || to + bytes > block.shared + block.shared_bytes)
    fail("copies to byte " + std::to_string(to - block.shared) + " of shared memory, of which it has " +
         std::to_string(block.shared_bytes));
  if (!aligned(shared, bytes) || !aligned(global, bytes))
    fail("copies " + std::to_string(bytes) + " bytes " + (aligned(shared, bytes) ? "from" : "to") +
         " an address that is not a multiple of them");
  if (valid) cuda_on_cpu::watch(global, size_t(bytes), Access::kRead, caller);
  cuda_on_cpu::watch_copy_issued(shared, size_t(bytes), caller);
  std::memset(to, 0xff, size_t(bytes));
  Copies& own = copies();
  own.waiting.push_back({to, global, valid, bytes, own.committed});
}
void copy_commit() { ++copies().committed; }
void copy_wait_for(int pending) {
  Copies& own = copies();
  while (!own.waiting.empty() && own.waiting.front().group < own.committed - pending) {
    const Copy& copy = own.waiting.front();
    if (copy.valid)
      std::memcpy(copy.to, copy.from, size_t(copy.bytes));
    else
      std::memset(copy.to, 0, size_t(copy.bytes));
    cuda_on_cpu::watch_copy_landed(copy.to, size_t(copy.bytes));
    own.waiting.pop_front();
  }
}

uint32_t to_tf32(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return 0x7fffffffu;
  return std::isinf(x) ? bits : (bits + 0x1000u) & 0xffffe000u;  // nearest, halves away from zero
}
void mma_tf32_16x8x4(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  Fragments own{d, a, &b};
  meet_warp(kTf32x4, &own);
}
void mma_bf16_16x8x8(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  Fragments own{d, a, &b};
  meet_warp(kBf16x8, &own);
}
void mma_f16_16x8x8(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  Fragments own{d, a, &b};
  meet_warp(kF16x8, &own);
}
void mma_tf32_16x8x8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Fragments own{d, a, b};
  meet_warp(kTf32x8, &own);
}
void mma_bf16_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Fragments own{d, a, b};
  meet_warp(kBf16x16, &own);
}
void mma_f16_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Fragments own{d, a, b};
  meet_warp(kF16x16, &own);
}

void atomic_add(float* at, float x) {
  if (!aligned(at, 4)) fail("adds to an address that is not a multiple of 4");
  cuda_on_cpu::watch(at, 4, Access::kAtomic, __builtin_return_address(0));
  *at += x;
}
void atomic_add2(float* at, float2 x) {
  if (!aligned(at, 8)) fail("adds two numbers at an address that is not a multiple of 8");
  cuda_on_cpu::watch(at, 8, Access::kAtomic, __builtin_return_address(0));
  at[0] += x.x, at[1] += x.y;
}
void atomic_add4(float* at, float4 x) {
  if (!aligned(at, 16)) fail("adds four numbers at an address that is not a multiple of 16");
  cuda_on_cpu::watch(at, 16, Access::kAtomic, __builtin_return_address(0));
  at[0] += x.x, at[1] += x.y, at[2] += x.z, at[3] += x.w;
}

float exp2_fast(float x) {
  const float y = std::exp2(x);
  return y < FLT_MIN ? 0.0f : y;  // ftz; a NaN is not smaller
}
float bfloat16_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }
uint16_t float_to_bfloat16(float x) {
  if (std::isnan(x)) return 0x7fff;
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);  // nearest, halves to even
}
float float16_to_float(uint16_t bits) {
  return float(torch::headeronly::Half(bits, torch::headeronly::Half::from_bits()));
}
uint16_t float_to_float16(float x) { return torch::headeronly::Half(x).x; }

}  // namespace fastcaps::gpu
