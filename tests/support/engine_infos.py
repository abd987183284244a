"""Engine infos of fake engines, from flat field names as on the page and in reports."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec

from jitney.engine.common.engine_info import EngineInfo

_GROUPS = {
    name: {field.encode_name for field in msgspec.structs.fields(kind)}
    for name, kind in get_type_hints(EngineInfo).items()
    if name not in ("version", "config_digest", "step_cost", "ceiling")
}
_FAKE: dict[str, Any] = dict(
    model="fake",
    context_length=64,
    vocab_size=40,
    seats=4,
    pages=32,
    page_size=4,
    token_budget=16,
    policy="continuous",
    order="fcfs",
    kernels="none",
    platform="none",
    device="none",
    dtype="float32",
    kv_dtype="float32",
    prefix_cache=True,
    version="0",
    max_waiting_requests=8,
)


def engine_info(**fields: Any) -> EngineInfo:
    """The info of a small fake engine, with these fields changed."""
    left = _FAKE | fields
    grouped: dict[str, Any] = {}
    for group, names in _GROUPS.items():
        grouped[group] = {name: left.pop(name) for name in names if name in left}
    adapters = grouped["model"].get("adapters", ())
    grouped["model"]["adapters"] = {name: number for number, name in enumerate(adapters, 1)}
    unknown = left.keys() - {"version", "config_digest"}
    if unknown:
        raise TypeError(f"EngineInfo has no {', '.join(sorted(unknown))}")
    return msgspec.convert(msgspec.to_builtins(grouped | left), EngineInfo)


def changed(info: EngineInfo | None, **fields: Any) -> EngineInfo:
    """The info with these fields changed."""
    assert info is not None
    return engine_info(**info.flat() | fields)
