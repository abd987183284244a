"""The process that draws a report (`jitney.dashboard.drawing`): its data from standard input, its
HTML to standard output.
"""

from __future__ import annotations

import os
import pickle
import sys

from jitney.dashboard.report import ReportData, render


def main() -> None:
    """Draw one report."""
    os.nice(5)  # requests go first
    data: ReportData = pickle.load(sys.stdin.buffer)  # our parent's own
    sys.stdout.buffer.write(render(data).encode())


if __name__ == "__main__":
    main()
