"""Query parameters, validated like bodies."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field
from starlette.requests import Request

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.chat.schema import checked

#: How clients mark the name of a list.
_LIST_MARK = "[]"


class PageQuery(BaseModel):
    """A page of batches or jobs: those after the id `after`, the newest first."""

    after: str = ""
    limit: Annotated[int, Field(ge=1, le=100)] = 20


def read_query[Q: BaseModel](request: Request, kind: type[Q]) -> Q:
    """The query of a request; names that are not of its model are ignored. Raises RequestError."""
    fields: JsonDict = {}
    for name, value in request.query_params.multi_items():
        name = name.removesuffix(_LIST_MARK)
        if _is_list(kind, name):
            fields.setdefault(name, []).append(value)
        else:
            fields[name] = value
    return checked(kind, fields)


def listed(items: list[JsonDict], *, more: bool) -> JsonDict:
    """One page of a list of things with ids."""
    ids = [item["id"] for item in items] or [None]
    ends = {"first_id": ids[0], "last_id": ids[-1]}
    return {"object": "list", "data": items} | ends | {"has_more": more}


def _is_list(kind: type[BaseModel], name: str) -> bool:
    field = kind.model_fields.get(name)
    return field is not None and isinstance(field.default, list)
