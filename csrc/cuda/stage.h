// Bringing children and weights into shared memory: a stage of a few children for all positions of the block's tile.
#pragma once

#include <type_traits>

#include "lanes.h"

namespace fastcaps::gpu {

FASTCAPS_DEVICE float load_number(const void* data, int64_t at, Storage storage) {
  switch (storage) {
    case Storage::kBFloat16: return bfloat16_to_float(static_cast<const uint16_t*>(data)[at]);
    case Storage::kFloat16: return float16_to_float(static_cast<const uint16_t*>(data)[at]);
    default: return static_cast<const float*>(data)[at];
  }
}

// A type that is known when compiled, as an argument.
template <Storage S>
using Stored = std::integral_constant<Storage, S>;

template <Storage S>
using Element = std::conditional_t<S == Storage::kFloat32, float, uint16_t>;

// Four neighbours of half precision, as they came in two words.
template <Storage S>
FASTCAPS_DEVICE void widen_vector(float2 pairs, float (&to)[4]) {
  const uint32_t bits[2] = {float_bits(pairs.x), float_bits(pairs.y)};
  FASTCAPS_UNROLL
  for (int k = 0; k < 4; ++k) {
    const uint16_t number = uint16_t(bits[k / 2] >> k % 2 * 16);
    to[k] = load_number(&number, 0, S);
  }
}

FASTCAPS_DEVICE void store_number(void* data, int64_t at, float x, Storage storage) {
  switch (storage) {
    case Storage::kBFloat16: static_cast<uint16_t*>(data)[at] = float_to_bfloat16(x); break;
    case Storage::kFloat16: static_cast<uint16_t*>(data)[at] = float_to_float16(x); break;
    default: static_cast<float*>(data)[at] = x;
  }
}

FASTCAPS_DEVICE float rounded(float x, Storage storage) {
  switch (storage) {
    case Storage::kBFloat16: return bfloat16_to_float(float_to_bfloat16(x));
    case Storage::kFloat16: return float16_to_float(float_to_float16(x));
    default: return x;
  }
}

// Where a parent's numbers begin, that has number `parent` of [B, Ho, Wo, M].
FASTCAPS_DEVICE int64_t offset_of_parent(const View& view, int64_t parent, int M, int Ho, int Wo) {
  const int64_t q = parent / M, row = q / Wo, b = row / Ho;
  return b * view.stride[0] + (row - b * Ho) * view.stride[1] + (q - row * Wo) * view.stride[2] +
         (parent - q * M) * view.stride[3];
}

// A position of the block's tile: where it lies, and where its window begins. Offsets in elements; the window may begin
// in the padding, before the tensor.
//
// Windows overlap, and so two positions may add to one child's gradient. Where that must happen in a fixed order, a
// launch takes positions of one colour only: those far enough from each other to share no child.
struct Seat {
  int64_t position;                     // (b * Ho + y) * Wo + x; -1: none
  int64_t children, gate, query, cell;  // cell: (b * H + y) * W + x of the window's first child, in the block's part
  int y, x;

  // Is there a child so far from the window's first, or only padding?
  FASTCAPS_DEVICE bool sees(const PassArgs& a, int dy, int dx) const {
    return position >= 0 && (!a.padded || (unsigned(y + dy) < unsigned(a.H) && unsigned(x + dx) < unsigned(a.W)));
  }
};

FASTCAPS_DEVICE Seat seat_of(const PassArgs& a, int64_t index) {
  Seat s{-1, 0, 0, 0, 0, 0, 0};
  if (index >= a.seats) return s;
  const int64_t samples = int64_t(a.by_sample.divisor);
  const int64_t b = index / samples;
  const int rest = int(index - b * samples);
  const int row = a.by_row.quotient(rest);
  const int y = a.colour_y + row * a.colours_y, x = a.colour_x + a.by_row.remainder(rest, row) * a.colours_x;
  s.position = (b * a.Ho + y) * a.Wo + x;
  s.y = y * int(a.window.sh) - int(a.window.ph);
  s.x = x * int(a.window.sw) - int(a.window.pw);
  s.children = b * a.children.stride[0] + s.y * a.children.stride[1] + s.x * a.children.stride[2];
  s.gate = b * a.gate.stride[0] + s.y * a.gate.stride[1] + s.x * a.gate.stride[2];
  s.query = b * a.query.stride[0] + y * a.query.stride[1] + x * a.query.stride[2];
  s.cell = block_y() * a.cells_part + (b * a.H + s.y) * a.W + s.x;
  return s;
}

// The t-th child of a position in the order of the kernels: children with the same weights one after another.
struct Child {
  int i, g;       // i = (ky * kw + kx) * N + n
  int n, dy, dx;  // type, and how far from the window's first child

