// How much of a call one item takes: see Cut in pass.h.
#pragma once

#include "pass.h"

namespace fastcaps {

// What a cut depends on besides the geometry.
struct Sizes {
  int64_t lanes;    // positions that make a tile
  int64_t number;   // bytes of the compute type
  int64_t state;    // numbers of a row's parents,
  int64_t results;  // and of what is made for them
  bool shared;      // children of the same type have the same weights and bias, and more of them may
  bool identity;    // votes are the children themselves
  bool folded;      // see folds()
  int64_t turns;    // of a routing, forward; whose gradients are made together, backward
  int64_t own = 0;  // numbers of the gradients that every item has its own of: bias, betas
};

// Whether a pass that is linear in its votes lets the matrices act on the parents (folded.h): enough children share
// them.
bool folds(const Geometry& g, bool shared, bool bias);

Cut cut_forward(const Geometry& g, const Sizes& sizes);
Cut cut_backward(const Geometry& g, const Sizes& sizes);

}  // namespace fastcaps
