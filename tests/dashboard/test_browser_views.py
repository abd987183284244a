"""The views of tenants, work, memory, performance and settings in a real browser, at a server with
files, batches and jobs; and those of a fleet.
"""

from __future__ import annotations

import json
import time

import httpx
from api_fakes import Script, until
from page_browser import endpoint, faults, holds_text, press, served, show, state, table_is
from page_replicas import FakeReplica, engines_app, urls_of

from jitney.dashboard.fleet import Endpoint, FleetView
from jitney.dashboard.fleet_page import FleetPage
from jitney.dashboard.remote import RemoteEngine
from jitney.engine.common.engine_info import KernelProof
from jitney.engine.common.key_file import digest_key
from jitney.engine.common.messages import SequenceEvent, StepReport
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.server.http.settings import ServerSettings

#: Whether the search over all replicas lists so many.
ROWS_ARE = "(n) => document.querySelectorAll('#request-table tbody tr').length === n"
BODY = {"model": "scripted", "prompt": "x", "max_tokens": 4}


def send_work(url: str) -> None:
    """A batch of two lines, which ends, and two jobs, of which the second never does."""
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": BODY}
        for name in ("one", "two")
    ]
    text = "\n".join(map(json.dumps, lines))
    with httpx.Client(base_url=url, timeout=20) as api:
        form = {"files": {"file": ("<b>in.jsonl", text)}, "data": {"purpose": "batch"}}
        file = api.post("/v1/files", **form).json()
        batch = {"endpoint": "/v1/completions", "completion_window": "24h"}
        made = api.post("/v1/batches", json=batch | {"input_file_id": file["id"]}).json()
        until(lambda: api.get(f"/v1/batches/{made['id']}").json()["status"] == "completed")


def test_work_is_listed_saved_and_cancelled(client, open_page, tmp_path):
    page = open_page.page
    with endpoint(client, data_dir=tmp_path) as url:
        page.goto(url + "/dashboard#work")
        state(page, "live")
        table_is(page, "batches", [["No batch was sent to this server."]])
        send_work(url)
        page.wait_for_selector("#batches .status.completed")
        row = page.locator("#batches tbody tr").inner_text()
        assert "2 of 2" in row and "/v1/completions" in row and "Cancel" not in row
        assert "<b>in.jsonl" in page.locator("#files").inner_text()
        with page.expect_download() as saved:
            page.click("#batches button[aria-label^='Save the answers']")
        answers = saved.value.path().read_text().splitlines()
        assert [json.loads(line)["custom_id"] for line in answers] == ["one", "two"]
        client.script = Script(hang=True)
        job = {"endpoint": "/v1/completions", "body": BODY}
        httpx.post(url + "/v1/jobs", json=job).raise_for_status()
        page.wait_for_selector("#jobs .status.in_progress, #jobs .status.queued")
        page.focus("#jobs button[data-act=cancel]")
        press(page, "Enter")
        page.wait_for_selector("#jobs .status.cancelled")
        until(lambda: not client.open)
        page.goto("about:blank")
    assert open_page.problems == []


def crowd(client) -> None:
    """Requests of two tenants and one user that have ended."""
    now = time.monotonic()
    for number, tenant in enumerate((digest_key("ann"), digest_key("ann"), digest_key("ben"), "")):
        name = f"{tenant[:3] or 'user'}-{number}"
        request = EngineRequest(
            id=name,
            prompt=[1] * 100,
            sampling=SamplingParams(max_tokens=9),
            arrival=now - 20,
            tenant=tenant,
            user="" if tenant else "<i>eve",
        )
        client.history.submit(request)
        seated = SequenceEvent("seated", name, 0, 2, -1, now - 15, 0, 0)
        client.history.take(StepReport([], events=[seated]))
        output = SequenceOutput(
            request_id=name, index=0, tokens=[1] * 9, finish="length", cached_tokens=64
        )
        client.history.take(StepReport([output]))


def test_tenants_have_their_row_and_lead_to_their_requests(client, open_page, tmp_path):
    page = open_page.page
    crowd(client)
    with endpoint(client, data_dir=tmp_path) as url:
        page.goto(url + "/dashboard#settings")
        page.fill("#price", "36")
        page.locator("#price").blur()
        press(page, "4")
        rows = page.locator("#tenant-table tbody tr")
        holds_text(page, "tenant-table", f"key {digest_key('ben')[:8]}")
        ann = rows.filter(has_text=f"key {digest_key('ann')[:8]}").inner_text().split("\t")
        assert ann[5] == "2" and ann[7:10] == ["200", "64\u00a0%", "18"] and float(ann[-1]) > 0
        assert "<i>eve" in page.locator("#tenant-table").inner_text()
        rows.filter(has_text=f"key {digest_key('ann')[:8]}").get_by_role("button").click()
        page.wait_for_selector("#view-requests.shown")
        table_is(page, "requests", [[f"{digest_key('ann')[:3]}-1"], [f"{digest_key('ann')[:3]}-0"]])
        assert page.locator("#requests tbody tr").count() == 2
        page.goto("about:blank")
    assert open_page.problems == []


