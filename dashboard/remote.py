"""HTTP client of a remote engine's dashboard: the feed, JSON answers, and the sign-in."""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from functools import cache
from urllib.parse import SplitResult, urlsplit

import httpx

from jitney.engine.common.errors import ConfigError, JitneyError

#: Seconds to connect.
_CONNECT_S = 5.0
#: Most seconds without data on a feed, whose frames come at least once a second.
_SILENCE_S = 10.0
_PATH = "/dashboard"
#: Matches an address without a scheme: localhost, or a dot or colon in its host.
_ADDRESS = re.compile(r"^(?:localhost(?=$|[:/])|[^/]*[.:])")
#: Most bytes of an event: a key frame of thousands of seats has a tenth of this.
_MOST_EVENT_BYTES = 8 << 20


class Unreachable(JitneyError):
    """The engine's page does not answer, or refuses access."""


def _base_of(url: str) -> str:
    """The dashboard's URL from an engine's. Raises ConfigError; a URL with a key in it is
    refused.
    """
    parts = _parts_of(url)
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path.removesuffix(_PATH)}{_PATH}"


def _parts_of(url: str) -> SplitResult:
    """Raises ConfigError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        is_right = _has_address(parts, url)
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigError(f"{url!r} is not the URL of an engine: give http://HOST:PORT")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "an engine's URL is http://HOST:PORT; a key comes from the environment or a file"
        )
    return parts


def _has_address(parts: SplitResult, url: str) -> bool:
    """Whether a text has a host. A single word is considered a mistake, not a host name. Raises
    ValueError for a port that is no number.
    """
    is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable()
    is_word = "://" not in url and not _ADDRESS.search(url)
    return is_http and not is_word and (parts.port is not None or not parts.netloc.endswith(":"))


class _EventTooLong(JitneyError):
    """A feed sends an event beyond the limit, so it is no feed of an engine."""


async def _whole_events(
    parts: AsyncIterator[bytes], most_bytes: int = _MOST_EVENT_BYTES
) -> AsyncIterator[bytes]:
    """The complete events of a feed, from its chunks. Raises _EventTooLong for more than
    most_bytes.
    """
    rest = b""
    async for part in parts:
        *events, rest = (rest + part).split(b"\n\n")
        if len(rest) > most_bytes:
            raise _EventTooLong(f"an event of its feed has more than {most_bytes} bytes")
        for event in events:
            if event and not event.startswith(b":"):
                yield event + b"\n\n"


class RemoteEngine:
    """One engine. key: an API key of it, empty if it needs none; it is only sent in the body
    of a sign-in.
    """

    def __init__(self, url: str, key: str = "", transport: httpx.AsyncBaseTransport | None = None):
        self.base = _base_of(url)
        self.url = self.base.removesuffix(_PATH)
        self._key = key
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S),
            transport=transport,
            verify=_tls(),
            trust_env=False,
            follow_redirects=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    @contextlib.asynccontextmanager
    async def answer(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        query: str = "",
        body: bytes = b"",
    ) -> AsyncIterator[httpx.Response]:
        """An answer whose body is not read yet; signs in if the engine requires that. Raises
        Unreachable.
        """
        url = f"{self.base}/{path}"
        if query:
            url += f"?{query}"
        may_sign_in = bool(self._key)
        try:
            while True:
                async with self._http.stream(method, url, headers=headers, content=body) as answer:
                    if answer.status_code != 401 or not may_sign_in:
                        yield answer
                        return
                may_sign_in = False
                await self._sign_in()
        except httpx.HTTPError as error:
            raise Unreachable(
                f"{self.url} does not answer: {str(error) or type(error).__name__}"
            ) from None

    async def _sign_in(self) -> None:
        answer = await self._http.post(f"{self.base}/sign-in", json={"key": self._key})
        if answer.status_code != 204:
            raise Unreachable(f"{self.url} does not accept the API key ({answer.status_code})")

    async def feed(
        self, path: str = "feed", most_bytes: int = _MOST_EVENT_BYTES
    ) -> AsyncIterator[bytes]:
        """A feed's events as they come, until it ends; most_bytes: of one of them. Raises
        Unreachable.
        """
        headers = {"accept": "text/event-stream"}
        async with self.answer("GET", path, headers=headers) as answer:
            if answer.status_code != 200:
                raise Unreachable(f"{self.url}: {_refusal(answer.status_code)}")
            try:
                async for event in _whole_events(answer.aiter_bytes(), most_bytes):
                    yield event
            except _EventTooLong as error:
                raise Unreachable(f"{self.url}: {error}") from None


@cache
def _tls() -> ssl.SSLContext:
    """The shared TLS context: making one reads all certificates of authorities."""
    return httpx.create_ssl_context(trust_env=False)


#: Status -> message for the viewer.
_REFUSALS = {
    401: "an API key is needed: set JITNEY_ENGINE_KEY, or give --key-file",
    404: "there is no page; is this a Jitney engine?",
    503: "too many viewers watch this engine already",
}


def _refusal(status: int) -> str:
    return _REFUSALS.get(status, f"the page answers {status}")
