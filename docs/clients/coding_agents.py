"""Coding agents' command lines, as they come, against a Jitney server.

    python coding_agents.py URL MODEL --program FILE       # FILE: codex, claude, opencode, ...

Each works in a folder of its own with one file. The server's model does what it is told
(`obedient_server.py`): it says a sentence, has the agent read the file and says what it read, and
has the agent change the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checks import Checks, Skipped, expect

checks = Checks(__doc__)
_LIMIT_S = 240
_SECRET = "4711"
#: Changes the file; FILE stands for its path.
_EDIT = "sed -i s/4711/4712/ FILE"


@dataclass(frozen=True)
class Agent:
    """How one program is run without a person."""

    #: Makes the command line of a prompt.
    command: Callable[[str], list[str]]
    #: The call that reads FILE, and the one that writes 4712 to it.
    read: tuple[str, dict[str, object]]
    write: tuple[str, dict[str, object]]
    #: Beside the caller's environment.
    environment: dict[str, str]
    #: Files that it wants, below its home.
    files: dict[str, str]
    #: The prompt comes on standard input, since the program escapes quotes of its arguments.
    by_stdin: bool = False


_OPENCODE = {
    "provider": {
        "jitney": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": checks.base_url, "apiKey": checks.key},
            "models": {checks.model: {"limit": {"context": 131072, "output": 4096}}},
        }
    },
    "autoupdate": False,
    "permission": {"external_directory": "allow"},
}
_CODEX = f"""model = "{checks.model}"
model_provider = "jitney"
[model_providers.jitney]
name = "Jitney"
base_url = "{checks.base_url}"
wire_api = "responses"
env_key = "JITNEY_KEY"
"""
_CONTINUE = f"""name: Jitney
version: 1.0.0
schema: v1
models:
  - name: {checks.model}
    provider: openai
    model: {checks.model}
    apiBase: {checks.base_url}
    apiKey: {checks.key}
    roles: [chat]
