"""One question to a server elsewhere, and what a refusal means to the person who asked."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from jitney.engine.common.errors import ConfigError, JitneyError

_TIMEOUT_S = 10.0
_REFUSALS = {
    401: "an API key is needed: set JITNEY_ENGINE_KEY, or give --key-file",
    403: "an administrator's key is needed",
}


class Refused(JitneyError):
    """A server does not answer, or does not tell."""


def ask(url: str, path: str, key: str, refusals: Mapping[int, str]) -> bytes:
    """What GET of `path` brings at the server at `url`. key: an administrator's, empty if it needs
    none. refusals: what other statuses than 401 and 403 mean. Raises ConfigError and Refused.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(
            url.rstrip("/") + path, headers=headers, timeout=_TIMEOUT_S, trust_env=False
        )
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"{url!r} is not a URL: {error}") from None
    except httpx.HTTPError as error:
        raise Refused(f"{url} does not answer: {str(error) or type(error).__name__}") from None
    if answer.status_code != 200:
        meanings = _REFUSALS | dict(refusals)
        why = meanings.get(answer.status_code, f"it answers {answer.status_code}")
        raise Refused(f"{url}: {why}")
    return answer.content
