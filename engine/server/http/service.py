"""The state that all routes share: the engine, the tokenizer, the limits, the counters, and whether
requests are still taken.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import Grammar, JsonDict
from jitney.engine.core import CheckedGrammar, CheckerSetup
from jitney.engine.server.chat.chat_templates import ChatTemplates, RenderedTooLong
from jitney.engine.server.chat.conversation.formats import TurnFormat
from jitney.engine.server.chat.conversation.template_abilities import ChatAbilities
from jitney.engine.server.chat.responses.store import ResponseStore
from jitney.engine.server.http.disconnect import until
from jitney.engine.server.http.errors import ErrorReply, HttpError, retry_after_s
from jitney.engine.server.http.metrics import ServerMetrics
from jitney.engine.server.http.model_cards import ModelCard
from jitney.engine.server.http.open_requests import OpenRequests
from jitney.engine.server.http.quotas import Quotas
from jitney.engine.server.http.settings import ServerSettings
from jitney.engine.server.http.slices import Slices
from jitney.engine.server.http.text_threads import TextThreads
from jitney.engine.server.process.client import EngineClient

if TYPE_CHECKING:
    from jitney.engine.config import Layered
    from jitney.engine.core import FillIn, Tokenizer
    from jitney.engine.server.chat.grammars import Grammars
    from jitney.engine.server.http.context import Context
    from jitney.engine.server.http.reload import Reload
    from jitney.engine.server.http.tracing import Tracing
    from jitney.engine.server.tasks.service import InternalRequests

_log = logging.getLogger("jitney.api")

#: Characters that a chat template may add of its own.
_TEMPLATE_CHARS = 1 << 16
#: Requests that may be read and rendered beyond those that can sit and wait, and the least seconds
#: after which one that was not read may come again.
_MOST_READ, _LEAST_RETRY_S = 64, 1.0
#: Seconds that it may take to see what a chat template accepts; one that takes longer is asked for
#: no more than users and assistants that alternate.
_PROBING_S = 10.0
#: Most characters that a chat template may make of a small conversation.
_PROBE_CHARS = 1 << 20


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
        self.internal_requests: InternalRequests | None = None
        #: Reads the files of the configuration again; None where nobody can.
        self.reload: Reload | None = None
        self._turns: TurnFormat | None = None
        self._abilities: ChatAbilities | None = None
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
        texts = dict.fromkeys((tokenizer.chat_template, tokenizer.tools_template))
        self._turns = TurnFormat.of("\n".join(texts), *names)

    async def chat_abilities(self) -> ChatAbilities:
        """The abilities of the model's chat template. Raises RequestError where there is no model
        yet.
        """
        if self._abilities is None:
            _, tokenizer = self.ready()
            await self.learn_abilities(tokenizer)
        assert self._abilities is not None
        return self._abilities

    async def learn_abilities(self, tokenizer: Tokenizer) -> None:
        """Render small conversations to see what the model's chat template accepts: some 50 ms,
        and at most `_PROBING_S`.
        """

        async def render(messages: list[JsonDict], variables: JsonDict) -> str:
            return await self._rendered(messages, tokenizer, _PROBE_CHARS, variables)

        if not tokenizer.has_chat_template:
            self._abilities = ChatAbilities()
            return
        try:
            async with asyncio.timeout(_PROBING_S):
                self._abilities = await ChatAbilities.of(render)
        except TimeoutError:
            reason = f"it takes more than {_PROBING_S:g} s for small conversations"
            self._abilities = ChatAbilities(refusal=reason)
        if self._abilities.refusal:
            _log.error(
                "the chat template cannot render one message of a user, so chats will be refused; "
                "--chat-template names a file with another one (%s)",
                self._abilities.refusal,
            )

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
        """The model's name in answers."""
        return self.model_names[0]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names that ask for the model with an adapter; none until the engine is ready."""
        info = self.client.info
        return () if info is None else tuple(info.model.adapters)

    @property
    def listed_names(self) -> tuple[str, ...]:
        """See `ModelLister`."""
        return (*self.model_names, *self.adapters)

    @property
    def running_names(self) -> tuple[str, ...]:
        """See `ModelLister`: none while the model is loaded, or the engine asleep."""
        return () if self.unready() is not None else self.model_names

    @property
    def engine_info(self) -> EngineInfo | None:
        """See `ModelLister`."""
        return self.client.info

    def card(self, name: str) -> ModelCard:
        """See `ModelLister`; an adapter's names the model that it changes, as vLLM's does."""
        info = self.client.info
        is_adapter = self.adapter_number(name)
        return ModelCard(
            id=name,
            created=self.created,
            root=name if is_adapter else self.model_name,
            parent=self.model_name if is_adapter else UNSET,
            max_model_len=info.model.context_length if info else None,
        )

    def adapter_number(self, model: str | None) -> int:
        """The number of the adapter that a request names as its model; 0: the model itself."""
        info = self.client.info
        if info is None or model is None:
            return 0
        return info.model.adapters.get(model, 0)

    def check_model(self, name: str | None) -> None:
        """Raises HttpError 404 for a name that is none of the model's or of its adapters."""
        if name is not None and name not in self.listed_names:
            raise HttpError.no_model(name, "; /v1/models lists what there is")

    def name_in_answers(self, model: str | None) -> str:
        """The model's name in the answer to a request that uses this name."""
        return model if model and self.adapter_number(model) else self.model_name

    def begin_drain(self) -> None:
        """Refuse new generation requests from now on; those that run go on, but for jobs and
        the lines of batches, which go on at the next start, or at another engine of their fleet.
        """
        self.draining = True
        self._drain_begun.set()
        if self.internal_requests is not None:
            self.internal_requests.stop()

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

    def generating(self, context: Context) -> AbstractContextManager[None]:
        """Counts one open generation request, which `drained` waits for. Raises RequestError
        queue_full at once where more are open than can sit and wait, or more are being read while
        the engine takes no newcomers: to render and tokenise what it will refuse takes the time of
        those that it has.
        """
        info = self.client.info
        if info is not None and not context.background:
            most = self._most_open(info)
            if self._open.are_too_many(context.tenant, most):
                wait = max(_LEAST_RETRY_S, self.client.counters.predicted_wait)
                raise RequestError(
                    f"{most} requests are open or being read already; retry in {wait:.1f} s",
                    code="queue_full",
                    retry_after=wait,
                )
        return self._open.one(context.tenant)

    def _most_open(self, info: EngineInfo) -> int:
        """Open generation requests, those that are being read among them. A few are read whatever
        waits: they may be those that were told to come back.
        """
        counters, queue, history = self.client.counters, info.queue, self.client.history
        most = info.sizes.seats + queue.max_waiting_requests
        longest = queue.max_predicted_wait_s or math.inf
        if counters.predicted_wait > longest or counters.waiting >= queue.max_waiting_requests:
            most = min(most, history.n_open - history.n_open_background)
        return most + _MOST_READ

    @property
    def internal_seats(self) -> int:
        """See `ServerContext`."""
        info, _ = self.ready()
        return info.sizes.seats

    @property
    def most_of_key(self) -> int:
        """See `ServerContext`."""
        return self.quotas.max_concurrent

    def check_background(self) -> None:
        """See `ServerContext`: where batches keep their seats, nobody gives way."""
        info = self.client.info
        if info is not None and info.queue.policy != "continuous":
            raise RequestError("batches need a server with the policy continuous")

    def opening(self, key: str) -> AbstractContextManager[None]:
        """See `ServerContext`."""
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

    def unstarted(self) -> RequestError | None:
        """None once the engine has been ready."""
        return None if self.client.info is not None else self.unready()

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

    def answered(self, context: Context, reply: ErrorReply | None) -> None:
        """See `middleware.RequestObserver`: the page tells of clients that were told to come again.
        Lines of batches are not: their sender asks again.
        """
        if reply is None or context.background:
            return
        generates = context.route is not None and context.route.generates
        if reply.status != 429 and not (reply.status == 503 and generates):
            return
        retry_s = retry_after_s(reply.headers, 0.0) or None
        self.client.history.incidents.refused(reply.status, reply.code or "", retry_s)

    @property
    def info(self) -> EngineInfo:
        """Facts of the running engine. Raises RequestError when there is none."""
        info, _ = self.ready()
        return info

    @property
    def body_limit(self) -> int | None:
        """See `middleware.RequestObserver`: known once the engine has been ready."""
        info = self.client.info
        if info is None:
            return self.settings.server.body_limit or None
        return self.settings.body_limit(info.model.context_length)

    @property
    def most_chars(self) -> int | None:
        """Characters of the longest text that the context can hold; None where the tokenizer leaves
        out characters, so that there is no such number. Raises RequestError.
        """
        info, tokenizer = self.ready()
        longest = tokenizer.longest_token
        return None if longest is None else info.request_limits.longest * longest

    def check_chars(self, chars: int, param: str) -> None:
        """Refuse a text that cannot fit before any time goes into tokenising it: one of more
        characters than the context holds of the tokenizer's longest token. Raises RequestError.

        Other texts are bounded by `body_limit` and `tokenize_timeout_s`. That is so where a
        tokenizer leaves out characters, and for prompts that are truncated: the last tokens of a
        text are those of the whole one, and tokenising only its end may give others.
        """
        most, limits = self.most_chars, self.info.request_limits
        if most is not None and chars > most:
            at_least = math.ceil(chars * limits.longest / most)
            raise RequestError.too_long(limits.overflow(at_least, 1, is_lower_bound=True), param)

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
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        is_truncated: bool = False,
    ) -> str:
        """The prompt text of a conversation. variables: what else the template is given.
        is_truncated: it may be longer than the context. Raises RequestError.
        """
        _, tokenizer = self.ready()
        if not tokenizer.has_chat_template:
            raise RequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        try:
            text = await self._rendered(messages, tokenizer, self._most_rendered, variables)
        except RenderedTooLong as error:
            if not is_truncated:
                self.check_chars(error.chars, "messages")
            raise
        if not is_truncated:
            self.check_chars(len(text), "messages")
        return text

    async def _rendered(
        self,
        messages: Sequence[JsonDict],
        tokenizer: Tokenizer,
        most_chars: int,
        variables: Mapping[str, Any],
    ) -> str:
        if self.chat_templates is None:
            return await self.off_loop(lambda: tokenizer.apply_chat_template(messages, **variables))
        return await self.chat_templates.render(messages, most_chars, variables)

    @property
    def _most_rendered(self) -> int:
        """Most characters that a chat template may make: of a body, and of earlier turns that are
        kept, as many as fit.
        """
        info, tokenizer = self.ready()
        fitting = info.request_limits.longest * (tokenizer.longest_token or 0)
        most = max(self.settings.body_limit(info.model.context_length), fitting)
        return most + _TEMPLATE_CHARS

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
    from jitney.engine.core import Checker

    return Checker(setup).check(grammar).usable(param)
