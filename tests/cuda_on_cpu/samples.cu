// Kernels for the tests of the machine itself: each primitive once, and faults planted one at a time beside the same
// kernel without them.
#include <string>

#include "../../csrc/cuda/device.h"
#include "../../csrc/cuda/launch.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

namespace samples {

using namespace fastcaps::gpu;
using torch::stable::Tensor;

// What a test passes on: numbers in and out, and a few sizes.
struct Args {
  const float* in;
  float* out;
  int64_t count;
  int option;
};

// ---- primitives: out[thread] = what the lane got --------------------------------------------------------------------
FASTCAPS_KERNEL(1024, 1) exchange_kernel(const Args args) {
  const int k = int(block_x()) * block_threads() + thread_index();
  const float x = args.in[k];
  args.out[2 * k] = shuffle_xor(x, args.option);
  args.out[2 * k + 1] = any_lane(x > 1.0f) ? 1.0f : 0.0f;
}

// D = A B for A [16, K], B [K, 8], one after the other in `in`.
template <int K>
FASTCAPS_KERNEL(32, 1)
mma_kernel(const Args args) {
  const int g = thread_index() / 4, t = thread_index() % 4;
  const float *a = args.in, *b = args.in + 16 * K;
  uint32_t fa[K / 2], fb[K / 4];
  for (int half = 0; half < K / 4; ++half) {
    fa[2 * half] = to_tf32(a[g * K + t + 4 * half]);
    fa[2 * half + 1] = to_tf32(a[(g + 8) * K + t + 4 * half]);
    fb[half] = to_tf32(b[(t + 4 * half) * 8 + g]);
  }
  float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  if constexpr (K == 4)
    mma_tf32_16x8x4(d, fa, fb[0]);
  else
    mma_tf32_16x8x8(d, fa, fb);
  args.out[g * 8 + 2 * t] = d[0];
  args.out[g * 8 + 2 * t + 1] = d[1];
  args.out[(g + 8) * 8 + 2 * t] = d[2];
  args.out[(g + 8) * 8 + 2 * t + 1] = d[3];
}

// The same of half precision, whose numbers come in float, with K = 16.
template <bool BFLOAT>
FASTCAPS_KERNEL(32, 1)
half_mma_kernel(const Args args) {
  const int g = thread_index() / 4, t = thread_index() % 4;
  const float *a = args.in, *b = args.in + 16 * 16;
  const auto bits = [](float x) { return uint32_t(BFLOAT ? float_to_bfloat16(x) : float_to_float16(x)); };
  uint32_t fa[4], fb[2];
  for (int half = 0; half < 2; ++half) {
    const int k = 8 * half + 2 * t;
    fa[2 * half] = bits(a[g * 16 + k]) | bits(a[g * 16 + k + 1]) << 16;
    fa[2 * half + 1] = bits(a[(g + 8) * 16 + k]) | bits(a[(g + 8) * 16 + k + 1]) << 16;
    fb[half] = bits(b[k * 8 + g]) | bits(b[(k + 1) * 8 + g]) << 16;
  }
  float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  if constexpr (BFLOAT)
    mma_bf16_16x8x16(d, fa, fb);
  else
    mma_f16_16x8x16(d, fa, fb);
  for (int k = 0; k < 4; ++k) args.out[(g + k / 2 * 8) * 8 + 2 * t + k % 2] = d[k];
}

// Functions of one number.
FASTCAPS_KERNEL(256, 1) numbers_kernel(const Args args) {
  const int64_t k = block_x() * block_threads() + thread_index();
  if (k >= args.count) return;
  const float x = args.in[k];
  float y = 0.0f;
  switch (args.option) {
    case 0: y = exp2_fast(x); break;
    case 1: y = reciprocal(x); break;
    case 2: y = reciprocal_sqrt(x); break;
    case 3: y = bfloat16_to_float(float_to_bfloat16(x)); break;
    case 4: y = float16_to_float(float_to_float16(x)); break;
    default: {
      const uint32_t bits = to_tf32(x);
      __builtin_memcpy(&y, &bits, 4);
    }
  }
  args.out[k] = y;
}

// Every thread adds to the same few numbers.
FASTCAPS_KERNEL(256, 1) atomics_kernel(const Args args) {
  const float x = args.in[block_x() * block_threads() + thread_index()];
  atomic_add(args.out + thread_index() % 4, x);
  atomic_add4(args.out + 4, make_float4(x, 2 * x, 3 * x, 4 * x));
}

// Copies of every width, of which every third is not valid, two groups one after the other.
template <int BYTES>
FASTCAPS_KERNEL(64, 1)
copy_kernel(const Args args) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  constexpr int kNumbers = BYTES / 4;
  const int units = int(args.count) / kNumbers, half = units / 2;
  for (int unit = thread_index(); unit < half; unit += block_threads())
    copy_async<BYTES>(shared + unit * kNumbers, args.in + unit * kNumbers, unit % 3 != 0);
  copy_commit();
  for (int unit = half + thread_index(); unit < units; unit += block_threads())
    copy_async<BYTES>(shared + unit * kNumbers, args.in + unit * kNumbers, unit % 3 != 0);
  copy_commit();
  copy_wait<1>();
  barrier();
  const int first = half * kNumbers;
  for (int k = thread_index(); k < first; k += block_threads()) args.out[k] = shared[k];
  copy_wait<0>();
  barrier();
  for (int k = first + thread_index(); k < args.count; k += block_threads()) args.out[k] = shared[k];
}

