"""Runs clients that other people wrote, as they are, against a Jitney server, and says what worked.

    python docs/clients/run.py --serve smollm2-135m           # starts a server for as long
    python docs/clients/run.py --url http://127.0.0.1:8000    # a server that runs
    python docs/clients/run.py --url ... --only openai llm    # some of them

Each client gets a virtual environment (or a folder of npm's) below --folder, with the versions that
`clients.toml` names; they come from the package index at the first run, and stay. Its script makes
its checks, and prints a line for each. What the clients of this and of earlier runs said is written
to results.md. Exit status 1: a check of this run failed, or a client could not be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from save_tokenizer import save_tokenizer

from jitney.engine.common.ports import free_port
from jitney.engine.lab.bench.peer_process import Peer

HERE = Path(__file__).resolve().parent
#: A line of a script: a check, what came of it, and a note.
_LINE = re.compile(r"([a-z0-9-]+): (ok|skipped|FAILED)(?: \((.*)\))?$")
_INSTALL_S = 1800.0
_NOTE_CHARS = 110
#: Of the printed table, in characters.
_WIDTH = 180
#: Where no client may go: hubs, and who counts its users.
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class Client:
    """A row of clients.toml, where its fields are explained."""

    name: str
    script: str
    packages: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    tokenizer: bool = False
    obedient: bool = False
    program: str = ""
    timeout_s: float = 300.0

    @property
    def version(self) -> str:
        """Of the first package."""
        return re.split(r"==|(?<=.)@", [*self.packages, *self.npm][0])[1]


@dataclass(frozen=True)
class Outcome:
    """What one check came to. result: ok, skipped, FAILED, or absent for a client that cannot be
    installed.
    """

    check: str
    result: str
    note: str = ""


@dataclass(frozen=True)
class Report:
    """What one client said, and when."""

    version: str
    date: str
    model: str
    server: str
    seconds: float
    outcomes: list[Outcome]

    @property
    def failed(self) -> bool:
        return any(outcome.result in ("FAILED", "absent") for outcome in self.outcomes)


class Unavailable(Exception):
    """The client cannot be installed here, and why."""


class Runner:
    """Runs clients against one server. folder: where their environments lie."""

    def __init__(self, url: str, model: str, folder: Path, python: str, vllm: str = ""):
        self.url = url
        self.model = model
        self.folder = folder
        self.python = python
        self.vllm = vllm
        self.server = _server_name(url)

    def run(self, client: Client) -> Report:
        """Install the client if it is not there yet, and run its script."""
        started = time.monotonic()
        try:
            outcomes = self._checks(client)
        except Unavailable as reason:
            outcomes = [Outcome("install", "absent", str(reason))]
        today = datetime.now(UTC).strftime("%Y-%m-%d")
        seconds = round(time.monotonic() - started, 1)
        version = self._version(client)
        return Report(version, today, self.model, self.server, seconds, outcomes)

    def _version(self, client: Client) -> str:
        if client.name == "vllm-bench" and self.vllm:
            return _output([self.vllm, "--version"]).split()[-1]
        return client.version

    def _checks(self, client: Client) -> list[Outcome]:
        command = [*self._interpreter(client), self.url, self.model]
        if client.tokenizer:
            command += ["--tokenizer", str(self._tokenizer())]
        program = self._program(client)
        if program:
            command += ["--program", program]
        environment = os.environ | _QUIET | client.environment
        environment.pop("PYTHONPATH", None)  # ours, whose packages are not the client's
        output, ended = _run_bounded(command, client.timeout_s, environment, self._place(client))
        (self._place(client) / "output.txt").write_text(output)
        outcomes = [Outcome(*match.groups(default="")) for match in _lines(output)]
        if not ended:
            outcomes.append(Outcome("all", "FAILED", f"not at its end after {client.timeout_s} s"))
        if not outcomes:
            outcomes.append(Outcome("start", "FAILED", output.strip()[-_NOTE_CHARS:]))
        return outcomes

    def _place(self, client: Client) -> Path:
        place = self.folder / client.name
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _interpreter(self, client: Client) -> list[str]:
        """What runs the client's script, which is the last word."""
        if client.npm:
            return _node(client, self._place(client))
        if client.name == "vllm-bench" and self.vllm:
            return [sys.executable, str(HERE / client.script)]
        python = _python(client, self._place(client), self.python)
        return [python, str(HERE / client.script)]

    def _program(self, client: Client) -> str:
        """The client's program, if it is one; its environment is installed by now."""
        if client.name == "vllm-bench":
            return self.vllm
        programs = "node_modules/.bin" if client.npm else "bin"
        return str(self._place(client) / programs / client.program) if client.program else ""

    def _tokenizer(self) -> Path:
        """The model's tokenizer as a folder, written once."""
        place = self.folder / "tokenizers" / self.model.replace("/", "--")
        if not (place / "tokenizer.json").is_file():
            save_tokenizer(self.model, place)
        return place


