"""What the device draws while a part runs, where its driver tells."""

from __future__ import annotations

import shutil
import subprocess
import threading
from statistics import mean

#: Milliseconds between two readings.
_EVERY_MS = 500
_COMMAND = (
    "nvidia-smi",
    "--query-gpu=power.draw",
    "--format=csv,noheader,nounits",
    f"--loop-ms={_EVERY_MS}",
    "--id=0",
)


class PowerMeter:
    """Reads the power of the first GPU, in watts, from `start` to `stop`; nothing where there is no
    `nvidia-smi`.
    """

    def __init__(self, command: tuple[str, ...] = _COMMAND):
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self.watts: list[float] = []

    def start(self) -> None:
        if shutil.which(self._command[0]) is None:
            return
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._reader.start()

    def stop(self) -> dict[str, float]:
        """The mean and the most of what was read, as figures of a row; empty if nothing was."""
        if self._process is None:
            return {}
        self._process.kill()
        self._process.wait()
        self._reader.join(timeout=5.0)
        watts = list(self.watts)
        if not watts:
            return {}
        return {"watts on average": mean(watts), "watts at most": max(watts)}

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self.watts.append(float(line))
            except ValueError:  # a card that does not tell says so in words
                continue
