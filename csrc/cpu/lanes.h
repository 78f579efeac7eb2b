// A lane is usually a position: element k of every vector belongs to the k-th position of a tile.
//
// A tile is kLanes consecutive positions (b, ho, wo). Its poses are read in place, whatever their strides, and
// transposed so that value j of a pose is one vector over the tile. Softmax over parents then never leaves a lane,
// weights are broadcast scalars in the layout the user gave, and no vector is ever partly filled but the last.
//
// If there are too few positions for that (a set at batch 1), a lane is a child. Weights are then vectors, transposed
// to lanes when they are read (or scalars, if all children share them), parents are scalars, and sums over children add
// up the lanes of a block. One source serves all, as a scalar times a vector and a vector times a vector are written
// alike.
#pragma once

#include "../votes.h"
#include "vec.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {

// Where value j of a row goes: to j, or, of a matrix [E, D], to its place in [D, E].
struct Straight {
  FASTCAPS_INLINE int64_t operator()(int64_t j) const { return j; }
};
struct Transposed {
  const int* places;
  FASTCAPS_INLINE int64_t operator()(int64_t j) const { return places[j]; }
};

// Row r of `lane` (stride 1, `count` values each) becomes column r: out[j][r] = lane[r][j]; a null lane reads as 0.
// `ahead`: from these rows to those of the next call.
template <class T, class S, class Place = Straight>
FASTCAPS_NOINLINE void gather_rows(const S* const* lane, int64_t count, Vec<T>* out, Place place, int64_t ahead) {
  constexpr int n = kLanes<T>;
  int64_t j = 0;
  for (; j + n <= count; j += n) {
    Vec<T> rows[n];
    unroll<n>([&](auto r) FASTCAPS_LAMBDA {
      rows[r] = lane[r] ? load_as<T>(lane[r] + j) : Vec<T>{};
      // the hardware does not prefetch as many as kLanes streams
      if (lane[r]) __builtin_prefetch(lane[r] + ahead + j);
    });
    transpose<T>(rows);
    unroll<n>([&](auto r) FASTCAPS_LAMBDA { out[place(j + r)] = rows[r]; });
  }
  for (; j < count; ++j) {
    T column[n];
    for (int r = 0; r < n; ++r) column[r] = lane[r] ? widen<T>(lane[r][j]) : T(0);
    out[place(j)] = load<T>(column);
  }
}
template <class T, class S>
FASTCAPS_INLINE void gather_rows(const S* const* lane, int64_t count, Vec<T>* out) {
  gather_rows<T>(lane, count, out, Straight{}, count);  // the next call reads what follows in memory
}

// The inverse: lane[r][j] = in[j][r], or += with kAdd; skips null lanes.
template <bool kAdd, class T, class S, class Place = Straight>
FASTCAPS_NOINLINE void scatter_rows(S* const* lane, int64_t count, const Vec<T>* in, Place place = {}) {
  constexpr int n = kLanes<T>;
  int64_t j = 0;
  for (; j + n <= count; j += n) {
    Vec<T> rows[n];
    unroll<n>([&](auto r) FASTCAPS_LAMBDA { rows[r] = in[place(j + r)]; });
    transpose<T>(rows);
    unroll<n>([&](auto r) FASTCAPS_LAMBDA {
      if (lane[r]) store_as<S, T>(lane[r] + j, kAdd ? load_as<T>(lane[r] + j) + rows[r] : rows[r]);
    });
  }
  for (; j < count; ++j) {
    T column[n];
    store<T>(column, in[place(j)]);
    for (int r = 0; r < n; ++r)
      if (lane[r]) lane[r][j] = narrow<S>(kAdd ? widen<T>(lane[r][j]) + column[r] : column[r]);
  }
}

// A pose (or several, one after another) of `rows` x `cols` values per lane, with any strides.
template <class T, class S>
FASTCAPS_NOINLINE void gather_poses(const S* const* lane, int64_t rows, int64_t cols, int64_t row_stride,
                                    int64_t col_stride, Vec<T>* out) {
  constexpr int n = kLanes<T>;
  if (col_stride == 1 && (row_stride == cols || rows == 1)) return gather_rows<T>(lane, rows * cols, out);
  for (int64_t c = 0; c < rows; ++c) {
    for (int64_t d = 0; d < cols; ++d) {
      T column[n];
      for (int r = 0; r < n; ++r) column[r] = lane[r] ? widen<T>(lane[r][c * row_stride + d * col_stride]) : T(0);
      out[c * cols + d] = load<T>(column);
    }
  }
}

// The positions of one tile: where their windows begin. Lanes past `count` are empty.
template <class T>
struct Tile {
  static constexpr int n = kLanes<T>;
  int64_t b[n], y[n], x[n];
  int64_t first;
  int count;

