// Loading and storing values; the rules on a pose; and copying a stage into shared memory: a few children for all
// positions of the block's tile, and their weights.
#pragma once

#include <type_traits>

#include "../algebra/pose.h"
#include "lanes.h"

namespace fastcaps::gpu {

// Half-precision values of either type; and values in memory, of any type that the kernels take.
FASTCAPS_DEVICE float widened(uint16_t bits, Storage storage) {
  return storage == Storage::kBFloat16 ? bfloat16_to_float(bits) : float16_to_float(bits);
}
FASTCAPS_DEVICE uint16_t narrowed(float x, Storage storage) {
  return storage == Storage::kBFloat16 ? float_to_bfloat16(x) : float_to_float16(x);
}
FASTCAPS_DEVICE float load_number(const void* data, int64_t at, Storage storage) {
  return storage == Storage::kFloat32 ? static_cast<const float*>(data)[at]
                                      : widened(static_cast<const uint16_t*>(data)[at], storage);
}
FASTCAPS_DEVICE void store_number(void* data, int64_t at, float x, Storage storage) {
  if (storage == Storage::kFloat32)
    static_cast<float*>(data)[at] = x;
  else
    static_cast<uint16_t*>(data)[at] = narrowed(x, storage);
}
FASTCAPS_DEVICE float rounded(float x, Storage storage) {
  return storage == Storage::kFloat32 ? x : widened(narrowed(x, storage), storage);
}

// A type that is known when compiled, as an argument; and body(type) for one that is found at run time.
template <Storage S>
using Stored = std::integral_constant<Storage, S>;

template <class Body>
FASTCAPS_DEVICE void with_type(Storage storage, Body&& body) {
  if (storage == Storage::kFloat32)
    body(Stored<Storage::kFloat32>());
  else if (storage == Storage::kBFloat16)
    body(Stored<Storage::kBFloat16>());
  else
    body(Stored<Storage::kFloat16>());
}

template <Storage S>
using Element = std::conditional_t<S == Storage::kFloat32, float, uint16_t>;

// Four neighbours of half precision, as they came in two words.
template <Storage S>
FASTCAPS_DEVICE void widen_vector(float2 pairs, float (&to)[4]) {
  const uint32_t bits[2] = {float_bits(pairs.x), float_bits(pairs.y)};
  FASTCAPS_UNROLL
  for (int k = 0; k < 4; ++k) to[k] = widened(uint16_t(bits[k / 2] >> k % 2 * 16), S);
}

// Applies a rule to a pose of sums, without LayerNorm's affine. With kUnit the last parents are the sums. UNITS: the
// rule is one of pooling's, else one of attention's.
template <bool UNITS, class Pose>
FASTCAPS_DEVICE void between(const ParentArgs& args, const Pose& pose, bool last) {
  if (args.rule == Rule::kSquash) {
    squash(pose);
  } else if constexpr (UNITS) {
    if (!last) unit(pose);
  } else if (args.rule == Rule::kLayerNorm) {
    standardise(pose, args.eps);
  }
}

// LayerNorm's affine, for the k-th value of a pose.
FASTCAPS_DEVICE float affine(const ParentArgs& args, float x, int k) {
  if (args.norm_weight) x *= load_number(args.norm_weight, k, args.storage);
  if (args.norm_bias) x += load_number(args.norm_bias, k, args.storage);
  return x;
}

// body(parent, exists) for the block's share of `count` parents, with `lanes` lanes for each; the first `blocks` share
// them. Lanes exchange values, so all of a warp loop equally often; `exists` says which have a parent.
template <class Body>
FASTCAPS_DEVICE void each_parent(int64_t count, int lanes, int64_t blocks, Body&& body) {
  const int64_t together = block_threads() / lanes, mine = block_x() * together + thread_index() / lanes;
  for (int64_t first = 0; first < count; first += blocks * together) body(first + mine, first + mine < count);
}

// Where the pose of a parent begins; `parent` is its index in [B, Ho, Wo, M].
FASTCAPS_DEVICE int64_t offset_of_parent(const View& view, int64_t parent, int M, int Ho, int Wo) {
  const int64_t q = parent / M, row = q / Wo, b = row / Ho;
  return b * view.stride[0] + (row - b * Ho) * view.stride[1] + (q - row * Wo) * view.stride[2] +
         (parent - q * M) * view.stride[3];
}

// Values are copied to shared memory as they are stored: T is float, or the 16 bits of half precision.

// Copies V values of a row that are `step` apart; `inside` says how many of them exist.
template <int V, class T>
FASTCAPS_DEVICE void stage_scattered(T* to, const T* from, int64_t step, int inside) {
  FASTCAPS_UNROLL
  for (int v = 0; v < V; ++v) {
    if constexpr (sizeof(T) == 4)
      copy_async<4>(to + v, from + (v < inside ? v * step : 0), v < inside);
    else
      to[v] = v < inside ? from[v * step] : T(0);  // asynchronous copies have at least 4 bytes
  }
}

// Copies children [count, tile_size, C, D]: zero if absent, and in the padding of rows and depth. A thread keeps its
// place within a child and goes through the children.
template <class Pose, int R, class T>
FASTCAPS_DEVICE void stage_children(const Lane<Pose, R>& lane, int count, const Offset* offsets, T* to) {
  constexpr int V = Pose::kVector;
  const PassArgs& args = lane.args;
  const int rows = lane.padded_rows(), vectors = lane.padded_depth() / V;
  for (int unit = thread_index(); unit < args.tile_size * rows * vectors; unit += block_threads()) {
    const auto [in_tile, c, d] = lane.vector_of_child(unit);
    const Position& position = lane.tile[in_tile];
    const int inside = Pose::kFixed ? V : c >= args.C ? 0 : args.D - d < V ? args.D - d : V;
    const T* from = static_cast<const T*>(args.children.data);
    const int64_t at = position.children + c * args.children.stride[4] + d * args.children.stride[5];
    T* target = to + in_tile * lane.child_stride() + c * lane.row_stride() + d;
    const int step = args.tile_size * lane.child_stride();
    const auto exists = [&](int k) { return inside > 0 && offsets[k].exists(args, position); };
    const auto begin = [&](int k) { return from + (exists(k) ? at + offsets[k].children : 0); };
    if (args.children_copy) {
      _Pragma("unroll 2") for (int k = 0; k < count; ++k, target += step)
          copy_async<V * sizeof(T)>(target, begin(k), exists(k));
    } else {
      FASTCAPS_NO_UNROLL
      for (int k = 0; k < count; ++k, target += step)
        stage_scattered<V>(target, begin(k), args.children.stride[5], exists(k) ? inside : 0);
    }
  }
}

// Copies weights [count, parents of the block] in the same way; zero for parents that do not exist.
template <class Pose, int R, class T>
FASTCAPS_DEVICE void stage_weights(const Lane<Pose, R>& lane, int first, int count, T* to) {
  constexpr int V = Pose::kWeightCopy, kNumbers = Pose::kD * Pose::kE;
  const PassArgs& args = lane.args;
  const int block_parents = lane.block_parents();
  for (int unit = thread_index(); unit < block_parents * (kNumbers / V); unit += block_threads()) {
    const int m = unit / (kNumbers / V), number = unit % (kNumbers / V) * V;
    const bool exists = lane.first_parent + m < args.M;
    const T* from =
        static_cast<const T*>(args.weight) + (exists ? int64_t(lane.first_parent + m) * kNumbers + number : 0);
    T* target = to + m * Pose::kWeightStride + number / Pose::kE * Pose::kWeightRow + number % Pose::kE;
    if constexpr (Pose::kSwaps)
      target += m / Pose::kParents * (Pose::kGroupStride - Pose::kParents * Pose::kWeightStride);
    _Pragma("unroll 2") for (int k = 0; k < count; ++k) {
      const int64_t group = exists ? args.by_group.quotient(first + k) : 0;
      copy_async<V * sizeof(T)>(target, from + group * args.M * kNumbers, exists);
      target += lane.matrices();
    }
  }
}

// A child's gate, and whether the child exists: padding has no child, and so not even a bias.
struct Seen {
  float gate, exists;

