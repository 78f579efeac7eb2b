// The kernels of the verbs for one instruction set; verbs.h describes the layout. The walk goes over blocks of
// children, whose matrices are packed, and for each block over positions: it takes the rows of one position, or of four
// if a pose has one row.
#include "verb_rows.h"

namespace fastcaps {
namespace FASTCAPS_NAMESPACE {
namespace {

// An output position.
struct Place {
  int64_t p, b, y, x;
};

template <class T, class S>
struct Walk {
  static constexpr int n = kLanes<T>;
  const VerbCall& call;
  const Votes& in;
  const int64_t C, D, E, flat;
  const bool pulls;
  const int64_t children_at_once;
  Arena arena;
  T *weights, *biases, *poses, *coefficients, *scores, *dvotes;
  Row<T>* rows;
  int64_t* starts;
  LongSum<T> dweight, dbias;
  int64_t tile = 0, first_parent = 0, parents = 0;          // the current tile
  int64_t packed = -1, packed_count = 0, packed_tile = -1;  // packed matrices: the first child's group; children; tile
  int64_t item = 0, range = 0, samples = 0;  // the item; its range of children; a pull's range of samples

  Walk(const VerbCall& call, void* scratch)
      : call(call),
        in(call.votes),
        C(in.C),
        D(in.D),
        E(in.E),
        flat(call.flat),
        pulls(call.kind >= Kind::kPull),
        children_at_once(in.G > 1 ? min(call.block, in.G) : call.block),
        arena{static_cast<char*>(scratch)},
        weights(arena.take<T>(in.weight ? call.block * D * flat : 0)),
        biases(arena.take<T>(in.bias ? call.block * C * flat : 0)),
        poses(arena.take<T>(call.block * row_count() * (in.weight ? D : flat + n))),
        coefficients(arena.take<T>(call.block * kRows * (call.tile + 2 * n))),
        scores(arena.take<T>(call.scores ? call.block * kRows * flat + n : 0)),
        dvotes(arena.take<T>(pulls ? call.block * row_count() * flat : 0)),
        rows(arena.take<Row<T>>(row_count())),
        starts(arena.take<int64_t>(flat / n)),
        dweight(pulls && call.dweight, call.block * D * flat, 256, arena),
        dbias(pulls && call.dbias, call.block * C * flat, std::is_same_v<T, double> ? 256 : 16, arena) {
    for (int64_t v = 0; scratch && v < flat / n; ++v) starts[v] = v * n % call.tile;
  }

  int64_t row_count() const { return C > kRows ? C : kRows; }

  Place place(int64_t p) const {
    const int64_t area = in.Ho * in.Wo;
    return {p, p / area, p % area / in.Wo, p % in.Wo};
  }
  void step(Place& at) const {
    ++at.p;
    if (++at.x < in.Wo) return;
    at.x = 0;
    if (++at.y < in.Ho) return;
    at.y = 0, ++at.b;
  }
  void enter_tile(int64_t t) {
    tile = t, first_parent = t * call.tile;
    parents = min(call.tile, in.M - first_parent);
  }

  // Matrices and biases of children i to i + count.
  int64_t weight_step() const { return in.G == 1 ? 0 : D * flat; }
  int64_t bias_step() const { return in.bias_stride_i == 0 ? 0 : C * flat; }
  template <class X>
  void pack_weight(const X* all, int64_t g, T* to) {
    const MatrixLayout& layout = in.matrices;
    pack<T>(all + layout.at(g, first_parent), layout.parent, layout.row, layout.column, parents, D, E, call.tile, flat,
            to);
  }
  void enter(int64_t i, int64_t count) {
    const int64_t g = i % in.G;
    const bool here = packed == g && packed_count >= (in.G > 1 ? count : 1) && packed_tile == tile;
    if (in.weight && !here) {
      leave_weights();
      packed = g, packed_count = in.G > 1 ? count : 1;
      for (int64_t j = 0; j < packed_count; ++j) {
        T* to = weights + j * D * flat;
        if (in.narrow_weight)
          pack_weight(static_cast<const BFloat16*>(in.weight), (g + j) % in.G, to);
        else
          pack_weight(static_cast<const T*>(in.weight), (g + j) % in.G, to);
      }
    }
    packed_tile = tile;
    for (int64_t j = 0; in.bias && j < (bias_step() ? count : 1); ++j)
      pack<T>(static_cast<const T*>(in.bias) + (i + j) * in.bias_stride_i + first_parent * in.bias_stride_m,
              in.bias_stride_m, E, 1, parents, C, E, call.tile, flat, biases + j * C * flat);
  }