// Two halves of the block, which never wait for each other, turn their numbers round, each through a place of its own.
FASTCAPS_KERNEL(256, 1) parts_kernel(const Args args) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  const int half = block_threads() / 2, part = thread_index() / half, k = thread_index() % half;
  float x = args.in[thread_index()];
  for (int turn = 0; turn <= 2 * part; ++turn) {  // the second does so more often
    shared[part * half + k] = x;
    barrier_part(1 + part, half);
    x = shared[part * half + half - 1 - k];
    barrier_part(1 + part, half);
  }
  args.out[thread_index()] = x;
}

// ---- faults: 0 is the kernel without any ----------------------------------------------------------------------------
enum Fault : int {
  kNone,
  kNoBarrier,       // between a write and the others' reads
  kNoBarrierAgain,  // between reads and the next write
  kNoBarrierWarp,   // between two lanes
  kOwnPartOnly,     // a barrier of a part only, where the other part reads
  kReadBehind,      // one number behind shared memory
  kReadBefore,      // one before
  kWriteBehind,
  kReadFarAway,         // of shared memory
  kNotWritten,          // one output
  kNeverWrittenShared,  // shared memory that nobody wrote is read
  kSomeLeave,           // a lane returns before a shuffle
  kOthersLeave,         // a lane returns while others wait in a shuffle
  kDifferentBarriers,
  kDifferentExchanges,
  kPartOfAWarp,    // waits at a barrier_part
  kCopyTooEarly,   // read before it was waited for
  kCopyNoBarrier,  // read by others without a barrier
  kCopyOverReads,  // issued where others still read
  kCopyMisaligned,
  kMisaligned,        // a vector
  kRegisterIndex,     // outside of a local array
  kBlocksCollide,     // two blocks write the same number
  kBlocksAddPlainly,  // or add to it without atomics
  kNowhere,           // reads from an address that is none
  kEndless,           // recursion
};

float endless(const Args& args, int depth) {
  volatile char frame[4096];
  frame[depth % 4096] = char(depth);
  return depth == args.count ? float(frame[0]) : endless(args, depth + 1) + float(frame[depth % 4096]);
}

