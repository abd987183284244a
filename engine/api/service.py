"""What all routes share: the engine, the tokenizer, the limits, the counters, and whether we still
take requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jitney.engine.api.disconnect import until
from jitney.engine.api.errors import HttpError
from jitney.engine.api.metrics import ServerMetrics
from jitney.engine.api.open_requests import OpenRequests
from jitney.engine.api.quotas import Quotas
from jitney.engine.api.responses.store import ResponseStore
from jitney.engine.api.settings import ServerSettings
from jitney.engine.api.slices import Slices
from jitney.engine.api.text_threads import TextThreads
from jitney.engine.conversation.formats import TurnFormat
from jitney.engine.errors import RequestError
from jitney.engine.process.client import EngineClient
from jitney.engine.structured.setup import CheckedGrammar, CheckerSetup
from jitney.engine.types import EngineInfo, Grammar, JsonDict

if TYPE_CHECKING:
    from jitney.engine.api.chat_templates import ChatTemplates
    from jitney.engine.api.grammars import Grammars
    from jitney.engine.api.own_requests import OwnRequests
    from jitney.engine.api.tracing import Tracing
    from jitney.engine.config.layers import Layered
    from jitney.engine.text.fill_in import FillIn
    from jitney.engine.text.tokenizer import Tokenizer

#: Times the context length: the longest text that is tokenised at all.
_CHARS_PER_TOKEN = 8


class Service:
    """One served model. tokenizer may be set later than the rest: until then the service is
    loading.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        settings: ServerSettings,
        model_name: str,
    ):
        self.client = client
        self.tokenizer = tokenizer
        self.settings = settings
        #: What requests may call the model; answers call it by the first.
        self.model_names = settings.server.served_model_name or (model_name,)
        self.created = int(time.time())
        #: The document of the routes, JSON.
        self.openapi = b""
        self.draining = False
        self.metrics = ServerMetrics(self)
        server = settings.server
        self.quotas = Quotas(server.key_max_concurrent, server.key_tokens_per_minute)
        #: The loop's time for answers with many tokens.
        self.slices = Slices()
        #: Answers of /v1/responses that clients may come back to.
        self.responses = ResponseStore(
            server.responses_kept, server.responses_bytes, server.responses_ttl_s
        )
        self._open = OpenRequests()
        self._drain_begun = asyncio.Event()
        self._threads = TextThreads()
        #: Renders chats; None: the text threads do, which a template that never ends would take.
        self.chat_templates: ChatTemplates | None = None
        #: Checks grammars; None: the text threads do, which one that never ends would take.
        self.grammars: Grammars | None = None
        #: Makes spans for OpenTelemetry; None: it is off.
        self.tracing: Tracing | None = None
        #: The settings, and where each came from; None: nobody said.
        self.layered: Layered | None = None
        #: Files and batches of requests, and jobs; None until the application is made.
        self.own_requests: OwnRequests | None = None
        self._turns: TurnFormat | None = None
        self._special_texts: dict[str, int] | None = None

    @property
    def turns(self) -> TurnFormat:
        """How the model's turns are read. Raises RequestError where there is no model yet."""
        if self._turns is None:
            _, tokenizer = self.ready()
            self.learn_turns(tokenizer)
        assert self._turns is not None
        return self._turns

    def learn_turns(self, tokenizer: Tokenizer) -> None:
        """See in the model's chat template how its turns are read: some 10 ms."""
        server = self.settings.server
        names = server.tool_call_parser, server.reasoning_parser
        self._turns = TurnFormat.of(tokenizer.chat_template, *names)

    def marker_ids(self, names: Collection[str]) -> frozenset[int]:
        """Special tokens that a parser must see. names: of the functions that may be called."""
        markers = self.turns.markers(with_calls=bool(names))
        special = self.special_texts
        return frozenset(special[marker] for marker in markers if marker in special)

    @property
    def special_texts(self) -> dict[str, int]:
        """The markers of the model's turns that are tokens of their own, and their ids. In tags
        they are so also where they are shown as text.
        """
        if self._special_texts is None:
            _, tokenizer = self.ready()
            self._special_texts = {}
            for text in self.turns.markers(with_calls=True):
                id = tokenizer.added_tokens.get(text)
                is_tag = text.startswith("<") and text.endswith(">")
                if id is not None and (is_tag or id in tokenizer.special_ids):
                    self._special_texts[text] = id
        return self._special_texts

    @property
    def model_name(self) -> str:
        """What answers call the model."""
        return self.model_names[0]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names that ask for the model with an adapter; none until the engine is ready."""
        info = self.client.info
        return () if info is None else info.model.adapters

    def adapter_number(self, model: str | None) -> int:
        """Of the adapter that a request's model names; 0: the model itself."""
        if model is None or model not in self.adapters:
            return 0
        return 1 + self.adapters.index(model)

    def check_model(self, name: str | None) -> None:
        """Raises HttpError 404 for a name that is none of the model's or of its adapters."""
        if name is not None and name not in (*self.model_names, *self.adapters):
            raise HttpError.no_model(name, "; /v1/models lists what there is")

    def name_in_answers(self, model: str | None) -> str:
        """What the answer to a request that calls the model so calls it."""
        return model if model and self.adapter_number(model) else self.model_name

    def begin_drain(self) -> None:
        """Refuse new generation requests from now on; those that run go on, but for jobs and
        the lines of batches, which go on at the next start, or at another engine of their fleet.
        """
        self.draining = True
        self._drain_begun.set()
        if self.own_requests is not None:
            self.own_requests.stop()

    async def until_drain(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what nobody waits for, which a drain does not wait for either. Raises RequestError
        draining if one begins first.
        """
        if await until(self._drain_begun.wait(), work):
            raise RequestError("the server is shutting down", code="draining")

    async def drained(self) -> None:
        """Wait until no generation request is open."""
        await self._open.until_idle()

    def close(self) -> None:
        """Let go of the threads; a tokenisation that still runs is not waited for."""
        self._threads.close()

    def generating(self) -> AbstractContextManager[None]:
        """Counts one open generation request, which `drained` waits for."""
        return self._open.one()

    @property
    def own_places(self) -> int:
        """See `batches.host.RequestHost`."""
        info, _ = self.ready()
        return info.sizes.seats

    @property
    def most_of_key(self) -> int:
        """See `batches.host.RequestHost`."""
        return self.quotas.max_concurrent

    def check_background(self) -> None:
        """See `batches.host.RequestHost`: where batches keep their seats, nobody gives way."""
        info = self.client.info
        if info is not None and info.queue.policy != "continuous":
            raise RequestError("batches need a server with the policy continuous")

    def opening(self, key: str) -> AbstractContextManager[None]:
        """See `batches.host.RequestHost`."""
        return self.quotas.open(key)

    def unready(self) -> RequestError | None:
        """Why no request can be served now, or None."""
        if self.draining or self.client.state == "draining":
            return RequestError("the server is shutting down", code="draining")
        if self.client.state == "dead":
            return RequestError("the engine is gone", code="engine_dead")
        if self.client.state == "sleeping":
            return RequestError("the engine is asleep: POST /wake_up wakes it", code="sleeping")
        is_loaded = self.client.info is not None and self.tokenizer is not None
        if self.client.state == "ready" and is_loaded:
            return None
        code, message = "loading", "the model is still loading"
        if self.client.state == "restarting":
            code, message = "restarting", "the engine died and is being started again"
        progress = self.client.progress
        if progress is not None:
            message += f": {progress.stage} {progress.done} of {progress.total}"
        return RequestError(message, code=code)

    def stalled(self) -> RequestError | None:
        """An engine that is up but shows no sign of life."""
        age = self.client.last_step_age()
        if age > self.settings.server.heartbeat_s:
            return RequestError(
                f"the engine has not finished a step for {age:.0f} s", code="engine_dead"
            )
        return None

    def ready(self) -> tuple[EngineInfo, Tokenizer]:
        """The running engine and its tokenizer. Raises RequestError when there is none."""
        reason = self.unready()
        if reason is not None:
            raise reason
        info, tokenizer = self.client.info, self.tokenizer
        assert info is not None and tokenizer is not None  # `unready` has just checked
        return info, tokenizer

    @property
    def info(self) -> EngineInfo:
        """Of the running engine. Raises RequestError when there is none."""
        info, _ = self.ready()
        return info

    @property
    def most_chars(self) -> int:
        """Of a text that is tokenised at all."""
        return self.info.model.context_length * _CHARS_PER_TOKEN

    def check_chars(self, chars: int, param: str) -> None:
        """Refuse text that cannot fit before any time goes into tokenising it."""
        most = self.most_chars
        if chars > most:
            raise RequestError(
                f"the text has {chars} characters; at most {most} are tokenised here",
                code="context_length_exceeded",
                param=param,
            )

    def fill_in(self, param: str) -> FillIn:
        """How the model is asked to fill in the middle. Raises RequestError naming the field that
        asks for it.
        """
        _, tokenizer = self.ready()
        if tokenizer.fill_in is None:
            raise RequestError(
                "this model was not taught to fill in the middle: its vocabulary has no tokens for "
                "it",
                code="unsupported_parameter",
                param=param,
            )
        return tokenizer.fill_in

    async def off_loop[T](self, work: Callable[[], T]) -> T:
        """Run blocking text work on a thread, for at most `tokenize_timeout_s`."""
        return await self._threads.run(work, self.settings.tokenize_timeout_s)

    async def render_chat(
        self,
        messages: Sequence[JsonDict],
        tokenizer: Tokenizer,
        most_chars: int,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt text of a conversation. variables: what else the template is given. Raises
        RequestError.
        """
        if not tokenizer.has_chat_template:
            raise RequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        if self.chat_templates is not None:
            return await self.chat_templates.render(messages, most_chars, variables)
        return await self.off_loop(lambda: tokenizer.apply_chat_template(messages, **variables))

    async def checked_grammar(self, grammar: Grammar, param: str) -> CheckedGrammar:
        """A grammar as the engine takes it. Raises RequestError, blamed on `param` or on a tool,
        for one that cannot be used.
        """
        if self.grammars is not None:
            return await self.grammars.checked(grammar, param)
        info, tokenizer = self.ready()
        setup = CheckerSetup(tokenizer.special_names, info.model.vocab_size)
        return await self.off_loop(lambda: _checked_here(setup, grammar, param))


def _checked_here(setup: CheckerSetup, grammar: Grammar, param: str) -> CheckedGrammar:
    """As `Grammars.checked`, in this thread. Raises RequestError."""
    from jitney.engine.structured.worker import Checker

    return Checker(setup).check(grammar).usable(param)