  // Processes children i to i + count, all in one cell of the window, at positions from `at` to `end`.
  void meet_places(int64_t i, int64_t count, Place at, int64_t end) {
    const Window& w = in.window;
    const int64_t cell = i / in.N, dy = cell / w.kw * w.dh - w.ph, dx = cell % w.kw * w.dw - w.pw;
    Meeting<T> with{};
    with.weight = in.weight ? weights : nullptr;
    with.weight_step = weight_step(), with.bias_step = bias_step(), with.dx_step = C * D, with.once = call.once();
    with.dvotes_step = call.makes_votes() ? row_count() * flat : 0;  // 0: one child's dvotes at a time
    with.D = D, with.starts = starts, with.flat = flat, with.end = count, with.together = C > 1;
    for (int64_t many = 0; at.p < end;) {
      Place places[kRows];
      const int64_t most = C > 1 ? 1 : kRows;
      for (many = 0; many < most && at.p < end; step(at)) {
        const int64_t y = at.y * w.sh + dy, x = at.x * w.sw + dx;
        if (y < 0 || y >= in.H || x < 0 || x >= in.W) {
          if (call.scores) write_scores(at.p, i, count, nullptr);
          continue;
        }
        set_rows(many, at, y, x, i, count, with);
        places[many++] = at;
      }
      if (many == 0) break;
      const int64_t rows_here = C > 1 ? C : many;
      if (pulls) {
        pull(with, rows_here, count);
      } else {
        make(with, rows_here);
      }
      for (int64_t k = 0; call.scores && k < many; ++k)
        write_scores(places[k].p, i, count, scores + k * call.block * flat);
    }
  }

  // Prefetches the next position's values; `stride` is that of samples, rows and columns.
  template <class X>
  void fetch_next(const X* from, const int64_t* stride, int64_t down, int64_t right, int64_t count) const {
    from += in.Wo > 1 ? right * stride[2] : in.Ho > 1 ? down * stride[1] : stride[0];
    for (int64_t k = 0; k < min(count, 256); k += 64 / int64_t(sizeof(X))) __builtin_prefetch(from + k);
  }

  // Sets the rows of the `which`th position of a group, whose window has children i to i + count at (y, x).
  void set_rows(int64_t which, const Place& at, int64_t y, int64_t x, int64_t i, int64_t count, Meeting<T>& with) {
    const int64_t *s = in.children.stride, type = i % in.N, row0 = C > 1 ? 0 : which, size = C * D;
    const int64_t own[] = {in.H * in.W * in.N * size, in.W * in.N * size, in.N * size};  // of dchildren
    const S* child = static_cast<const S*>(in.children.data) + at.b * s[0] + y * s[1] + x * s[2] + type * s[3];
    fetch_next(child, s, in.window.sh, in.window.sw, count * s[3]);
    T* dx = static_cast<T*>(call.dchildren);
    if (dx) dx += at.b * own[0] + y * own[1] + x * own[2] + type * size;
    if (dx) fetch_next(dx, own, in.window.sh, in.window.sw, count * size);
    const int64_t pairs = in.I * in.M, scored[] = {in.Ho * in.Wo * pairs, in.Wo * pairs, pairs};
    if (call.scores)
      fetch_next(static_cast<T*>(call.scores) + (at.p * in.I + i) * in.M + first_parent, scored, 1, 1, count * in.M);
    const T* poses_here = nullptr;
    int64_t row_step = s[4];
    if constexpr (std::is_same_v<S, T>)
      if (in.weight && s[5] == 1) poses_here = child, with.x_step = s[3];
    if (!poses_here) {
      row_step = in.weight ? D : flat, with.x_step = row_count() * row_step;
      poses_here = copy_poses(child, count, poses + row0 * row_step, row_step);
    }
    const T* r = call.coefficients.data ? coefficients_of(which, at, i, count, with.r_step) : nullptr;
    const int64_t pose = (tile * in.positions() + at.p) * C;
    for (int64_t c = 0; c < C; ++c) {
      Row<T>& row = rows[row0 + c];
      row.x = poses_here + c * row_step;
      row.bias = in.bias ? biases + c * flat : nullptr;
      row.r = r;
      row.about = static_cast<const T*>(call.about) + (pose + c) * call.about_step;
      row.precisions = static_cast<const T*>(call.precisions) + (pose + c) * call.precisions_step;
      const int64_t sum = range * call.numbers() + (pose + c) * flat;
      row.scores = call.scores ? scores + which * call.block * flat : nullptr;
      row.dvotes = dvotes + (row0 + c) * flat;
      row.sums = call.sums ? static_cast<T*>(call.sums) + sum : nullptr;
      row.squares = call.squares ? static_cast<T*>(call.squares) + sum : nullptr;
      row.dx = dx ? dx + c * D : nullptr;
    }
  }

