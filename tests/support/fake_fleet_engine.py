"""A scripted engine in its own process, started like `jitney serve`: a fleet's engine without a
model. It takes half a minute to answer a prompt with the word "slowly"; with `--revision broken` it
exits. A host that is not an engine's first serves nothing, as with `jitney serve`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import AsyncIterator

import uvicorn
from api_fakes import FakeClient, Script, make_app

from jitney.engine.common.key_file import digest_key
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest
from jitney.engine.server.http.access import ApiKeys
from jitney.engine.server.http.settings import ServerSettings

_TEXT = "Hello, wörld! " * 4
#: Seconds before each token: usually, and for a prompt with the word "slowly".
_DELAY_S, _SLOWLY_S = 0.01, 0.5


class _Client(FakeClient):
    """A client whose expected wait is one second for each open request beyond its seats; these
    requests wait.
    """

    async def _outputs(
        self, request: EngineRequest, script: Script
    ) -> AsyncIterator[SequenceOutput]:
        self._note_waits()
        if b"slowly" in bytes(token for token in request.prompt if token < 256):
            script = Script(_TEXT, delay_s=_SLOWLY_S)
        try:
            async for output in super()._outputs(request, script):
                yield output
        finally:
            self.open.discard(request.id)
            self._note_waits()

    def _note_waits(self) -> None:
        assert self.info is not None
        self.counters.waiting = max(0, len(self.open) - self.info.sizes.seats)
        self.counters.predicted_wait = float(self.counters.waiting)


def _flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def _hear_the_fleet(keys: ApiKeys) -> None:
    """Read standard input to its end; each line has new values of environment variables."""
    for line in sys.stdin:
        keys.replace((), _digests(json.loads(line)["JITNEY_ADMIN_KEYS"]))


def _end_with_the_fleet(server: uvicorn.Server, keys: ApiKeys) -> None:
    _hear_the_fleet(keys)
    server.should_exit = True


def _digests(keys: str) -> list[str]:
    return [digest_key(key) for key in keys.split(",") if key]


def main() -> None:
    admins = tuple(_digests(os.environ.get("JITNEY_ADMIN_KEYS", "")))
    keys = ApiKeys(ServerSettings(admin_keys=admins))
    name = _flag("--served-model-name")
    if "broken" in sys.argv:
        raise SystemExit(3)
    if "--host-id" in sys.argv and _flag("--host-id") != "0" and "--data-parallel" not in sys.argv:
        _hear_the_fleet(keys)
        return
    app = make_app(
        _Client(Script(_TEXT, delay_s=_DELAY_S)),
        model=name,
        keys=keys,
    )
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=_flag("--host"),
            port=int(_flag("--port")),
            log_level="warning",
            loop="asyncio",
        )
    )
    threading.Thread(target=_end_with_the_fleet, args=(server, keys), daemon=True).start()
    server.run()


if __name__ == "__main__":
    main()
