// Memory for tensors that ends where access ends: who reads or writes behind a tensor, or far before it, is caught in
// the act. This is torch's CPU allocator for as long as a test asks for it; it needs more of torch than the stable ABI
// has.
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

namespace {

constexpr size_t kGuard = 1 << 20;

struct Mapping {
  void* begin;
  size_t bytes;
};

void release(void* context) {
  Mapping* mapping = static_cast<Mapping*>(context);
  munmap(mapping->begin, mapping->bytes);
  delete mapping;
}

class GuardedAllocator final : public c10::Allocator {
 public:
  // What may lie before the tensor in its first page, and the last bytes that make 16 of it, hold NaN.
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), rounded = (bytes + 15) / 16 * 16;
    const size_t inside = (rounded + page - 1) / page * page, all = inside + 2 * kGuard;
    void* found = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    char* begin = static_cast<char*>(found) + kGuard;
    mprotect(begin, inside, PROT_READ | PROT_WRITE);
    std::memset(begin, 0xff, inside);
    return {begin + inside - rounded, new Mapping{found, all}, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) void cuda_on_cpu_guard(bool on) {
#ifdef __SANITIZE_ADDRESS__
  return (void)on;  // it watches torch's own allocator, to the byte
#endif
  static GuardedAllocator guarded;
  static c10::Allocator* before = nullptr;
  if (on && before == nullptr) {
    before = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&guarded, 127);
  } else if (!on && before != nullptr) {
    c10::SetCPUAllocator(before, 127);
    before = nullptr;
  }
}
