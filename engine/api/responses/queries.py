"""What may stand after the question mark of the routes that show a response."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field

from jitney.engine.api.responses.schema import includable
from jitney.engine.errors import RequestError
from jitney.engine.types import JsonDict

_Include = Annotated[list[str], AfterValidator(includable)]


class ResponseQuery(BaseModel):
    """GET /v1/responses/{response_id}. Log-probabilities are not kept, so they are not included."""

    include: _Include = []
    include_obfuscation: Literal["false"] | None = None


class InputItemsQuery(BaseModel):
    """GET /v1/responses/{response_id}/input_items. after: the id of an item."""

    include: _Include = []
    after: Annotated[str, Field(max_length=512)] | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"

    def page(self, items: list[JsonDict]) -> tuple[list[JsonDict], bool]:
        """These items, and whether more follow. Raises RequestError."""
        ordered = items if self.order == "asc" else items[::-1]
        start = 0
        if self.after is not None:
            ids = [item["id"] for item in ordered]
            if self.after not in ids:
                raise RequestError("after must be the id of an item of the list", param="after")
            start = ids.index(self.after) + 1
        end = start + self.limit
        return ordered[start:end], end < len(ordered)
