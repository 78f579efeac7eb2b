// To be preloaded: memory that a program asks to be aligned (torch's tensors, the kernels' scratch) ends where a page
// begins that nothing may touch. What lies between an end that is no multiple of the alignment and that page is checked
// when the memory is given back.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, MANY = 1 << 18, FILL = 0xa5 };

typedef struct {
  char *memory, *begin;
  size_t length, size, room;
} Block;

static Block blocks[MANY];  // by address, open addressing; a block that was given back keeps its slot for the next
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Block* find(const void* begin) {
  size_t at = ((uintptr_t)begin >> 6) * 2654435761u % MANY;
  while (blocks[at].begin != NULL && blocks[at].begin != begin) at = (at + 1) % MANY;
  return &blocks[at];
}

static void* guarded(size_t alignment, size_t size) {
  const size_t room = (size + alignment - 1) / alignment * alignment, pages = (room + PAGE - 1) / PAGE * PAGE;
  char* memory = mmap(NULL, pages + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory + pages, PAGE, PROT_NONE) != 0) abort();
  char* begin = memory + pages - room;
  memset(memory, FILL, pages);
  pthread_mutex_lock(&lock);
  *find(begin) = (Block){memory, begin, pages + PAGE, size, room};
  pthread_mutex_unlock(&lock);
  return begin;
}

int posix_memalign(void** out, size_t alignment, size_t size) {
  *out = guarded(alignment, size ? size : 1);
  return 0;
}

void* aligned_alloc(size_t alignment, size_t size) { return guarded(alignment, size ? size : 1); }

void free(void* begin) {
  static void (*next)(void*);
  if (begin == NULL) return;
  pthread_mutex_lock(&lock);
  Block* block = find(begin);
  const Block mine = *block;
  if (mine.begin != NULL) block->memory = NULL;
  pthread_mutex_unlock(&lock);
  if (mine.begin == NULL || mine.memory == NULL) {
    if (next == NULL) next = (void (*)(void*))dlsym(RTLD_NEXT, "free");
    next(begin);
    return;
  }
  for (size_t k = mine.size; k < mine.room; ++k)
    if ((unsigned char)mine.begin[k] != FILL) {
      static const char text[] = "guard pages: written behind the end\n";
      if (write(2, text, sizeof text - 1) < 0) _exit(3);
      abort();
    }
  munmap(mine.memory, mine.length);
}
