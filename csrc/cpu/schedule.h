// How a call is cut up: see Schedule in call.h. One place decides, for the ops and for who asks how they would run.
#pragma once

#include <type_traits>

#include "call.h"

namespace fastcaps {

// What a schedule depends on besides the sizes of the votes.
struct Load {
  int64_t lanes;    // positions that make a tile
  int64_t number;   // bytes of the compute type
  int64_t state;    // numbers of a row's parents,
  int64_t results;  // and of what is made for them
  int64_t turns;    // of a routing, forward; whose gradients are made together, backward
  int64_t own = 0;  // numbers of the gradients that every item has its own of: bias, betas
  bool shared;      // children of the same type have the same weights and bias, and more of them may
  bool identity;    // votes are the children themselves
  bool folded;      // the matrices act on the parents (folded.h)

  // `folds`: the pass is linear in its votes, so it may be folded: where enough children share a matrix, or none has
  // one.
  Load(const Votes& in, bool folds, int64_t lanes, bool is_double, int64_t state, int64_t results, int64_t turns)
      : lanes(lanes),
        number(is_double ? 8 : 4),
        state(state),
        results(results),
        turns(turns),
        shared(in.N % in.G == 0 && in.bias_stride_i == 0),
        identity(in.weight == nullptr),
        folded(folds && !is_double && (identity || (shared && !in.bias && in.I / in.G >= 8))) {}
};

Schedule schedule_forward(const Votes& in, const Load& load);
Schedule schedule_backward(const Votes& in, const Load& load);

template <class Operands>
int64_t lanes_of(const Kernels<Operands>& table, bool is_double) {
  return is_double ? table.lanes_double : table.lanes_float;
}

template <class Operands>
Schedule schedule_of(ForwardCall<Operands>& call, bool is_double) {
  const Kernels<Operands>& table = kernels<Operands>(call.votes, is_double);
  Load load(call.votes, std::is_same_v<Operands, Attention>, lanes_of(table, is_double), is_double, 0, 0, call.total);
  call.schedule.folded = load.folded;
  load.state = table.forward_state(call);
  load.results = table.forward_results(call);
  return schedule_forward(call.votes, load);
}

// `dparents`: are there gradients of parents?
template <class Operands>
Schedule schedule_of(const BackwardCall<Operands>& call, bool is_double, bool dparents, int64_t own = 0) {
  const Kernels<Operands>& table = kernels<Operands>(call.votes, is_double);
  const int64_t turns = int64_t(call.with.size());
  Load load(call.votes, std::is_same_v<Operands, Attention>, lanes_of(table, is_double), is_double,
            turns * table.backward_state(call), dparents ? table.backward_results(call) : 0, turns);
  load.own = own;
  return schedule_backward(call.votes, load);
}

}  // namespace fastcaps