  FASTCAPS_DEVICE bool counts() const { return exists != 0.0f && gate != 0.0f; }
};

template <class Pose, int R>
FASTCAPS_DEVICE void stage_seen(const Lane<Pose, R>& lane, int count, const Offset* offsets, Seen* to) {
  const PassArgs& args = lane.args;
  for (int unit = thread_index(); unit < count * args.tile_size; unit += block_threads()) {
    const int k = args.by_tile.quotient(unit);
    const Position& position = lane.tile[args.by_tile.remainder(unit, k)];
    const bool exists = offsets[k].exists(args, position);
    const int64_t at = exists ? position.gate + offsets[k].gate : 0;
    to[unit].exists = exists ? 1.0f : 0.0f;
    if (args.gate.data && args.storage == Storage::kFloat32)
      copy_async<4>(&to[unit].gate, static_cast<const float*>(args.gate.data) + at, exists);
    else
      to[unit].gate = !exists ? 0.0f : args.gate.data ? load_number(args.gate.data, at, args.storage) : 1.0f;
  }
}

// One child after another of a stage in shared memory.
template <class Pose>
struct Stage {
  const float *children, *weight;  // [tile_size, C, D], child_stride apart; [parents / kParents, kParents]
  const uint16_t *stored_children, *stored_weight;  // the same as stored, in half precision
  const Seen* seen;                                 // [tile_size]
  int t;                                            // which child it is, in the order of the kernels

