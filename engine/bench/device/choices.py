"""What XLA measured to choose a GPU's products by, as a file beside the results.

A machine that is lent takes its folders with it when it goes. The archive holds the folder that
`engine.executor.autotuning` names, so unpacked into `engine/executor/autotuned` it is shipped.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from jitney.engine.executor.autotuning import RESULTS


class Choices:
    """The archive of one card and release, and the folder that XLA fills and reads."""

    def __init__(self, folder: Path, programs: Path, name: str):
        """folder: of the results; programs: of all compiled programs; name: of the card's own."""
        self._name = name
        self._measured = programs / name / RESULTS
        self._archive = folder / f"autotuned_{name}.tar.gz"
        self._packed: list[str] = []

    def take_up(self) -> None:
        """Put what an earlier call measured where XLA reads it, but nothing over what is there."""
        if not self._archive.is_file():
            return
        self._measured.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tarfile.open(self._archive) as archive:
            for member in archive:
                folder, _, file = member.name.partition("/")
                content = archive.extractfile(member)
                if content is None or folder != self._name or file != Path(file).name:
                    continue
                if not (self._measured / file).exists():
                    (self._measured / file).write_bytes(content.read())

    def save(self) -> None:
        """Write the archive, whole or not at all, if there is something new. Raises OSError."""
        if not self._measured.is_dir():
            return
        files = sorted(path.name for path in self._measured.iterdir() if path.is_file())
        if files == self._packed:
            return
        draft = self._archive.with_name(f"{self._archive.name}.part")
        with tarfile.open(draft, "w:gz") as archive:
            for file in files:
                archive.add(self._measured / file, f"{self._name}/{file}")
        draft.replace(self._archive)
        self._packed = files