  FASTCAPS_DEVICE Child(const PassArgs& a, int t) {
    g = a.by_group.quotient(t);
    i = a.by_group.remainder(t, g) * a.G + g;
    const int q = a.by_types.quotient(i);
    n = a.by_types.remainder(i, q);
    const int ky = a.by_kernel_width.quotient(q);
    dy = ky * int(a.window.dh);
    dx = a.by_kernel_width.remainder(q, ky) * int(a.window.dw);
  }
  FASTCAPS_DEVICE bool exists(const PassArgs& a, const Seat& s) const { return s.sees(a, dy, dx); }
  FASTCAPS_DEVICE int64_t cell(const PassArgs& a, const Seat& s) const {  // (.., y, x, n) of a dense grid
    return (s.cell + int64_t(dy) * a.W + dx) * a.N + n;
  }
};

FASTCAPS_DEVICE void make_seats(const PassArgs& a, int tile, char* shared) {
  Seat* seats = reinterpret_cast<Seat*>(shared + a.shared_seat);
  for (int k = thread_index(); k < a.tile; k += block_threads()) seats[k] = seat_of(a, int64_t(tile) * a.tile + k);
}

// Where the children of a stage lie, seen from the first child of a window. Worked out by one thread a child, one stage
// ahead, in one of two places that take turns.
struct Offset {
  int64_t children, gate;
  int dy, dx;

