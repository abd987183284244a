"""A store that is damaged, or a disk that is full, costs the routes that need them and nothing
else: 503 `store_unavailable`, never a bare 500, and the server starts.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_fakes import FakeClient, Script, http_client, make_app, served, until
from batch_files import batch_of
from batch_process import serving_process

from jitney.engine.common import database
from jitney.engine.common.database import StoreUnavailable
from jitney.engine.common.ports import free_port
from jitney.engine.config import ServerSection
from jitney.engine.server.tasks import batch_rows, job_rows
from jitney.engine.server.tasks.keeper import StoreKeeper
from jitney.engine.server.tasks.records import Batch, Job, Line, StoredFile
from jitney.engine.server.tasks.store import TaskStore

CHATS = "/v1/chat/completions"
CHAT = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
JOB = {"endpoint": CHATS, "body": CHAT}
LISTS = ("/v1/jobs", "/v1/batches", "/v1/files")
DATABASE = "batches.sqlite3"
#: What the routes ask a store for.
READS: tuple[Callable[[TaskStore], object], ...] = (
    TaskStore.unfinished,
    TaskStore.file_ids,
    lambda store: store.n_bytes("me"),
    lambda store: batch_rows.open_lines(store, "batch_1", 0, 9),
    lambda store: store.find(Batch, "batch_1", "me"),
    lambda store: store.find(Job, "job_1", "me"),
)
#: Bytes of a file that may be written while the disk is "full".
FULL = 1 << 16


def job_of(number: int, owner: str = "me") -> Job:
    return Job(f"job_{number}", owner, CHATS, {"n": str(number)}, "", 1, 1 << 40)


def add(store: TaskStore, number: int, size: int = 5) -> None:
    server = ServerSection(key_file_bytes=1 << 40)
    job_rows.add(store, job_of(number), server, body=b"1" * size, repeat_key=None, digest="d")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a job, a batch and a file of an earlier server."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    (folder / "files").mkdir(mode=0o700)
    (folder / "files" / "file-1").write_bytes(b"theirs")
    store = TaskStore(folder / DATABASE)
    add(store, 1)
    store.insert(StoredFile("file-1", "me", "batch", "in", 6, 1))
    store.insert(batch_of("batch_1"))
    batch_rows.add_lines(store, "batch_1", [Line(1, "one", 0, 1)])
    store.close()
    return folder


@contextmanager
def serving(folder: Path) -> Iterator[httpx.Client]:
    app = make_app(FakeClient(Script("some words")), data_dir=folder)
    with served(app) as (url, _), http_client(url) as http:
        yield http


def unavailable(reply: httpx.Response) -> bool:
    """Whether a route says that it needs the store; anything else must be a good answer."""
    if reply.status_code < 300:
        return False
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "store_unavailable")
    return True


def finished(http: httpx.Client) -> bool:
    """Whether a new job comes to its end."""
    id = http.post("/v1/jobs", json=JOB).json()["id"]
    until(lambda: http.get(f"/v1/jobs/{id}").json()["status"] != "in_progress")
    return http.get(f"/v1/jobs/{id}").json()["status"] == "completed"


def garbage(path: Path) -> None:
    path.write_bytes(b"no database at all" * 1000)


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 100])


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def no_pages(path: Path) -> None:
    """Only the first page is what it was."""
    path.write_bytes(path.read_bytes()[:4096] + b"\xa5" * (path.stat().st_size - 4096))


def no_version(path: Path) -> None:
    """The tables are there, and the number that says so is not."""
    path.write_bytes(path.read_bytes()[:60] + bytes(4) + path.read_bytes()[64:])


def no_json(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'{"n":"1"}', b'{"n":"1"]'))


@pytest.mark.parametrize(
    "damage",
    [garbage, half, zeros, nothing, no_pages, no_version, no_json],
    ids=lambda f: f.__name__,
)
def test_a_damaged_store_is_set_aside(
    folder: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
):
    damage(folder / DATABASE)
    damaged = (folder / DATABASE).read_bytes()
    with serving(folder) as http:
        assert http.post(CHATS, json=CHAT).status_code == 200
        for path in LISTS:
            until(lambda path=path: not unavailable(http.get(path)))
        assert finished(http)
        form = {"purpose": (None, "batch"), "file": ("a", b"x")}
        assert http.post("/v1/files", files=form).status_code == 200
    [aside] = folder.glob("damaged-*")
    assert (aside / "files" / "file-1").read_bytes() == b"theirs"
    assert damage is nothing or (aside / DATABASE).stat().st_size == len(damaged)
    told = [record for record in caplog.records if str(aside) in record.getMessage()]
    assert len(told) == 1 and told[0].levelno == logging.ERROR
    assert not any(record.exc_info for record in caplog.records)


def test_any_byte_of_a_store_may_be_another(folder: Path):
    """Every answer is right or says that the store cannot be read, whatever byte has changed."""
    whole = (folder / DATABASE).read_bytes()

    async def look() -> None:
        kept = await StoreKeeper.open(folder)
        try:
            for read in READS:
                with suppress(StoreUnavailable):
                    await kept.do(read)
        finally:
            await kept.close()

    changed = [place for place, byte in enumerate(whole) if byte][::61]
    for place in changed:
        (folder / DATABASE).write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
        try:
            asyncio.run(look())
        except Exception as error:
            error.add_note(f"byte {place}")
            raise


def test_a_store_that_breaks_while_it_serves_is_begun_anew(tmp_path: Path):
    """What is under way finds that it is not known any more."""
    folder = tmp_path / "data"

    troubles: list[str] = []

    async def run() -> None:
        kept = await StoreKeeper.open(folder, troubles.append)
        for number in range(40):
            await kept.do(add, number, 200_000)
        await kept.do(lambda store: store.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").close())
        path = folder / DATABASE
        path.write_bytes(path.read_bytes()[:8192] + b"\xa5" * (path.stat().st_size - 8192))
        with pytest.raises(StoreUnavailable):
            for number in range(40):
                await kept.do(job_rows.begin, f"job_{number}", 5)
        assert await kept.do(job_rows.begin, "job_1", 5) is None
        assert not await kept.do(job_rows.finish, "job_1", "completed", b"{}", 5)
        await kept.do(batch_rows.finish, "batch_1", "completed", None, None, 5)
        await kept.do(add, 99)
        assert [job.id for job in await kept.do(TaskStore.unfinished)] == ["job_99"]
        await kept.close()

    asyncio.run(run())
    assert troubles == ["files, batches and jobs were damaged; a new store is begun"]
    [aside] = folder.glob("damaged-*")
    assert (aside / DATABASE).stat().st_size > 40 * 200_000


async def test_of_damaged_stores_the_first_and_the_latest_stay(tmp_path: Path):
    """However often a failing disk damages them."""
    folder = tmp_path / "data"

    kept = await StoreKeeper.open(folder)
    aside = []
    for number in range(7):
        (folder / DATABASE).write_text(str(number))
        aside.append(await kept.on_disk(kept.set_aside))
    await kept.close()
    assert {*folder.glob("damaged-*")} == {aside[0], *aside[-3:]}
    assert (aside[0] / DATABASE).read_text() == "0"


def test_a_damaged_store_that_cannot_be_moved_is_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The disk is full, too: there is no room for a folder to set it aside in."""
    garbage(folder / DATABASE)

    def no_room(**_: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(database.tempfile, "mkdtemp", no_room)
        with serving(folder) as http:
            assert http.post(CHATS, json=CHAT).status_code == 200
            assert all(unavailable(http.get(path)) for path in LISTS)
            patch.undo()
            assert http.get("/v1/jobs").status_code == 200 and finished(http)


def test_a_newer_version_s_store_is_left_alone(folder: Path):
    with sqlite3.connect(folder / DATABASE) as db:
        db.execute("PRAGMA user_version = 99")
    with serving(folder) as http:
        assert http.get("/v1/jobs").json()["error"]["code"] == "no_store"
        assert http.post(CHATS, json=CHAT).status_code == 200
    assert not list(folder.glob("damaged-*"))


def test_a_file_whose_bytes_are_gone_is_no_crash(folder: Path, caplog: pytest.LogCaptureFixture):
    with serving(folder) as http:
        form = {"purpose": (None, "batch"), "file": ("a", b"x")}
        id = http.post("/v1/files", files=form).json()["id"]
        (folder / "files" / id).unlink()
        assert unavailable(http.get(f"/v1/files/{id}/content"))
    assert not any(record.exc_info for record in caplog.records)


def test_a_full_disk_costs_what_has_to_be_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """And no longer than it is full. As a limit of what a process may write to one file, which
    needs no rights: the store is longer than that already.
    """
    folder, port = tmp_path / "data", free_port()
    form: dict[str, Any] = {"purpose": (None, "batch"), "file": ("a", b"x" * 2 * FULL)}
    with serving_process(folder, port) as process, http_client(f"http://127.0.0.1:{port}") as http:
        for _ in range(8):
            assert finished(http)
        assert (folder / f"{DATABASE}-wal").stat().st_size > FULL
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FULL, resource.RLIM_INFINITY))
        for _ in range(3):
            assert unavailable(http.post("/v1/jobs", json=JOB))
            assert unavailable(http.post("/v1/files", files=form))
            assert unavailable(http.post("/v1/files", files=form | {"file": ("a", b"x")}))
        for path in LISTS:
            assert http.get(path).status_code == 200, "what is there can be read"
        assert http.post(CHATS, json=CHAT).status_code == 200
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)
        assert finished(http)
        assert http.post("/v1/files", files=form).status_code == 200
        assert len(http.get("/v1/files").json()["data"]) == 1
    assert len(list((folder / "files").iterdir())) == 1 and not list(folder.glob("damaged-*"))
    told = capfd.readouterr().err
    assert told.count("cannot be kept") == 1 and "Traceback" not in told
