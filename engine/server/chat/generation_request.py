"""The request for generation that a body makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.server.chat.conversation.thoughts import AssistantParser
from jitney.engine.server.chat.schema import GenerationBody


@dataclass(slots=True)
class EncodedPrompt:
    ids: list[int]
    #: As the client wrote it; None if it sent token ids.
    text: str | None = None
    #: End of a conversation's text, which shows whether the model has begun to think.
    tail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A generation request: engine requests and the options of the answer."""

    id: str
    #: Seconds since 1970.
    created: int
    #: The model's name in the answer.
    model: str
    prompts: list[EncodedPrompt]
    #: One per prompt, in order.
    engine_requests: list[EngineRequest]
    #: sampling.n sequences are generated per prompt.
    sampling: SamplingParams
    #: Its fields say how the answer is written.
    body: GenerationBody
    #: Alternatives shown per token; None for no log-probabilities.
    top_logprobs: int | None
    #: Whether the answer begins with the prompt.
    echo: bool = False
    #: Echo without a continuation (max_tokens 0): the one token is dropped.
    prompt_only: bool = False
    #: Makes a choice's parser of thoughts, content and calls; None: the text is not parsed.
    make_parser: Callable[[], AssistantParser] | None = None
    #: Special tokens that stay in the text for the parser; others stay only if requested.
    seen_ids: frozenset[int] = frozenset()
    #: Number of tool calls after which a choice ends; None: unlimited.
    most_calls: int | None = None
    #: Whether each choice must call, so that it has no content.
    must_call: bool = False
    #: Names of the tools that take a text.
    custom_names: frozenset[str] = frozenset()
    #: Whether thoughts are shown.
    shows_reasoning: bool = True
    #: Most prompts that are in the engine at a time; None: all.
    in_flight: int | None = None
    #: Numbers that each vector is cut to, of length 1 again; None: all.
    dimensions: int | None = None

    @property
    def first_group(self) -> int:
        """Number of prompts to submit at first."""
        together = len(self.engine_requests)
        return together if self.in_flight is None else min(self.in_flight, together)

    @property
    def sequences(self) -> int:
        """Sequences that are open at a time, of all prompts."""
        return self.first_group * self.sampling.n
