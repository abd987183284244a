"""The command line: what is refused before anything loads, what is printed, and what the signals
do.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from jitney.engine.cli import _COMMANDS, main
from jitney.engine.cli.chat import _Conversation, _converse
from jitney.engine.cli.serve import _curl_line
from jitney.engine.common.display import _Lines
from jitney.engine.common.engine_info import ModelInfo
from jitney.engine.common.errors import ConfigError, RequestError
from jitney.engine.common.key_file import is_open
from jitney.engine.common.messages import Progress
from jitney.engine.config.layers import ResolvedConfig
from jitney.engine.config.schema import Config, ServerSection
from jitney.engine.server.http.listen import AcceptedKeys, base_url, listen


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch):
    for name in [
        name for name in os.environ if name.startswith("JITNEY_") and name != "JITNEY_CACHE"
    ]:
        monkeypatch.delenv(name)


def jitney(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from jitney.engine.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_lists_every_command():
    done = jitney("--help")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in _COMMANDS.table)


def test_help_loads_nothing_heavy():
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            "import sys; from jitney.engine.cli import main\n"
            "try: main(['--help'])\n"
            "except SystemExit: print({'jax', 'pydantic', 'zmq', 'numpy'} & set(sys.modules))",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize("arguments", [["--version"], ["bench", "--version"]])
def test_version(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"jitney {version('jitney')}\n"


def test_every_command_has_a_module_that_runs_it():
    assert set(_COMMANDS.groups) < set(_COMMANDS.table)
    for commands in (_COMMANDS, *_COMMANDS.groups.values()):
        for name in set(commands.table) - set(commands.groups):
            assert callable(commands.function(name))


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, ""),
        (["serv"], 2, "no command 'serv'; did you mean serve?"),
        (["bench"], 2, ""),
        (["bench", "polices"], 2, "no command 'polices'; did you mean policies?"),
        (["bench", "--kind", "serve"], 2, "unrecognized arguments: --kind"),
        (["serve", "--max-seat", "3"], 2, "--max-seat is unknown; did you mean --max-seats?"),
        (["serve", "--api-keys", "k"], 2, "--api-keys is unknown"),
        (["generate", "--port", "1"], 2, "--port is unknown"),
        (["batch", "in.jsonl"], 2, "arguments are required: -o"),
    ],
)
def test_wrong_usage(
    arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == status
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--max-seats", "0"], "--max-seats: must be greater than or equal to 1"),
        (["serve", "--max-seats", "many"], "--max-seats: must be a whole number, not many"),
        (["serve", "--host", "0.0.0.0"], "no API key is set"),
        (["serve", "--config", "absent.toml"], "absent.toml: cannot be read"),
        (["serve", "--webhook-prefixes", "ftp://a/"], "is not the beginning of a URL"),
        (["serve", "--webhook-prefixes", "https://a/"], "needs webhook_secret_file"),
        (["batch", "absent.jsonl", "-o", "out"], "absent.jsonl cannot be read"),
        (["serve", "--api-key-file", "absent"], "api_key_file absent cannot be read"),
        (
            ["serve", "--host", "203.0.113.7", "--insecure"],
            "no network interface here has that address",
        ),
        (["generate", "--temperature", "3"], "--temperature must be at least 0.0 and at most 2.0"),
        (["generate", "--temperature", "nan"], "--temperature must be"),
        (["chat", "--top-p", "0"], "--top-p must be more than 0.0"),
    ],
)
def test_bad_settings_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert words in err and err.startswith("jitney: ") and err.count("\n") == 1 and not out


def test_print_config_prints_what_loads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JITNEY_MAX_SEATS", "8")
    assert (
        main(
            ["serve", "tiny-random", "--print-config", "--no-prefix-cache", "--seat-buckets", "4,8"]
        )
        == 0
    )
    file = tmp_path / "printed.toml"
    file.write_text(capsys.readouterr().out)
    config = ResolvedConfig.load(file).config
    assert (
        config.model.id,
        config.engine.max_seats,
        config.engine.prefix_cache,
        config.engine.seat_buckets,
    ) == ("tiny-random", 8, False, (4, 8))


def test_every_setting_is_in_the_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from jitney.engine.config.layers import settings

    monkeypatch.setenv("COLUMNS", "300")  # help that is not folded

    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    for setting in settings().values():
        assert (setting.flag in text) != setting.secret
        assert setting.secret or str(setting.field.description) in text


def test_a_port_in_use_is_one_line_before_anything_loads(capsys: pytest.CaptureFixture[str]):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "no-such-model", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"jitney: port {port} on 127.0.0.1 is in use by another program; choose another with "
        "--port\n"
    )


def test_a_port_can_be_taken_again_at_once():
    """A closed connection's wait must not block the next start."""
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        first.listen(1)
        with socket.create_connection(("127.0.0.1", port)), first.accept()[0]:
            pass
    with listen("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port


@pytest.mark.parametrize(
    ("owner", "mode", "refused"),
    [
        (0, 0o400, False),
        (0, 0o440, False),
        (0, 0o460, True),
        (0, 0o444, True),
        (1000, 0o600, False),
        (1000, 0o640, True),
    ],
)
def test_the_group_may_read_keys_that_are_roots(owner: int, mode: int, refused: bool):
    """A secret's volume in Kubernetes; a key file that root gives a service's group."""
    assert is_open(os.stat_result((mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))) is refused


def test_keys_come_from_a_file_that_is_ours_alone(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("# mine\nsk-one\n\n  sk-two \n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=f"chmod 600 {file}"):
        AcceptedKeys.of(ServerSection(api_key_file=str(file)))
    file.chmod(0o600)
    assert AcceptedKeys.of(
        ServerSection(api_key_file=str(file), api_keys=("env",))
    ) == AcceptedKeys(users=("env", "sk-one", "sk-two"))
    both = ServerSection(admin_key_file=str(file), admin_keys=("root",), api_keys=("env",))
    assert AcceptedKeys.of(both) == AcceptedKeys(
        users=("env",), admins=("root", "sk-one", "sk-two")
    )
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no key"):
        AcceptedKeys.of(ServerSection(api_key_file=str(file)))


def test_the_url_is_one_that_a_client_here_can_use():
    assert base_url(ServerSection(), 80) == "http://127.0.0.1:80"
    assert base_url(ServerSection(host="0.0.0.0", insecure=True), 80) == "http://127.0.0.1:80"
    assert base_url(ServerSection(host="::", insecure=True), 80) == "http://[::1]:80"


@pytest.mark.parametrize(
    "server",
    [
        ServerSection(),
        ServerSection(api_keys=("sk-one", "sk-two")),
        ServerSection(api_key_file="{keys}"),
        ServerSection(admin_keys=("sk-one",)),
        ServerSection(admin_key_file="{keys}"),
    ],
    ids=["open", "environment", "file", "administrator's environment", "administrator's file"],
)
def test_the_curl_line_means_the_same_to_a_shell(server: ServerSection, tmp_path: Path):
    """Run by a shell with a curl that prints its arguments."""
    keys = tmp_path / "my keys"
    keys.write_text("# mine\nsk-one\n")
    files = {
        "api_key_file": server.api_key_file.format(keys=keys),
        "admin_key_file": server.admin_key_file.format(keys=keys),
    }
    server = server.model_copy(update=files)
    model = ModelInfo(name='it\'s a "model"', context_length=8, vocab_size=8)
    line = _curl_line(Config(server=server), "http://127.0.0.1:8000", model, chat=True)
    done = subprocess.run(
        ["bash", "-c", f"curl() {{ printf '%s\\n' \"$@\"; }}; {line}"],
        capture_output=True,
        text=True,
        env=os.environ | {"JITNEY_API_KEYS": "sk-one,sk-two", "JITNEY_ADMIN_KEYS": "sk-one,sk-two"},
        check=True,
    )
    url, *flags = done.stdout.splitlines()
    assert url == "http://127.0.0.1:8000/v1/chat/completions"
    assert json.loads(flags[-1])["model"] == 'it\'s a "model"'
    assert ("authorization: Bearer sk-one" in flags) == server.has_keys


@pytest.mark.parametrize(
    ("pooling", "route", "field"),
    [("cls", "embeddings", "input"), ("classify", "rerank", "documents")],
)
def test_the_curl_line_of_an_encoder_asks_for_what_it_makes(pooling: str, route: str, field: str):
    model = ModelInfo(
        name="m", context_length=8, vocab_size=8, encoder=True, embedding_pooling=pooling
    )
    line = _curl_line(Config(), "http://127.0.0.1:8000", model, chat=False)
    words = shlex.split(line)
    assert words[1] == f"http://127.0.0.1:8000/v1/{route}" and field in json.loads(words[-1])


def test_a_log_file_gets_lines_at_a_stage_s_start_and_end_and_every_few_seconds_between(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level("INFO")
    lines, gib = _Lines(), 1 << 30
    for second, stage, done, total, detail in [
        (0, "download", 0, 0, "a model"),
        (1, "weights", 0, 8 * gib, ""),
        (3, "weights", gib, 8 * gib, ""),
        (9, "weights", 4 * gib, 8 * gib, ""),
        (12, "weights", 7 * gib, 8 * gib, ""),
        (17, "weights", 8 * gib, 8 * gib, ""),
        (18, "weights", 8 * gib, 8 * gib, ""),
        (20, "compile", 0, 9, ""),
        (26, "compile", 3, 9, "x"),
        (27, "compile", 9, 9, ""),
    ]:
        monkeypatch.setattr("time.monotonic", lambda second=second: float(second))
        lines.progress(Progress(stage, done, total, detail))
    assert [record.message for record in caplog.records] == [
        "downloading a model",
        "reading weights",
        "reading weights: 4.0 of 8.0 GiB, 0.54 GB/s, 8 s left",
        "reading weights: done (0.54 GB/s, 16.0 s)",
        "compiling",
        "compiling: 3 of 9, 6.0 s",
        "compiling: done (7.0 s)",
    ]


def test_a_chat_remembers_and_starts_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class Parrot:
        def __init__(self) -> None:
            self.heard: list[list[dict[str, str]]] = []

        def answer(self, messages):
            self.heard.append([dict(message) for message in messages])
            yield from ("you said ", messages[-1]["content"])

    typed = iter(["one", "two", "/new", "three", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    parrot = Parrot()
    _converse(_Conversation(parrot.answer, "be brief"))
    assert capsys.readouterr().out == "you said one\nyou said two\nyou said three\n"
    assert [[m["content"] for m in heard] for heard in parrot.heard] == [
        ["be brief", "one"],
        ["be brief", "one", "you said one", "two"],
        ["be brief", "three"],
    ]


def test_what_is_meant_for_the_chat_program_is_not_sent_to_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class Model:
        def __init__(self) -> None:
            self.heard: list[list[str]] = []

        def answer(self, messages):
            said = [message["content"] for message in messages]
            if "too long" in said:
                raise RequestError("no room", code="context_length_exceeded")
            self.heard.append(said)
            yield "aha"

    typed = iter(
        ["one", "/help", "/cleer", "too long", "two", "/clear", " /etc is a folder", "/exit", "x"]
    )
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    model = Model()
    _converse(_Conversation(model.answer))
    assert model.heard == [["one"], ["one", "aha", "two"], ["/etc is a folder"]]
    assert next(typed) == "x"  # nothing is read after /exit
    told = capsys.readouterr().err
    assert "did you mean /clear?" in told and "no room" in told
    assert told.count("Ctrl-D ends") == 2  # for /help and for what it does not know


@pytest.mark.parametrize(
    ("arguments", "suggested"),
    [
        (["serve", "--policy", "continous"], "continuous"),
        (["serve", "--log-level", "warnin"], "warning"),
        (["serve", "--insecure=tru"], ""),
        (["bench", "policies", "--policies", "statik"], "static"),
        (["serve", "smollm2-135", "--port", "0"], "smollm2-135m"),
    ],
)
def test_a_value_that_is_nearly_right_is_suggested(
    arguments: list[str], suggested: str, capsys: pytest.CaptureFixture[str]
):
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status
    err = capsys.readouterr().err
    assert f"; did you mean {suggested}?" in err if suggested else "did you mean" not in err


def test_a_choice_that_is_nearly_right_is_suggested(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["serve", "--for", "latencyy"])
    assert "did you mean latency?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--context", "99999"], ["context 99999", "8192"]),
        (["--memory-gib", "0.0001"], ["memory_gib 0.0001", "32 seats", "max_seats"]),
        (["--memory-gib", "1e6", "--max-seats", "1024", "--token-budget", "2048"], ["GiB free"]),
        (["--pages", "2"], ["pages 2", "at least pages 33"]),
        (["--pages", "1000000000"], ["pages 1000000000", "GiB free"]),
        (["--tensor-parallel", "7"], ["tensor_parallel 7 does not divide"]),
        (["--tensor-parallel", "3"], ["tensor_parallel 3 needs 3 devices here"]),
    ],
)
def test_what_cannot_fit_the_model_is_said_before_anything_is_loaded(
    flags: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """The core's process is not even started."""
    from jitney.engine.core.weights.checkpoints.sources import ModelSource
    from jitney.engine.server.process.process_client import ProcessClient

    async def no_core(client: ProcessClient) -> None:
        raise AssertionError("the core was started")

    built_in = ModelSource.of_shapes("smollm2-135m")
    monkeypatch.setattr(ModelSource, "resolve", lambda *_, **__: built_in)
    monkeypatch.setattr(ProcessClient, "start", no_core)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    given = ["serve", "smollm2-135m", "--port", "0", "--no-measured-sizes", *flags]
    assert main(given) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("jitney: ")
    for word in words:
        assert word in err


def test_the_short_help_names_the_long_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from jitney.engine.config.flags import _USUAL
    from jitney.engine.config.layers import settings

    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    short = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    long = capsys.readouterr().out
    assert "--help-all" in short and 2 * len(short) < len(long)
    assert set(settings()) >= _USUAL
    for setting in settings().values():
        assert (f"\n  {setting.flag}" in short) == (setting.name in _USUAL)


@pytest.mark.parametrize("word", ["notaurl", "host:port", "http:/x"])
def test_a_page_of_no_address_is_refused(word: str, capsys: pytest.CaptureFixture[str]):
    assert main(["dashboard", word, "--port", "0"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"jitney: {word!r} is not the URL of an engine")


@pytest.mark.parametrize("text", ["\x1b]0;mine\x07\x1b[2J", "a\x9b31mb", "x\x7f\r"])
def test_foreign_text_is_shown_and_not_obeyed(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from jitney.engine.common.reports.page import Table
    from jitney.engine.common.terminal import VisibleFormatter, say
    from jitney.engine.core.llm import Completion

    def shown() -> str:
        out, err = capsys.readouterr()
        return out + err

    foreign = {character for character in text if not character.isprintable()}
    say(text)
    escaped = shown()
    Table(["name"], [[text]]).print(text)
    table = shown()
    assert main(["top", f"http://{text}"]) != 0
    unreachable = shown()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    answers = [SimpleNamespace(outputs=[Completion(0, text)], error=None)]
    llm = SimpleNamespace(
        info=SimpleNamespace(model=SimpleNamespace(sampling_defaults={})),
        generate=lambda *words, **options: answers,
        close=lambda: None,
    )
    monkeypatch.setattr("jitney.engine.cli.generate.load_llm", lambda config: llm)
    for flags in ([], ["--json"]):
        assert main(["generate", "--prompt", "x", *flags]) == 0
    generated = shown()
    logged = VisibleFormatter().format(logging.makeLogRecord({"msg": text}))
    for printed in (escaped, table, unreachable, generated, logged):
        assert not foreign & set(printed)
    for character in foreign:
        assert f"\\x{ord(character):02x}" in escaped


def test_compiling_ahead_fills_the_cache_folder_and_says_each_step_s_memory(tmp_path: Path):
    sizes = "--max-seats 1 --token-budget 16 --token-buckets 16 --pages 8 --kernels reference"
    done = subprocess.run(
        [sys.executable, "-m", "jitney", "compile", "tiny-random", *sizes.split()],
        env=os.environ | {"JITNEY_CACHE": str(tmp_path), "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    steps = [line.split()[0] for line in done.stdout.splitlines()]
    assert {"decode-1", "mixed-16"} <= set(steps)
    assert "of temporaries" in done.stdout and str(tmp_path / "xla") in done.stdout
    assert list((tmp_path / "xla").glob("jit__run_model-*"))
    assert main(["compile", "tiny-random", "--no-compilation-cache"]) == 2
