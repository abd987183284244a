"""Scores of a request's pairs. The prompts are sent to the engine in groups."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from jitney.engine.common.requests import SamplingParams
from jitney.engine.server.chat.choices import TokenList
from jitney.engine.server.chat.generation import Generation
from jitney.engine.server.chat.generation_request import GenerationRequest
from jitney.engine.server.chat.ranking.bodies import Pair, RankingBody
from jitney.engine.server.chat.ranking.kinds import Prompts, YesNo, kind_of
from jitney.engine.server.chat.request import RequestBuilder, RouteKind
from jitney.engine.server.chat.schema import GenerationBody

#: Number of alternatives requested from a yes-or-no model.
_ALTERNATIVES = 20
#: Makes the request of some prompts of tokens.
type _Ask = Callable[[Sequence[list[int]]], Awaitable[GenerationRequest]]


@dataclass(slots=True)
class _Output:
    """The engine's output for one prompt."""

    #: A vector or logits, float32, if they were asked for.
    embedding: bytes
    tokens: TokenList


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scores the pairs of one body. kind: how errors blame its texts."""

    builder: RequestBuilder[GenerationBody]
    body: RankingBody
    kind: RouteKind

    async def scores(self) -> list[float]:
        """A score for each pair; counts tokens in the context. Raises RequestError, HttpError."""
        service, context = self.builder.service, self.builder.context
        service.check_model(self.body.model)
        info, tokenizer = service.ready()
        kind = kind_of(info, tokenizer, service.settings.server.rerank)
        room = info.request_limits.longest_prompt
        room = min(room, self.body.truncate_prompt_tokens or room)
        with self.kind.blaming():
            pairs = self._tokenised_pairs()
            prompts = await service.text.off_loop(lambda: kind.prompts(pairs, self.body, room))
            self._note_cut(prompts)
            if isinstance(kind, YesNo):
                scores = await self._yes_no(kind, prompts.ids)
            else:
                outputs = await self._run(prompts.ids, partial(self.builder.vectors, self.kind))
                scores = kind.scores(prompts, [output.embedding for output in outputs])
        context.prompt_tokens = sum(map(len, prompts.ids))
        return scores

    def _tokenised_pairs(self) -> list[Pair]:
        """The pairs, documents cut to what can fit. Raises RequestError for a query as long."""
        service, pairs = self.builder.service, self.body.pairs
        service.text.check_chars(max(len(pair.query) for pair in pairs), "query")
        most = service.text.most_chars
        return [pair._replace(document=pair.document[:most]) for pair in pairs]

    def _note_cut(self, prompts: Prompts) -> None:
        """Note cut documents, unless the client has set a length."""
        if self.body.truncate_prompt_tokens is None:
            notes = self.builder.context.notes
            notes.warnings.extend(
                f"documents[{place}] is cut to the context" for place in prompts.cut
            )

    async def _yes_no(self, kind: YesNo, prompts: Sequence[list[int]]) -> list[float]:
        """Scores of a yes-or-no model by log-probabilities, which allowed tokens do not change. If
        the other word is not among the alternatives, which is rare, a second request asks for it.
        """
        width = min(_ALTERNATIVES, self.builder.service.info.sizes.max_logprobs)
        words = (kind.yes, kind.no)
        outputs = await self._run(prompts, partial(self._chosen, allowed=words, width=width))
        logprobs = [_logprobs(output) for output in outputs]
        for word in words:
            missing = [place for place, scores in enumerate(logprobs) if word not in scores]
            ask = partial(self._chosen, allowed=(word,), width=0)
            more = await self._run([prompts[place] for place in missing], ask)
            for place, output in zip(missing, more, strict=True):
                logprobs[place] |= _logprobs(output)
        return [kind.score(scores) for scores in logprobs]

    async def _chosen(
        self, prompts: Sequence[list[int]], allowed: tuple[int, ...], width: int
    ) -> GenerationRequest:
        """One of these tokens behind each prompt. width: alternatives."""
        sampling = SamplingParams(
            max_tokens=1, temperature=0.0, allowed_token_ids=allowed, logprobs=width
        )
        return await self.builder.tokens(self.kind, prompts, sampling)

    async def _run(self, prompts: Sequence[list[int]], ask: _Ask) -> list[_Output]:
        """The outputs of all prompts, in order. ask: makes the request of a group of them."""
        outputs: list[_Output] = []
        size = self.builder.group_size
        for start in range(0, len(prompts), size):
            request = await ask(prompts[start : start + size])
            outputs += await self._answered(request)
        return outputs

    async def _answered(self, request: GenerationRequest) -> list[_Output]:
        service, context = self.builder.service, self.builder.context
        async with Generation(service, request, context) as generation:
            tokens = [TokenList.empty(request.top_logprobs) for _ in generation.choices]
            while not generation.done:
                for choice, delta in await generation.deltas(None):
                    tokens[choice.index].extend(delta.tokens)
        return [_Output(*both) for both in zip(generation.embeddings, tokens, strict=True)]


def _logprobs(output: _Output) -> dict[int, float]:
    """Log-probabilities of the chosen token and the likeliest ones."""
    scores, [chosen] = output.tokens.scores, output.tokens.ids
    assert scores is not None  # they were requested
    logprobs = dict(scores.top(0))
    logprob = scores.logprob(0)
    return logprobs if logprob is None else logprobs | {chosen: logprob}
