"""What the HTTP side may do, decided before it starts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from jitney.engine.config import ServerSection

#: Where no limit of a body is set, so many bytes for each token of the context. Eight characters a
#: token, each written as a JSON escape of six bytes, are far more than any language takes: English
#: has some 4.6 characters a token, Chinese 1.5.
_BYTES_PER_TOKEN = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits and keys of the HTTP endpoint: the [server] section as it was configured, and what
    was found out from it, or stands nowhere in it. Sizes are bytes, times seconds.
    """

    #: Bytes of a body that are always taken where no limit is set.
    LEAST_BODY: ClassVar[int] = 1 << 20

    #: What counts below counts in place of the field here that has the same name. Not shown where
    #: settings are: it may have keys.
    server: ServerSection = field(default_factory=ServerSection, repr=False)
    #: `digest_key` of each accepted key, of users and of administrators (`access.Role`); where both
    #: are empty no key is asked for, and everybody is an administrator.
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    #: Of routes outside the table: exact paths that need no key, and beginnings of paths that look
    #: after keys themselves (the page has its own sign-in).
    public_paths: frozenset[str] = frozenset()
    public_prefixes: tuple[str, ...] = ()
    #: Accepted Host names, lower case, without port; None for any.
    allowed_hosts: tuple[str, ...] | None = None
    #: As many as the limit of open files allows.
    max_connections: int = ServerSection().max_connections
    #: Where files and batches are kept; None: nowhere.
    data_dir: Path | None = None
    #: What messages about ended batches and jobs are signed with.
    webhook_secret: str = field(default="", repr=False)
    tokenize_timeout_s: float = 10.0
    #: How long a stream's status line waits for the engine's first output: the engine refuses a
    #: request within a step, and that should be a status. Who waits longer gets a sign of life.
    header_wait_s: float = 1.0
    #: Time without output after which a stream sends a comment.
    comment_s: float = 15.0

    def body_limit(self, context_length: int) -> int:
        """Most bytes of a request body: as it was set, or by a model's context."""
        return self.server.body_limit or max(self.LEAST_BODY, _BYTES_PER_TOKEN * context_length)

    def with_page(self, path: str) -> ServerSettings:
        """What an endpoint that has a page at `path` leaves to the page's own sign-in: a browser
        cannot send a bearer key with a page.
        """
        prefixes, paths = (path + "/",), frozenset({path})
        return replace(self, public_prefixes=prefixes, public_paths=paths)

    @property
    def page(self) -> str | None:
        """Where the page is, relative to the root; None where there is none."""
        return self.public_prefixes[0].removeprefix("/") if self.public_prefixes else None


def digest_key(key: str) -> str:
    """The form in which a key is kept and compared: SHA-256, hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()
