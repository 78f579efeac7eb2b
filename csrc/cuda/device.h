// Every CUDA built-in that the kernels use, under one name each. Kernels include this file and call nothing else of
// CUDA's, so that the very same sources run on the CPU in the tests (tests/cuda_on_cpu), where a thread is a fiber and
// this file is replaced by another with the same names.
#pragma once

#ifdef FASTCAPS_CUDA_ON_CPU
#include "cuda_on_cpu.h"
#else

#include <cuda_runtime.h>

#include <cstdint>

#define FASTCAPS_DEVICE __device__ __forceinline__
#define FASTCAPS_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define FASTCAPS_CONSTANT __grid_constant__  // an argument that threads read where it lies
#define FASTCAPS_UNROLL _Pragma("unroll")
#define FASTCAPS_NO_UNROLL _Pragma("unroll 1")

namespace fastcaps::gpu {

constexpr int kWarp = 32;

// ---- where a thread is ----------------------------------------------------------------------------------------------
FASTCAPS_DEVICE int thread_index() { return int(threadIdx.x); }
FASTCAPS_DEVICE int block_threads() { return int(blockDim.x); }
FASTCAPS_DEVICE int64_t block_x() { return blockIdx.x; }
FASTCAPS_DEVICE int64_t block_y() { return blockIdx.y; }
FASTCAPS_DEVICE int64_t blocks_x() { return gridDim.x; }

// ---- shared memory: one dynamic piece a block, its size given at the launch, 16-byte aligned ------------------------
FASTCAPS_DEVICE char* shared_memory() {
  extern __shared__ float4 memory[];
  return reinterpret_cast<char*>(memory);
}

// ---- neighbours in one go, at an address that is a multiple of their size -------------------------------------------
FASTCAPS_DEVICE float2 load2(const float* at) { return *reinterpret_cast<const float2*>(at); }
FASTCAPS_DEVICE float4 load4(const float* at) { return *reinterpret_cast<const float4*>(at); }
FASTCAPS_DEVICE void store2(float* at, float2 x) { *reinterpret_cast<float2*>(at) = x; }
FASTCAPS_DEVICE void store4(float* at, float4 x) { *reinterpret_cast<float4*>(at) = x; }

// ---- barriers -------------------------------------------------------------------------------------------------------
FASTCAPS_DEVICE void barrier() { __syncthreads(); }
FASTCAPS_DEVICE void barrier_warp() { __syncwarp(); }
// A barrier for a part of the block: `threads` threads (a multiple of 32) call it with the same id, 1 to 15.
FASTCAPS_DEVICE void barrier_part(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- between the lanes of a warp: all 32 take part ------------------------------------------------------------------
FASTCAPS_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
FASTCAPS_DEVICE double shuffle_xor(double x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
FASTCAPS_DEVICE bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }

// ---- asynchronous copies from global to shared memory ---------------------------------------------------------------
// BYTES is 4, 8 or 16, and both addresses are multiples of it; with valid = false the target becomes zero and the
// source is not read.
template <int BYTES>
FASTCAPS_DEVICE void copy_async(void* shared, const void* global, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  const unsigned target = unsigned(__cvta_generic_to_shared(shared));
  const int size = valid ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(global), "r"(size) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(global), "n"(BYTES), "r"(size)
                 : "memory");
}
FASTCAPS_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most PENDING of this thread's latest groups are still on their way.
template <int PENDING>
FASTCAPS_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- four matrices of 8 rows of 16 bytes from shared memory, as fragments: lane 8 m + n gives the address of the n-th
// row of matrix m; lane 4 g + t ends with word t of every matrix's row g ----------------------------------------------
FASTCAPS_DEVICE void load_fragments(uint32_t (&to)[4], const float* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(unsigned(__cvta_generic_to_shared(row)))
               : "memory");
}

// ---- tensor cores: d += a * b, fragments as PTX lays them out -------------------------------------------------------
// float to tf32, rounded to nearest: 10 bits of mantissa, in the bits of a float. Ties to even are one instruction,
// ties away from zero three.
FASTCAPS_DEVICE uint32_t to_tf32(float x) {
  uint32_t bits;
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#endif
  return bits;
}
// By the shape and types of the factors. A word of a half-precision factor is two neighbours along the depth; the
// products of bfloat16 or float16 are exact.
#define FASTCAPS_MMA_SMALL(name, kind)                                                               \
  FASTCAPS_DEVICE void name(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {                     \
    asm volatile("mma.sync.aligned." kind ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(b));                                                    \
  }
#define FASTCAPS_MMA(name, kind)                                                                                 \
  FASTCAPS_DEVICE void name(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {                     \
    asm volatile("mma.sync.aligned." kind ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                            \
  }
FASTCAPS_MMA_SMALL(mma_tf32_16x8x4, "m16n8k4.row.col.f32.tf32.tf32")
FASTCAPS_MMA_SMALL(mma_bf16_16x8x8, "m16n8k8.row.col.f32.bf16.bf16")
FASTCAPS_MMA_SMALL(mma_f16_16x8x8, "m16n8k8.row.col.f32.f16.f16")
FASTCAPS_MMA(mma_tf32_16x8x8, "m16n8k8.row.col.f32.tf32.tf32")
FASTCAPS_MMA(mma_bf16_16x8x16, "m16n8k16.row.col.f32.bf16.bf16")
FASTCAPS_MMA(mma_f16_16x8x16, "m16n8k16.row.col.f32.f16.f16")
#undef FASTCAPS_MMA_SMALL
#undef FASTCAPS_MMA

// ---- sums in global memory, in whatever order the blocks come -------------------------------------------------------
FASTCAPS_DEVICE void atomic_add(float* at, float x) { atomicAdd(at, x); }
// Two or four neighbours, at a multiple of their size; one instruction from sm_90 on.
FASTCAPS_DEVICE void atomic_add2(float* at, float2 x) {
#if __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float2*>(at), x);
#else
  atomicAdd(at, x.x), atomicAdd(at + 1, x.y);
#endif
}
FASTCAPS_DEVICE void atomic_add4(float* at, float4 x) {
#if __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float4*>(at), x);
#else
  atomicAdd(at, x.x), atomicAdd(at + 1, x.y), atomicAdd(at + 2, x.z), atomicAdd(at + 3, x.w);
#endif
}

// ---- numbers --------------------------------------------------------------------------------------------------------
FASTCAPS_DEVICE float exp2_fast(float x) {  // 2 ulp, exact at 0 and the infinities; NaN stays NaN
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FASTCAPS_DEVICE float reciprocal(float x) {  // 1 ulp
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FASTCAPS_DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }
FASTCAPS_DEVICE float bits_float(uint32_t x) { return __uint_as_float(x); }
FASTCAPS_DEVICE float bfloat16_to_float(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
FASTCAPS_DEVICE uint16_t float_to_bfloat16(float x) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
FASTCAPS_DEVICE float float16_to_float(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
FASTCAPS_DEVICE uint16_t float_to_float16(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

}  // namespace fastcaps::gpu
#endif  // FASTCAPS_CUDA_ON_CPU
