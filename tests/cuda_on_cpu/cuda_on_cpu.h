// What csrc/cuda/device.h is on a GPU, with the same names, for kernels that run on the CPU in the tests. Everything
// that does something is in primitives.cpp: this file is compiled with the kernels and watched like them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#define FASTCAPS_DEVICE inline
#define FASTCAPS_KERNEL(threads, blocks) __attribute__((visibility("default"))) void  // errors say its name
#define FASTCAPS_CONSTANT
#if defined(__clang__)
#define FASTCAPS_UNROLL
#else
#define FASTCAPS_UNROLL _Pragma("GCC unroll 16")  // which keeps registers out of memory
#endif
#define FASTCAPS_NO_UNROLL

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace fastcaps::gpu {

constexpr int kWarp = 32;

// ---- where a thread is ----------------------------------------------------------------------------------------------
int thread_index();
int block_threads();
int64_t block_x();
int64_t block_y();
int64_t blocks_x();

char* shared_memory();

// ---- neighbours in one go: one access, as on a GPU ------------------------------------------------------------------
float2 load2(const float* at);
float4 load4(const float* at);
void store2(float* at, float2 x);
void store4(float* at, float4 x);

// ---- barriers -------------------------------------------------------------------------------------------------------
void barrier();
void barrier_warp();
void barrier_part(int id, int threads);

// ---- between the lanes of a warp ------------------------------------------------------------------------------------
float shuffle_xor(float x, int mask);
double shuffle_xor(double x, int mask);
bool any_lane(bool x);

// ---- asynchronous copies: made when they are waited for, not earlier ------------------------------------------------
void copy_async_bytes(void* shared, const void* global, bool valid, int bytes);
template <int BYTES>
inline void copy_async(void* shared, const void* global, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  copy_async_bytes(shared, global, valid, BYTES);
}
void copy_commit();
void copy_wait_for(int pending);
template <int PENDING>
inline void copy_wait() {
  copy_wait_for(PENDING);
}

void load_fragments(uint32_t (&to)[4], const float* row);

// ---- tensor cores ---------------------------------------------------------------------------------------------------
uint32_t to_tf32(float x);
void mma_tf32_16x8x4(float (&d)[4], const uint32_t (&a)[2], uint32_t b);
void mma_bf16_16x8x8(float (&d)[4], const uint32_t (&a)[2], uint32_t b);
void mma_f16_16x8x8(float (&d)[4], const uint32_t (&a)[2], uint32_t b);
void mma_tf32_16x8x8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void mma_bf16_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void mma_f16_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

// ---- sums in global memory ------------------------------------------------------------------------------------------
void atomic_add(float* at, float x);
void atomic_add2(float* at, float2 x);
void atomic_add4(float* at, float4 x);

// ---- numbers --------------------------------------------------------------------------------------------------------
float exp2_fast(float x);
inline float reciprocal(float x) { return 1.0f / x; }
inline uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float bits_float(uint32_t x) { return __builtin_bit_cast(float, x); }
float bfloat16_to_float(uint16_t bits);
uint16_t float_to_bfloat16(float x);
float float16_to_float(uint16_t bits);
uint16_t float_to_float16(float x);

}  // namespace fastcaps::gpu
