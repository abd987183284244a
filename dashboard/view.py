"""The view of one client: of other clients' requests it shows only occupied seats."""

from __future__ import annotations

from typing import Any

import msgspec

from jitney.dashboard.sse import SEAT_NUMBERS, Delta
from jitney.engine.common.engine_info import Seat
from jitney.engine.common.history import History
from jitney.engine.common.messages import SequenceEvent
from jitney.engine.server import Identity

#: A seat's numbers where the viewer may not see them.
_NO_NUMBERS = (0,) * len(SEAT_NUMBERS)


class View:
    """The part of the history that one client may see."""

    def __init__(self, history: History, identity: Identity):
        self.history = history
        self.identity = identity

    def shows(self, request_id: str | None, index: int) -> bool:
        """Whether a sequence is visible; forgotten ones are not, as they may be of any client."""
        if self.identity.is_admin:
            return True
        record = self.history.find(request_id, index) if request_id is not None else None
        return record is not None and self.identity.may_see(record.tenant)

    def seat(self, seat: Seat) -> Seat:
        if self.shows(seat.request_id, seat.index):
            return seat
        return Seat(seat=seat.seat, state=seat.state)

    def seat_row(self, row: list[Any]) -> list[Any]:
        """A row of a delta's seats: [seat, state, request, *SEAT_NUMBERS]."""
        if self.shows(*row[2:4]):
            return row
        return [*row[:2], None, *_NO_NUMBERS]

    def delta(self, changes: Delta) -> Delta:
        if self.identity.is_admin or "seats" not in changes:
            return changes
        return {**changes, "seats": [self.seat_row(row) for row in changes["seats"]]}

    def events(self, events: list[SequenceEvent]) -> list[SequenceEvent]:
        """All events, because they are numbered; those of other clients with time and seat only."""
        if self.identity.is_admin:
            return events
        return [self._event(event) for event in events]

    def _event(self, event: SequenceEvent) -> SequenceEvent:
        if self.shows(event.request_id, event.index):
            return event
        return msgspec.structs.replace(event, request_id="", index=0, n_in=0, n_out=0, reason="")