  FASTCAPS_DEVICE Stage(const PassArgs& args, char* shared, int slot, int first) : t(first) {
    const char* floats = shared + args.shared_float + slot * args.float_stage;
    children = reinterpret_cast<const float*>(floats);
    weight = reinterpret_cast<const float*>(floats + args.shared_weight);
    stored_children = reinterpret_cast<const uint16_t*>(shared + slot * args.shared_stage);
    stored_weight = stored_children + args.shared_weight / int(sizeof(float));
    seen = reinterpret_cast<const Seen*>(shared + slot * args.shared_stage + args.shared_seen);
  }
  template <int R>
  FASTCAPS_DEVICE void next(const Lane<Pose, R>& lane) {
    children += lane.args.tile_size * lane.child_stride();
    weight += lane.matrices();
    stored_children += lane.args.tile_size * lane.child_stride();
    stored_weight += lane.matrices();
    seen += lane.args.tile_size;
    ++t;
  }

  // Children and weights in their type, which the caller knows.
  template <Storage S>
  FASTCAPS_DEVICE const Element<S>* children_as() const {
    if constexpr (S == Storage::kFloat32)
      return children;
    else
      return stored_children;
  }
  template <Storage S>
  FASTCAPS_DEVICE const Element<S>* weight_as() const {
    if constexpr (S == Storage::kFloat32)
      return weight;
    else
      return stored_weight;
  }
};

// Starts copying a stage, from the t-th child on or as many as there are: they are there after copy_wait and a barrier.
// Their offsets must be there, after a barrier. LEAN: nobody asks whether a child is seen.
template <bool LEAN, class Pose, int R>
FASTCAPS_DEVICE void bring(const Lane<Pose, R>& lane, const ChildRange& range, int slot, int t) {
  const PassArgs& args = lane.args;
  const int count = range.last - t < args.stage ? range.last - t : args.stage;
  if (count <= 0) return;
  const Offset* offsets = offsets_of(args, lane.shared, range, t);
  char* base = lane.shared + slot * args.shared_stage;
  const auto numbers = [&](auto* to) {
    stage_children(lane, count, offsets, to);
    if constexpr (Pose::kWeightStride > 0)
      if (args.weight && range.matrices) stage_weights(lane, t, count, to + args.shared_weight / int(sizeof(float)));
  };
  if (args.storage == Storage::kFloat32)
    numbers(reinterpret_cast<float*>(base));
  else
    numbers(reinterpret_cast<uint16_t*>(base));
  if constexpr (!LEAN) stage_seen(lane, count, offsets, reinterpret_cast<Seen*>(base + args.shared_seen));
}

// Widens a stage to float, once for all lanes that read it: four neighbours at a time, in the same order, padding
// included. Needs a barrier before it and another after it.
template <class Pose, int R>
FASTCAPS_DEVICE void widen(const Lane<Pose, R>& lane, int slot, int count) {
  const PassArgs& args = lane.args;
  const float* from = reinterpret_cast<const float*>(lane.shared + slot * args.shared_stage);  // two values each
  float* to = reinterpret_cast<float*>(lane.shared + args.shared_float);
  const bool staged = Pose::kWeightStride > 0 && args.weight;
  const int numbers = staged ? args.shared_weight / int(sizeof(float)) + count * lane.matrices()
                             : count * args.tile_size * lane.child_stride();
  const auto all = [&](auto stored) {
    for (int k = thread_index() * 4; k < numbers; k += block_threads() * 4) {
      float x[4];
      widen_vector<stored()>(load2(from + k / 2), x);
      store4(to + k, make_float4(x[0], x[1], x[2], x[3]));
    }
  };
  if (args.storage == Storage::kBFloat16)
    all(Stored<Storage::kBFloat16>());
  else
    all(Stored<Storage::kFloat16>());
}

// Rounds a stage's children to tf32. Needs a barrier before it and another after it.
template <class Pose, int R>
FASTCAPS_DEVICE void round_children(const Lane<Pose, R>& lane, int slot, int count) {
  const PassArgs& args = lane.args;
  float* children = reinterpret_cast<float*>(lane.shared + slot * args.shared_stage);
  for (int k = thread_index(); k < count * args.tile_size * lane.child_stride(); k += block_threads())
    children[k] = bits_float(to_tf32(children[k]));
}

// Sets children with a gate of exactly 0 that are NaN or infinite to zero and makes them absent: 0 times them would be
// NaN. Needs a barrier before it and another after it.
template <class Pose, int R>
FASTCAPS_DEVICE void silence(const Lane<Pose, R>& lane, int slot, int count) {
  const PassArgs& args = lane.args;
  char* stage = lane.shared + slot * args.shared_stage;
  Seen* seen = reinterpret_cast<Seen*>(stage + args.shared_seen);
  const int numbers = lane.padded_rows() * lane.row_stride(), depth = lane.padded_depth();
  const auto all = [&](auto* children, auto is_finite) {
    for (int unit = thread_index(); unit < count * args.tile_size; unit += block_threads()) {
      if (seen[unit].gate != 0.0f || seen[unit].exists == 0.0f) continue;
      auto* child = children + unit * lane.child_stride();
      bool finite = true;
      for (int row = 0; row < numbers; row += lane.row_stride())
        for (int d = 0; d < depth; ++d) finite = finite && is_finite(child[row + d]);
      if (finite) continue;
      for (int n = 0; n < numbers; ++n) child[n] = 0;
      seen[unit].exists = 0.0f;
    }
  };
  if constexpr (Pose::kStored) {
    if (args.storage != Storage::kFloat32) {
      const uint16_t top = args.storage == Storage::kBFloat16 ? 0x7f80 : 0x7c00;  // the exponent of what is not finite
      all(reinterpret_cast<uint16_t*>(stage), [=](uint16_t bits) { return (bits & top) != top; });
      return;
    }
  }
  all(reinterpret_cast<float*>(lane.shared + args.shared_float + slot * args.float_stage),
      [](float x) { return fabsf(x) < INFINITY; });
}

}  // namespace fastcaps::gpu