  FASTCAPS_DEVICE bool exists(const PassArgs& a, const Seat& s) const { return s.sees(a, dy, dx); }
};

FASTCAPS_DEVICE Offset* offsets_of(const PassArgs& a, char* shared, int which) {
  return reinterpret_cast<Offset*>(shared + a.shared_offset) + which * kMostChildren;
}

FASTCAPS_DEVICE void make_offsets(const PassArgs& a, char* shared, int which, int first, int last) {
  const int k = thread_index();
  if (k >= a.stage || first + k >= last) return;
  const Child child(a, first + k);
  const int64_t* p = a.children.stride;
  const int64_t* g = a.gate.stride;
  offsets_of(a, shared, which)[k] = {child.dy * p[1] + child.dx * p[2] + child.n * p[3],
                                     child.dy * g[1] + child.dx * g[2] + child.n * g[3], child.dy, child.dx};
}

// Numbers come into shared memory as they are stored: T is float, or the 16 bits of half precision.

// V neighbours of a row to shared memory; `inside` says how many of them there are.
template <int V, class T>
FASTCAPS_DEVICE void stage_vector(const PassArgs& a, T* to, int64_t at, int inside) {
  const T* from = static_cast<const T*>(a.children.data);
  const int64_t step = a.children.stride[5];
  if (a.children_copy) {
    copy_async<V * sizeof(T)>(to, from + (inside > 0 ? at : 0), inside > 0);
    return;
  }
  FASTCAPS_UNROLL
  for (int v = 0; v < V; ++v) {
    if constexpr (sizeof(T) == 4)
      copy_async<4>(to + v, from + (v < inside ? at + v * step : 0), v < inside);
    else
      to[v] = v < inside ? from[at + v * step] : T(0);  // no copy is so small
  }
}

// Children [count, tile, C, D], zero where there is none and in the padding of rows and depth. A thread keeps its place
// within a child and goes through the children.
template <class Pose, class T>
FASTCAPS_DEVICE void stage_children(const PassArgs& a, int count, const Seat* seats, const Offset* offsets, T* to) {
  constexpr int V = Pose::kVector;
  const int rows = Pose::padded_rows(a), vectors = Pose::padded_depth(a) / V, stride = row_stride<Pose>(a);
  for (int unit = thread_index(); unit < a.tile * rows * vectors; unit += block_threads()) {
    int row, d;
    if constexpr (Pose::kFixed) {
      row = unit / (Pose::kD / V);
      d = unit % (Pose::kD / V) * V;
    } else {
      row = a.by_depth.quotient(unit);
      d = a.by_depth.remainder(unit, row) * V;
    }
    const int which = Pose::kFixed ? row / (Pose::kFixed ? Pose::kC : 1) : a.by_rows.quotient(row);
    const int c = row - which * rows;
    const Seat& seat = seats[which];
    const int inside = Pose::kFixed ? V : c >= a.C ? 0 : a.D - d < V ? a.D - d : V;
    const int64_t at = seat.children + c * a.children.stride[4] + d * a.children.stride[5];
    T* target = to + which * child_stride<Pose>(a) + c * stride + d;
    for (int k = 0; k < count; ++k) {
      stage_vector<V>(a, target, at + offsets[k].children, offsets[k].exists(a, seat) ? inside : 0);
      target += a.tile * child_stride<Pose>(a);
    }
  }
}

// Weights [count, parents of the block, stride]; zero for parents that there are not. As above.
template <class Pose, class T>
FASTCAPS_DEVICE void stage_weights(const PassArgs& a, int first, int count, T* to) {
  constexpr int V = Pose::kWeightCopy, kNumbers = Pose::kD * Pose::kE;
  const int block_parents = Lane<Pose>::block_parents(a);
  const int first_parent = a.first_parent + int(block_y()) * block_parents;
  for (int unit = thread_index(); unit < block_parents * (kNumbers / V); unit += block_threads()) {
    const int m = unit / (kNumbers / V), number = unit % (kNumbers / V) * V;
    const bool exists = first_parent + m < a.M;
    const T* from = static_cast<const T*>(a.weight) + (exists ? int64_t(first_parent + m) * kNumbers + number : 0);
    T* target = to + m * Pose::kWeightStride + number;
    for (int k = 0; k < count; ++k) {
      const int64_t group = exists ? a.by_group.quotient(first + k) : 0;
      copy_async<V * sizeof(T)>(target, from + group * a.M * kNumbers, exists);
      target += block_parents * Pose::kWeightStride;
    }
  }
}

// What multiplies a child's share, and whether there is such a child at all: padding holds none, not even a bias.
struct Seen {
  float gate, exists;
};

FASTCAPS_DEVICE void stage_seen(const PassArgs& a, int count, const Seat* seats, const Offset* offsets, Seen* to) {
  for (int unit = thread_index(); unit < count * a.tile; unit += block_threads()) {
    const int k = a.by_tile.quotient(unit);
    const Seat& seat = seats[a.by_tile.remainder(unit, k)];
    Seen seen{0.0f, 0.0f};
    if (offsets[k].exists(a, seat)) {
      seen = {1.0f, 1.0f};
      if (a.gate.data) seen.gate = load_number(a.gate.data, seat.gate + offsets[k].gate, a.storage);
    }
    to[unit] = seen;
  }
}

// One child after another of a stage in shared memory.
template <class Pose>
struct Stage {
  const float* children;   // [tile, C, D], child_stride apart
  const uint16_t* stored;  // the same as they came, of half precision
  const float* weight;     // [parents of the block, stride]
  const Seen* seen;        // [tile]
  int t;                   // which child it is, in the order of the kernels

  FASTCAPS_DEVICE Stage(const PassArgs& a, char* shared, int which, int first) : t(first) {
    const char* floats = shared + a.shared_float + which * a.float_stage;
    children = reinterpret_cast<const float*>(floats);
    stored = reinterpret_cast<const uint16_t*>(shared + which * a.shared_stage);
    weight = reinterpret_cast<const float*>(floats + a.shared_weight);
    seen = reinterpret_cast<const Seen*>(shared + which * a.shared_stage + a.shared_seen);
  }
  FASTCAPS_DEVICE void next(const PassArgs& a) {
    children += a.tile * child_stride<Pose>(a);
    stored += a.tile * child_stride<Pose>(a);
    weight += Lane<Pose>::block_parents(a) * Pose::kWeightStride;
    seen += a.tile;
    ++t;
  }

  // The children in a type that the caller knows them to be in.
  template <Storage S>
  FASTCAPS_DEVICE const Element<S>* children_as() const {
    if constexpr (S == Storage::kFloat32)
      return children;
    else
      return stored;
  }

