"""Opens the dashboard in Debian's chromium, for tests: records a page's errors, starts servers, and
waits for texts.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from api_fakes import ByteTokenizer, until

from jitney.dashboard import Dashboard
from jitney.engine.config import ResolvedConfig
from jitney.engine.lab.policy_lab import Lab
from jitney.engine.server.app import create_app
from jitney.engine.server.http.settings import ServerSettings

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
#: Most milliseconds to wait for a condition; only a failing test takes as long.
PATIENCE = 60_000


def watched(browser, **options: Any) -> SimpleNamespace:
    """A page in its own browser context; problems: console errors and exceptions; hosts: hosts to
    which it sent requests.
    """
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
    page = context.new_page()
    seen = SimpleNamespace(page=page, context=context, problems=[], hosts=set())
    page.on(
        "console", lambda message: message.type == "error" and seen.problems.append(message.text)
    )
    page.on("pageerror", lambda error: seen.problems.append(str(error)))
    page.on(
        "request", lambda request: seen.hosts.add(re.sub(r"^\w+://([^:/]*).*", r"\1", request.url))
    )
    page.set_default_timeout(PATIENCE)
    return seen


@contextlib.contextmanager
def served(app: Any, port: int = 0) -> Iterator[str]:
    """A real server in a thread; it does not wait long for open feeds when it stops. Yields its
    URL.
    """
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host="127.0.0.1",
            port=port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(120)
        assert not thread.is_alive()


def endpoint(
    client: Any, port: int = 0, data_dir: Path | None = None
) -> contextlib.AbstractContextManager[str]:
    """A server with the complete HTTP app of a scripted engine."""
    settings = ServerSettings(data_dir=data_dir).with_page("/dashboard")
    lab = Lab(client, None)
    page = Dashboard(client, settings, lab=lab, service=lambda: app.state.service)
    app = create_app(client, ByteTokenizer(), settings, "scripted", page.mounted("/dashboard"))  # type: ignore[arg-type]
    app.state.service.resolved = ResolvedConfig.load(flags={"max_seats": 4})
    return served(app, port)


@contextlib.contextmanager
def visit(page, client: Any) -> Iterator[str]:
    """Open the page and wait until it is live; closes it before its server stops. Yields the
    server's URL.
    """
    with endpoint(client) as url:
        page.goto(url + "/dashboard")
        state(page, "live")
        yield url
        page.goto("about:blank")


def state(page, name: str) -> None:
    """Wait until the page is in this state."""
    page.wait_for_selector(f"[data-state={name}]")


def show(page, view: str) -> None:
    """Go to a view by its link."""
    page.click(f"#views a[href='#{view}']")
    page.wait_for_selector(f"#view-{view}.shown")


def says(page, id: str, text: str) -> None:
    """Wait until the element's text is just this."""
    page.wait_for_function(
        "([id, text]) => document.getElementById(id).textContent === text", arg=[id, text]
    )


def holds_text(page, id: str, text: str) -> None:
    """Wait until the element's text holds this."""
    page.wait_for_function(
        "([id, text]) => document.getElementById(id).textContent.includes(text)", arg=[id, text]
    )


def table_is(page, id: str, rows: list[list[str]]) -> None:
    """Wait until the first cells of the table's first rows are these."""
    page.wait_for_function(
        """([id, rows]) => {
        const shown = [...document.getElementById(id).tBodies[0]?.rows ?? []];
        return shown.length >= rows.length && rows.every((row, i) => row.every((cell, j) =>
            shown[i].cells[j]?.textContent === cell));
    }""",
        arg=[id, rows],
    )


def figures(page) -> dict[str, str]:
    return dict(
        zip(
            page.locator("#figures dt").all_inner_texts(),
            page.locator("#figures .value").all_inner_texts(),
            strict=True,
        )
    )


def faults(page, axe: Any, scheme: str = "light") -> dict[str, list[str]]:
    """Violations that axe-core finds: rule -> elements that break it. In the dark scheme only the
    rules about colours run, since no other rule depends on the scheme.
    """
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    options: dict[str, Any] = {"resultTypes": ["violations"]}
    if scheme == "dark":
        rules = ["color-contrast", "link-in-text-block"]
        options["runOnly"] = {"type": "rule", "values": rules}
    violations = axe.run(page, options=options).response["violations"]
    return {rule["id"]: [node["html"] for node in rule["nodes"]] for rule in violations}


def press(page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)
