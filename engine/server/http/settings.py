"""The settings of the HTTP side, resolved before it starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from jitney.engine.config import ServerSection

#: Body bytes per token of the context, if no limit is set: eight characters, each as a JSON
#: escape of six bytes. English has some 4.6 characters a token, Chinese 1.5.
_BYTES_PER_TOKEN = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits and keys of the HTTP endpoint: the [server] section, and what follows from it. Sizes
    are bytes, times seconds.
    """

    #: Smallest limit of a body in bytes, if no limit is set.
    LEAST_BODY: ClassVar[int] = 1 << 20

    #: The section; fields below replace those of the same name. Not in reprs: it may have keys.
    server: ServerSection = field(default_factory=ServerSection, repr=False)
    #: `digest_key` of each accepted key; where both are empty every client is an administrator.
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    #: Routes outside the table: paths that need no key, and prefixes that check access themselves.
    public_paths: frozenset[str] = frozenset()
    public_prefixes: tuple[str, ...] = ()
    #: Accepted Host names, lower case, without port; None for any.
    allowed_hosts: tuple[str, ...] | None = None
    #: As many as the limit of open files allows.
    max_connections: int = ServerSection().max_connections
    #: Folder of files and batches; None: none.
    data_dir: Path | None = None
    #: Secret that signs messages about ended batches and jobs.
    webhook_secret: str = field(default="", repr=False)
    tokenize_timeout_s: float = 10.0
    #: Seconds that a stream's status line waits for the first output: the engine refuses within a
    #: step, and that should be a status.
    header_wait_s: float = 1.0
    #: Time without output after which a stream sends a comment.
    comment_s: float = 15.0

    def body_limit(self, context_length: int) -> int:
        """Most bytes of a request body: the setting, else by the model's context."""
        return self.server.body_limit or max(self.LEAST_BODY, _BYTES_PER_TOKEN * context_length)

    def with_page(self, path: str) -> ServerSettings:
        """The settings with a page at `path`, which has a sign-in: browsers send no bearer key."""
        prefixes, paths = (path + "/",), frozenset({path})
        return replace(self, public_prefixes=prefixes, public_paths=paths)

    @property
    def page(self) -> str | None:
        """Path of the page, relative to the root; None where there is none."""
        return self.public_prefixes[0].removeprefix("/") if self.public_prefixes else None
