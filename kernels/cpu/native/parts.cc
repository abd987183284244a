// What the parts of a step took, for whoever opened the library.
#include "parts.h"

#pragma GCC visibility push(default)
extern "C" const char jitney_part_names[] =
    "products,head,attention of decoding rows,attention of prompts,norms,rotation and writes,"
    "recurrent layers";

// Seconds of each part since the library was loaded, in the order of the names.
extern "C" void jitney_part_times(double* seconds) {
  for (int part = 0; part < jitney::kParts; ++part) {
    seconds[part] = 1e-9 * static_cast<double>(jitney::part_times[part].load());
  }
}
#pragma GCC visibility pop
