// How a call is cut up: see Schedule in pass.h. One place decides.
#pragma once

#include <type_traits>

#include "levels.h"

namespace fastcaps {

// What a schedule depends on besides the sizes of the votes.
struct Task {
  int64_t lanes;   // positions that make a tile
  int64_t number;  // bytes of the compute type
  RowNumbers row;
  int64_t iterations;  // forward: of the routing; backward: whose gradients are made together
  int64_t copied = 0;  // values of the gradients that every item has a copy of: bias, betas
  bool shared;         // lanes may be children that share weights and bias
  bool identity;       // votes are the children themselves
  bool folded;         // the matrices act on the parents (folded.h)

  // `folds`: the pass is linear in its votes, so it is folded if enough children share a matrix, or none has one.
  Task(const Votes& in, bool folds, int64_t lanes, RowNumbers row, int64_t iterations)
      : lanes(lanes),
        number(in.is_double() ? 8 : 4),
        row(row),
        iterations(iterations),
        shared(in.N % in.G == 0 && in.bias_stride_i == 0),
        identity(in.weight == nullptr),
        folded(folds && !in.is_double() && (identity || (shared && !in.bias && in.I / in.G >= 8))) {
    shared = shared && (folded || !folds);  // a pass that folds has such lanes for folded calls alone (kernels.h)
  }
};

Schedule schedule_forward(const Votes& in, const Task& task);
Schedule schedule_backward(const Votes& in, const Task& task);

template <class Operands>
Schedule schedule_of(ForwardCall<Operands>& call) {
  const Kernels<Operands>& table = kernels<Operands>(call.votes);
  Task task(call.votes, std::is_same_v<Operands, Attention>, table.lanes(call.votes), {}, call.total);
  call.schedule.folded = task.folded;
  task.row = table.forward_row(call);
  return schedule_forward(call.votes, task);
}

// `dparents`: whether gradients of parents are wanted. `iterations`: 0 for the call's.
template <class Operands>
Schedule schedule_of(const BackwardCall<Operands>& call, bool dparents, int64_t copied = 0, int64_t iterations = 0) {
  const Kernels<Operands>& table = kernels<Operands>(call.votes);
  if (iterations == 0) iterations = int64_t(call.with.size());
  Task task(call.votes, std::is_same_v<Operands, Attention>, table.lanes(call.votes), table.backward_row(call),
            iterations);
  task.row.state *= iterations;
  if (!dparents) task.row.results = 0;
  task.copied = copied;
  return schedule_backward(call.votes, task);
}

}  // namespace fastcaps
