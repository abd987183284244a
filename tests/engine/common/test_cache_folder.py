"""Compiled programs are run, so they are kept only where nobody else can have written."""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import stat
from pathlib import Path

import jax
import pytest

from jitney.engine.common.cache_folder import make_folders, make_private
from jitney.engine.config.schema import Config, EngineSection
from jitney.engine.core import jax_start
from jitney.engine.core.jax_start import open_compilation_cache
from jitney.engine.lab.tuned_sizes import TunedSizes

ROOT = os.geteuid() == 0


def mode_of(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder as most systems make it; what is above it (such as /tmp) looks like root's."""
    folder = tmp_path / "home"
    folder.mkdir()
    folder.chmod(0o755)
    lstat = Path.lstat

    def lstat_of(self: Path) -> os.stat_result:
        status = lstat(self)
        if self not in folder.parents:
            return status
        fields = list(status)
        fields[stat.ST_MODE] = status.st_mode & ~0o1022
        fields[stat.ST_UID] = 0
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "lstat", lstat_of)
    return folder


def test_folders_are_made_for_us_alone(home: Path):
    folder = home / ".cache" / "jitney" / "xla"
    before = os.umask(0o002)
    try:
        assert make_private(folder) == ""
    finally:
        os.umask(before)
    assert [mode_of(one) for one in (folder, folder.parent, folder.parent.parent)] == [0o700] * 3
    assert make_private(folder) == "", "and are found again"


def test_a_folder_that_others_can_only_read_is_fine(home: Path):
    folder = home / "xla"
    folder.mkdir()
    folder.chmod(0o755)
    assert make_private(folder) == ""


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777, 0o702])
@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_folder_that_others_can_write_to_is_refused(home: Path, above: int, mode: int):
    folder = home / "cache" / "jitney" / "xla"
    make_folders(folder)
    folder.chmod(0o755)
    open_one = (folder, *folder.parents)[above]
    open_one.chmod(mode)
    reason = make_private(folder)
    assert str(open_one) in reason and "written to by other users" in reason
    open_one.chmod(0o755)
    assert make_private(folder) == ""


def test_below_a_shared_folder_it_must_be_closed(home: Path):
    shared = home / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    folder = shared / "jitney" / "xla"
    assert make_private(folder) == "", "made there, it is closed"
    folder.chmod(0o755)
    assert str(shared) in make_private(folder)
    folder.chmod(0o700)
    assert make_private(folder) == ""
    shared.chmod(0o777)
    assert str(shared) in make_private(folder), "without the sticky bit anybody could replace it"


def test_nothing_is_made_in_somebody_elses_folder(home: Path):
    home.chmod(0o777)
    folder = home / "jitney" / "xla"
    assert make_private(folder)
    assert not folder.parent.exists()


def test_links_are_followed_with_suspicion(home: Path):
    good, bad = home / "good", home / "bad"
    good.mkdir(0o700)
    bad.mkdir()
    (bad / "inside").mkdir(0o700)
    bad.chmod(0o777)
    (home / "link").symlink_to(good)
    assert "symbolic link" in make_private(home / "link")
    assert make_private(home / "link" / "xla") == "", "a link above it that is ours is fine"
    (home / "other").symlink_to(bad / "inside")
    assert str(bad) in make_private(home / "other" / "xla")
    (bad / "way").symlink_to(good)
    assert str(bad) in make_private(bad / "way" / "xla"), "others could turn the link elsewhere"


@pytest.mark.skipif(not ROOT, reason="only root gives folders away")
@pytest.mark.parametrize("above", [0, 1])
def test_another_users_folder_is_refused(home: Path, above: int):
    folder = home / "jitney" / "xla"
    make_folders(folder)
    os.chown((folder, *folder.parents)[above], 4242, 4242)
    assert "belongs to another user (number 4242)" in make_private(folder)


@pytest.mark.skipif(not ROOT, reason="only root gives folders away")
def test_a_link_of_another_user_is_refused(home: Path):
    (home / "real").mkdir(0o700)
    (home / "link").symlink_to(home / "real")
    os.chown(home / "link", 4242, 4242, follow_symlinks=False)
    assert "belongs to another user" in make_private(home / "link" / "xla")


def test_a_refused_folder_is_one_loud_line_and_no_cache(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("JITNEY_CACHE", str(home / "cache"))
    assert open_compilation_cache(EngineSection(compilation_cache=False)) is None
    assert open_compilation_cache(EngineSection()) == home / "cache" / "xla"
    assert not caplog.records
    (home / "cache").chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert open_compilation_cache(EngineSection()) is None
    (record,) = caplog.records
    assert "COMPILED PROGRAMS ARE NOT KEPT" in record.getMessage()
    assert str(home / "cache") in record.getMessage() and "JITNEY_CACHE" in record.getMessage()


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_jax_is_given_the_folder_only_if_it_is_safe(
    home: Path, monkeypatch: pytest.MonkeyPatch, mode: int
):
    given = {}
    monkeypatch.setattr(jax.config, "update", given.__setitem__)
    monkeypatch.setenv("JITNEY_CACHE", str(home / "cache"))
    make_folders(home / "cache" / "xla")
    (home / "cache").chmod(mode)
    jax_start.start_jax(Config(engine=EngineSection(platform="cpu")))
    wanted = str(home / "cache" / "xla") if mode == 0o700 else None
    assert given.get("jax_compilation_cache_dir") == wanted


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_a_full_cache_folder_is_read_and_not_written(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int
):
    """jax would warn of every program otherwise."""
    given: dict[str, object] = {}
    monkeypatch.setattr(jax.config, "update", given.__setitem__)
    monkeypatch.setenv("JITNEY_CACHE", str(home / "cache"))
    usage = shutil.disk_usage(home)._replace(free=free)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with caplog.at_level(logging.WARNING):
        jax_start.start_jax(Config(engine=EngineSection(platform="cpu")))
    assert given["jax_compilation_cache_dir"] == str(home / "cache" / "xla")
    least = given["jax_persistent_cache_min_compile_time_secs"]
    warnings = [text for text in caplog.messages if "NOT KEPT" in text]
    if free:
        assert least == 0.0 and not warnings
    else:
        [warning] = warnings
        assert least == math.inf and str(home / "cache") in warning and "JITNEY_CACHE" in warning


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_sizes_that_cannot_be_kept_say_where_and_what_to_do(
    home: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    def write(path: Path, content: bytes) -> int:
        raise OSError(number, "no")

    monkeypatch.setenv("JITNEY_CACHE", str(home / "cache"))
    monkeypatch.setattr(Path, "write_bytes", write)
    reason = TunedSizes({}, "2026-01-02").keep(Config(), "a machine")
    assert str(home / "cache" / "sizes") in reason and "JITNEY_CACHE" in reason
