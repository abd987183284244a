"""Text work of the served model: limits, tokenizing, chats, grammars, and its turn format."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jitney.engine.common.errors import RequestError
from jitney.engine.common.replaceable_threads import ReplaceableThreads
from jitney.engine.common.requests import Grammar, JsonDict
from jitney.engine.core import ChatTemplates, CheckedGrammar, RenderedTooLong, checked_here
from jitney.engine.server.chat.conversation.formats import TurnFormat
from jitney.engine.server.chat.conversation.template_abilities import ChatAbilities
from jitney.engine.server.http.settings import ServerSettings

if TYPE_CHECKING:
    from jitney.engine.common.engine_info import EngineInfo
    from jitney.engine.core import FillIn, Grammars, Tokenizer

_log = logging.getLogger("jitney.api")

#: Threads that tokenise, and most replaced threads that may still run.
_THREADS = 2
_MOST_LEFT = 8
#: Seconds after which a thread without work ends.
_IDLE_S = 5.0
#: Most characters that a chat template may add to the messages.
_TEMPLATE_CHARS = 1 << 16
#: Most seconds to find a template's abilities; after that the defaults are used.
_PROBING_S = 10.0
#: Most characters that a chat template may make of a small conversation.
_PROBE_CHARS = 1 << 20

#: The running engine and its tokenizer. Raises RequestError when there is none.
type _Ready = Callable[[], tuple[EngineInfo, Tokenizer]]


class ModelText:
    """Runs the model's text work off the event loop, within limits."""

    def __init__(self, ready: _Ready, settings: ServerSettings):
        self._ready = ready
        self._settings = settings
        self._threads = TextThreads()
        #: Renders chats in processes; None: in the text threads, which an endless template blocks.
        self.chat_templates: ChatTemplates | None = None
        #: Checks grammars in processes; None: in the text threads, with the same risk.
        self.grammars: Grammars | None = None

    def close(self) -> None:
        """Release the threads; a tokenisation that still runs is not waited for."""
        self._threads.close()

    async def off_loop[T](self, work: Callable[[], T]) -> T:
        """Run blocking text work on a thread, for at most `tokenize_timeout_s`."""
        return await self._threads.run(work, self._settings.tokenize_timeout_s)

    @property
    def most_chars(self) -> int | None:
        """Most characters that fit the context; None: unknown, as the tokenizer drops
        characters.
        """
        info, tokenizer = self._ready()
        longest = tokenizer.longest_token
        return None if longest is None else info.request_limits.longest * longest

    def check_chars(self, chars: int, param: str) -> None:
        """Raise RequestError for a text with more characters than the context can hold in the
        longest tokens. Shorter ones are bounded by the body limit and `tokenize_timeout_s`. A
        prompt to be truncated is tokenised whole, since its end alone may give other tokens.
        """
        info, _ = self._ready()
        most, limits = self.most_chars, info.request_limits
        if most is not None and chars > most:
            at_least = math.ceil(chars * limits.longest / most)
            raise RequestError.too_long(limits.overflow(at_least, 1, is_lower_bound=True), param)

    def fill_in(self, param: str) -> FillIn:
        """The model's fill-in-the-middle tokens. param: the field to blame. Raises RequestError."""
        _, tokenizer = self._ready()
        if tokenizer.fill_in is None:
            raise RequestError(
                "this model was not taught to fill in the middle: its vocabulary has no tokens for "
                "it",
                code="unsupported_parameter",
                param=param,
            )
        return tokenizer.fill_in

    async def render_chat(
        self,
        messages: Sequence[JsonDict],
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        is_truncated: bool = False,
    ) -> str:
        """A conversation's prompt text. is_truncated: it may exceed the context. Raises
        RequestError.
        """
        info, tokenizer = self._ready()
        if not tokenizer.has_chat_template:
            raise RequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        # Enough for the longest body and the stored earlier turns.
        fitting = info.request_limits.longest * (tokenizer.longest_token or 0)
        most = max(self._settings.body_limit(info.model.context_length), fitting) + _TEMPLATE_CHARS
        try:
            text = await self.rendered(messages, tokenizer, most, variables)
        except RenderedTooLong as error:
            if not is_truncated:
                self.check_chars(error.chars, "messages")
            raise
        if not is_truncated:
            self.check_chars(len(text), "messages")
        return text

    async def rendered(
        self,
        messages: Sequence[JsonDict],
        tokenizer: Tokenizer,
        most_chars: int,
        variables: Mapping[str, Any],
    ) -> str:
        """The text of a chat template, also before the engine is ready. Raises RequestError."""
        if self.chat_templates is None:
            return await self.off_loop(lambda: tokenizer.apply_chat_template(messages, **variables))
        return await self.chat_templates.render(messages, most_chars, variables)

    async def checked_grammar(self, grammar: Grammar, param: str) -> CheckedGrammar:
        """The usable grammar. Raises RequestError, blamed on `param` or on a tool."""
        if self.grammars is not None:
            return await self.grammars.checked(grammar, param)
        info, tokenizer = self._ready()
        names, size = tokenizer.special_names, info.model.vocab_size
        return await self.off_loop(lambda: checked_here(names, size, grammar, param))


