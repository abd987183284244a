"""Validation errors of a body, in terms of its fields instead of pydantic's models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonObject, JsonValue
from jitney.engine.server.http.errors import echo

#: Most errors in one message.
_MOST_FAULTS = 10
#: Pydantic's error types whose own messages name classes, or are less clear.
_REASONS = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "extra_forbidden": "is no field here",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "list_type": "must be a list",
    "missing": "is missing",
    "model_type": "must be an object",
    "string_type": "must be a string",
}
_MUST_BE = "must be "
_FIELD = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclass(frozen=True, slots=True)
class _Fault:
    """One validation error. A value of a union type has the errors of all branches."""

    path: str
    reason: str
    #: Pydantic's type of the error.
    kind: str
    #: The outermost union on the path: its place, and the branch; empty: there is none.
    union: str = ""
    branch: str = ""

    @property
    def is_mismatch(self) -> bool:
        """The value does not have the basic type of its branch."""
        return self.path == self.union

    @property
    def is_of_other_type(self) -> bool:
        """The value is an object whose `type` names another branch, or none."""
        return self.path == f"{self.union}.type"


def readable(error: ValidationError, raw: JsonObject) -> RequestError:
    """RequestError with at most 10 errors; `param` is the first. Only names in `raw` are
    repeated.
    """
    entries = error.errors(include_url=False, include_input=False)
    faults = list(_without_branches([_fault(entry, raw) for entry in entries]))[:_MOST_FAULTS]
    first = faults[0]
    code = first.kind if first.kind == "unsupported_parameter" else "invalid_value"
    message = "; ".join(f"{fault.path}: {fault.reason}" for fault in faults)
    return RequestError(message, param=first.path, code=code)


def _fault(entry: ErrorDetails, raw: JsonObject) -> _Fault:
    """A fault; its path omits pydantic's names of union branches and dictionary keys."""
    path, union, branch = "", "", ""
    value: JsonValue | JsonObject = dict(raw)
    is_known = True
    for depth, name in enumerate(entry["loc"]):
        if isinstance(name, int):
            path += f"[{name}]"
            is_known = is_known and isinstance(value, list) and name < len(value)
            value = value[name] if is_known and isinstance(value, list) else None
            continue
        is_last = depth == len(entry["loc"]) - 1
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif is_last and entry["type"] == "missing":
            value = None
        elif is_known or not _FIELD.match(name):
            if not branch:
                union, branch = path, name
            continue
        path = _joined(path, name)
    if entry["type"] == "combination":
        path = _joined(path, entry.get("ctx", {})["field"])
    return _Fault(path, _reason(entry), entry["type"], union, branch)


def _joined(path: str, name: str) -> str:
    """`messages[0].content`. The first name is a field of ours; others may be the client's."""
    return f"{path}.{echo(name)[1:-1]}" if path else name


def _reason(entry: ErrorDetails) -> str:
    own = _REASONS.get(entry["type"])
    if own is not None:
        return own
    words = entry["msg"].removeprefix("Value error, ").replace("Input should be ", _MUST_BE)
    return words.replace(" after validation", "")


def _without_branches(faults: Iterable[_Fault]) -> Iterator[_Fault]:
    """The faults; those of a union are reduced to the branch that the client meant."""
    for union, group in groupby(faults, lambda fault: fault.union):
        if union:
            yield from _of_union(list(group))
        else:
            yield from group


def _of_union(faults: list[_Fault]) -> list[_Fault]:
    """Errors of the branch that `type` names; else one error, with the accepted types."""
    branches: dict[str, list[_Fault]] = {}
    for fault in faults:
        branches.setdefault(fault.branch, []).append(fault)
    alike = [each for each in branches.values() if not any(fault.is_mismatch for fault in each)]
    meant = [each for each in alike if not any(fault.is_of_other_type for fault in each)]
    if meant:
        return min(meant, key=len)
    if alike:
        return [_merged([fault for each in alike for fault in each if fault.is_of_other_type])]
    return [_merged(faults)]


def _merged(faults: list[_Fault]) -> _Fault:
    """One fault with the reasons of several at the same path: `must be X, or Y`."""
    first = faults[0]
    reasons = list(dict.fromkeys(fault.reason for fault in faults))
    others = [reason.removeprefix(_MUST_BE) for reason in reasons[1:]]
    return _Fault(first.path, ", or ".join([reasons[0], *others]), first.kind)
