"""Reads the files under configs/deploy: our commands, probes, and the stages of the Dockerfile."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml
from places import CONFIGS, DEPLOY, ROOT


class Stage(NamedTuple):
    """One stage of the Dockerfile: its lines as (instruction, arguments)."""

    name: str
    base: str
    lines: list[tuple[str, str]]

    def all(self, instruction: str) -> list[str]:
        """The arguments of all lines with this instruction."""
        return [rest for name, rest in self.lines if name == instruction]


def stages() -> dict[str, Stage]:
    """The stages of the Dockerfile by name."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    by_name: dict[str, Stage] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        instruction, _, rest = line.strip().partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            by_name[name] = Stage(name, base, [])
        elif by_name:
            list(by_name.values())[-1].lines.append((instruction, " ".join(rest.split())))
    return by_name


def run_lines(stage: str) -> list[str]:
    """The shell commands of a stage, without their mounts."""
    return [re.sub(r"^(--mount=\S+ )+", "", rest) for rest in stages()[stage].all("RUN")]


def documents(file: str) -> list[dict[str, Any]]:
    """The YAML documents of a file under configs/deploy."""
    return list(yaml.safe_load_all((DEPLOY / file).read_text()))


def container(file: str) -> dict[str, Any]:
    """The engine's container in a StatefulSet."""
    (document,) = documents(file)
    (engine,) = document["spec"]["template"]["spec"]["containers"]
    return engine


def unit_lines(section: str) -> list[tuple[str, str]]:
    """(key, value) of a section of the systemd unit, in order."""
    text = (DEPLOY / "jitney.service").read_text()
    body = text.partition(f"[{section}]\n")[2].partition("\n[")[0]
    lines = [line for line in body.splitlines() if line and not line.startswith("#")]
    return [(key, value) for key, _, value in (line.partition("=") for line in lines)]


def serve_commands() -> Iterator[tuple[str, list[str]]]:
    """(source, words after `jitney`) of every command that starts an engine, in the files and in
    docs/deploy.md.
    """
    (command,) = stages()["base"].all("CMD")
    yield "Dockerfile", yaml.safe_load(command)
    for file in ("compose.yaml", "compose.cuda12.yaml"):
        (document,) = documents(file)
        yield file, document["services"]["jitney"]["command"]
    for file in ("kubernetes/gpu.yaml", "kubernetes/tpu.yaml"):
        yield file, container(file)["args"]
    yield "jitney.service", shlex.split(dict(unit_lines("Service"))["ExecStart"])[1:]
    (task,) = documents("sky.yaml")
    for where, text in (
        ("sky.yaml", task["run"]),
        ("docs/deploy.md", (ROOT / "docs" / "deploy.md").read_text()),
    ):
        for line in re.findall(r"jitney (serve .*?)(?:\s#.*)?(?: &)?$", text, flags=re.MULTILINE):
            yield where, shlex.split(line)


def with_files_here(words: list[str]) -> list[str]:
    """The words with paths of installed files replaced by our own files."""
    return [re.sub(r"^/etc/jitney/(.*\.toml)$", rf"{CONFIGS}/\1", word) for word in words]
