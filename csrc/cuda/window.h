// Which children a position sees, and where they lie.
#pragma once

#include "pass.h"

namespace fastcaps::gpu {

// A position of the block's tile: where it lies, and where its window begins. Offsets in elements; the window may begin
// in the padding, before the tensor.
//
// Windows overlap, and so two positions may add to one child's gradient. If that must happen in a fixed order, a launch
// takes only positions of one colour: those far enough from each other to share no child.
struct Position {
  int64_t index;  // (b * Ho + y) * Wo + x; -1: none
  int64_t children, gate, query;
  int64_t cell;  // ((b * H + y) * W + x) * N of the window's first child, in the block's part
  int y, x;

  FASTCAPS_DEVICE bool exists() const { return index >= 0; }
  // Whether a child, not padding, is at this distance from the window's first.
  FASTCAPS_DEVICE bool sees(const PassArgs& args, int dy, int dx) const {
    return exists() && (!args.padded || (unsigned(y + dy) < unsigned(args.H) && unsigned(x + dx) < unsigned(args.W)));
  }
};

// The position with index `number` in the launch.
FASTCAPS_DEVICE Position position_of(const PassArgs& args, int64_t number) {
  Position at{-1, 0, 0, 0, 0, 0, 0};
  if (number >= args.launched) return at;
  const int64_t samples = int64_t(args.by_sample.divisor), b = number / samples;
  const int in_sample = int(number - b * samples), row = args.by_row.quotient(in_sample);
  const int y = args.colour_y + row * args.colours_y;
  const int x = args.colour_x + args.by_row.remainder(in_sample, row) * args.colours_x;
  const int64_t *children = args.children.stride, *gate = args.gate.stride, *query = args.query.stride;
  at.index = (b * args.Ho + y) * args.Wo + x;
  at.y = y * int(args.window.sh) - int(args.window.ph);
  at.x = x * int(args.window.sw) - int(args.window.pw);
  at.children = b * children[0] + at.y * children[1] + at.x * children[2];
  at.gate = b * gate[0] + at.y * gate[1] + at.x * gate[2];
  at.query = b * query[0] + y * query[1] + x * query[2];
  at.cell = (block_y() * args.cells_part + (b * args.H + at.y) * args.W + at.x) * args.N;
  return at;
}

FASTCAPS_DEVICE void make_tile(const PassArgs& args, int number, char* shared) {
  Position* tile = reinterpret_cast<Position*>(shared + args.shared_tile);
  for (int k = thread_index(); k < args.tile_size; k += block_threads())
    tile[k] = position_of(args, int64_t(number) * args.tile_size + k);
}

// The t-th child of a position in the order of the kernels: children with the same weights one after another.
struct Child {
  int i, g;       // i = (ky * kw + kx) * N + n
  int n, dy, dx;  // type, and how far from the window's first child

  FASTCAPS_DEVICE Child(const PassArgs& args, int t) {
    g = args.by_group.quotient(t);
    i = args.by_group.remainder(t, g) * args.G + g;
    const int q = args.by_types.quotient(i);
    n = args.by_types.remainder(i, q);
    const int ky = args.by_kernel_width.quotient(q);
    dy = ky * int(args.window.dh);
    dx = args.by_kernel_width.remainder(q, ky) * int(args.window.dw);
  }
  FASTCAPS_DEVICE bool exists(const PassArgs& args, const Position& at) const { return at.sees(args, dy, dx); }
  FASTCAPS_DEVICE int64_t cell(const PassArgs& args) const {  // from the window's first child, in a dense grid
    return (int64_t(dy) * args.W + dx) * args.N + n;
  }
};

// Where a child lies, seen from the first child of a window. Computed by one thread per child, a stage before it is
// brought. A block keeps those of the stages that are being computed, brought, or about to be.
struct Offset {
  int64_t children, gate, cell;  // cell: as of Position, in children
  int dy, dx;

  FASTCAPS_DEVICE bool exists(const PassArgs& args, const Position& at) const { return at.sees(args, dy, dx); }
};

// A block's range of children, and its share of the tiles.
struct ChildRange {
  int group, chunk, first, last;
  bool matrices = true;  // whether stages bring them

  FASTCAPS_DEVICE explicit ChildRange(const PassArgs& args) {
    group = args.by_chunk.quotient(int(block_x())), chunk = args.by_chunk.remainder(int(block_x()), group);
    first = chunk * args.chunk_children,
    last = first + args.chunk_children < args.I ? first + args.chunk_children : args.I;
  }
};

// Of a stage that begins with the t-th child.
FASTCAPS_DEVICE Offset* offsets_of(const PassArgs& args, char* shared, const ChildRange& range, int t) {
  return reinterpret_cast<Offset*>(shared + args.shared_offset) + (t - range.first) % kOffsets;
}

// Of `count` children from the t-th on, or as many as there are.
FASTCAPS_DEVICE void make_offsets(const PassArgs& args, char* shared, const ChildRange& range, int t, int count) {
  t += thread_index();
  if (thread_index() >= count || t >= range.last) return;
  const Child child(args, t);
  const int64_t *p = args.children.stride, *g = args.gate.stride;
  *offsets_of(args, shared, range, t) = {child.dy * p[1] + child.dx * p[2] + child.n * p[3],
                                         child.dy * g[1] + child.dx * g[2] + child.n * g[3], child.cell(args), child.dy,
                                         child.dx};
}

}  // namespace fastcaps::gpu