// Every thread gets the sum of its own number and the one of the thread opposite, twice over; four warps or more.
FASTCAPS_KERNEL(1024, 1) faults_kernel(const Args args) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  const int fault = args.option, k = thread_index(), n = block_threads(), opposite = n - 1 - k;
  const int64_t at = block_x() * n + k;
  float x = 0.0f;

  copy_async<4>(shared + k, args.in + at, true);
  if (fault == kCopyMisaligned) copy_async<8>(shared + n + 1, args.in, true);
  copy_commit();
  if (fault == kCopyTooEarly) x += shared[k] * 0.0f;
  copy_wait<0>();
  if (fault != kCopyNoBarrier) barrier();
  x += shared[k] + shared[opposite];
  if (fault == kCopyOverReads) {
    copy_async<4>(shared + k, args.in + at, true);
    copy_wait<0>();
  }
  barrier();

  shared[k] = x;
  if (fault == kOwnPartOnly)
    barrier_part(1 + k / (n / 2), n / 2);
  else if (fault != kNoBarrier)
    barrier();
  x = 0.5f * (x + shared[opposite]);
  if (fault != kNoBarrierAgain) barrier();
  shared[k] = x;
  if (fault == kNoBarrierWarp) x = shared[k ^ 1];
  barrier_warp();
  x = 0.5f * (x + shared[k ^ 1]) + 0.5f * (x - shared[k ^ 1]);
  barrier();

  if (fault == kReadBehind && k == 5) x += shared[2 * n] * 0.0f;
  if (fault == kReadBefore && k == 5) x += shared[-1] * 0.0f;
  if (fault == kWriteBehind && k == 5) shared[2 * n] = x;
  if (fault == kReadFarAway && k == 5) x += shared[1 << 17] * 0.0f;
  if (fault == kNeverWrittenShared) x += shared[n + k] * 0.0f;
  if (fault == kMisaligned) x += reinterpret_cast<const float4*>(shared + 1)->y * 0.0f;
  if (fault == kRegisterIndex) {
    float local[4] = {x, x, x, x};
    x = local[(int(args.count) + k) % 8];
  }
  if (fault == kDifferentBarriers) {
    if (k < n / 2)
      barrier();
    else
      barrier_part(2, n);
  }
  if (fault == kPartOfAWarp && k < 48) barrier_part(1, k < 16 ? 32 : 64);
  if (fault == kPartOfAWarp && k >= 80) barrier_part(1, 64);
  if (fault == kSomeLeave && k == 7) return;
  if (fault == kDifferentExchanges && k % 2) x += any_lane(x > 0.0f) ? 0.0f : 1.0f;
  x = shuffle_xor(x, 1);
  if (fault == kOthersLeave && k == 7) return;
  x = shuffle_xor(x, 1);
  if (fault == kNowhere) x += *reinterpret_cast<const float*>(uintptr_t(args.count) * 64);
  if (fault == kEndless) x += endless(args, 1);
  if (fault == kBlocksCollide && k == 0) args.out[0] = x;
  if (fault == kBlocksAddPlainly && k == n - 1) args.out[args.count - 1] += x;
  if (fault == kNotWritten && k == 9) return;
  args.out[at] = x;
}

// ---- ops ------------------------------------------------------------------------------------------------------------
void run(const std::string& name, const Tensor& in, const Tensor& out, const Grid& grid, int64_t option) {
  const Args args{static_cast<const float*>(in.const_data_ptr()), static_cast<float*>(out.mutable_data_ptr()),
                  in.numel(), int(option)};
  const DeviceGuard guard(in);
  if (name == "exchange") return launch(exchange_kernel, grid, args);
  if (name == "mma4") return launch(mma_kernel<4>, grid, args);
  if (name == "mma8") return launch(mma_kernel<8>, grid, args);
  if (name == "mma-bf16") return launch(half_mma_kernel<true>, grid, args);
  if (name == "mma-f16") return launch(half_mma_kernel<false>, grid, args);
  if (name == "numbers") return launch(numbers_kernel, grid, args);
  if (name == "atomics") return launch(atomics_kernel, grid, args);
  if (name == "copy4") return launch(copy_kernel<4>, grid, args);
  if (name == "copy8") return launch(copy_kernel<8>, grid, args);
  if (name == "copy16") return launch(copy_kernel<16>, grid, args);
  if (name == "parts") return launch(parts_kernel, grid, args);
  if (name == "faults") return launch(faults_kernel, grid, args);
  STD_TORCH_CHECK(false, "no such sample: ", name);
}

Tensor run_op(const std::string name, const Tensor in, const Tensor out, int64_t blocks, int64_t threads,
              int64_t shared, int64_t option) {
  run(name, in, out, {blocks, 1, int(threads), shared}, option);
  return out;
}

}  // namespace samples

STABLE_TORCH_LIBRARY(fastcaps_cuda_on_cpu_samples, m) {
  m.def("run(str name, Tensor input, Tensor(a!) out, int blocks, int threads, int shared, int option) -> Tensor(a!)");
}

STABLE_TORCH_LIBRARY_IMPL(fastcaps_cuda_on_cpu_samples, CPU, m) { m.impl("run", TORCH_BOX(&samples::run_op)); }