class ModelTurns:
    """The chat format of the model, detected from its template at the start or the first use."""

    def __init__(self, ready: _Ready, settings: ServerSettings, text: ModelText):
        self._ready = ready
        self._settings = settings
        self._text = text
        self._format: TurnFormat | None = None
        self._abilities: ChatAbilities | None = None
        self._special_texts: dict[str, int] | None = None

    @property
    def format(self) -> TurnFormat:
        """The form of the model's turns. Raises RequestError while no model is loaded."""
        return self._format or self.learn_format(self._ready()[1])

    def learn_format(self, tokenizer: Tokenizer) -> TurnFormat:
        """Detect the turn format from the chat template; takes some 10 ms."""
        server = self._settings.server
        names = server.tool_call_parser, server.reasoning_parser
        texts = dict.fromkeys((tokenizer.chat_template, tokenizer.tools_template))
        self._format = TurnFormat.of("\n".join(texts), *names)
        return self._format

    async def abilities(self) -> ChatAbilities:
        """The chat template's abilities. Raises RequestError while no model is loaded."""
        return self._abilities or await self.learn_abilities(self._ready()[1])

    async def learn_abilities(self, tokenizer: Tokenizer) -> ChatAbilities:
        """Find the abilities by rendering small conversations: some 50 ms, at most `_PROBING_S`."""
        abilities = self._abilities = await self._probed(tokenizer)
        if abilities.refusal:
            _log.error(
                "the chat template cannot render one message of a user, so chats will be refused; "
                "--chat-template names a file with another one (%s)",
                abilities.refusal,
            )
        return abilities

    async def _probed(self, tokenizer: Tokenizer) -> ChatAbilities:
        async def render(messages: list[JsonDict], variables: JsonDict) -> str:
            return await self._text.rendered(messages, tokenizer, _PROBE_CHARS, variables)

        if not tokenizer.has_chat_template:
            return ChatAbilities()
        try:
            async with asyncio.timeout(_PROBING_S):
                return await ChatAbilities.of(render)
        except TimeoutError:
            reason = f"it takes more than {_PROBING_S:g} s for small conversations"
            return ChatAbilities(refusal=reason)

    def marker_ids(self, names: Collection[str]) -> frozenset[int]:
        """Special tokens that a parser needs. names: the functions that may be called."""
        markers = self.format.markers(with_calls=bool(names))
        special = self.special_texts
        return frozenset(special[marker] for marker in markers if marker in special)

    @property
    def special_texts(self) -> dict[str, int]:
        """Token ids of the turns' markers; also of angle-bracket markers that are normal
        tokens.
        """
        if self._special_texts is None:
            _, tokenizer = self._ready()
            self._special_texts = {}
            for text in self.format.markers(with_calls=True):
                id = tokenizer.added_tokens.get(text)
                is_tag = text.startswith("<") and text.endswith(">")
                if id is not None and (is_tag or id in tokenizer.special_ids):
                    self._special_texts[text] = id
        return self._special_texts


class TextThreads:
    """Runs text work in a few threads, and replaces threads that hang."""

    def __init__(
        self, threads: int = _THREADS, most_left: int = _MOST_LEFT, idle_s: float = _IDLE_S
    ):
        self._threads = ReplaceableThreads("tokenize", threads, most_left=most_left, idle_s=idle_s)

    async def run[T](self, work: Callable[[], T], timeout_s: float) -> T:
        """The result of `work`, or its error. Raises RequestError after `timeout_s`."""
        future: Future[T] = Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                _do(work, future)

        def give_up() -> None:
            if not future.running():
                return
            if self._threads.leave(job):
                _log.warning("a text takes too long to tokenise; another thread takes over")
            else:
                _log.error("too many threads tokenise without an end; no more are added")

        done = asyncio.wrap_future(future)
        # The timer stays if the client leaves: a thread that hangs must be replaced.
        timer = asyncio.get_running_loop().call_later(timeout_s, give_up)
        self._threads.put(job)
        await asyncio.wait((done,), timeout=timeout_s)
        if done.done():
            timer.cancel()
            return done.result()
        if future.cancel():
            raise RequestError("too many prompts wait to be tokenised", code="busy")
        raise RequestError("the prompt took too long to tokenise")

    def close(self) -> None:
        """Let the threads end after their queued work; the server does not wait for them."""
        self._threads.close()


def _do[T](work: Callable[[], T], future: Future[T]) -> None:
    try:
        result = work()
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:  # a panic in a library; the thread must go on
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
    else:
        future.set_result(result)
