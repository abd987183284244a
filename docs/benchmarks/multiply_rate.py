"""What a core multiplies at most, and what the products of 512 rows reach of it.

    python docs/benchmarks/multiply_rate.py

Compiles a program against the sources of the CPU kernels, for the level that serves here. The most:
the instruction that multiplies pairs of bfloat16, on registers alone, as many sums as a tile has.
The products: a layer of SmolLM2-135M (queries, keys and values; behind attention; gates
and what they gate; down), each as the kernel makes it, on one core, the least of 60 times. For CPUs
whose kernels multiply pairs of bfloat16 without tiles of AMX's.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from jitney.engine.common.machine import cpu_name
from jitney.kernels.cpu import build, library

NATIVE = Path(build.__file__).parent / "native"
SOURCE = """
#include <chrono>
#include <cstdio>
#include <vector>

#include "panels.h"

using namespace jitney;

namespace {

constexpr Index kRows = 512;
constexpr int kTimes = 60;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds of one instruction, the least of kTimes runs on a core that does nothing else. What is
// multiplied changes each turn, or nothing would be left to do.
double instruction() {
  constexpr Index turns = 200'000;
  std::vector<float> numbers((kSums + 8) * kLanes);
  double least = 1e9;
  for (int time = 0; time < kTimes; ++time) {
    Floats sums[kSums];
    repeat<kSums>([&](auto i) { sums[i] = load(&numbers[i * kLanes]); });
    const double begin = now();
    for (Index turn = 0; turn < turns; ++turn) {
      const Floats x = load(&numbers[(kSums + turn % 8) * kLanes]);
      repeat<kSums>([&](auto i) { sums[i] = Bfloat16Panels::add(x, x, sums[i]); });
    }
    repeat<kSums>([&](auto i) { store(sums[i], &numbers[i * kLanes]); });
    least = std::min(least, now() - begin);
  }
  return least / (turns * kSums);
}

// Seconds of kRows rows of `size` inputs times `outs` outputs.
double product(Index size, Index outs, bool gated) {
  constexpr Index columns = 96;
  const Index depth = size / 2, panels = outs / columns, width = gated ? columns / 2 : columns;
  const std::vector<Pair> w(panels * depth * columns, Pair{0x3c003c00});
  const std::vector<Pair> x(kRows * depth, Pair{0x3c003c00});
  std::vector<Bfloat16> y(kRows * outs);
  const Panels<Bfloat16Panels> of{x.data(), w.data(), kRows, panels, depth, columns};
  double least = 1e9;
  for (int time = 0; time < kTimes; ++time) {
    const double begin = now();
    for (Index ticket = 0; ticket < panels * of.chunks(); ++ticket) {
      const Index panel = ticket % panels, first = ticket / panels * of.chunk();
      multiply_panel(of, panel, first, [&](Index row, const float* sums) {
        Bfloat16* to = y.data() + (row * panels + panel) * width;
        if (gated) {
          gate_row(sums, to, width);
        } else {
          copy_row(sums, to, width);
        }
      });
    }
    least = std::min(least, now() - begin);
  }
  return least;
}

}  // namespace

int main() {
  struct Shape {
    Index size, outs;
    bool gated;
  };
  double seconds = 0, operations = 0;
  for (const Shape& shape : {Shape{576, 960, false}, Shape{576, 576, false},
                             Shape{576, 3072, true}, Shape{1536, 576, false}}) {
    seconds += product(shape.size, shape.outs, shape.gated);
    operations += 2.0 * kRows * shape.size * shape.outs;
  }
  const double reached = operations / seconds / 1e9, possible = 4.0 * kLanes / instruction() / 1e9;
  std::printf("%.0f GFLOP/s at most, %.0f in the products of a layer: %.0f %%\\n",
              possible, reached, 100 * reached / possible);
}
"""


def main() -> None:
    level = next(level for level in build.Level.here() if level.name == library.load().level)
    command = build.compiler()
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "rate.cc"), Path(folder, "rate")
        source.write_text(SOURCE)
        build._run(
            [
                *command,
                *build._FLAGS,
                *level.flags(command),
                *("-I", str(NATIVE), "-isystem", str(build._headers())),
                *(str(source), "-o", str(program)),
            ]
        )
        print(f"one core of {cpu_name()}, {level.name}:")
        subprocess.run([program], check=True)


if __name__ == "__main__":
    main()
