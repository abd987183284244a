"""What is kept of a job. Plain data; times: seconds since 1970."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import orjson

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.tasks.batches.rows import OwnedTable

#: States whose time an answer tells, beside the times of coming and expiring.
_TIMED = ("in_progress", "completed", "failed", "cancelled", "expired")


@dataclass(slots=True)
class Job:
    """One job, without the body of its request."""

    id: str
    #: Whose it is: the digest of the key that it came with.
    owner: str
    #: The route that answers it.
    endpoint: str
    #: The client's own notes, given back with it.
    metadata: dict[str, str]
    #: Where its end is told; empty: nowhere.
    webhook_url: str
    #: This and all times: seconds since 1970.
    created_at: int
    #: When it ends without an answer.
    expires_at: int
    #: queued or in_progress, then completed, failed, cancelled or expired.
    status: str = "queued"
    #: When each other state was reached.
    times: dict[str, int] = field(default_factory=dict[str, int])
    #: Once it was answered: JSON of an object with status_code, request_id and body.
    answer: bytes | None = None

    @property
    def is_over(self) -> bool:
        return self.status in OwnedTable.ENDED

    @property
    def response(self) -> orjson.Fragment | None:
        """The answer as a part of a larger JSON text; None if there is none."""
        return None if self.answer is None else orjson.Fragment(self.answer)

    def shown(self) -> JsonDict:
        """As clients see it."""
        return self.summary() | {"response": self.response}

    def summary(self) -> JsonDict:
        """The same without its answer, for lists."""
        shown: JsonDict = {
            "id": self.id,
            "object": "job",
            "endpoint": self.endpoint,
            "status": self.status,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "webhook_url": self.webhook_url or None,
            "metadata": self.metadata or None,
        }
        for status in _TIMED:
            shown[f"{status}_at"] = self.times.get(status)
        return shown


@dataclass(frozen=True, slots=True)
class JobRequest:
    """The request of a new job, and by what a repetition of it is known."""

    #: In which clients say what they call it.
    REPEAT_HEADER: ClassVar[str] = "idempotency-key"

    #: JSON of an object.
    body: bytes
    #: As the client calls it; None: each time it comes is another job.
    repeat_key: str | None
    #: Of all that the client sent.
    digest: str
