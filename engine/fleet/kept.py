"""Which engine keeps an answer of /v1/responses: clients come back to it by its id alone, and no
other engine has it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from jitney.engine.lru import LruCache

#: The path of the route whose answers are kept; those about one of them begin so.
RESPONSES = "/v1/responses"
#: How ids of such answers are written, and where they stand in one.
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_IN_ANSWER = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,120})"')
#: Ids that are remembered.
_MOST = 100_000


@dataclass(frozen=True, slots=True)
class AnswerKeeper:
    """An engine that keeps an answer."""

    model: str
    replica: str


def _new_cache() -> LruCache[str, AnswerKeeper]:
    return LruCache(_MOST, lambda id: 1)


@dataclass(slots=True)
class Keepers:
    """By the ids of answers, as far as they passed here."""

    _known: LruCache[str, AnswerKeeper] = field(default_factory=_new_cache)

    def get(self, id: str) -> AnswerKeeper | None:
        return self._known.get(id)

    def put(self, id: str, keeper: AnswerKeeper) -> None:
        self._known.put(id, keeper)

    def learn(self, model: str, replica: str, begun: bytes) -> None:
        """See in the beginning of an answer what its id is."""
        found = _IN_ANSWER.search(begun)
        if found:
            self.put(found[1].decode(), AnswerKeeper(model, replica))


def is_id(value: object) -> bool:
    """An id that an engine might have given."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None
