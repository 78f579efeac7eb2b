// How much of a call one item takes: see Cut in attention.h.
#pragma once

#include "attention.h"

namespace fastcaps {

// `lanes` positions make a tile; `number` is the size of the compute type in bytes.
Cut cut_forward(const Geometry& g, int64_t lanes, int64_t number);
Cut cut_backward(const Geometry& g, int64_t lanes, int64_t number);

}  // namespace fastcaps
