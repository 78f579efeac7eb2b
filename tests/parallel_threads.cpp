// To be preloaded under ThreadSanitizer: torch's parallel_for by threads that are started and joined here, where the
// sanitizer sees both. torch's own pool synchronises in a library that it cannot look into: all would be races to it.
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*run)(int64_t, int64_t, void*),
                                      void* context) {
  const int64_t most = 4, each = std::max((end - begin + most - 1) / most, grain);
  std::vector<std::thread> threads;
  for (int64_t at = begin; at < end; at += each)
    threads.emplace_back([=] { run(at, std::min(at + each, end), context); });
  for (std::thread& thread : threads) thread.join();
  return 0;
}
