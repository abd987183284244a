// The RMS norm of one row.
#pragma once

#include <cmath>

#include "vectors.h"

namespace jitney {

// out = x / sqrt(mean(x * x) + eps) * weight, all [size], in float32 and rounded once; out may be x
// where both are of one type.
template <class From, class Weight, class To>
void norm_row(const From* x, const Weight* weight, To* out, std::int64_t size, float eps) {
  Floats squares = {};
  for (std::int64_t i = 0; i < size; i += kLanes) {
    const Floats here = load(x + i);
    squares = multiply_add(here, here, squares);
  }
  const float mean = total(squares) * (1.0f / static_cast<float>(size));
  const Floats factor = splat(1.0f / std::sqrt(mean + eps));
  for (std::int64_t i = 0; i < size; i += kLanes) {
    store(load(x + i) * factor * load(weight + i), out + i);
  }
}

}  // namespace jitney
