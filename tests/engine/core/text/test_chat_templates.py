"""Templates that never end, tokenisers that never end, tokenisers that panic: each costs its own
request and nobody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from api_fakes import ByteTokenizer, FakeClient, call, make_app, run, until
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from jitney.engine.common.errors import RequestError
from jitney.engine.core.text.chat_templates import ChatTemplates
from jitney.engine.core.text.fast_tokenizers import FastTokenizer, _tiny_fast
from jitney.engine.core.text.template_worker import TemplateSource, render_source
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.server.chat.conversation.template_abilities import (
    ChatAbilities,
    TemplateAbilities,
)
from jitney.engine.server.chat.model_text import TextThreads

#: What a message makes this template do.
TEMPLATE = """
{%- if messages[0].content == 'spin' -%}
{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif messages[0].content == 'refuse' -%}{{ raise_exception('no such role') }}
{%- elif messages[0].content == 'long' -%}{{ 'x' * 5000 }}
{%- elif messages[0].content == 'memory' -%}{{ 'x' * (messages | length * 4000000000) }}
{%- elif messages[0].content == 'escape' -%}{{ ''.__class__.__mro__ }}
{%- else -%}{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}{%- endif -%}
"""
SOURCE = TemplateSource(TEMPLATE, {"bos_token": "<s>"})
#: Seconds that a chat may take where one does not end, and where all do.
BRIEF_S, PATIENT_S = 1.5, 30.0


def said(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@contextlib.asynccontextmanager
async def rendering(timeout_s: float = PATIENT_S) -> AsyncIterator[ChatTemplates]:
    templates = ChatTemplates(SOURCE, timeout_s)
    await templates.start()
    try:
        yield templates
    finally:
        await templates.close()


def processes(templates: ChatTemplates) -> list[int]:
    return [each.process.pid for each in templates._workers._workers if each.process is not None]


async def error_of(templates: ChatTemplates, content: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await templates.render(said(content), 1000)
    assert caught.value.info.param == "messages"
    return caught.value


async def test_what_comes_back_is_what_transformers_makes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JITNEY_API_KEYS", "sesame")
    monkeypatch.setenv("JITNEY_ADMIN_KEYS", "sesame")

    async with rendering() as templates:
        for pid in processes(templates):
            assert b"sesame" not in Path(f"/proc/{pid}/environ").read_bytes()
        text = await templates.render(said("hi"), 1000)
        assert text == "<s>user: hi\nassistant: "
        assert text == render_source(SOURCE, said("hi"), add_generation_prompt=True)
        assert "no such role" in str(await error_of(templates, "refuse"))
        assert "unsafe" in str(await error_of(templates, "escape"))
        too_long = await error_of(templates, "long")
        assert too_long.info.code == "context_length_exceeded" and "5000" in str(too_long)
        before = processes(templates)
        assert "refused the messages" in str(await error_of(templates, "memory"))
        assert processes(templates) == before, "no process had to be ended for these"


async def test_an_answer_may_go_on_where_the_last_message_ends():
    messages = [*said("a"), {"role": "assistant", "content": "The answer"}]

    async with rendering() as templates:
        variables = {"add_generation_prompt": False, "continue_final_message": True}
        assert await templates.render(messages, 1000, variables) == (
            "<s>user: a\nassistant: The answer"
        )
        variables["continue_final_message"] = False
        assert await templates.render(messages, 1000, variables) == (
            "<s>user: a\nassistant: The answer\n"
        )


async def test_chats_that_do_not_end_are_cut_off_and_others_go_on():
    async with rendering(BRIEF_S) as templates:
        before = processes(templates)
        bad = [asyncio.create_task(error_of(templates, "spin")) for _ in range(2)]
        await asyncio.sleep(0.1)
        good = asyncio.create_task(templates.render(said("hi"), 1000))
        errors = await asyncio.gather(*bad)
        assert all(f"took longer than {BRIEF_S} s" in str(error) for error in errors)
        assert await good == "<s>user: hi\nassistant: ", "with two of two processes held up"
        assert await templates.render(said("again"), 1000)
        after = processes(templates)
        assert not set(before) & set(after)
        for pid in before:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


class Stuck(ByteTokenizer):
    """Encodes the text "stuck" no sooner than it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def encode(self, text, *, add_special_tokens=True):
        if text == "stuck":
            self.released.wait(20)
        return super().encode(text)


def asking(tokenizer: Any, **settings: Any) -> Callable[[object], Awaitable[Any]]:
    """A function that completes a prompt with this tokenizer."""
    app = make_app(FakeClient(), **settings)
    app.state.service.tokenizer = tokenizer
    return lambda prompt: call(app, "/v1/completions", {"model": "m", "prompt": prompt})


async def test_texts_that_are_never_tokenised_do_not_stop_others():
    tokenizer = Stuck()
    ask = asking(tokenizer, tokenize_timeout_s=0.2)
    stuck = await asyncio.gather(*(ask("stuck") for _ in range(2)))
    assert [reply.status for reply in stuck] == [400, 400]
    assert (await ask("fine")).status == 200
    lost = [thread for thread in threading.enumerate() if thread.name == "tokenize"]
    assert len(lost) >= 4 and all(thread.daemon for thread in lost)
    tokenizer.released.set()