  // Copies poses in the type of sums; without matrices as flat rows, which are the votes.
  const T* copy_poses(const S* child, int64_t count, T* to, int64_t row_step) const {
    const int64_t *s = in.children.stride, copies = in.weight ? 1 : call.tile;
    for (int64_t j = 0; j < count; ++j)
      for (int64_t c = 0; c < C; ++c)
        for (int64_t d = 0; d < D; ++d) {
          const T value = widen<T>(child[j * s[3] + c * s[4] + d * s[5]]);
          T* out = to + (j * row_count() + c) * row_step + d * copies;
          for (int64_t m = 0; m < copies; ++m) out[m] = value;
        }
    return to;
  }

  // Returns coefficients of children i to i + count. Each child's are repeated for one more vector: a vector may begin
  // with any parent and continues with the first after the last.
  const T* coefficients_of(int64_t which, const Place& at, int64_t i, int64_t count, int64_t& step) {
    const int64_t* t = call.coefficients.stride;
    const T* all = static_cast<const T*>(call.coefficients.data) + at.b * t[0] + at.y * t[1] + at.x * t[2] + i * t[3] +
                   first_parent * t[4];
    fetch_next(all, t, 1, 1, count * t[3]);
    step = t[3];
    const int64_t M = parents, many = call.tile, last = many + n, step_m = t[4];
    if (step_m == 1 && M % n == 0 && M == many) return all;
    step = kRows * (last + n);
    T* to = coefficients + which * (last + n);
    for (int64_t j = 0; j < count; ++j) {
      T* out = to + j * step;
      const T* from = all + j * t[3];
      if (step_m == 1 && t[3] == M && M == many && (count - j) * M >= ceil_div(M, n) * n) {  // reads past this child
        for (int64_t k = 0; k < last; k += M)
          for (int64_t m = 0; m < M && k + m < last; m += n) store<T>(out + k + m, load<T>(from + m));
      } else {
        for (int64_t m = 0; m < M; ++m) out[m] = from[m * step_m];
        for (int64_t m = M; m < many; ++m) out[m] = 0;
        for (int64_t m = many; m < last; ++m) out[m] = out[m - many];
      }
    }
    return to;
  }

  void make(const Meeting<T>& with, int64_t count) {
    switch (call.kind) {
      case Kind::kDots: return meet_all<T, Kind::kDots>(with, rows, count);
      case Kind::kDistances: return meet_all<T, Kind::kDistances>(with, rows, count);
      case Kind::kAdd: return meet_all<T, Kind::kAdd>(with, rows, count);
      case Kind::kAddCentred: return meet_all<T, Kind::kAddCentred>(with, rows, count);
      case Kind::kAddSquares: return meet_all<T, Kind::kAddSquares>(with, rows, count);
      case Kind::kPull: return meet_all<T, Kind::kPull>(with, rows, count);
      default: return meet_all<T, Kind::kPullSquared>(with, rows, count);
    }
  }

  // Writes scores of children i to i + count: sums over e of flat rows; zeros if `from` is null.
  void write_scores(int64_t p, int64_t i, int64_t count, const T* from) {
    T* to = static_cast<T*>(call.scores) + (p * in.I + i) * in.M + first_parent;
    for (int64_t j = 0; j < count; ++j, to += in.M)
      for (int64_t m = 0; m < parents; m += n) {
        Vec<T> sum{};
        for (int64_t e = 0; from && e < E; ++e) sum += load<T>(from + j * flat + e * call.tile + m);
        if (m + n <= parents || (call.tiles == 1 && j + 1 < count && parents - m + in.M >= n))
          store<T>(to + m, sum);  // the next child's scores overwrite what is beyond the parents
        else
          for (int64_t k = 0; m + k < parents; ++k) to[m + k] = sum[k];
      }
  }

  // ---- pull ----

