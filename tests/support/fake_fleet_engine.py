"""A scripted engine as a process of its own, started as `jitney serve` is: a fleet's engine without
a model.
"""

from __future__ import annotations

import os
import sys
import threading

import uvicorn
from api_fakes import FakeClient, Script, make_app

from jitney.engine.api.settings import digest_key


def _flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def _end_with_the_fleet(server: uvicorn.Server) -> None:
    while os.read(0, 1):
        pass
    server.should_exit = True


def main() -> None:
    keys = [digest_key(key) for key in os.environ.get("JITNEY_ADMIN_KEYS", "").split(",") if key]
    name = _flag("--served-model-name")
    if "broken" in sys.argv:
        raise SystemExit(3)
    app = make_app(
        FakeClient(Script("Hello, wörld! " * 4, delay_s=0.01)),
        model=name,
        admin_keys=tuple(keys),
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
    threading.Thread(target=_end_with_the_fleet, args=(server,), daemon=True).start()
    server.run()


if __name__ == "__main__":
    main()
