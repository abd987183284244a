"""GET requests of commands to a running server, with refusals as errors for the user."""

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
    """A server does not answer, or refuses the request."""


def ask(url: str, path: str, key: str, refusals: Mapping[int, str]) -> bytes:
    """The body of GET `path` at the server at `url`. Raises ConfigError and Refused.

    key: an administrator's, "" if none is needed. refusals: messages for statuses other than 401
    and 403.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(
            url.rstrip("/") + path, headers=headers, timeout=_TIMEOUT_S, trust_env=False
        )
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"{url!r} is not a URL: {error}") from None
    except httpx.HTTPError as error:
        raise Refused(f"{url} does not answer: {str(error) or type(error).__name__}") from None
    if response.status_code != 200:
        reasons = _REFUSALS | dict(refusals)
        reason = reasons.get(response.status_code, f"it answers {response.status_code}")
        raise Refused(f"{url}: {reason}")
    return response.content
