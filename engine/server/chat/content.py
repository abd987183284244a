"""The content of a message as one text; notes replace parts that a text model cannot read."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict, JsonValue
from jitney.engine.server.chat.schema import kind_of, unsupported
from jitney.engine.server.http.errors import echo


class Content(NamedTuple):
    """The content of a message, as text."""

    text: str
    #: Types of the parts for which only a note stands in the text.
    replaced: tuple[str, ...] = ()
    #: Whether the text consists of notes only.
    is_lost: bool = False


def content_of(value: JsonValue) -> Content:
    """A text, or a list of parts, which are joined by line breaks. Raises ValueError."""
    if isinstance(value, str):
        return Content(value)
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    parts = [_part(place, part) for place, part in enumerate(value)]
    replaced = [kind for part in parts for kind in part.replaced]
    is_lost = bool(parts) and all(part.is_lost for part in parts)
    return Content("\n".join(part.text for part in parts), tuple(replaced), is_lost)


def refuse_lost(content: Content, param: str) -> None:
    """Raise RequestError if the newest message has only notes. In earlier messages notes will
    do.
    """
    if content.is_lost:
        raise RequestError(
            f"this model reads text only, and the newest message is nothing but "
            f"{' and '.join(dict.fromkeys(content.replaced))}",
            code="unsupported_parameter",
            param=param,
        )


def is_content(kind: str | None) -> bool:
    """Whether a part of this type can be turned into text."""
    return kind in _READERS


def _part(place: int, part: JsonValue) -> Content:
    kind = kind_of(part)
    if kind is None or not isinstance(part, dict):
        raise ValueError(f"part {place} must be an object with a type")
    if kind not in _READERS:
        raise unsupported(f"part {place}: parts of type {echo(kind)} are not supported here")
    said = _READERS[kind](part)
    if said is None:
        raise ValueError(f"part {place} of type {kind!r} has not the fields of that type")
    return said


def _replaced(part: JsonDict) -> Content:
    """A note that replaces a part which no text model can read. URLs are never fetched."""
    kind = part["type"]
    titles = [part.get("title"), part.get("filename")]
    name = next((f" {title!r}" for title in titles if isinstance(title, str)), "")
    return Content(f"[{kind}{name}: not shown, this model reads text only]", (kind,), is_lost=True)


def _text(part: JsonDict, field: str = "text") -> Content | None:
    text = part.get(field)
    return Content(text) if isinstance(text, str) else None


def _document(part: JsonDict) -> Content | None:
    source = part.get("source")
    if not isinstance(source, dict):
        return None
    said = _source(source)
    if said is None:
        return _replaced(part)
    heads = [part[name] for name in ("title", "context") if isinstance(part.get(name), str)]
    return said._replace(text="\n".join([*heads, said.text]))


def _source(source: JsonDict) -> Content | None:
    """The text of a document; None where it is none."""
    data = source.get("data")
    match source.get("type"):
        case "text" if isinstance(data, str):
            return Content(data)
        case "base64" if isinstance(data, str):
            return _decoded(str(source.get("media_type")), data)
        case "content":
            return content_of(source.get("content"))
        case _:
            return None


def _decoded(media_type: str, data: str) -> Content | None:
    """A text in base64."""
    if not media_type.startswith("text/"):
        return None
    try:
        return Content(base64.b64decode(data, validate=True).decode(errors="replace"))
    except binascii.Error:
        raise ValueError("the data of a document is not base64") from None


def _file(part: JsonDict) -> Content:
    """A file in OpenAI's form: a data URL, or something that is not here."""
    data = part.get("file_data")
    head, _, rest = data.partition(";base64,") if isinstance(data, str) else ("", "", "")
    said = _decoded(head.removeprefix("data:"), rest)
    return _replaced(part) if said is None else said


def _search_result(part: JsonDict) -> Content | None:
    heads = [part[name] for name in ("title", "source") if isinstance(part.get(name), str)]
    said = content_of(part.get("content"))
    return said._replace(text="\n".join([*heads, said.text]))


_READERS: dict[str, Callable[[JsonDict], Content | None]] = {
    "audio_url": _replaced,
    "browser_state": _replaced,
    "computer_screenshot": _replaced,
    "document": _document,
    "image": _replaced,
    "image_url": _replaced,
    "input_audio": _replaced,
    "input_file": _file,
    "input_image": _replaced,
    "input_text": _text,
    "output_text": _text,
    "reasoning_text": _text,
    "refusal": partial(_text, field="refusal"),
    "search_result": _search_result,
    "summary_text": _text,
    "text": _text,
    "tool_reference": partial(_text, field="tool_name"),
    "video_url": _replaced,
}