  // Children [first, last), or as many as fit; they have come when copy_wait and a barrier are passed. The offsets of
  // the first must be there, behind a barrier; those of the children after them are made.
  static FASTCAPS_DEVICE void bring(const PassArgs& a, char* shared, int which, int first, int last) {
    const int count = last - first < a.stage ? last - first : a.stage;
    if (count <= 0) return;
    make_offsets(a, shared, which ^ 1, first + a.stage, last);
    const Seat* seats = reinterpret_cast<const Seat*>(shared + a.shared_seat);
    const Offset* offsets = offsets_of(a, shared, which);
    char* base = shared + which * a.shared_stage;
    const auto numbers = [&](auto* to) {
      stage_children<Pose>(a, count, seats, offsets, to);
      if constexpr (Pose::kWeightStride > 0)
        if (a.weight) stage_weights<Pose>(a, first, count, to + a.shared_weight / int(sizeof(float)));
    };
    if (a.storage == Storage::kFloat32)
      numbers(reinterpret_cast<float*>(base));
    else
      numbers(reinterpret_cast<uint16_t*>(base));
    stage_seen(a, count, seats, offsets, reinterpret_cast<Seen*>(base + a.shared_seen));
  }

  // Half precision to float, once for all lanes that will read it: four neighbours at a time, from the stage to where
  // its floats lie, in the same order and what lies between them too. Behind a barrier, and another must follow.
  static FASTCAPS_DEVICE void widen(const PassArgs& a, char* shared, int which, int count) {
    const float* from = reinterpret_cast<const float*>(shared + which * a.shared_stage);  // two numbers each
    float* to = reinterpret_cast<float*>(shared + a.shared_float);
    const bool staged = Pose::kWeightStride > 0 && a.weight;
    const int numbers =
        staged ? a.shared_weight / int(sizeof(float)) + count * Lane<Pose>::block_parents(a) * Pose::kWeightStride
               : count * a.tile * child_stride<Pose>(a);
    const auto all = [&](auto stored) {
      for (int k = thread_index() * 4; k < numbers; k += block_threads() * 4) {
        float x[4];
        widen_vector<stored()>(load2(from + k / 2), x);
        store4(to + k, make_float4(x[0], x[1], x[2], x[3]));
      }
    };
    if (a.storage == Storage::kBFloat16)
      all(Stored<Storage::kBFloat16>());
    else
      all(Stored<Storage::kFloat16>());
  }

  // Children behind a gate of exactly 0 that are NaN or infinite become zeros, as if they were not there: nothing that
  // they are multiplied by is a number. Behind a barrier, and another must follow.
  static FASTCAPS_DEVICE void silence(const PassArgs& a, char* shared, int which, int count) {
    Seen* seen = reinterpret_cast<Seen*>(shared + which * a.shared_stage + a.shared_seen);
    const int numbers = Pose::padded_rows(a) * row_stride<Pose>(a), depth = Pose::padded_depth(a);
    const auto all = [&](auto* children, auto is_finite) {
      for (int unit = thread_index(); unit < count * a.tile; unit += block_threads()) {
        if (seen[unit].gate != 0.0f || seen[unit].exists == 0.0f) continue;
        auto* child = children + unit * child_stride<Pose>(a);
        bool finite = true;
        for (int row = 0; row < numbers; row += row_stride<Pose>(a))
          for (int d = 0; d < depth; ++d) finite = finite && is_finite(child[row + d]);
        if (finite) continue;
        for (int n = 0; n < numbers; ++n) child[n] = 0;
        seen[unit].exists = 0.0f;
      }
    };
    if constexpr (Pose::kStored) {
      if (a.storage != Storage::kFloat32) {
        const uint16_t top = a.storage == Storage::kBFloat16 ? 0x7f80 : 0x7c00;  // the exponent of what is not finite
        all(reinterpret_cast<uint16_t*>(shared + which * a.shared_stage),
            [=](uint16_t bits) { return (bits & top) != top; });
        return;
      }
    }
    all(reinterpret_cast<float*>(shared + a.shared_float + which * a.float_stage),
        [](float x) { return fabsf(x) < INFINITY; });
  }
};

}  // namespace fastcaps::gpu