def _lines(output: str) -> Iterator[re.Match[str]]:
    for line in output.splitlines():
        match = _LINE.match(line)
        if match is not None:
            yield match


def _python(client: Client, place: Path, base: str) -> str:
    """The interpreter of the client's environment, which is made with `base` if need be.
    Unavailable if pip cannot.
    """
    python = place / "bin" / "python"
    mark = place / "installed.txt"
    wanted = "\n".join(client.packages)
    if mark.is_file() and mark.read_text() == wanted:
        return str(python)
    _install([base, "-m", "venv", str(place)], place)
    _install([str(python), "-m", "pip", "install", "--quiet", *client.packages], place)
    mark.write_text(wanted)
    return str(python)


def _node(client: Client, place: Path) -> list[str]:
    """What runs the script: node, beside the packages that it imports, which are found by where it
    lies; or, for a program that Python runs, our own interpreter.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise Unavailable("Node is not installed here")
    mark = place / "installed.txt"
    wanted = "\n".join(client.npm)
    if not mark.is_file() or mark.read_text() != wanted:
        _install([npm, "install", "--no-audit", "--no-fund", *client.npm], place)
        mark.write_text(wanted)
    if client.script.endswith(".py"):
        return [sys.executable, str(HERE / client.script)]
    shutil.copy(HERE / "checks.mjs", place)
    return [node, shutil.copy(HERE / client.script, place)]


def _install(command: Sequence[str], place: Path) -> None:
    output, _ = _run_bounded(command, _INSTALL_S, dict(os.environ), place, strict=True)
    (place / "install.txt").write_text(output)


def _run_bounded(
    command: Sequence[str],
    limit_s: float,
    environment: dict[str, str],
    place: Path,
    strict: bool = False,
) -> tuple[str, bool]:
    """All that a command prints, and whether it came to its end; what it started ends with it.
    strict: Unavailable if its status is not 0.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        cwd=place,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
            ended = True
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            ended = False
    if strict and (not ended or process.returncode):
        raise Unavailable(_last_error(output))
    return output, ended


def _last_error(output: str) -> str:
    lines = output.strip().splitlines() or ["it printed nothing"]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines)[0][:_NOTE_CHARS]


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=300).stdout


def _server_name(url: str) -> str:
    headers = {"authorization": f"Bearer {os.environ.get('JITNEY_API_KEY', 'none')}"}
    return f"Jitney {httpx.get(f'{url}/version', headers=headers, timeout=30).json()['version']}"


def _first_model(url: str) -> str:
    headers = {"authorization": f"Bearer {os.environ.get('JITNEY_API_KEY', 'none')}"}
    return httpx.get(f"{url}/v1/models", headers=headers, timeout=30).json()["data"][0]["id"]


def clients_from(file: Path) -> list[Client]:
    """The table of clients, in its order."""
    clients = []
    for name, row in tomllib.loads(file.read_text()).items():
        lists = {key: tuple(row.pop(key)) for key in ("packages", "npm") if key in row}
        clients.append(Client(name, **lists, **row))
    return clients


def _print(reports: dict[str, Report]) -> None:
    table = Table("client", "version", "check", "result", "note", box=SIMPLE)
    for name, report in reports.items():
        for outcome in report.outcomes:
            note = outcome.note[:_NOTE_CHARS]
            table.add_row(name, report.version, outcome.check, outcome.result, note)
    Console(width=_WIDTH).print(table, markup=False)