async def test_a_prompt_of_token_ids_waits_for_no_thread():
    tokenizer = Stuck()
    ask = asking(tokenizer)
    stuck = [asyncio.ensure_future(ask("stuck")) for _ in range(4)]
    ids = await ask([[1, 2], [3]])
    assert ids.status == 200 and len(ids.json()["choices"]) == 2
    assert not any(task.done() for task in stuck)
    tokenizer.released.set()
    assert [reply.status for reply in await asyncio.gather(*stuck)] == [200] * 4


def test_only_so_many_threads_are_given_up():
    release = threading.Event()

    async def session() -> list[Any]:
        threads = TextThreads(threads=1, most_left=2)
        results = []
        for work in [lambda: release.wait(20)] * 3 + [lambda: True]:
            try:
                results.append(await threads.run(work, 0.1))
            except RequestError as error:
                results.append(error.info.code)
        release.set()
        async with asyncio.timeout(PATIENT_S):
            while True:
                with contextlib.suppress(RequestError):
                    results.append(await threads.run(lambda: True, PATIENT_S))
                    break
                await asyncio.sleep(0.01)
        threads.close()
        return results

    assert run(session()) == ["invalid_value"] * 3 + ["busy", True]


async def test_threads_come_with_the_work_and_go_without_it():
    before = set(threading.enumerate())  # those of other tests end when they like

    def count() -> int:
        threads = set(threading.enumerate()) - before
        return sum(thread.name == "tokenize" for thread in threads)

    threads = TextThreads(idle_s=0.05)
    assert count() == 0
    for _ in range(2):
        assert await threads.run(lambda: 1, 20) == 1
        until(lambda: count() == 0)
    both = threading.Barrier(2, timeout=20)
    await asyncio.gather(*(threads.run(both.wait, 30) for _ in range(2)))
    waiting = TextThreads(threads=1)
    await asyncio.gather(*(waiting.run(lambda: 1, 20) for _ in range(5)))
    assert count() >= 1
    waiting.close()
    until(lambda: count() == 0)


def panicking() -> Tokenizer:
    """Its regular expression takes too many steps on 'aaaa...c', where Rust panics."""
    rust = RustTokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    return Tokenizer(FastTokenizer(rust, {}))


async def test_a_panic_of_a_tokenizer_is_an_error_of_its_request():
    ask = asking(panicking())
    for _ in range(3):
        reply = await ask("a" * 40 + "c")
        assert (reply.status, reply.error["param"]) == (400, "prompt")
        assert "tokenizer fails" in reply.error["message"]
    assert (await ask("a")).status == 200


def test_a_panic_in_decoding_is_ours_too(monkeypatch: pytest.MonkeyPatch):
    class PanicException(BaseException):
        pass

    class Rust:
        def decode(self, ids, skip_special_tokens):
            raise PanicException("index out of bounds")

    tokenizer = Tokenizer(_tiny_fast())
    monkeypatch.setattr(tokenizer, "_rust", Rust())
    with pytest.raises(RequestError) as caught:
        tokenizer.decode([1, 2])
    assert caught.value.info.code == "internal_error"


def test_the_source_of_a_template_has_what_it_needs():
    tokenizer = Tokenizer(_tiny_fast())
    source = tokenizer.template_source
    assert source is not None
    assert render_source(
        source, said("hi"), add_generation_prompt=True
    ) == tokenizer.apply_chat_template(said("hi"))


def test_a_template_that_never_ends_does_not_hold_the_start(caplog: pytest.LogCaptureFixture):
    """Neither with every message nor with some of those that show what it accepts."""
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    always = TemplateSource(loop, {})
    later = TemplateSource(
        "{% if messages | length > 1 %}" + loop + "{% endif %}{{ messages[0].content }}", {}
    )

    async def session(source: TemplateSource) -> ChatAbilities:
        app = make_app(FakeClient())
        service = app.state.service
        service.text.chat_templates = ChatTemplates(source, BRIEF_S)
        try:
            await service.text.chat_templates.start()
            await service.turns.learn_abilities(service.tokenizer)
            return await service.turns.abilities()
        finally:
            await service.text.chat_templates.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jitney.engine.server.chat.model_text._PROBING_S", 2.0)
        for source in (always, later):
            can = run(session(source))
            assert can.plain == TemplateAbilities() and can.refusal
    assert [record.levelname for record in caplog.records].count("ERROR") == 2
    assert "--chat-template" in caplog.text


def test_the_abilities_of_the_worker_are_those_of_the_tokenizer():
    async def session() -> tuple[ChatAbilities, ChatAbilities]:
        tokenizer = Tokenizer(_tiny_fast())
        app = make_app(FakeClient())
        service = app.state.service
        await service.turns.learn_abilities(tokenizer)
        here = await service.turns.abilities()
        assert tokenizer.template_source is not None
        service.text.chat_templates = ChatTemplates(tokenizer.template_source, PATIENT_S)
        try:
            await service.turns.learn_abilities(tokenizer)
            return here, await service.turns.abilities()
        finally:
            await service.text.chat_templates.close()

    here, there = run(session())
    assert here == there and here.plain.system and here.with_tools is None
