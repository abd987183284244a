"""`jitney config`: settings of files and of running servers, and how they differ."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from api_fakes import FakeClient, make_app, served

from jitney.engine.cli import main
from jitney.engine.cli.config_command import digest_here
from jitney.engine.common.key_file import digest_key
from jitney.engine.config.layers import ResolvedConfig


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("JITNEY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "500")  # no path is broken, however long


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    tiny = "[model]\nid = 'tiny-random'\n"
    return (
        write(tmp_path, "a.toml", tiny + "[engine]\nmax_seats = 8\n"),
        write(tmp_path, "b.toml", tiny + "[engine]\nmax_seats = 16\n[server]\nport = 1\n"),
    )


def test_files_that_differ_are_shown_setting_by_setting(files, capsys: pytest.CaptureFixture[str]):
    assert main(["config", "diff", *files]) == 1
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "[engine] max_seats" in line.split("  ")[0]]
    assert [word for word in ("8", "16", f"{files[0]}:", f"{files[1]}:") if word not in line] == []
    assert "[server] port" in out and "not counted" in out


def test_equal_files_end_with_0(files, capsys: pytest.CaptureFixture[str]):
    assert main(["config", "diff", files[0], files[0]]) == 0
    assert "They do not differ" in capsys.readouterr().out


def test_json_and_what_is_part_of_the_digest(
    files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["config", "diff", *files, "--json", "--counted"]) == 1
    told = json.loads(capsys.readouterr().out)
    (seats,) = told["differences"]
    assert seats["name"] == "max_seats" and seats["counted"]
    assert (seats["a"]["value"], seats["b"]["value"]) == (8, 16)
    digests = [digest_here(ResolvedConfig.load(file).config) for file in files]
    assert [told["a"]["config_digest"], told["b"]["config_digest"]] == digests
    port = write(tmp_path, "c.toml", (tmp_path / "a.toml").read_text() + "[server]\nport = 2\n")
    assert main(["config", "diff", files[0], port, "--counted"]) == 0
    assert main(["config", "diff", files[0], port]) == 1


def test_another_model_behind_the_same_settings_differs(
    files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    digests = iter(("a" * 64, "b" * 64))
    monkeypatch.setattr("jitney.engine.cli.config_command.digest_here", lambda _: next(digests))
    assert main(["config", "diff", files[0], files[0]]) == 1
    assert "files of the model or the version differ" in capsys.readouterr().out


def test_show_takes_the_environment_and_hides_secrets(
    files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("JITNEY_ORDER", "fair")
    monkeypatch.setenv("JITNEY_API_KEYS", "sesame")
    assert main(["config", "show", files[0], "--json"]) == 0
    out = capsys.readouterr().out
    told = json.loads(out)["settings"]
    assert (told["order"]["value"], told["order"]["origin"]) == ("fair", "JITNEY_ORDER")
    assert told["max_seats"]["origin"] == f"{files[0]}: [engine] max_seats"
    assert "sesame" not in out
    assert main(["config", "show"]) == 0
    out = capsys.readouterr().out
    assert "[engine] policy" in out and '"continuous"' in out and "default" in out


def test_show_says_that_the_order_is_fair_for_the_keys(
    files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("JITNEY_API_KEYS", "sesame")
    assert main(["config", "show", "--json"]) == 0
    order = json.loads(capsys.readouterr().out)["settings"]["order"]
    assert (order["value"], order["origin"]) == ("fair", "default with API keys")


def test_a_running_server_is_asked(
    files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    app = make_app(FakeClient(config_digest="c" * 64), admin_keys=(digest_key("boss"),))
    app.state.service.resolved = ResolvedConfig.load(files[0], flags={"order": "fair"})
    with served(app) as (url, _):
        assert main(["config", "diff", files[0], url]) == 1
        assert "an API key is needed" in capsys.readouterr().err
        monkeypatch.setenv("JITNEY_ENGINE_KEY", "boss")
        assert main(["config", "diff", files[0], url, "--json"]) == 1
        told = json.loads(capsys.readouterr().out)
        (order,) = told["differences"]
        assert (order["b"]["value"], order["b"]["origin"]) == ("fair", "--order")
        assert told["b"]["config_digest"] == "c" * 64
        assert main(["config", "show", url]) == 0
        assert "c" * 64 in capsys.readouterr().out


def test_a_server_that_tells_nothing_is_named(capsys: pytest.CaptureFixture[str]):
    with served(make_app()) as (url, _):
        assert main(["config", "show", url]) == 1
    assert f"{url}: it does not report its settings" in capsys.readouterr().err
    assert main(["config", "show", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_a_bad_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bad = write(tmp_path, "bad.toml", "[engine]\nmax_seat = 1\n")
    assert main(["config", "diff", bad, bad]) == 2
    assert "did you mean max_seats?" in capsys.readouterr().err
