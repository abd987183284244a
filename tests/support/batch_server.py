"""A server with a fake engine, run as its own process, which a test can kill.

python batch_server.py PORT FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn
from api_fakes import FakeClient, Script, make_app


def main() -> None:
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    engine = FakeClient(Script(text="some words", delay_s=0.002), seats=4)
    app = make_app(engine, data_dir=folder)
    uvicorn.run(app, host="127.0.0.1", port=port, log_config=None)


if __name__ == "__main__":
    main()