  void pull(Meeting<T>& with, int64_t count, int64_t children) {
    if (call.makes_votes()) make(with, count);
    for (int64_t j = 0; j < children; ++j) {
      const int64_t at = j * with.dvotes_step;
      for (int64_t k = 0; !call.makes_votes() && k < count; ++k)
        for (int64_t v = 0; v < flat; v += n)
          store<T>(rows[k].dvotes + at + v,
                   load<T>(rows[k].r + j * with.r_step + starts[v / n]) * load<T>(rows[k].about + v));
      if (dbias.near)
        for (int64_t k = 0; k < count; k += C > 1 ? 1 : count) {
          T* sum = dbias.near + j * bias_step() + k * flat;
          for (int64_t v = 0; v < flat; v += n) {
            Vec<T> terms = load<T>(rows[k].dvotes + at + v);  // of positions, whose biases are the same
            for (int64_t other = 1; C == 1 && other < count; ++other) terms += load<T>(rows[other].dvotes + at + v);
            store<T>(sum + v, load<T>(sum + v) + terms);
          }
        }
      T* dw = dweight.near ? dweight.near + j * weight_step() : nullptr;
      if (!in.weight) {
        if (call.dchildren) add_runs(with, count, j);
      } else if (call.dchildren && dw) {
        pull_all<T, true, true>(with, rows, count, j, dw);
      } else if (call.dchildren) {
        pull_all<T, true, false>(with, rows, count, j, dw);
      } else if (dw) {
        pull_all<T, false, true>(with, rows, count, j, dw);
      }
    }
    dweight.count(weight_step() ? count : count * children);
    dbias.count(bias_step() ? 1 : children);
  }

  // If votes are the children's poses: dx gets the sums over the parents.
  void add_runs(const Meeting<T>& with, int64_t count, int64_t j) {
    for (int64_t k = 0; k < count; ++k)
      for (int64_t e = 0; e < E; ++e) {
        T& dx = rows[k].dx[j * with.dx_step + e];
        dx = (with.once ? 0 : dx) + sum_of<T>(rows[k].dvotes + j * with.dvotes_step + e * call.tile, parents);
      }
  }

  // Adds the gradient of the packed matrices to the result.
  void leave_weights() {
    if (!dweight.near) return;
    if (packed >= 0) {
      T* out = call.dweight.part<T>(call.own_weights() ? samples : item);
      for (int64_t j = 0; j < packed_count; ++j)
        for (int64_t m = 0; m < parents; ++m) {
          T* to = out + (((packed + j) % in.G) * in.M + packed_tile * call.tile + m) * D * E;
          for (int64_t d = 0; d < D; ++d)
            for (int64_t e = 0; e < E; ++e) to[d * E + e] += T(dweight.at((j * D + d) * flat + e * call.tile + m));
        }
    }
    dweight.clear();
  }
  void leave_biases(int64_t i, int64_t count) {
    if (!dbias.near) return;
    T* out = call.dbias.part<T>(call.own_bias() ? samples : item);
    const int64_t together = in.bias_stride_m ? 1 : parents;  // parents that share a bias
    for (int64_t j = 0; j < (bias_step() ? count : 1); ++j)
      for (int64_t m = 0; m < parents; m += together) {
        T* to = out + (i + j) * in.bias_stride_i + (first_parent + m) * in.bias_stride_m;
        for (int64_t c = 0; c < C; ++c)
          for (int64_t e = 0; e < E; ++e) {
            double sum = 0;
            for (int64_t k = 0; k < together; ++k) sum += dbias.at((j * C + c) * flat + e * call.tile + m + k);
            to[c * E + e] += T(sum);
          }
      }
    dbias.clear();
  }

  void run_pull(int64_t which) {
    item = which, samples = which % call.place_ranges, range = which / call.place_ranges;
    const int64_t area = in.Ho * in.Wo;
    const int64_t begin = range * in.N / call.child_ranges, end = (range + 1) * in.N / call.child_ranges;
    const int64_t from = samples * in.B / call.place_ranges, until = (samples + 1) * in.B / call.place_ranges;
    packed = -1;
    dbias.clear();
    for (int64_t t = 0; t < call.tiles; ++t) {
      leave_weights();
      packed = -1;
      enter_tile(t);
      clear_sums(from * area, until * area);
      for (int64_t first = begin, count; first < end; first += count) {
        count = min(children_at_once, end - first);
        for (int64_t cell = 0; cell < in.window.kh * in.window.kw; ++cell) {
          const int64_t i = cell * in.N + first;
          enter(i, count);
          meet_places(i, count, place(from * area), until * area);
          if (bias_step()) leave_biases(i, count);
        }
      }
      if (!bias_step()) leave_biases(0, 1);
    }
    leave_weights();
  }

