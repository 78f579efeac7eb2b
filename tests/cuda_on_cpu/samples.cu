// A kernel for the tests of the machine itself: with faults planted one at a time, and without any.
#include "../../csrc/cuda/device.h"
#include "../../csrc/cuda/launch.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

namespace samples {

using namespace fastcaps::gpu;
using torch::stable::Tensor;

struct Args {
  const float* in;
  float* out;
  int64_t count;
  int fault;
};

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
  kMisaligned,        // a number
  kVectorMisaligned,  // four of them
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
  const int fault = args.fault, k = thread_index(), n = block_threads(), opposite = n - 1 - k;
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
  if (fault == kMisaligned) x += *reinterpret_cast<const float*>(shared_memory() + 2) * 0.0f;
  if (fault == kVectorMisaligned) x += load4(shared + 1).y * 0.0f;
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
Tensor run(const Tensor in, const Tensor out, int64_t blocks, int64_t threads, int64_t shared, int64_t fault) {
  const Args args{static_cast<const float*>(in.const_data_ptr()), static_cast<float*>(out.mutable_data_ptr()),
                  in.numel(), int(fault)};
  launch(faults_kernel, {blocks, 1, int(threads), shared}, args);
  return out;
}

}  // namespace samples

STABLE_TORCH_LIBRARY(fastcaps_cuda_on_cpu_samples, m) {
  m.def("run(Tensor input, Tensor(a!) out, int blocks, int threads, int shared, int fault) -> Tensor(a!)");
}

STABLE_TORCH_LIBRARY_IMPL(fastcaps_cuda_on_cpu_samples, CPU, m) { m.impl("run", TORCH_BOX(&samples::run)); }
