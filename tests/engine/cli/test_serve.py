"""`jitney serve` as a program: probes while loading, what it prints, a core killed under it, drains
and quick ends.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from adapter_files import write_adapter
from api_fakes import http_client
from engine_infos import engine_info
from places import SUPPORT
from server_settings import SMALL_ENGINE

from jitney.engine.cli.serve import _curl_line
from jitney.engine.common.ports import free_port
from jitney.engine.config.schema import Config, ServerSection
from jitney.engine.core.weights.checkpoints.sources import ModelSource

#: A stream may be silent for so long on a machine with other things to do.
SILENCE_S = 180.0
BODY: dict[str, Any] = {
    "model": "tiny-random",
    "prompt": "abc",
    "temperature": 0,
    "ignore_eos": True,
}


_RUN = "import sys; from jitney.engine.cli import main; sys.exit(main())"
#: With a core that needs no model.
_RUN_FAKE = f"""
from functools import partial
from jitney.engine import server
server.ProcessClient = partial(server.ProcessClient, builder="process_core:build_slow_letters")
{_RUN}
"""


class Serving:
    """One running `jitney serve`, and what it wrote. cache: keeps compiled programs for the next
    one. code: what runs it.
    """

    def __init__(self, cache: Path, *flags: str, code: str = _RUN):
        self.port = free_port()
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("JITNEY_")
        }
        environ["JITNEY_CACHE"] = str(cache)
        environ["JITNEY_MEASURED_SIZES"] = "false"
        environ["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
        environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # compiled in a hurry
        command = [
            sys.executable,
            "-P",
            "-c",
            code,
            "serve",
            *SMALL_ENGINE,
            "--port",
            str(self.port),
            *flags,
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        )
        self.url = f"http://127.0.0.1:{self.port}"
        self.out: queue.Queue[str] = queue.Queue()
        self.err: list[str] = []
        self.readers = [
            threading.Thread(target=self._read, args=each, daemon=True)
            for each in (
                (self.process.stdout, self.out.put),
                (self.process.stderr, self.err.append),
            )
        ]
        for reader in self.readers:
            reader.start()

    @staticmethod
    def _read(pipe: Any, keep: Callable[[str], None]) -> None:
        for line in pipe:
            keep(line.rstrip("\n"))

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, verify=False)

    def counter(self, name: str) -> float:
        """A metric without labels."""
        lines = self.get("/metrics").text.splitlines()
        (value,) = [line.split()[1] for line in lines if line.startswith(name + " ")]
        return float(value)

    def outages(self) -> list[dict[str, Any]]:
        """Times without a core, as the page draws them."""
        return self.get("/dashboard/timeline?from=0&bins=1").json()["outages"]

    def open_at(self, t: float) -> set[str]:
        """Requests that had come by then and had not ended, whatever became of them."""
        rows = self.get("/dashboard/requests?limit=1000").json()["requests"]
        return {
            row["request"]
            for row in rows
            if row["arrival"] < t and (row["finished"] is None or row["finished"] > t)
        }

    def status(self, path: str) -> int:
        """0 while nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 180) -> None:
        """A dead process ends the wait at once; the time is for a machine with other things to
        do.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, "\n".join(self.err)
            time.sleep(0.1)

    def ready(self) -> Serving:
        self.wait_for(lambda: self.status("/readyz") == 200)
        return self

    def core(self) -> int:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        (core,) = [
            child
            for child in children
            if b"core.process" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        return int(core)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        for reader in self.readers:
            reader.join(5)


def serving_letters(cache: Path, *flags: str) -> Serving:
    """With a core whose letters come slowly: for what happens around it."""
    return Serving(cache, *flags, code=_RUN_FAKE)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(cache: Path) -> Iterator[Serving]:
    with Serving(cache) as serving:
        serving.wait_for(lambda: serving.status("/livez") == 200)
        serving.loading = {path: serving.get(path) for path in ("/livez", "/startupz", "/readyz")}  # type: ignore
        serving.refused = httpx.post(serving.url + "/v1/completions", json=BODY)  # type: ignore
        yield serving.ready()


def test_probes_tell_the_truth_while_it_loads(server: Any):
    assert {path: answer.status_code for path, answer in server.loading.items()} == {
        "/livez": 200,
        "/startupz": 503,
        "/readyz": 503,
    }
    assert server.refused.status_code == 503
    assert server.refused.json()["error"]["code"] == "loading"
    assert "retry-after" in server.refused.headers
    assert server.status("/startupz") == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_printed_line_works_as_it_stands(server: Serving):
    printed = []
    while not any("curl" in line for line in printed):
        printed.append(server.out.get(timeout=60))
    assert "Jitney serves tiny-random" in printed[0] and "4 seats" in printed[0]
    assert any(f"{server.url}/v1" in line for line in printed)
    line = re.sub(r"^\s*try\s+", "", printed[-1])
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout)["choices"][0]["finish_reason"] in ("stop", "length"), done.stdout


def test_the_printed_line_names_the_model_as_it_is_served():
    config = Config(server=ServerSection(served_model_name=("ours", "alias")))
    model = engine_info().model
    assert '"model": "ours"' in _curl_line(config, "http://h:1", model, chat=True)
    assert f'"model": "{model.name}"' in _curl_line(Config(), "http://h:1", model, chat=False)


def test_the_openai_client_runs_against_it(server: Serving):
    """Completions, chat, streams and errors through the client that most programs use, with its own
    types.
    """
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=2) as client:
        assert [model.id for model in client.models.list()] == ["tiny-random"]
        plain = client.completions.create(
            model="tiny-random",
            prompt="abc",
            max_tokens=12,
            temperature=0,
            logprobs=2,
            extra_body={"ignore_eos": True},
        )
        assert plain.usage is not None and plain.usage.completion_tokens == 12
        assert (
            plain.choices[0].logprobs is not None
            and len(plain.choices[0].logprobs.tokens or []) == 12
        )
        stream = client.completions.create(
            model="tiny-random",
            prompt="abc",
            max_tokens=12,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text
        body = {
            "model": "tiny-random",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 9,
            "seed": 4,
        }
        answer = client.chat.completions.create(**body, n=2)
        assert len(answer.choices) == 2 and answer.choices[0].message.role == "assistant"
        pieces = list(
            client.chat.completions.create(
                **body, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text == answer.choices[0].message.content
        assert pieces[-1].usage is not None and pieces[-1].usage.completion_tokens <= 9
        assert client.models.retrieve("tiny-random").owned_by == "jitney"
        with pytest.raises(openai.NotFoundError) as unknown:
            client.completions.create(model="other", prompt="abc")
        assert unknown.value.code == "model_not_found" and unknown.value.request_id
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**body, temperature=5)
        assert caught.value.param == "temperature"


def test_it_says_little_about_itself(server: Serving):
    headers = server.get("/livez").headers
    assert "server" not in headers


def test_a_killed_core_is_replaced_and_readiness_tells(server: Serving):
    old = server.core()
    os.kill(old, signal.SIGKILL)
    server.wait_for(lambda: server.status("/readyz") == 503)
    assert server.status("/livez") == 200
    refused = httpx.post(server.url + "/v1/completions", json=BODY, timeout=60)
    error = refused.json()["error"]
    assert refused.status_code == 503 and error["code"] == "restarting", error
    assert error["message"].startswith("the engine died and is being started again")
    assert 'jitney_engine_state{state="restarting"} 1.0' in server.get("/metrics").text
    server.ready()
    assert server.core() != old
    assert 'jitney_engine_restarts_total{cause="died"} 1.0' in server.get("/metrics").text
    assert any("killed by SIGKILL, signal 9" in line for line in server.err)
    assert httpx.post(server.url + "/v1/completions", json=BODY, timeout=60).status_code == 200


#: Each with all that its seat and its text half must not lose.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "max_tokens": 300},
    {"temperature": 1.0, "seed": 7, "max_tokens": 300, "n": 2},
    {
        "temperature": 0,
        "max_tokens": 300,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"65": 2.0},
    },
    {"temperature": 0.8, "seed": -3, "max_tokens": 280, "top_p": 0.9, "logprobs": 2, "echo": True},
)


def streamed(url: str, kind: dict[str, Any], begun: threading.Semaphore) -> list[Any]:
    """Per choice its text, tokens, log-probabilities and end; and the usage, which is the last."""
    body = BODY | kind | {"stream": True, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True}
    choices: dict[int, list[Any]] = {}
    usage = None
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=SILENCE_S) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            usage = chunk["usage"] or usage
            for choice in chunk["choices"]:
                kept = choices.setdefault(choice["index"], ["", [], [], [], None])
                kept[0] += choice["text"]
                kept[1] += choice.get("token_ids") or []
                logprobs = choice["logprobs"] or {"token_logprobs": [], "text_offset": []}
                kept[2] += logprobs["token_logprobs"]
                kept[3] += logprobs["text_offset"]
                kept[4] = choice["finish_reason"] or kept[4]
                begun.release()
    assert usage is not None
    return [*[choices[index] for index in sorted(choices)], usage["completion_tokens"]]


def test_streams_go_on_through_the_death_of_the_core(server: Serving):
    """Killed in the middle of several streams: every client gets each token once, those of a run
    without a death, and no error.
    """
    undisturbed = [streamed(server.url, kind, threading.Semaphore()) for kind in KINDS]
    old, begun = server.core(), threading.Semaphore(0)
    resumed_before = server.counter("jitney_requests_resumed_total")
    n_outages = len(server.outages())
    with ThreadPoolExecutor(2 * len(KINDS)) as pool:
        kinds = [*KINDS, *KINDS]
        running = [pool.submit(streamed, server.url, kind, begun) for kind in kinds]
        for _ in range(150):
            assert begun.acquire(timeout=SILENCE_S)
        os.kill(old, signal.SIGKILL)
        answers = [each.result(timeout=2 * SILENCE_S) for each in running]
    assert server.core() != old
    for answer, wanted in zip(answers, [*undisturbed, *undisturbed], strict=True):
        *choices, usage = answer
        *wanted_choices, wanted_usage = wanted
        assert usage == wanted_usage
        for choice, expected in zip(choices, wanted_choices, strict=True):
            assert choice[:2] == expected[:2] and choice[3:] == expected[3:]
            assert choice[2] == pytest.approx(expected[2], abs=1e-4)
    outages = server.outages()[n_outages:]
    n_open = [len(server.open_at(outage["began"])) for outage in outages]
    # All of them, unless the core was done with some before their clients had read so far.
    assert n_open[0] > 0 and [outage["n_resumed"] for outage in outages] == n_open
    assert [outage["n_lost"] for outage in outages] == [0] * len(outages)
    resumed = server.counter("jitney_requests_resumed_total") - resumed_before
    assert resumed == sum(n_open)


def test_a_core_that_dies_in_a_drain_is_replaced_and_answers_end_as_in_peace(cache: Path):
    begun = threading.Semaphore(0)
    with serving_letters(cache, "--drain-s", "170") as serving, ThreadPoolExecutor(4) as pool:
        serving.ready()
        alone = streamed(serving.url, KINDS[0], threading.Semaphore())
        running = [pool.submit(streamed, serving.url, KINDS[0], begun) for _ in range(4)]
        for _ in range(100):
            assert begun.acquire(timeout=SILENCE_S)
        serving.process.send_signal(signal.SIGTERM)
        serving.wait_for(lambda: serving.status("/readyz") == 503)
        os.kill(serving.core(), signal.SIGKILL)
        answers = [each.result(timeout=2 * SILENCE_S) for each in running]
        assert [answer[0][:2] for answer in answers] == [alone[0][:2]] * 4
        assert serving.process.wait(60) == 0
        assert any("killed by SIGKILL" in line for line in serving.err)


@contextlib.contextmanager
def long_stream(serving: Serving) -> Iterator[Iterator[str]]:
    """The lines of a stream of many tokens, after the first one."""
    body = BODY | {"max_tokens": 460, "stream": True}
    url = serving.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        lines = answer.iter_lines()  # kept: letting go of it would end the request
        next(lines)
        yield lines


#: Bodies that are refused, and one that is too large to be read.
BAD_BODIES = (b"", b"{", b"[" * 100_000, b'{"n": -1}', b"\xff", b"x" * (9 << 20))


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(cache: Path):
    """Bad inputs are refused until the end, and none of them holds it up."""
    with serving_letters(cache) as serving:
        serving.ready()
        sent = threading.Semaphore(0)

        def keep_asking(body: bytes) -> set[int]:
            statuses: set[int] = set()
            headers = {"content-type": "application/json"}
            # Until it has stopped listening.
            with contextlib.suppress(httpx.HTTPError), http_client(serving.url) as web:
                while True:
                    reply = web.post("/v1/completions", content=body, headers=headers)
                    statuses.add(reply.status_code)
                    sent.release()
                    time.sleep(0.05)
            return statuses

        with ThreadPoolExecutor(len(BAD_BODIES)) as pool, long_stream(serving) as lines:
            asking = [pool.submit(keep_asking, body) for body in BAD_BODIES]
            for _ in range(2 * len(BAD_BODIES)):
                assert sent.acquire(timeout=60)
            serving.process.send_signal(signal.SIGTERM)
            serving.wait_for(lambda: serving.status("/readyz") == 503)
            refused = httpx.post(serving.url + "/v1/completions", json=BODY)
            rest = [line for line in lines if line]
            assert serving.process.wait(60) == 0, serving.err
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        for statuses in [each.result() for each in asking]:
            assert statuses <= {400, 413, 503}, statuses


def test_a_drain_that_takes_too_long_ends_requests_with_an_error(cache: Path):
    with serving_letters(cache, "--drain-s", "0.1") as serving:
        serving.ready()
        with long_stream(serving) as lines:
            os.kill(serving.core(), signal.SIGSTOP)  # a step that does not end
            serving.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"code":"draining"' in rest[-2]
        assert serving.process.wait(60) == 1
        assert any("draining ends" in line for line in serving.err)


def test_a_signal_has_it_read_its_keys_again(cache: Path, tmp_path: Path):
    """And leaves the processes behind it alone, which may hear the signal too."""
    file = tmp_path / "run.toml"

    def ask(key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        body = BODY | {"max_tokens": 2}
        return httpx.post(serving.url + "/v1/completions", json=body, headers=headers, timeout=60)

    file.write_text('[server]\nadmin_keys = ["first"]\n')
    with serving_letters(cache, "--config", str(file)) as serving:
        serving.ready()
        core = serving.core()
        file.write_text('[server]\nadmin_keys = ["second", "third"]\n')
        program = psutil.Process(serving.process.pid)
        for process in (*program.children(recursive=True), program):
            process.send_signal(signal.SIGHUP)
        serving.wait_for(lambda: ask("second").status_code == 200)
        assert ask("first").status_code == 401
        assert serving.core() == core
        assert len(program.children(recursive=True)) >= 3, "the core, and workers for templates"
        headers = {"authorization": "Bearer third"}
        shown = httpx.get(serving.url + "/config", headers=headers, timeout=60).json()["settings"]
        assert shown["admin_keys"]["value"] == "2 set, not shown"


def test_adapters_come_and_go_with_the_configuration(cache: Path, tmp_path: Path):
    """A core that is started anew is an engine that was started with them."""
    file, model = tmp_path / "run.toml", ModelSource.resolve("tiny-random").config
    folders = {name: write_adapter(tmp_path / name, model, seed) for seed, name in enumerate("abc")}

    def configure(*names: str) -> None:
        listed = [f"{name}={folders[name]}" for name in names]
        file.write_text(f"[model]\nadapters = {json.dumps(listed)}\nadapter_room = 4\n")

    def ask(name: str) -> httpx.Response:
        body = BODY | {"max_tokens": 8, "model": name}
        return httpx.post(serving.url + "/v1/completions", json=body, timeout=60)

    def text(name: str) -> str:
        return ask(name).json()["choices"][0]["text"]

    def reload() -> httpx.Response:
        return httpx.post(serving.url + "/admin/reload", timeout=60)

    configure("a")
    with Serving(cache, "--config", str(file)) as serving:
        serving.ready()
        before, digest = text("a"), serving.get("/version").json()["config_digest"]
        assert ask("b").status_code == 404
        configure("a", "b")
        news = reload().json()
        assert news["adapters"]["added"] == ["b"] and not news["adapters"]["replaced"]
        assert news["needs_restart"] == []
        assert serving.get("/version").json()["adapters"] == ["a", "b"]
        assert serving.get("/version").json()["config_digest"] != digest
        assert serving.get("/config").json()["settings"]["adapters"]["value"][1][:2] == "b="
        names = [card["id"] for card in serving.get("/v1/models").json()["data"]]
        assert names == ["tiny-random", "a", "b"]
        texts = [text(name) for name in names]
        assert texts[1] == before and len(set(texts)) == 3

        configure("b")
        assert reload().json()["adapters"]["removed"] == ["a"]
        assert (ask("a").status_code, text("b")) == (404, texts[2])
        (folders["c"] / "adapter_model.safetensors").write_bytes(b"")
        configure("b", "c")
        refused = reload()
        assert refused.status_code == 409
        assert "nothing was changed: adapter c: " in refused.json()["error"]["message"]
        assert (ask("c").status_code, text("b")) == (404, texts[2])

        os.kill(serving.core(), signal.SIGKILL)
        serving.wait_for(lambda: bool(serving.outages()))
        serving.ready()
        assert (ask("a").status_code, text("b")) == (404, texts[2])


def test_a_second_signal_ends_it_at_once(cache: Path):
    with serving_letters(cache) as serving:
        serving.ready()
        with long_stream(serving):
            os.kill(serving.core(), signal.SIGSTOP)
            serving.process.send_signal(signal.SIGINT)
            serving.wait_for(lambda: serving.status("/readyz") == 503)
            # Within the 20 s of `end`; the drain would take 30.
            assert serving.end(signal.SIGINT) == 128 + signal.SIGINT


def test_a_signal_while_loading_ends_it_with_status_0(cache: Path):
    with Serving(cache) as serving:
        serving.wait_for(lambda: serving.status("/livez") == 200)
        assert serving.end() == 0


def test_an_engine_that_is_not_started_again_ends_the_server_with_one_line(cache: Path):
    with serving_letters(cache, "--max-restarts", "0") as serving:
        serving.ready()
        os.kill(serving.core(), signal.SIGKILL)
        assert serving.process.wait(60) == 1
        for reader in serving.readers:
            reader.join(5)
        (line,) = [line for line in serving.err if line.startswith("jitney: ")]
        assert "killed by SIGKILL, signal 9" in line
        assert not [line for line in serving.err if "Traceback" in line]


def test_a_model_that_is_not_there_is_one_line(cache: Path):
    with Serving(cache, "--model", str(cache / "absent")) as serving:
        assert serving.process.wait(60) == 1
        for reader in serving.readers:
            reader.join(5)
        assert (
            next(line for line in serving.err if line.startswith("jitney: ")).count("absent") == 1
        )
        assert not [line for line in serving.err if "Traceback" in line]
