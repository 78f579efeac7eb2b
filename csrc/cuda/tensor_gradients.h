// Gradients of N x N poses on the tensor cores, in tf32, from the gradients dV of votes that a warp holds: a few
// columns of one parent's votes at a time, its part.
//
// dW needs no exchange: for 8 parents and two columns of dV, a[(e, m), (position, row)] = dV[m, position, row, e] and
// b[(position, row), d] = P[position, row, d], as the lanes hold them. dP sums over parents, which other lanes hold, so
// dV goes through shared memory: a[(position, row), (m, e)], b[(m, e), d] = W[m, d, e]. An instruction has 8 columns d;
// those beyond the pose repeat others.
//
// The instruction cuts dV off to 11 significant bits. What it takes away on average, kLift gives back before: that
// costs nothing, where rounding would take an instruction for each number.
#pragma once

#include "gradients.h"

namespace fastcaps::gpu {

constexpr float kLift = 1.0f + 0.3466f / 1024;  // ln 2 / 2 of the last bit: mantissas are spread evenly over 1 to 2

// What a lane follows from child to child. (Were it made anew for each, from the lane's number, that would take dozens
// of instructions.)
template <class Pose>
struct TensorGradients {
  static_assert(Pose::kProducts == 1 && !Pose::kStored && Pose::kC == Pose::kD && Pose::kD == Pose::kE);
  using Lane = gpu::Lane<Pose, 1>;
  static constexpr int N = Pose::kD, W = N == 4 ? 4 : 2;  // columns of a part
  static constexpr int kTiles = (4 * N + 15) / 16;        // instructions' rows (position, row)
  static constexpr Storage kFloat = Storage::kFloat32;
  using Part = float[N][W];
  const Lane& lane;
  const float *rows, *columns;     // of the child: what votes take, and dW
  const float *matrix, *matrices;  // towards the first parents: of the lane's vote, and of dP
  // The warp's own place, for dV of 8 parents: [planes][position, row], four words a row: columns x and x + 1 of two
  // parents (N = 4: x and x + 2). A part has planes for pairs of parents, and for x = 0 and 1 if it has four columns.
  // Rows are in an order without bank conflicts. In bytes of shared memory: where the lane's dV begins, and the row
  // that it loads of a tile's 16 (N = 6: the second tile has 8).
  unsigned turned, turned_rows[N == 6 ? 2 : 1];
  ChildFactors<Pose> child;
  uint32_t outer[N];        // the factor b of dW
  float dchild[kTiles][4];  // rows parent, parent + 8, ... of all tiles, two columns from 2 position on

  FASTCAPS_DEVICE TensorGradients(const Lane& lane_, const Stage<Pose>& stage) : lane(lane_) {
    const unsigned g = lane.parent, t = lane.position, n = lane.lane % 8, m = lane.lane / 8;
    const unsigned d = g % (N == 4 ? 4 : 8), row = d < N ? d : N - 1;  // whose results are dropped, if beyond the pose
    rows = stage.children + first_row(lane);
    columns = stage.children + lane.in_tile(0) * Pose::kChildStride + row;
    const float* first = stage.weight + lane.group(0) * Pose::kGroupStride;
    matrix = first + g * Pose::kWeightStride;
    matrices = first + t / 2 * Pose::kWeightStride + row * N + t % 2 * (W / 2);
    if constexpr (N == 4) rows += t, matrix += t * 4;
    const unsigned turn = lane.args.shared_turn + unsigned(thread_index()) / kWarp * kTurn * 4;
    turned = (turn + g / 2 * kPlane + t * N * 16 + g % 2 * 8) ^ (swap(t * N / 8, g / 2) * 16);
    const unsigned plane = W == 4 ? m / 2 * 4 : m / 2;
    turned_rows[0] = (turn + plane * kPlane + m % 2 * 128 + n * 16) ^ (swap(m % 2, plane) * 16);
    if constexpr (N == 6) turned_rows[1] = (turn + plane * kPlane + 256 + n * 16) ^ (swap(2, plane) * 16);
  }
  FASTCAPS_DEVICE void next() {
    const int children = lane.args.tile_size * lane.child_stride();
    rows += children, columns += children, matrix += lane.matrices(), matrices += lane.matrices();
    const unsigned nothing = unknown_zero(lane.args);  // a compiler would make them anew
    turned |= nothing, turned_rows[0] |= nothing;
  }

  // Begins a child.
  FASTCAPS_DEVICE void take() { take_child<kFloat, Pose>(rows, place(), child); }
  // The part of the lane's p-th parent that begins with column e.
  FASTCAPS_DEVICE void vote(int p, int e, Part& to) const {
    multiply_on_tensor_cores<kFloat, Pose>(matrix + p * Pose::kGroupStride + e, place(), child, to);
  }