"""
_ANTHROPIC = {
    "ANTHROPIC_BASE_URL": checks.url,
    "ANTHROPIC_API_KEY": checks.key,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}
_OPENAI = {"OPENAI_BASE_URL": checks.base_url, "OPENAI_API_KEY": checks.key}


AGENTS = {
    "codex": Agent(
        lambda prompt: [
            *(checks.program, "exec", "--skip-git-repo-check"),
            *("--sandbox", "danger-full-access", prompt),
        ],
        ("*exec_command*", {"cmd": "cat FILE"}),
        ("*exec_command*", {"cmd": _EDIT}),
        {"JITNEY_KEY": checks.key},
        {".codex/config.toml": _CODEX},
    ),
    "claude": Agent(
        lambda prompt: [
            *(checks.program, "-p", "--model", checks.model),
            *("--allowedTools", "Read", "Bash"),
        ],
        ("Read", {"file_path": "FILE"}),
        ("Bash", {"command": _EDIT, "description": "change the file"}),
        _ANTHROPIC | {"ANTHROPIC_SMALL_FAST_MODEL": checks.model},
        {},
        by_stdin=True,
    ),
    "opencode": Agent(
        lambda prompt: [checks.program, "run", "-m", f"jitney/{checks.model}"],
        ("read", {"filePath": "FILE"}),
        ("bash", {"command": _EDIT, "description": "change the file"}),
        {},
        {".config/opencode/opencode.json": json.dumps(_OPENCODE)},
        by_stdin=True,
    ),
    "qwen": Agent(
        lambda prompt: [checks.program, "--auth-type", "openai", "-y", "-p", prompt],
        ("read_file", {"file_path": "FILE", "absolute_path": "FILE"}),
        ("run_shell_command", {"command": _EDIT, "is_background": False}),
        _OPENAI | {"OPENAI_MODEL": checks.model},
        {},
    ),
    "cn": Agent(
        lambda prompt: [
            *(checks.program, "-p", "--auto"),
            *("--config", str(Path(os.environ["HOME"], "continue.yaml")), prompt),
        ],
        ("Read", {"filepath": "FILE"}),
        ("Bash", {"command": _EDIT}),
        {},
        {"continue.yaml": _CONTINUE},
    ),
    "cline": Agent(
        lambda prompt: [checks.program, prompt],
        ("read_files", {"files": [{"path": "FILE"}]}),
        ("run_commands", {"commands": [_EDIT]}),
        {},
        {},
    ),
    "aider": Agent(
        lambda prompt: [
            *(checks.program, "--model", f"openai/{checks.model}", "--no-git", "--yes-always"),
            *("--no-show-model-warnings", "--no-check-update", "--analytics-disable"),
            *("--edit-format", "diff", "--message", prompt, "note.txt"),
        ],
        ("", {}),
        ("", {}),
        {"OPENAI_API_BASE": checks.base_url, "OPENAI_API_KEY": checks.key},
        {},
    ),
}
#: A prompt of more tokens than the context of the server's model.
_LONG = "word " * 200_000
NAME = Path(checks.program).name
AGENT = AGENTS[NAME]
_place = tempfile.TemporaryDirectory()
HOME = Path(_place.name, "home")
WORK = Path(_place.name, "work")
FILE = WORK / "note.txt"
os.environ["HOME"] = str(HOME)


def _run(*lines: str, flags: tuple[str, ...] = ()) -> str:
    """All that the program prints when it is given this prompt. Fails if it fails."""
    status, output = _outcome("\n".join(["Do this:", *lines, "That is all."]), flags)
    expect(status == 0, output[-300:])
    return output


def _outcome(prompt: str, flags: tuple[str, ...]) -> tuple[int, str]:
    """Exit status and output."""
    process = subprocess.run(
        [*AGENT.command(prompt), *flags],
        cwd=WORK,
        env=os.environ | AGENT.environment,
        input=prompt if AGENT.by_stdin else "",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_LIMIT_S,
    )
    return process.returncode, process.stdout


def _call(call: tuple[str, dict[str, object]]) -> str:
    name, arguments = call
    return f"CALL {name} {json.dumps(arguments).replace('FILE', str(FILE))}"


def _prepare() -> None:
    """The folders, and what the program wants to find."""
    WORK.mkdir()
    HOME.mkdir()
    FILE.write_text(f"the secret is {_SECRET}\n")
    for name, text in AGENT.files.items():
        file = HOME / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    if NAME == "cline":
        to = ("--provider", "openai-compatible", "--apikey", checks.key, "--modelid", checks.model)
        command = [checks.program, "auth", *to, "--baseurl", checks.base_url]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_LIMIT_S)


@checks.add
def says() -> None:
    output = _run("SAY the sky is blue")
    expect("the sky is blue" in output, output[-300:])


@checks.add
def reads() -> None:
    _need_tools()
    output = _run(_call(AGENT.read), "SAY it reads RESULT")
    after = output[output.rfind("it reads") :]
    expect(_SECRET in after, output[-300:])


@checks.add
def edits() -> None:
    FILE.write_text(f"the secret is {_SECRET}\n")
    if NAME == "aider":
        blocks = ("note.txt", "```", "<<<<<<< SEARCH", f"the secret is {_SECRET}", "=======")
        text = "\\n".join([*blocks, "the secret is 4712", ">>>>>>> REPLACE", "```"])
        _run(f"SAY {text}")
    else:
        _run(_call(AGENT.write), "SAY done")
    expect("4712" in FILE.read_text(), FILE.read_text())


@checks.add
def two_calls() -> None:
    _need_tools()
    FILE.write_text(f"the secret is {_SECRET}\n")
    output = _run(_call(AGENT.write), _call(AGENT.read), "SAY it reads RESULT")
    expect("4712" in output[output.rfind("it reads") :], output[-300:])


def _need_tools() -> None:
    if NAME == "aider":
        raise Skipped("it shows its files in the prompt, and has no tools")


if NAME == "claude":

    @checks.add
    def claude_name() -> None:
        """Under the name of one of Anthropic's models, which has it send what those can do."""
        FILE.write_text(f"the secret is {_SECRET}\n")
        lines = (_call(AGENT.read), "SAY it reads RESULT")
        output = _run(*lines, flags=("--model", "claude-sonnet-4-5"))
        expect(_SECRET in output[output.rfind("it reads") :], output[-300:])

    @checks.add
    def too_long() -> None:
        """It knows the server's error by its words, and says so in its own."""
        _, output = _outcome(_LONG, ())
        expect("prompt is too long" in output.lower(), output[-300:])


_prepare()
checks.run()
