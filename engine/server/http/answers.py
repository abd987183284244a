"""The base of every response body, and bodies that engines and fleets share. A body is a struct:
what is sent is what `/openapi.json` describes.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, UnsetType

from jitney.engine.common.requests import JsonDict

#: A field that may be left out; its default is UNSET. Other defaults are sent.
type Maybe[T] = T | UnsetType


class ResponseModel(Struct, forbid_unknown_fields=True):
    """A response body, or part of one."""


class Status(ResponseModel):
    """The answer of a probe."""

    status: str


class Version(Struct):
    """GET /version; the engine's fields come once it is ready."""

    version: str


class Sleeping(ResponseModel):
    """GET /is_sleeping."""

    is_sleeping: bool


class Asleep(ResponseModel):
    """POST /sleep. freed_bytes: of the device's memory; 0 if it slept already."""

    freed_bytes: int
    status: Literal["asleep"] = "asleep"


class Slot(ResponseModel, kw_only=True):
    """A seat, with llama.cpp's names where they exist. request_id: null if the seat is free."""

    id: int
    is_processing: bool
    state: str
    n_ctx: int
    request_id: str | None
    background: bool
    index: int
    n_prompt_tokens: int
    n_prompt_tokens_processed: int
    n_decoded: int
    n_remain: int
    n_pages: int


class Document(Struct):
    """An OpenAPI document."""

    openapi: str
    info: JsonDict
    paths: JsonDict
    components: JsonDict