  // Begins its gradients.
  FASTCAPS_DEVICE void begin() {
    FASTCAPS_UNROLL
    for (int c = 0; c < N; ++c) outer[c] = to_tf32(columns[c * N]);
    FASTCAPS_UNROLL
    for (int n = 0; n < 4 * kTiles; ++n) dchild[n / 4][n % 4] = 0.0f;
  }
  // From dV of a part. All lanes of the warp call this together.
  FASTCAPS_DEVICE void put(int p, int e, const Part& dvote, const StageGradients<Pose, 1>& gradients) {
    barrier_warp();  // all have read what was there
    FASTCAPS_UNROLL
    for (int x = 0; x < W / 2; ++x) {
      FASTCAPS_UNROLL
      for (int c = 0; c < N; ++c)
        store2(at((turned ^ unsigned(c & kMoved) * 16) + (c & ~kMoved) * 16 + x * 4 * kPlane),
               make_float2(dvote[c][x], dvote[c][x + W / 2]));
    }
    float dweight[W / 2][4] = {};  // columns x and x + W / 2, each of rows 2 position and 2 position + 1
    FASTCAPS_UNROLL
    for (int x = 0; x < W / 2; ++x) {
      FASTCAPS_UNROLL
      for (int c = 0; c < N; c += 2)
        mma_tf32_16x8x8(dweight[x],
                        {float_bits(dvote[c][x]), float_bits(dvote[c][x + W / 2]), float_bits(dvote[c + 1][x]),
                         float_bits(dvote[c + 1][x + W / 2])},
                        {outer[c], outer[c + 1]});
    }
    barrier_warp();
    add_to_child(matrices + p * Pose::kGroupStride + e);
    if (lane.position * 2 >= N) return;
    FASTCAPS_UNROLL
    for (int x = 0; x < W / 2; ++x) store_vector<4>(gradients.fragment(p, e / 2 + x), dweight[x]);
  }
  // Adds dP of all parents.
  template <bool LEAN>
  FASTCAPS_DEVICE void finish(const Stage<Pose>& stage, const StageGradients<Pose, 1>& gradients) const {
    if constexpr (N == 4) {  // half of the lanes would have nothing to add
      const bool upper = lane.position >= 2;
      const float x[2] = {upper ? dchild[0][2] : dchild[0][0], upper ? dchild[0][3] : dchild[0][1]};
      gradients.template put_pair<LEAN>(stage, 0, x);
    } else if (lane.position * 2 < N) {
      FASTCAPS_UNROLL
      for (int n = 0; n < N / 2; ++n)
        gradients.template put_pair<LEAN>(stage, n, {dchild[n / 2][n % 2 * 2], dchild[n / 2][n % 2 * 2 + 1]});
    }
  }

 private:
  static constexpr unsigned kPlane = 4 * N * 16;     // bytes
  static constexpr int kMoved = N == 6 ? 1 : N - 1;  // bits of a row's number that the order changes
  // What a row's number is changed by: lanes that store together, or load together, use different banks.
  static FASTCAPS_DEVICE unsigned swap(unsigned eight, unsigned plane) {
    return N == 4 ? eight | plane % 2 * 2 : N == 6 ? plane % 2 : eight | plane % 2 * 4;
  }
  FASTCAPS_DEVICE float* at(unsigned byte) const { return reinterpret_cast<float*>(lane.shared + byte); }
  FASTCAPS_DEVICE int place() const { return N == 4 ? 0 : lane.position; }  // in the depth of a vote

  FASTCAPS_DEVICE void add_to_child(const float* from) {
    constexpr int kSteps = W == 4 ? 4 : 2;
    const auto factor = [](float x) { return Pose::kRounded ? float_bits(x) : to_tf32(x); };
    FASTCAPS_UNROLL
    for (int j = 0; j < kSteps; ++j) {  // two parents' four columns, or four parents' two
      uint32_t b[2];
      if constexpr (W == 4) {
        const float2 pair = load2(from + j * 2 * Pose::kWeightStride);
        b[0] = factor(pair.x), b[1] = factor(pair.y);
      } else {
        b[0] = factor(from[j * 4 * Pose::kWeightStride]), b[1] = factor(from[(j * 4 + 2) * Pose::kWeightStride]);
      }
      FASTCAPS_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        uint32_t a[4];
        const unsigned row = turned_rows[N == 6 ? tile : 0];
        if constexpr (N == 4)
          load_fragments(a, at((row ^ unsigned(j % 2 * 32)) + j * kPlane));
        else if constexpr (N == 6)
          load_fragments(a, at(row + j * 2 * kPlane));
        else
          load_fragments(a, at((row ^ unsigned(tile * 32)) + tile * 256 + j * 2 * kPlane));
        mma_tf32_16x8x8(dchild[tile], a, b);
      }
    }
  }
};

}  // namespace fastcaps::gpu
