// The builds of the kernels, one for each instruction set, and the choice among them. A source that is compiled for
// every one of them (CMakeLists.txt) defines its table there: a specialisation of `table`.
#pragma once

#include "pass.h"

#if defined(FASTCAPS_BUILT_DEFAULT)
#define FASTCAPS_IF_DEFAULT(each) each(default)
#else
#define FASTCAPS_IF_DEFAULT(each)
#endif
#if defined(FASTCAPS_BUILT_AVX2)
#define FASTCAPS_IF_AVX2(each) each(avx2)
#else
#define FASTCAPS_IF_AVX2(each)
#endif
#if defined(FASTCAPS_BUILT_AVX512)
#define FASTCAPS_IF_AVX512(each) each(avx512)
#else
#define FASTCAPS_IF_AVX512(each)
#endif
#define FASTCAPS_EACH_LEVEL(each) FASTCAPS_IF_DEFAULT(each) FASTCAPS_IF_AVX2(each) FASTCAPS_IF_AVX512(each)
#define FASTCAPS_LEVEL(level) \
  namespace isa_##level {     \
    template <class Table>    \
    const Table& table();     \
  }

namespace fastcaps {

FASTCAPS_EACH_LEVEL(FASTCAPS_LEVEL)

// The level in use, 0 the lowest of those built; and whether the user forced it. Raises an error if the processor has
// none of them, or not the forced one; fastcaps/backends.py chooses another backend earlier, or raises.
int level_in_use();
bool level_is_forced();

template <class Table>
const Table& table_of(int level) {
#define FASTCAPS_TABLE(level) &isa_##level::table<Table>,
  static constexpr const Table& (*kAll[])() = {FASTCAPS_EACH_LEVEL(FASTCAPS_TABLE)};
#undef FASTCAPS_TABLE
  return kAll[level]();
}

// For this machine and a call, unless a level is forced. If positions fill at most half a vector, use the level below,
// if it is built, whose vectors have half the length: it computes as many positions at once.
template <class Operands>
const Kernels<Operands>& kernels(const Votes& in) {
  const int level = level_in_use();
  const auto& table = table_of<Kernels<Operands>>(level);
  if (level == 0 || in.is_double() || level_is_forced()) return table;
  const auto& below = table_of<Kernels<Operands>>(level - 1);
  const bool half = 2 * below.lanes_float == table.lanes_float && below.lanes_float >= 8;
  const int64_t most = below.lanes_float, positions = in.positions();
  return half && positions > most / 4 && positions <= most ? below : table;
}

}  // namespace fastcaps