  FASTCAPS_INLINE void place(const Votes& in, int64_t first_position, int64_t end) {
    first = first_position;
    count = end - first < n ? int(end - first) : n;
    const int64_t L = in.Ho * in.Wo;
    for (int r = 0; r < n; ++r) {
      const int64_t p = first + (r < count ? r : 0), at = p % L;
      b[r] = p / L;
      y[r] = at / in.Wo * in.window.sh - in.window.ph;
      x[r] = at % in.Wo * in.window.sw - in.window.pw;
    }
  }

  // Where each lane finds child (ky, kx, n) in a [B, H, W, N, ...] tensor; null where the window leaves the grid.
  template <class S>
  FASTCAPS_INLINE void child(const Votes& in, S* data, const int64_t* stride, int64_t i, S** lane) const {
    const int64_t at = i / in.N, ky = at / in.window.kw * in.window.dh, kx = at % in.window.kw * in.window.dw;
    S* base = data + (i % in.N) * stride[3];
    for (int r = 0; r < n; ++r) {
      const int64_t yy = y[r] + ky, xx = x[r] + kx;
      const bool inside = r < count && yy >= 0 && yy < in.H && xx >= 0 && xx < in.W;
      lane[r] = inside ? base + (b[r] * stride[0] + yy * stride[1] + xx * stride[2]) : nullptr;
    }
  }

  // The same for the first lane only.
  template <class S>
  FASTCAPS_INLINE S* first_child(const Votes& in, S* data, const int64_t* stride, int64_t i) const {
    const int64_t at = i / in.N;
    const int64_t yy = y[0] + at / in.window.kw * in.window.dh, xx = x[0] + at % in.window.kw * in.window.dw;
    const bool inside = yy >= 0 && yy < in.H && xx >= 0 && xx < in.W;
    return inside ? data + (b[0] * stride[0] + yy * stride[1] + xx * stride[2] + (i % in.N) * stride[3]) : nullptr;
  }

  // Where each lane finds its own row in a contiguous [positions, row] tensor.
  template <class S>
  FASTCAPS_INLINE void row(S* data, int64_t length, S** lane) const {
    for (int r = 0; r < n; ++r) lane[r] = r < count ? data + (first + r) * length : nullptr;
  }

  // Where each lane finds parent m in a strided [B, Ho, Wo, M, C, E] tensor.
  template <class S>
  FASTCAPS_INLINE void parent(const Votes& in, S* data, const int64_t* stride, int64_t m, S** lane) const {
    const int64_t L = in.Ho * in.Wo;
    for (int r = 0; r < n; ++r) {
      const int64_t p = first + r, at = p % L;
      lane[r] = r < count ? data + (p / L * stride[0] + at / in.Wo * stride[1] + at % in.Wo * stride[2] + m * stride[3])
                          : nullptr;
    }
  }
};

// f(S*) with the pointer cast to what it stores: values of the compute type T, or bfloat16 for float.
template <class T, class F>
FASTCAPS_INLINE void with_storage(Storage storage, const void* data, F&& f) {
  if constexpr (std::is_same_v<T, float>)
    if (storage == Storage::kBFloat16) return f(static_cast<const BFloat16*>(data));
  f(static_cast<const T*>(data));
}

// Whether a row is a single position (lanes are children, X = T) or a tile of kLanes positions (X is a vector).
template <class T, class X>
inline constexpr bool kOnePosition = std::is_same_v<X, T>;

// `many` poses of `rows` x `columns` values from a strided [B, Ho, Wo, M, C, E] tensor (or [B, Ho, Wo, M], 1 x 1).
template <class T, class X>
FASTCAPS_NOINLINE void gather_parents(const Votes& in, const Tile<T>& tile, Storage storage, const View& view,
                                      int64_t many, int64_t rows, int64_t columns, X* out) {
  with_storage<T>(storage, view.data, [&](auto* data) FASTCAPS_LAMBDA {
    using S = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    const S* lane[kLanes<T>];
    const int64_t pose = rows * columns;
    const bool packed = (columns == 1 || view.stride[5] == 1) && (rows == 1 || view.stride[4] == columns);
    if constexpr (kOnePosition<T, X>) {
      for (int64_t m = 0; m < many; ++m) {
        tile.parent(in, data, view.stride, m, lane);
        for (int64_t c = 0; c < rows; ++c)
          for (int64_t e = 0; e < columns; ++e)
            out[m * pose + c * columns + e] = widen<T>(lane[0][c * view.stride[4] + e * view.stride[5]]);
      }
    } else {
      if (packed && (many == 1 || view.stride[3] == pose)) {
        tile.parent(in, data, view.stride, 0, lane);
        return gather_rows<T>(lane, many * pose, out);
      }
      for (int64_t m = 0; m < many; ++m) {
        tile.parent(in, data, view.stride, m, lane);
        gather_poses<T>(lane, rows, columns, view.stride[4], view.stride[5], out + m * pose);
      }
    }
  });
}