def _markdown(reports: dict[str, Report]) -> str:
    """results.md: a table of clients, and one of the checks that did not pass."""
    lines = [
        "# Results of the clients",
        "",
        "Written by `docs/clients/run.py` ([clients](README.md)). "
        f"{platform.system()}, Python {platform.python_version()}.",
        "",
        "| client | version | date | model | ok | not ok |",
        "|---|---|---|---|---|---|",
    ]
    for name, report in reports.items():
        lines.append(_client_row(name, report))
    lines += ["", "| client | check | result | note |", "|---|---|---|---|"]
    for name, report in reports.items():
        lines += _noted_rows(name, report)
    return "\n".join(lines) + "\n"


def _client_row(name: str, report: Report) -> str:
    passed = sum(outcome.result == "ok" for outcome in report.outcomes)
    others = len(report.outcomes) - passed
    cells = [name, report.version, report.date, report.model, passed, others]
    return f"| {' | '.join(map(str, cells))} |"


def _noted_rows(name: str, report: Report) -> Iterator[str]:
    for outcome in report.outcomes:
        if outcome.result != "ok":
            note = outcome.note.replace("|", "\\|")
            yield f"| {name} | {outcome.check} | {outcome.result} | {note} |"


def _known_reports(file: Path) -> dict[str, Report]:
    """Of earlier runs."""
    if not file.is_file():
        return {}
    known: dict[str, Any] = json.loads(file.read_text())
    reports = {}
    for name, row in known.items():
        outcomes = [Outcome(**outcome) for outcome in row.pop("outcomes")]
        reports[name] = Report(**row, outcomes=outcomes)
    return reports


def _save(reports: dict[str, Report], file: Path) -> None:
    rows = {name: asdict(report) for name, report in reports.items()}
    file.write_text(json.dumps(rows, indent=1))


@contextmanager
def _server(args: argparse.Namespace, *, obedient: bool) -> Iterator[str]:
    """The address of the server that is there, or of one started for as long. obedient: its model
    does what it is told (`obedient_server.py`).
    """
    if args.url:
        yield args.url.rstrip("/")
        return
    flags = ("--data-dir", str(args.folder.resolve() / "server"), "--embedding-pooling", "mean")
    program = "import sys; from jitney.engine.cli import main; sys.exit(main())"
    command = (sys.executable, "-c", program, "serve", args.serve, *flags)
    if obedient:
        command = (sys.executable, str(HERE / "obedient_server.py"), *flags)
    with Peer("Jitney", command, {}, "").serving(free_port()) as url:
        yield url


def _arguments(names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run clients of others against a Jitney server.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a server that runs")
    where.add_argument("--serve", metavar="MODEL", help="start a server with this model")
    parser.add_argument("--model", help="a name that the server's /v1/models lists [the first]")
    parser.add_argument("--only", nargs="+", choices=names, metavar="CLIENT", default=names)
    python = "for new environments [this one]"
    parser.add_argument("--python", default=sys.executable, metavar="FILE", help=python)
    parser.add_argument("--vllm", default="", help="a vllm program that is installed")
    folder = HERE.parent.parent / "build" / "clients"
    parser.add_argument("--folder", type=Path, default=folder, help="for what is installed")
    parser.add_argument("--results", type=Path, default=HERE / "results.md")
    return parser.parse_args()


def main() -> int:
    """Run the clients that are asked for."""
    table = clients_from(HERE / "clients.toml")
    args = _arguments([client.name for client in table])
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    reports = _known_reports(folder / "reports.json")
    mine: dict[str, Report] = {}
    for obedient in (False, True):
        chosen = [
            client for client in table if client.name in args.only and client.obedient == obedient
        ]
        if not chosen:
            continue
        with _server(args, obedient=obedient) as url:
            model = args.model or _first_model(url)
            runner = Runner(url, model, folder, args.python, args.vllm)
            for client in chosen:
                print(f"{client.name} ...", file=sys.stderr, flush=True)
                mine[client.name] = reports[client.name] = runner.run(client)
                _save(reports, folder / "reports.json")
    _print(mine)
    ordered = {client.name: reports[client.name] for client in table if client.name in reports}
    args.results.write_text(_markdown(ordered))
    return int(any(report.failed for report in mine.values()))


if __name__ == "__main__":
    sys.exit(main())
