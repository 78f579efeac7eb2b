// Gradients of 4 x 4 poses on the tensor cores, in tf32, from the gradients dV of votes that a warp holds.
//
// dW needs no exchange: for 8 parents and two columns of dV, a[(e, m), (position, row)] = dV[m, position, row, e] and
// b[(position, row), d] = P[position, row, d], as the lanes hold them. dP sums over parents, which other lanes hold, so
// dV goes through shared memory: a[(position, row), (m, e)] for two parents, b[(m, e), d] = W[m, d, e]. An instruction
// has 8 columns d, of which 4 repeat the others.
//
// The instruction cuts dV off to 11 significant bits. What it takes away on average, kLift gives back before: that
// costs nothing, where rounding would take an instruction for each number.
#pragma once

#include "gradients.h"

namespace fastcaps::gpu {

constexpr float kLift = 1.0f + 0.3466f / 1024;

// What a lane follows from child to child. (Were it made anew for each, from the lane's number, that would take dozens
// of instructions.)
template <class Pose>
struct TensorGradients {
  static_assert(Pose::kProducts == 1 && !Pose::kStored && Pose::kC == 4 && Pose::kD == 4 && Pose::kE == 4);
  using Lane = gpu::Lane<Pose, 1>;
  static constexpr Storage kFloat = Storage::kFloat32;
  const Lane& lane;
  const float *rows, *columns;     // of the child: what votes take, and dW
  const float *matrix, *matrices;  // towards the first parents: of the lane's vote, and of dP
  // The warp's own place, for dV: [e % 2][pair of parents][position / 2][8 rows: position % 2, row]. A row is four
  // words: columns e of the first parent, and of the second. Rows are in an order without bank conflicts. In bytes of
  // shared memory: where the lane's dV begins, and the row that it loads.
  unsigned turned, turned_row;
  ChildFactors<Pose> child;
  uint32_t outer[4];  // the factor b of dW
  float dchild[4];    // of positions parent / 4 and 2 + parent / 4: row parent % 4, two columns from 2 position on

  FASTCAPS_DEVICE TensorGradients(const Lane& lane_, const Stage<Pose>& stage) : lane(lane_) {
    const unsigned g = lane.parent, t = lane.position, n = lane.lane % 8, half = lane.lane / 8 % 2;
    rows = stage.children + first_row(lane) + t;
    columns = stage.children + lane.in_tile(0) * Pose::kChildStride + g % 4;
    const float* first = stage.weight + lane.group(0) * Pose::kGroupStride;
    matrix = first + g * 16 + t * 4;
    matrices = first + t / 2 * 16 + g % 4 * 4 + t % 2 * 2;
    const unsigned turn = lane.args.shared_turn + unsigned(thread_index()) / kWarp * kTurn * 4;
    turned = turn + g / 2 * 256 + t / 2 * 128 + g % 2 * 8 + ((t % 2 * 4) ^ (t / 2) ^ (g & 2)) * 16;
    turned_row = turn + lane.lane / 16 * 1024 + half * 128 + (n ^ half) * 16;
  }
  FASTCAPS_DEVICE void next() {
    const int children = lane.args.tile_size * lane.child_stride();
    rows += children, columns += children, matrix += lane.matrices(), matrices += lane.matrices();
    const unsigned nothing = lane.args.iterations;
    turned |= nothing, turned_row |= nothing;
  }

  // Begins a child.
  FASTCAPS_DEVICE void take() { take_child<kFloat, Pose>(rows, 0, child); }
  // The vote for the lane's p-th parent.
  FASTCAPS_DEVICE void vote(int p, Patch<Pose>& to) const {
    multiply_on_tensor_cores<kFloat, Pose>(matrix + p * Pose::kGroupStride, 0, child, to);
  }

  // Begins its gradients.
  FASTCAPS_DEVICE void begin() {
    FASTCAPS_UNROLL
    for (int c = 0; c < 4; ++c) outer[c] = to_tf32(columns[c * 4]), dchild[c] = 0.0f;
  }
  // From dV of the lane's p-th parent. All lanes of the warp call this together.
  FASTCAPS_DEVICE void put(int p, const Patch<Pose>& dvote, const StageGradients<Pose, 1>& gradients) {
    barrier_warp();  // all have read what was there
    FASTCAPS_UNROLL
    for (int h = 0; h < 2; ++h) {
      FASTCAPS_UNROLL
      for (int c = 0; c < 4; ++c)
        store2(at((turned ^ unsigned(c * 16)) + h * 1024), make_float2(dvote[c][h], dvote[c][h + 2]));
    }
    float dweight[2][4] = {};  // columns h and h + 2, each of rows 2 position and 2 position + 1
    FASTCAPS_UNROLL
    for (int h = 0; h < 2; ++h) {
      FASTCAPS_UNROLL
      for (int c = 0; c < 4; c += 2)
        mma_tf32_16x8x8(dweight[h],
                        {float_bits(dvote[c][h]), float_bits(dvote[c][h + 2]), float_bits(dvote[c + 1][h]),
                         float_bits(dvote[c + 1][h + 2])},
                        {outer[c], outer[c + 1]});
    }
    barrier_warp();
    FASTCAPS_UNROLL
    for (int j = 0; j < 4; ++j) {  // two parents
      const float2 pair = load2(matrices + p * Pose::kGroupStride + j * 32);
      uint32_t rows[4];
      load_fragments(rows, at((turned_row ^ unsigned(j % 2 * 32)) + j * 256));
      mma_tf32_16x8x8(dchild, rows, {float_bits(pair.x), float_bits(pair.y)});
    }
    FASTCAPS_UNROLL
    for (int h = 0; h < 2; ++h)
      if (lane.position < 2) store_vector<4>(gradients.fragment(p, h), dweight[h]);
  }
  // Adds dP of all parents.
  template <bool LEAN>
  FASTCAPS_DEVICE void finish(const Stage<Pose>& stage, const StageGradients<Pose, 1>& gradients) const {
    const bool upper = lane.position >= 2;
    const float x[2] = {upper ? dchild[2] : dchild[0], upper ? dchild[3] : dchild[1]};
    gradients.template put_pair<LEAN>(stage, x);
  }

 private:
  FASTCAPS_DEVICE float* at(unsigned byte) const { return reinterpret_cast<float*>(lane.shared + byte); }
};

}  // namespace fastcaps::gpu