  // Clears the range's sums at positions from `from` to `until`.
  void clear_sums(int64_t from, int64_t until) {
    for (void* sums : {call.sums, call.squares})
      for (int64_t k = from * C * flat; sums && k < until * C * flat; ++k)
        static_cast<T*>(sums)[range * call.numbers() + tile * in.positions() * C * flat + k] = 0;
  }

  void run(int64_t which) {
    if (pulls) return run_pull(which);
    item = which, range = which % call.child_ranges;
    const int64_t q = which / call.child_ranges % call.place_ranges;
    const int64_t from = q * in.positions() / call.place_ranges, until = (q + 1) * in.positions() / call.place_ranges;
    const int64_t begin = range * in.I / call.child_ranges, end = (range + 1) * in.I / call.child_ranges;
    enter_tile(which / call.child_ranges / call.place_ranges);
    clear_sums(from, until);
    for (int64_t i = begin, count; i < end; i += count) {
      count = min(min(children_at_once, end - i), in.N - i % in.N);
      enter(i, count);
      meet_places(i, count, place(from), until);
    }
  }
};

// Calls f<T, S>() with the type of sums and the type in memory.
template <class F>
auto with_types(const Votes& in, F&& f) {
  if (in.storage == Storage::kFloat64) return f.template operator()<double, double>();
  if (in.storage == Storage::kBFloat16) return f.template operator()<float, BFloat16>();
  return f.template operator()<float, float>();
}

void walk(const VerbCall& call, int64_t begin, int64_t end, void* scratch) {
  with_types(call.votes, [&]<class T, class S>() {
    Walk<T, S> walk(call, scratch);
    for (int64_t item = begin; item < end; ++item) walk.run(item);
  });
}

int64_t scratch_bytes(const VerbCall& call) {
  return with_types(call.votes, [&]<class T, class S>() { return Walk<T, S>(call, nullptr).arena.used; });
}

template <class T, bool kFlatten>
void move(const FlatPoses& poses, int64_t begin, int64_t end) {
  const VerbCall& call = poses.call;
  const Votes& in = call.votes;
  const int64_t* s = poses.from.stride;
  for (int64_t p = begin; p < end; ++p)
    for (int64_t t = 0; t < call.tiles; ++t) {
      const int64_t first = t * call.tile, count = min(call.tile, in.M - first);
      const int64_t at = (t * in.positions() + p) * call.pose_numbers();
      if constexpr (kFlatten) {
        const int64_t area = in.Ho * in.Wo, b = p / area, y = p % area / in.Wo, x = p % in.Wo;
        const T* from = static_cast<const T*>(poses.from.data) + b * s[0] + y * s[1] + x * s[2] + first * s[3];
        pack<T>(from, s[3], s[4], s[5], count, in.C, in.E, call.tile, call.flat, static_cast<T*>(poses.to) + at);
      } else {
        T *to = static_cast<T*>(poses.to) + (p * in.M + first) * in.parent_size(),
          *sums = static_cast<T*>(poses.sums) + at;
        for (int64_t k = 1; k < call.child_ranges; ++k)
          for (int64_t x = 0; x < call.pose_numbers(); ++x) sums[x] += sums[k * call.numbers() + x];
        for (int64_t m = 0; m < count; ++m)
          for (int64_t c = 0; c < in.C; ++c)
            for (int64_t e = 0; e < in.E; ++e) to[(m * in.C + c) * in.E + e] = sums[c * call.flat + e * call.tile + m];
      }
    }
}

template <bool kFlatten>
void move_poses(const FlatPoses& poses, int64_t begin, int64_t end, void*) {
  if (poses.call.votes.is_double())
    move<double, kFlatten>(poses, begin, end);
  else
    move<float, kFlatten>(poses, begin, end);
}

}  // namespace

template <>
const VerbKernels& table() {
  static constexpr VerbKernels kTable{kLanes<float>,      kLanes<double>, &move_poses<true>,
                                      &move_poses<false>, &walk,          &scratch_bytes};
  return kTable;
}

}  // namespace FASTCAPS_NAMESPACE
}  // namespace fastcaps
