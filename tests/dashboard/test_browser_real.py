"""The page on the real engine, with a random model: a busload sent from the page itself rides,
ends, and is told of.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from page_browser import holds_text, says, show, state
from places import SUPPORT
from server_settings import SMALL_ENGINE

from jitney.engine.common.ports import free_port

#: `jitney` with an engine that takes its time.
CODE = """
import sys
from functools import partial
from jitney.engine.server.process import process_client
process_client.ProcessClient = partial(
    process_client.ProcessClient, builder="process_core:build_slowed"
)
from jitney.engine.cli import main
sys.exit(main())
"""


@pytest.fixture
def served_url(tmp_path, hurried_processes: None) -> Iterator[str]:
    port = free_port()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JITNEY_")}
    environ["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), environ.get("PYTHONPATH", "")])
    own = ("--port", str(port), "--data-dir", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", CODE, "serve", *SMALL_ENGINE, "--kernels", "reference", *own],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(120)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 180  # compiling on a machine with other things to do
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(url + "/readyz", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    pytest.fail("the engine did not start")


def test_a_chat_is_stopped_and_a_busload_rides(served_url, open_page):
    page = open_page.page
    page.goto(served_url + "/dashboard/")
    state(page, "live")
    page.wait_for_selector("#empty:not([hidden])")
    show(page, "chat")
    page.click("#talks summary")
    page.fill("#talks input[min='1']", "200")
    # Greedy, so that the random model's answer does not end before it is stopped.
    page.fill("#talks input[max='2']", "0")
    page.fill("#prompt", "Where to?")
    page.keyboard.press("Enter")
    says(page, "send", "Stop")
    page.wait_for_function("() => document.querySelector('.assistant .text').textContent")
    page.keyboard.press("Escape")
    page.wait_for_function(
        "() => document.querySelector('.assistant .sub').textContent.includes('stopped')"
    )
    holds_text(page, "headline", "Idle: all 4 seats free")
    listing = httpx.get(served_url + "/dashboard/requests?search=chat-", trust_env=False).json()
    (stopped,) = listing["requests"]
    assert stopped["finish"] == "abort" and 0 < stopped["n_output"] < 200
    page.click("#crowd")
    show(page, "requests")
    page.wait_for_function("""() => {
        const rows = [...document.querySelectorAll("#requests tbody tr")];
        return rows.length === 17 && rows.every((row) => row.dataset.state === "finished");
    }""")
    listed = httpx.get(served_url + "/dashboard/requests", trust_env=False).json()["requests"]
    shown = page.evaluate("""() => [...document.querySelectorAll("#requests tbody tr")].map((row) =>
        [8, 9, 15].map((i) => row.cells[i].textContent))""")
    assert shown == [
        [str(row["n_prompt"]), f"{row['n_output']} / {row['max_tokens']}", row["finish"]]
        for row in listed
    ]
    show(page, "overview")
    page.click("#time-details summary")
    page.wait_for_function("() => document.querySelectorAll('#time-table tbody tr').length === 17")
    show(page, "requests")
    page.locator("#requests tbody tr").first.click()
    holds_text(page, "drawer", "It took ")
    page.wait_for_selector("#drawer .waterfall .bar.chunk")
    page.keyboard.press("Escape")
    holds_text(page, "headline", "Idle: all 4 seats free")
    page.goto("about:blank")
    assert open_page.hosts == {"127.0.0.1"}
    assert open_page.problems == []
