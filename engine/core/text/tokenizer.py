"""Encodes text to token ids and decodes them. Imports no jax."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from jitney.engine.common.errors import RequestError
from jitney.engine.common.rendered import reason_of
from jitney.engine.core.text.chat_template import read_template, used_templates
from jitney.engine.core.text.fast_tokenizers import (
    FastTokenizer,
    byte_characters,
    fast_tokenizer,
)
from jitney.engine.core.text.fill_in import FillIn
from jitney.engine.core.text.template_worker import TemplateSource, render_source
from jitney.engine.core.text.token_lengths import longest_token
from jitney.engine.core.weights.checkpoints.sources import ModelSource

_log = logging.getLogger("jitney.text")

#: SentencePiece's token of a single byte.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """The tokenizer and chat template of a model; thread-safe.

    It calls the Rust tokenizer directly: transformers' wrapper sets padding on it at every call,
    which fails with "Already borrowed" in concurrent threads.
    """

    def __init__(self, fast: FastTokenizer, eos_ids: Iterable[int] = ()):
        self._rust: Any = fast.rust  # its annotations allow lists where only numbers occur
        self._rust.no_padding()
        self._rust.no_truncation()
        #: Special tokens by name, such as "bos_token".
        self.special_tokens = fast.special_tokens
        self._templates = fast.chat_template
        end = self._special_id("eos_token")
        own = [] if end is None else [end]
        #: Tokens that end a generation.
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*eos_ids, *own]))
        #: Tokens that `decode(skip_special_tokens=True)` leaves out.
        self.special_ids: frozenset[int] = frozenset(
            id for id, token in self._rust.get_added_tokens_decoder().items() if token.special
        )
        #: Number of tokens; the model's vocabulary may be padded beyond it.
        self.vocab_size: int = self._rust.get_vocab_size(with_added_tokens=True)
        #: Most characters of a token; None: unbounded.
        self.longest_token: int | None = longest_token(self._rust)
        #: Cache by token id: computing a token's bytes takes about 6 us, and lists of
        #: log-probabilities need a thousand at once.
        self._known_bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, source: ModelSource, chat_template: str = "") -> Tokenizer:
        """The tokenizer of a model. Raises ModelError, and ConfigError for a template.

        chat_template: a file with a template to use in place of the model's.
        """
        override = read_template(chat_template) if chat_template else ""
        fast = fast_tokenizer(source)
        fast.chat_template = override or used_templates(fast.chat_template)
        return cls(fast, source.config.eos_ids)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Each token, as the tokenizer's files write it, and its id."""
        return self._rust.get_vocab(with_added_tokens=True)

    @property
    def bos_id(self) -> int | None:
        return self._special_id("bos_token")

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Text -> id of tokens that are matched in a text before all others."""
        return {token.content: id for id, token in self._rust.get_added_tokens_decoder().items()}

    @property
    def chat_template(self) -> str:
        """The template for chats without tools; "" without one."""
        if isinstance(self._templates, dict):
            return self._templates["default"]
        return self._templates or ""

    @property
    def tools_template(self) -> str:
        """The template for chats with tools; "" without one."""
        if isinstance(self._templates, dict):
            return self._templates.get("tool_use", self.chat_template)
        return self.chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, by default with the model's special tokens around it. Raises
        RequestError.

        Computes no offsets, which would hold Python's lock.
        """
        try:
            [encoding] = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoding.ids
        except BaseException as error:
            if not _is_tokenizers_own(error):
                raise
            raise _failed_on(text, error) from None

    def first_tokens(self, text: str, most: int) -> list[int]:
        """At most `most` ids of `text`, with special tokens; the end of the text is cut."""
        ids = self.encode(text)
        if len(ids) <= most:
            return ids
        plain = self.encode(text, add_special_tokens=False)
        n_special = len(ids) - len(plain)
        start = next((at for at in range(n_special + 1) if ids[at : at + len(plain)] == plain), 0)
        cut = plain[: max(0, most - n_special)]
        return ids[:start] + cut + ids[start + len(plain) :]

    def encode_pair(self, query: str, document: str, max_tokens: int | None = None) -> list[int]:
        """Token ids of two texts in the model's template (`[CLS] query [SEP] document [SEP]`).

        max_tokens: cut the document to fit. Raises RequestError if not a token of it fits.
        """
        try:
            first, second = (
                self._rust.encode(text, add_special_tokens=False) for text in (query, document)
            )
            if max_tokens is not None:
                special = self._rust.num_special_tokens_to_add(is_pair=True)
                room = max_tokens - special - len(first.ids)
                _check_room(room, len(first.ids), max_tokens)
                second.truncate(room)
            return self._rust.post_process(first, second).ids
        except BaseException as error:
            if not _is_tokenizers_own(error) or isinstance(error, RequestError):
                raise
            raise _failed_on(query + document, error) from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; incomplete characters become U+FFFD. Raises RequestError."""
        try:
            return self._rust.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not _is_tokenizers_own(error):
                raise
            _log.error("the tokenizer failed on %d tokens: %s", len(ids), error)
            raise RequestError(
                "the model's tokenizer fails on these tokens", code="internal_error"
            ) from None

    @property
    def template_source(self) -> TemplateSource | None:
        """The template for `template_worker`; None without one."""
        if not self.has_chat_template:
            return None
        return TemplateSource(self.chat_template, self.special_tokens, self.tools_template)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation with special tokens, rendered in a sandbox.

        Raises RequestError without a template, or if it refuses the messages.
        """
        source = self.template_source
        if source is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        try:
            # Many templates write the word None for a key that is null.
            return render_source(
                source,
                [
                    {key: value for key, value in message.items() if value is not None}
                    for message in messages
                ],
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except (
            Exception
        ) as error:  # a template may raise anything: jinja2's errors, TypeError, KeyError, ...
            raise RequestError(
                f"the chat template refused the messages: {reason_of(error)}", param="messages"
            ) from error

    @cached_property
    def fill_in(self) -> FillIn | None:
        """Tokens for fill-in-the-middle; None if the model has none."""
        return FillIn.of(self)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary, or None."""
        return self._rust.token_to_id(token)

    @property
    def special_names(self) -> tuple[str, ...]:
        """Names of the special tokens."""
        names = [self.id_to_token(id) for id in sorted(self.special_ids)]
        return tuple([name for name in names if name])

    @property
    def json(self) -> str:
        """JSON of the `tokenizers` library."""
        return self._rust.to_str()

    def id_to_token(self, id: int) -> str | None:
        """The token of the vocabulary, or None."""
        return self._rust.id_to_token(id)

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token adds to the text, maybe part of a character; b"" if unknown."""
        data = self._known_bytes.get(id)
        if data is None:
            data = self._known_bytes[id] = self._compute_bytes(id)
        return data

    def _compute_bytes(self, id: int) -> bytes:
        token = self.id_to_token(id)
        if token is None:
            return b""
        if id in self._added:
            return token.encode()
        if self._byte_level:
            return bytes(byte for character in token for byte in self._character_bytes(character))
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def _character_bytes(self, character: str) -> bytes:
        byte = self._bytes_of.get(character)
        return character.encode() if byte is None else bytes([byte])

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._rust.get_added_tokens_decoder())

    @cached_property
    def _byte_level(self) -> bool:
        """Whether the vocabulary maps bytes to characters (GPT-2), unlike SentencePiece's."""
        return b"ByteLevel" in self._rust.decoder.__getstate__() if self._rust.decoder else False

    @cached_property
    def _bytes_of(self) -> dict[str, int]:
        return {character: byte for byte, character in byte_characters().items()}


def _is_tokenizers_own(error: BaseException) -> bool:
    """Whether the tokenizer raised the error; a Rust panic is no Exception, and its class cannot be
    imported.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _failed_on(text: str, error: BaseException) -> RequestError:
    _log.warning("the tokenizer failed on a text of %d characters: %s", len(text), error)
    return RequestError("the model's tokenizer fails on this text", param="prompt")


def _check_room(room: int, query_tokens: int, max_tokens: int) -> None:
    """Raise RequestError unless a query leaves room for a token of a document."""
    if room < 1:
        raise RequestError(
            f"the query has {query_tokens} tokens, which leaves no room for a document in the "
            f"model's {max_tokens}",
            code="context_length_exceeded",
            param="query",
        )
