"""Answers of all replicas of a fleet as one: a search of their requests, and their tenants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec

from jitney.dashboard.fleet_member import Member
from jitney.dashboard.remote import Unreachable
from jitney.engine.common.requests import JsonDict
from jitney.engine.server import Identity

#: Seconds that a replica has to answer, and the most bytes of its answer.
_ANSWER_S, _MOST_BYTES = 5.0, 8 << 20
#: Requests of one search that are listed.
_MOST_REQUESTS = 200
#: Columns that are added up over replicas, and columns with the worst replica's value.
_SUMMED = (
    "requests",
    "seats",
    "waiting",
    "refused",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "useful_tokens",
    "seat_s",
)
_WORST = ("wait_s", "ttft_s")


async def search_requests(members: Iterable[Member], state: str, search: str) -> JsonDict:
    """The newest requests that match at any replica, see `request_detail.listing`: at most
    _MOST_REQUESTS, each with its replica's name and the seconds since its arrival (`age_s`).
    missing: names of replicas without an answer.
    """
    query = urlencode({"state": state, "search": search, "limit": _MOST_REQUESTS})
    answers, missing = await _ask_all(members, "requests", query)
    rows = [
        row | {"replica": name, "age_s": round(answer["t"] - row["arrival"], 3)}
        for name, answer in answers.items()
        for row in answer["requests"]
    ]
    rows.sort(key=lambda row: row["age_s"])
    return {"t": round(time.time(), 3), "requests": rows[:_MOST_REQUESTS], "missing": missing}


async def tenants_of_all(members: Iterable[Member], identity: Identity) -> JsonDict:
    """The rows of `tenants.tenants` added up over the replicas; waits are those of the replica on
    which they are longest. Of a user its own row. missing: as in `search_requests`.
    """
    answers, missing = await _ask_all(members, "tenants", "")
    sums: dict[str, JsonDict] = {}
    for answer in answers.values():
        for row in answer["tenants"]:
            _add_row(sums.setdefault(row["search"], {}), row)
    seat_s = sum(row["seat_s"] for row in sums.values())
    for row in sums.values():
        row["share"] = row["seat_s"] / seat_s if seat_s else None
        row["fair_share"] = 1 / len(sums) if identity.is_admin else None
    shown = [row for row in sums.values() if identity.may_see(row["search"])]
    return {
        "seconds": max((answer["seconds"] for answer in answers.values()), default=0.0),
        "seats": sum(answer["seats"] for answer in answers.values()),
        "useful_tokens": sum(answer["useful_tokens"] for answer in answers.values()),
        "tenants": sorted(shown, key=lambda row: -row["seat_s"]),
        "missing": missing,
    }


def _add_row(total: JsonDict, row: Mapping[str, Any]) -> None:
    """Add a replica's row of a tenant to the total. There are no total limits, as each replica has
    its own.
    """
    total |= {"name": row["name"], "search": row["search"]}
    for name in _SUMMED:
        total[name] = total.get(name, 0) + row[name]
    for name in _WORST:
        points = [one for one in (total.get(name), row[name]) if one is not None]
        total[name] = max(points, key=lambda one: one["p95"], default=None)
    total |= dict.fromkeys(("max_open", "open", "tokens_per_minute", "left"))


async def _ask_all(
    members: Iterable[Member], path: str, query: str
) -> tuple[dict[str, Any], list[str]]:
    """The answers by replica name, and the names of replicas without an answer."""
    members_asked = list(members)
    replies = await asyncio.gather(*(_ask(member, path, query) for member in members_asked))
    pairs = list(zip([member.name for member in members_asked], replies, strict=True))
    answers = {name: answer for name, answer in pairs if answer is not None}
    return answers, [name for name, answer in pairs if answer is None]


async def _ask(member: Member, path: str, query: str) -> Any:
    """The JSON answer of one replica; None without an answer."""
    try:
        async with (
            asyncio.timeout(_ANSWER_S),
            member.engine.answer("GET", path, query=query) as answer,
        ):
            if answer.status_code != 200:
                return None
            body = bytearray()
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > _MOST_BYTES:
                    return None
        return msgspec.json.decode(body)
    except (Unreachable, TimeoutError, msgspec.MsgspecError):
        return None
