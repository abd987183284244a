"""Sending over HTTP: latencies count from the intended time, errors are counted, the client watches
itself.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from traces import write_trace

from jitney.engine.cli import main
from jitney.engine.common.errors import ConfigError, JitneyError
from jitney.engine.common.scrape import Scrape
from jitney.engine.common.sse import events
from jitney.engine.common.trace import Arrival, TraceLine
from jitney.engine.lab.bench.client import Answer, EndpointClient, RemoteEndpoint
from jitney.engine.lab.bench.cost import CostLine
from jitney.engine.lab.bench.load import Sender, _record_of, run_load
from jitney.engine.lab.bench.online import OnlineBench, OnlineRun, _Ruler, _ServerMetrics
from jitney.engine.lab.simulation.workload import WORKLOADS

SERVICE_S = 0.05
Handler = Callable[[str, dict], Awaitable[tuple[int, bytes]]]


def frames(words: list[str], finish: str | None = "length", usage: dict | None = None) -> bytes:
    """A stream of text completions."""
    chunks: list[dict] = [
        {"choices": [{"index": 0, "text": word, "finish_reason": None}]} for word in words
    ]
    if finish:
        chunks.append({"choices": [{"index": 0, "text": "", "finish_reason": finish}]})
    if usage:
        chunks.append({"choices": [], "usage": usage})
    return (
        b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
        + b"data: [DONE]\n\n"
    )


class ScriptedServer:
    """An HTTP server of a few lines: each request is handed to `handler(path, body) -> (status,
    body)`.
    """

    def __init__(self, handler: Handler):
        self.handler = handler

    async def __aenter__(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *exc: object) -> None:
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(
            (
                int(line.split(":")[1])
                for line in head.splitlines()
                if line.startswith("content-length")
            ),
            0,
        )
        body = json.loads(await reader.readexactly(length)) if length else {}
        status, answer = await self.handler(head.split(" ")[1], body)
        writer.write(
            b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            % (status, len(answer))
        )
        writer.write(answer)
        await writer.drain()
        writer.close()


def one_at_a_time() -> Handler:
    """A server that serves one request after another, 50 ms each."""
    lock = asyncio.Lock()

    async def handler(path: str, body: dict) -> tuple[int, bytes]:
        async with lock:
            await asyncio.sleep(SERVICE_S)
        return 200, frames(["a", "b"], usage={"prompt_tokens": 3, "completion_tokens": 2})

    return handler


async def against(handler: Handler, arrivals: list[Arrival], **options):
    async with ScriptedServer(handler) as url:
        target = RemoteEndpoint(url, "m")
        async with EndpointClient(target) as client:
            return await run_load(
                lambda n: client.ask(target.body("hi", arrivals[n].n_output)),
                arrivals,
                **options,
            )


def test_a_slow_server_cannot_hide_its_queue():
    """Ten requests in one instant at 50 ms each: the last one waits half a second, whoever sends
    them, even when the client holds requests back. Timed from its own sending, each would take 50
    ms."""
    arrivals = [Arrival(0.0, 3, 2)] * 10
    for options in ({}, {"concurrency": 2}):
        load = asyncio.run(against(one_at_a_time(), arrivals, **options))
        e2e = sorted(t.e2e_s or 0.0 for t in load.requests)
        assert all(seconds >= number * SERVICE_S for number, seconds in enumerate(e2e, 1))
        assert [t.finish for t in load.requests] == ["length"] * 10


def test_a_closed_loop_keeps_so_many_open():
    open_now = most = 0

    async def send(number: int) -> Answer:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.002)
        open_now -= 1
        return Answer(sent=0.0, finished=time.monotonic(), finish="stop")

    asyncio.run(run_load(send, [Arrival(0.0, 1, 1)] * 20, concurrency=3, closed=True))
    assert most == 3


async def test_every_failure_is_counted_by_kind():
    script = {
        1: (429, b'{"error":{"message":"full"}}'),
        2: (200, frames(["a"], finish=None)),
        3: (200, b'data: {"error":{"message":"died"}}\n\ndata: [DONE]\n\n'),
        4: (200, b"data: {nonsense\n\n"),
    }

    async def handler(path: str, body: dict) -> tuple[int, bytes]:
        await asyncio.sleep(60.0 if body["max_tokens"] == 5 else 0.0)
        return script.get(body["max_tokens"], (200, frames(["a"])))

    async with ScriptedServer(handler) as url:
        answers = []
        for n in range(1, 7):
            target = RemoteEndpoint(url, "m", timeout_s=0.2 if n == 5 else 60.0)
            async with EndpointClient(target) as client:
                answers.append(await client.ask(target.body("x", n)))
    gone = RemoteEndpoint(url, "m")
    async with EndpointClient(gone) as client:
        answers = [*answers, await client.ask(gone.body("x", 1))]
    kinds = "http_429 broken_stream error_in_stream broken_stream timeout length connect"
    assert [a.finish for a in answers] == shlex.split(kinds)
    assert "full" in answers[0].detail and all(a.finished >= a.sent > 0 for a in answers)
    failed = _record_of(0, Arrival(0.0, 7, 9), 1.0, answers[0])
    assert not failed.served and (failed.n_prompt, failed.n_output) == (7, 0)


def test_frames_may_be_cut_anywhere():
    stream = (
        b': keep-alive\r\n\r\ndata: {"a":1}\r\n\r\n'
        b"event: x\ndata: two\ndata: lines\n\ndata:[DONE]\n\n"
    )

    async def collect(size: int) -> list[bytes]:
        async def parts():
            for start in range(0, len(stream), size):
                yield stream[start : start + size]

        return [event async for event in events(parts())]

    for size in (1, 2, 3, 7, 1000):
        assert asyncio.run(collect(size)) == [b'{"a":1}', b"two\nlines", b"[DONE]"]


def test_chat_and_completions_are_asked_alike():
    chat = RemoteEndpoint("http://h/v1/", "m", chat=True, ignore_eos=False)
    assert chat.generation == "http://h/v1/chat/completions"
    assert chat.body("hi", 5)["messages"] == [{"role": "user", "content": "hi"}]
    assert "ignore_eos" not in chat.body("hi", 5)
    plain = RemoteEndpoint("http://h", "m", api_key="secret")
    assert (
        plain.generation == "http://h/v1/completions" and plain.body("hi", 5)["ignore_eos"] is True
    )
    assert plain.headers == {"authorization": "Bearer secret"} and "secret" not in repr(plain)


def test_the_client_says_when_it_is_the_bottleneck():
    assert Sender(cpu_share=0.3, lag_s=[0.001] * 100, late_s=[0.0] * 100).trouble == ""
    assert "97% of a CPU" in Sender(cpu_share=0.97).trouble
    assert "event loop woke up 200 ms late" in Sender(lag_s=[0.2] * 10).trouble
    assert "requests left 80 ms late" in Sender(late_s=[0.08] * 10).trouble

    async def blocking(number: int) -> Answer:
        time.sleep(0.08)  # on purpose: it holds up the event loop
        await asyncio.sleep(0)
        return Answer(sent=0.0, finished=time.monotonic(), finish="stop")

    load = asyncio.run(run_load(blocking, [Arrival(0.0, 1, 1)] * 6))
    assert "client may be the bottleneck" in load.sender.trouble


def metrics(text: str) -> _ServerMetrics:
    return _ServerMetrics(Scrape(text))


METRICS = """# HELP jitney_rows_total computed rows
jitney_rows_total{kind="prefill"} %d
jitney_rows_total{kind="decode"} %d
jitney_rows_total{kind="padding"} %d
jitney_step_seconds_sum{kind="decode",rows="4"} %s
jitney_step_seconds_sum{kind="mixed",rows="64"} 1.5
jitney_queue_seconds_count %d
jitney_queue_seconds_sum %s
jitney_queue_seconds_bucket{le="0.5"} 3
jitney_up 1
"""


def test_the_servers_ledger_is_the_difference_of_two_readings():
    before = metrics(METRICS % (10, 20, 30, "0.5", 4, "2.0"))
    after = metrics(METRICS % (12, 26, 32, "1.5", 8, "2.5"))
    lines = after.bill_since(before, seconds=1.25)
    assert after.queue_mean_since(before) == 0.125 and after.queue_mean_since(after) is None
    assert lines["prefill"] == pytest.approx((2, 0.2))
    assert lines["decode"] == pytest.approx((6, 0.6))
    assert lines["padding"] == pytest.approx((2, 0.2)) and lines["idle"] == pytest.approx((0, 0.25))
    assert lines["cancelled"] == CostLine(0, 0)
    free = metrics(METRICS % (12, 26, 32, "1.5", 8, "2.5") + "jitney_padding_is_free 1\n")
    lines = free.bill_since(before, seconds=1.25)
    assert lines["padding"] == CostLine(2, 0)
    assert lines["prefill"] == pytest.approx((2, 0.25))


def test_texts_are_sized_by_the_endpoints_own_count():
    """An endpoint of 2 tokens a word and 7 around them; it publishes no metrics."""
    prompts = []

    async def handler(path: str, body: dict) -> tuple[int, bytes]:
        if path.endswith("/models"):
            return 200, b'{"data":[{"id":"other"}]}'
        if path.endswith("/metrics"):
            return 404, b""
        assert body["model"] == "other" and body["stream_options"] == {"include_usage": True}
        words = len(body["prompt"].split())
        prompts.append(body["prompt"])
        return 200, frames(
            ["x"] * body["max_tokens"],
            usage={"prompt_tokens": 7 + 2 * words, "completion_tokens": body["max_tokens"]},
        )

    async def main(clients: int) -> OnlineRun:
        async with ScriptedServer(handler) as url:
            arrivals = [Arrival(0.0, 101, 4), Arrival(0.0, 33, 2)]
            bench = OnlineBench(RemoteEndpoint(url, ""), warmup=1, clients=clients)
            return await bench.measure(arrivals, concurrency=2, closed=True)

    shared = asyncio.run(main(2))  # each of two processes sends one
    prompts.clear()
    online = asyncio.run(main(1))
    for both in zip(online.load.requests, shared.load.requests, strict=True):
        facts = [
            (t.number, t.n_prompt, t.n_output, t.finish, len(t.token_times or ())) for t in both
        ]
        assert facts[0] == facts[1]
    assert shared.load.seconds > 0 and shared.load.sender.lag_s
    assert [(t.n_prompt, t.n_output, t.finish) for t in online.load.requests] == [
        (101, 4, "length"),
        (33, 2, "length"),
    ]
    assert online.bill is None and online.endpoint.model == "other"
    assert len({prompt[:40] for prompt in prompts}) == len(prompts) == 6, (
        "no text begins like another"
    )
    assert _Ruler(7.0, 2.0).words(3) == 1 and _Ruler.of(9, 39, 16) == _Ruler(7.0, 2.0)


@contextmanager
def in_background(handler: Handler) -> Iterator[str]:
    """A scripted server in a thread of its own, for commands that run their own event loop."""
    loop, server = asyncio.new_event_loop(), ScriptedServer(handler)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(60)
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)


async def foreign(path: str, body: dict) -> tuple[int, bytes]:
    """Another's endpoint: chat only, two tokens a word, no metrics, and it does not know
    ignore_eos.
    """
    if path.endswith("/models"):
        return 200, b'{"data":[{"id":"theirs"}]}'
    if not path.endswith("/chat/completions"):
        return 404, b""
    if "ignore_eos" in body:
        return 400, b'{"error":{"message":"ignore_eos: extra fields are not permitted"}}'
    words, wanted = len(body["messages"][0]["content"].split()), body["max_tokens"]
    await asyncio.sleep(0.002)
    if wanted == 7:
        return 429, b'{"error":{"message":"not now"}}'
    chunks = [{"choices": [{"delta": {"content": "x"}, "finish_reason": None}]}] * wanted
    chunks += [
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 2 * words, "completion_tokens": wanted}},
    ]
    return 200, b"".join(
        b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks
    ) + b"data: [DONE]\n\n"


def test_the_serve_command_measures_anothers_endpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_trace(
        tmp_path / "t.jsonl", [Arrival(0.01 * n, 60, 5 if n else 7, "a") for n in range(10)]
    )
    with in_background(foreign) as url:
        words = ["bench", "serve", "--url", url, "--chat", "--warmup", "2"]
        assert main([*words, "--requests", "3"]) == 1
        assert "--no-ignore-eos leaves that field out" in capsys.readouterr().err
        files = {"--trace": "t.jsonl", "--json": "s.json", "--html": "s.html"}
        for flag, name in (files | {"--trace-to": "r.jsonl"}).items():
            words += [flag, str(tmp_path / name)]
        assert main([*words, "--no-ignore-eos"]) == 0
    shown, report = capsys.readouterr().out, json.loads((tmp_path / "s.json").read_text())
    assert (
        "failed with http_429: 1 of 10; " in shown
        and "theirs at" in shown
        and "Ledger" not in shown
    )
    assert (report["figures"]["served"], report["figures"]["requests"]) == (9, 10)
    assert report["figures"]["output_tokens"] == 45 and report["figures"]["prompt_tokens"] == 9 * 60
    assert report["ledger"] is None and report["figures"]["queue_s"] is None
    assert (
        report["errors"]["http_429"]["count"] == 1
        and "not now" in report["errors"]["http_429"]["first"]
    )
    lines = TraceLine.read_all(tmp_path / "r.jsonl")
    assert [line.finish for line in lines].count("length") == 9 and {
        line.tenant for line in lines
    } == {"a"}
    assert "<title>Traffic for theirs</title>" in (tmp_path / "s.html").read_text()


def test_the_sweep_command_draws_a_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with in_background(foreign) as url:
        words = f"bench sweep --url {url} --chat --no-ignore-eos --prompt 20 --output 3".split()
        words += f"--requests 4 --warmup 0 --html {tmp_path / 'c.html'}".split()
        assert main([*words, "--concurrencies", "1,2,4", "--json", str(tmp_path / "c.json")]) == 0
        assert "knee" in capsys.readouterr().out
        assert main([*words, "--rates", "50,100", "--json", "-"]) == 0
    closed = json.loads((tmp_path / "c.json").read_text())
    assert [point["concurrency"] for point in closed["points"]] == [1, 2, 4]
    assert [point["figures"]["served"] for point in closed["points"]] == [4, 8, 16]
    rates = json.loads(capsys.readouterr().out)
    assert (
        rates["axis"] == "rate"
        and rates["knee"] is None
        and rates["traffic"]["arrivals"] == "poisson"
    )


def overloaded(per_second: float, version: bytes | None) -> Handler:
    """An endpoint that begins so many requests a second, one after another, and has two seats."""
    busy_until = 0.0

    async def handler(path: str, body: dict) -> tuple[int, bytes]:
        nonlocal busy_until
        if path.endswith("/version"):
            return (404, b"") if version is None else (200, version)
        if path.endswith("/slots"):
            return (404, b"") if version is None else (200, b"[{},{}]")
        if path.endswith("/models"):
            return 200, b'{"data":[{"id":"theirs"}]}'
        if path.endswith("/metrics"):
            return 404, b""
        words, wanted = len(body["prompt"].split()), body["max_tokens"]
        busy_until = max(busy_until, time.monotonic()) + 1 / per_second
        await asyncio.sleep(busy_until - time.monotonic())
        return 200, frames(
            ["x"] * wanted, usage={"prompt_tokens": words, "completion_tokens": wanted}
        )

    return handler


@pytest.mark.parametrize("preset", ["mixed", "chat"])
def test_every_named_workload_can_be_served_and_swept(
    preset: str, capsys: pytest.CaptureFixture[str]
):
    bodies: list[dict] = []
    fast = overloaded(5000.0, None)

    async def handler(path: str, body: dict) -> tuple[int, bytes]:
        bodies.append(body)
        return await fast(path, body)

    with in_background(handler) as url:
        words = ["--url", url, "--preset", preset, "--requests", "8", "--warmup", "0"]
        assert main(["bench", "serve", *words, "--json", "-"]) == 0
        traffic = json.loads(capsys.readouterr().out)["traffic"]
        assert main(["bench", "sweep", *words, "--concurrencies", "2", "--json", "-"]) == 0
    assert traffic["preset"] == preset and traffic["about"] == WORKLOADS[preset].about
    assert {"median", "mean", "p95", "at_shortest", "at_longest"} < set(traffic["prompt_lengths"])
    starts = {body["prompt"][:200] for body in bodies if body.get("max_tokens", 0) > 1}
    assert (len(starts) < 4) == (preset == "chat"), "only conversations share their beginning"
    assert (traffic["conversations"] > 0) == (preset == "chat")


def test_an_endpoint_that_is_not_there_is_one_clear_error():
    async def nobody(path: str, body: dict) -> tuple[int, bytes]:
        return 400, b'{"error":"ignore_eos is unknown"}'

    async def main(model: str):
        async with ScriptedServer(nobody) as url:
            await OnlineBench(RemoteEndpoint(url, model)).measure([Arrival(0.0, 9, 1)])

    with pytest.raises(ConfigError, match="no model list"):
        asyncio.run(main(""))
    with pytest.raises(JitneyError, match="--no-ignore-eos"):
        asyncio.run(main("named"))