def test_memory_performance_and_settings_show_the_engines_own_figures(client, open_page, tmp_path):
    page = open_page.page
    proofs = [KernelProof("attention", 0.01, 0.125), KernelProof("head", 9.0, 0.125, "<b>no</b>")]
    client = type(client)(proofs=proofs, seat_buckets=(1, 4), token_buckets=(32,))
    client.states, client.windows = bytes([0, 1, 1, 2, 3, 0, 0, 0, 0, 0, 0]), {128: [1, 5, 2, 0]}
    crowd(client)
    for compiled in (1, 0, 0):
        client.step(bucket_seats=4, compiled=compiled, pages_used=6)
    with endpoint(client, data_dir=tmp_path) as url:
        page.goto(url + "/dashboard#memory")
        state(page, "live")
        table_is(
            page,
            "group-table",
            [
                ["Layers that see all positions", "6", "2", "1", "1", "30\u00a0%"],
                ["Layers with a window of 128", "1", "5", "2", "0", "88\u00a0%"],
            ],
        )
        for name in ("tenant-page-table", "depth-table"):
            page.click(f"details:has(#{name}) summary")
        table_is(
            page, "depth-table", [["0 to 64", "4", "256", "256"], ["from 64", "4", "144", "0"]]
        )
        assert page.locator("#tenant-page-table tbody tr").count() == 3
        page.wait_for_selector("#chart-depths .trace", state="attached")
        show(page, "performance")
        table_is(page, "program-table", [["decode-1", "0"], ["decode-4", "0"], ["mixed-32", "3"]])
        mixed = page.locator("#program-table tbody tr").nth(2).inner_text()
        assert "late, 1 time" in mixed and "20.0 ms" not in mixed and "20 ms" in mixed
        table_is(page, "proof-table", [["attention", "0.010", "0.13", "right"], ["head", "9.0"]])
        holds_text(page, "proof-table", "taken out: <b>no</b>")
        page.click("#propose")
        holds_text(page, "proposal", "no step is recorded yet")
        show(page, "settings")
        table_is(page, "setting-table", [["engine.max_seats", "4", "--max-seats"]])
        page.fill("#setting-search", "token_budget")
        holds_text(page, "setting-table", "engine.token_budget")
        page.goto("about:blank")
    assert [one for one in open_page.problems if "400" not in one] == []


def test_the_lists_are_accessible(client, open_to_axe, axe, tmp_path):
    page = open_to_axe.page
    crowd(client)
    with endpoint(client, data_dir=tmp_path) as url:
        send_work(url)
        page.goto(url + "/dashboard")
        state(page, "live")
        for width, scheme in ((390, "light"), (1440, "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            for view, id in (("tenants", "tenant-table"), ("work", "files"), ("memory", "group-table"),
                             ("settings", "setting-table")):  # fmt: skip
                show(page, view)
                page.wait_for_selector(f"#{id} tbody td:not(.faint)")
                assert page.evaluate("document.documentElement.scrollWidth") == width
                assert (view, faults(page, axe, scheme)) == (view, {})
        page.goto("about:blank")
    assert open_to_axe.problems == []


def test_a_request_and_a_tenant_are_found_at_any_replica(open_to_axe, axe):
    clients = {"r1": FakeReplica(4), "r2": FakeReplica(4)}
    clients["r1"].take_seat(0, n_prompt=8, n_output=5, max_tokens=30)
    crowd(clients["r2"])
    page = open_to_axe.page
    with served(engines_app(clients)) as base:
        engines = {name: RemoteEngine(one) for name, one in urls_of(clients, base).items()}
        engines["gone"] = RemoteEngine("http://127.0.0.1:1")
        told = Endpoint(choices={"known": 12, "spread": 3})
        fleet = FleetView(engines, endpoint=lambda: told)
        with served(FleetPage(fleet, ServerSettings()).by_itself()) as url:
            page.goto(url)
            state(page, "live")
            holds_text(page, "routing", "12 to the engine that has their beginning; 3 with a new")
            show(page, "requests")
            page.wait_for_function(ROWS_ARE, arg=5)
            holds_text(page, "request-sub", "Without an answer: gone.")
            page.fill("#request-search", digest_key("ben"))
            page.wait_for_function(ROWS_ARE, arg=1)
            found = page.locator("#request-table tbody tr").inner_text()
            assert found.startswith(f"{digest_key('ben')[:3]}-2") and "r2" in found
            show(page, "tenants")
            holds_text(page, "tenant-table", f"key {digest_key('ann')[:8]}")
            assert page.locator("#views a[href='#work']").is_hidden()
            for width, scheme in ((390, "light"), (1440, "dark")):
                page.set_viewport_size({"width": width, "height": 900})
                for view in ("requests", "tenants", "fleet"):
                    show(page, view)
                    assert page.evaluate("document.documentElement.scrollWidth") == width
                    assert (view, faults(page, axe, scheme)) == (view, {})
            show(page, "requests")
            page.locator("#request-table a").click()
            page.wait_for_selector("#drawer[open] .verdict")
            page.goto("about:blank")
    assert [one for one in open_to_axe.problems if "ERR_CONN" not in one] == []