// Writes `length` values for each position to contiguous rows.
template <class T, class S, class X>
void write_row(const Tile<T>& tile, S* data, int64_t length, const X* in) {
  S* lane[kLanes<T>];
  tile.row(data, length, lane);
  if constexpr (kOnePosition<T, X>)
    for (int64_t k = 0; k < length; ++k) lane[0][k] = narrow<S>(in[k]);
  else
    scatter_rows<false, T>(lane, length, in);
}

// The same to rows in the storage type, from row `first` on.
template <class T, class X>
FASTCAPS_NOINLINE void write_parents(const Tile<T>& tile, Storage storage, void* data, int64_t first, int64_t length,
                                     const X* in) {
  with_storage<T>(storage, data, [&](auto* typed) FASTCAPS_LAMBDA {
    using Out = std::remove_const_t<std::remove_pointer_t<decltype(typed)>>;
    write_row<T>(tile, const_cast<Out*>(typed) + first * length, length, in);
  });
}

// Rounds to the storage type: parents between two iterations are rounded as between two calls.
template <class T, class X>
FASTCAPS_INLINE X rounded(Storage storage, X x) {
  if (storage != Storage::kBFloat16) return x;
  return each_lane<T>(x, [](T number) { return widen<T>(narrow<BFloat16>(number)); });
}

// The children of an item, numbered q = 0, 1, ...: types [first, first + run) at each place in the window in turn, or
// simply children [first, first + run) of a single run.
struct Range {
  int64_t first, run, step, count;

  FASTCAPS_INLINE int64_t child(int64_t q) const { return first + q / run * step + q % run; }
};

// Where units of children lie. A unit is the children of one vector: one child, seen from every position of a tile, or
// kLanes children, seen from one position.
template <class T, bool kChildLanes>
struct UnitsOf {
  static constexpr int n = kLanes<T>;
  static constexpr int64_t kUnit = kChildLanes ? n : 1;

  // Where the lanes of the unit that begins with child q of the range are in a [B, H, W, N, ...] tensor; null where the
  // window leaves the grid or the range has ended.
  template <class S>
  static FASTCAPS_INLINE void find(const Votes& in, const Tile<T>& tile, S* data, const int64_t* stride,
                                   const Range& range, int64_t q, S** lane) {
    if constexpr (kChildLanes) {
      for (int r = 0; r < n; ++r)
        lane[r] = q + r < range.count ? tile.first_child(in, data, stride, range.child(q + r)) : nullptr;
    } else {
      tile.child(in, data, stride, range.child(q), lane);
    }
  }

  // Returns how many units from q on, at most `units`, are adjacent in memory if the types of a place are.
  static FASTCAPS_INLINE int64_t neighbours(const Votes& in, const Range& range, int64_t q, int64_t units) {
    if (kChildLanes) return 1;
    const int64_t in_run = range.run - q % range.run, at_place = in.N - range.child(q) % in.N;
    const int64_t left = in_run < at_place ? in_run : at_place;
    return left < units ? left : units;
  }

  // Poses of `units` units from child q on as [units][C * D] vectors, and their gates: the user's (1 if none), 0
  // for a child that the window does not hold.
  static FASTCAPS_NOINLINE void gather(const Votes& in, const Tile<T>& tile, Storage storage, const View& children,
                                       const View& gate, const Range& range, int64_t q, int64_t units, Vec<T>* poses,
                                       Vec<T>* gates) {
    const int64_t pose = in.child_size();
    const bool packed = !kChildLanes && children.stride[5] == 1 && (in.C == 1 || children.stride[4] == in.D) &&
                        (in.N == 1 || children.stride[3] == pose);
    with_storage<T>(storage, children.data, [&](auto* data) FASTCAPS_LAMBDA {
      using S = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
      const S* lane[n];
      const S* gate_lane[n];
      for (int64_t k = 0; k < units;) {
        const int64_t at = q + k * kUnit, run = packed ? neighbours(in, range, at, units - k) : 1;
        find(in, tile, data, children.stride, range, at, lane);
        if (packed)
          gather_rows<T>(lane, run * pose, poses + k * pose);
        else
          gather_poses<T>(lane, in.C, in.D, children.stride[4], children.stride[5], poses + k * pose);
        for (int64_t j = 0; j < run; ++j) {
          if (gate.data) find(in, tile, static_cast<const S*>(gate.data), gate.stride, range, at + j, gate_lane);
          T value[n];
          for (int r = 0; r < n; ++r) value[r] = lane[r] == nullptr ? T(0) : gate.data ? widen<T>(*gate_lane[r]) : T(1);
          gates[k + j] = load<T>(value);
        }
        k += run;
      }
    });
  }
};

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
