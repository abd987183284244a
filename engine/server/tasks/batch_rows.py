"""The rows of batches and of their lines; see `tasks.store`. A line gets its answer once."""

from __future__ import annotations

from jitney.engine.common.errors import RequestError
from jitney.engine.config import ServerSection
from jitney.engine.server.http.errors import HttpError, echo
from jitney.engine.server.tasks.records import (
    AnsweredLine,
    Batch,
    Fault,
    Line,
    LineOutcome,
    StoredFile,
    Task,
)
from jitney.engine.server.tasks.store import TaskStore

#: Most ended batches per key that stay listed.
_KEPT_BATCHES = 1000
#: Most bytes of answers in memory at once.
_READ_BYTES = 16 << 20
_UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


def add(store: TaskStore, batch: Batch, server: ServerSection) -> None:
    """Store a new batch. Raises HttpError without its file, RequestError at its key's limits."""
    with store.transaction():
        file = store.find(StoredFile, batch.input_file_id, batch.owner)
        if file is None:
            id = echo(batch.input_file_id)
            raise HttpError(404, f"no file {id}", code="not_found", param="input_file_id")
        if file.purpose != "batch":
            raise RequestError('the file\'s purpose must be "batch"', param="input_file_id")
        store.check_room(batch.owner, server)
        store.check_open(batch, server.key_batches, "key_batches", 60.0)
        store.forget_ended(Batch, batch.owner, _KEPT_BATCHES)
        store.insert(batch)


def move(store: TaskStore, id: str, sources: tuple[str, ...], status: str, now: int) -> bool:
    """Change a batch's status from one of `sources`; False if it had none of them."""
    with store.transaction():
        return store.move(Batch, id, sources, status, now)


def begin_lines(store: TaskStore, id: str) -> None:
    """Delete the lines of a batch before its file is read, perhaps again."""
    with store.transaction():
        _forget_lines(store, id)


def add_lines(store: TaskStore, id: str, lines: list[Line]) -> list[Line]:
    """Add lines; returns those whose custom_id the batch has already."""
    query = """INSERT OR IGNORE INTO lines (batch_id, number, custom_id, start, size)
        VALUES (?, ?, ?, ?, ?)"""
    duplicates: list[Line] = []
    with store.transaction():
        for line in lines:
            values = (id, line.number, line.custom_id, line.start, line.size)
            if not store.db.execute(query, values).rowcount:
                duplicates.append(line)
    return duplicates


def fail(store: TaskStore, id: str, faults: list[Fault], now: int) -> None:
    """End a batch with faults of its file, if it is still being validated."""
    with store.transaction():
        if store.move(Batch, id, ("validating",), "failed", now, faults=faults):
            _forget_lines(store, id)


def start(store: TaskStore, id: str, now: int) -> bool:
    """Begin to answer a batch's lines. False if it is not being validated any more."""
    with store.transaction():
        total = store.value("SELECT COUNT(*) FROM lines WHERE batch_id = ?", id)
        return store.move(Batch, id, ("validating",), "in_progress", now, total=total)


def open_lines(store: TaskStore, id: str, after: int, limit: int) -> list[Line]:
    """Lines without an answer that come after one of the file."""
    query = """SELECT number, custom_id, start, size FROM lines
        WHERE batch_id = ? AND outcome IS NULL AND number > ? ORDER BY number LIMIT ?"""
    return [Line(*row) for row in store.db.execute(query, (id, after, limit))]


def answer(
    store: TaskStore,
    batch: Task,
    number: int,
    outcome: LineOutcome,
    text: bytes,
    most_bytes: int | None = None,
) -> bool:
    """Store a line's answer; False if it has one or the batch is over. Raises StorageFull."""
    count = "completed" if outcome is LineOutcome.COMPLETED else "failed"
    query = """UPDATE lines SET outcome = ?, answer = ?
        WHERE batch_id = ? AND number = ? AND outcome IS NULL"""
    with store.transaction():
        if not store.db.execute(query, (int(outcome), text, batch.id, number)).rowcount:
            return False
        if most_bytes is not None:
            store.check_bytes(batch.owner, most_bytes, len(text))
        query = f"""UPDATE batches
            SET {count} = {count} + 1, answer_bytes = answer_bytes + ? WHERE id = ?"""
        store.db.execute(query, (len(text), batch.id))
        return True


def answers(store: TaskStore, id: str, after: int, limit: int) -> list[AnsweredLine]:
    """The lines after number `after`: at most `limit`, fewer if long; empty only at the end."""
    query = """SELECT number, custom_id, outcome, answer FROM lines
        WHERE batch_id = ? AND number > ? ORDER BY number LIMIT ?"""
    lines: list[AnsweredLine] = []
    n_bytes = 0
    for row in store.db.execute(query, (id, after, limit)):
        outcome = None if row["outcome"] is None else LineOutcome(row["outcome"])
        lines.append(AnsweredLine(row["number"], row["custom_id"], outcome, row["answer"] or b""))
        n_bytes += len(lines[-1].answer)
        if n_bytes >= _READ_BYTES:
            break
    return lines


def finish(
    store: TaskStore,
    id: str,
    status: str,
    output: StoredFile | None,
    errors: StoredFile | None,
    now: int,
) -> None:
    """End a batch with its output files, and delete its lines."""
    with store.transaction():
        ids = {
            "output_file_id": output and output.id,
            "error_file_id": errors and errors.id,
        }
        if store.move(Batch, id, _UNFINISHED, status, now, **ids):
            for file in filter(None, (output, errors)):
                store.insert(file)
            _forget_lines(store, id)


def _forget_lines(store: TaskStore, id: str) -> None:
    store.db.execute("DELETE FROM lines WHERE batch_id = ?", (id,))
    store.db.execute("UPDATE batches SET answer_bytes = 0 WHERE id = ?", (id,))
