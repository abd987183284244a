"""Checks of webhook URLs against the prefixes that the operator allows."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from urllib.parse import unquote

import httpx

from jitney.engine.common.errors import RequestError

#: Path segments with a special meaning.
_DOTS = {".", ".."}
#: Most times that a path may be percent-encoded.
_MOST_ENCODINGS = 5


def check_webhook_url(prefixes: tuple[str, ...], url: str, param: str) -> None:
    """Raise RequestError, blaming the field `param`, for a URL that is not allowed."""
    if url and not is_allowed(url, prefixes):
        raise RequestError("this server sends nothing to that URL (webhook_prefixes)", param=param)


def is_allowed(url: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a URL lies under a prefix: same scheme, host, port, and whole path segments."""
    target = _Target.of(url)
    allowed = [_Target.of(prefix) for prefix in prefixes]
    return target is not None and any(each and target.lies_under(each) for each in allowed)


@dataclass(frozen=True, slots=True)
class _Target:
    """A URL as the HTTP client reads it: lower-case host, without default port and dot segments."""

    #: Scheme, host and port.
    server: tuple[str, bytes, int | None]
    #: The path as sent, and fully decoded.
    raw_path: str
    path: str

    @classmethod
    def of(cls, text: str) -> _Target | None:
        """The target of a URL; None if it is invalid, has a user, or is ambiguous."""
        if not text.isascii() or any(char <= " " or char in "\\\x7f" for char in text):
            return None
        try:
            url = httpx.URL(text)
        except httpx.InvalidURL:
            return None
        raw_path = url.raw_path.partition(b"?")[0].decode()
        path = _decoded(raw_path)
        if path is None or url.userinfo or url.fragment:
            return None
        return cls((url.scheme, url.raw_host, url.port), raw_path, path)

    def lies_under(self, folder: _Target) -> bool:
        """Whether the path, as sent and decoded, is below a folder."""
        return (
            self.server == folder.server
            and _lies_under(self.raw_path, folder.raw_path)
            and _lies_under(self.path, folder.path)
        )


def _decoded(path: str) -> str | None:
    """A path fully percent-decoded; None if a server might resolve it to another place."""
    for _ in range(_MOST_ENCODINGS):
        try:
            decoded = unicodedata.normalize("NFKC", unquote(path, errors="strict"))
        except UnicodeDecodeError:
            return None
        if decoded == path:
            break
        path = decoded
    else:
        return None
    names = [segment.partition(";")[0].strip() for segment in path.replace("\\", "/").split("/")]
    if _DOTS & set(names) or not path.isprintable():
        return None
    return path


def _lies_under(path: str, folder: str) -> bool:
    folder = folder.removesuffix("/")
    return path == folder or path.startswith(folder + "/")
