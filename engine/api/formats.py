"""The two shapes an answer can have, whole or in chunks: text completion and chat completion."""

from __future__ import annotations

from typing import Any

import orjson

from jitney.engine.api.generation import Choice, ChoiceDelta, Generation, Token
from jitney.engine.text.detokenizer import TokenBytes

DONE = b"data: [DONE]\n\n"
#: JSON has no minus infinity; OpenAI writes this for a token that cannot be chosen.
LOWEST = -9999.0


class Format:
    """Answers of one run. `whole` for a plain answer, `chunks` and `tail` for a stream (SSE
    frames).
    """

    whole_object = chunk_object = ""

    def __init__(self, run: Generation, tokenizer: TokenBytes):
        self.run, self.job = run, run.job
        self._token_bytes = tokenizer.token_bytes
        self._head = {
            "id": self.job.id,
            "object": "",
            "created": self.job.created,
            "model": self.job.model,
        }

    def whole(self, pieces: dict[int, ChoiceDelta]) -> bytes:
        """The body of a plain answer; pieces: everything each choice gained, by choice index."""
        choices = [
            self._choice(index, choice, pieces[choice.index])
            for index, choice in enumerate(self._best())
        ]
        return orjson.dumps(
            self._head
            | {"object": self.whole_object, "choices": choices}
            | self._whole_extra()
            | {"usage": self.run.usage()}
        )

    def chunks(self, choice: Choice, piece: ChoiceDelta) -> bytes:
        """The frames of one piece; the first one of a choice opens it."""
        frames = b"".join(self._frame([entry]) for entry in self._entries(choice, piece))
        choice.started = True
        return frames

    def tail(self) -> bytes:
        """What follows the last chunk."""
        return (self._frame([], self.run.usage()) if self.job.include_usage else b"") + DONE

    def _frame(
        self, choices: list[dict[str, Any]], usage: dict[str, object] | None = None
    ) -> bytes:
        body = self._head | {"object": self.chunk_object, "choices": choices}
        if self.job.continuous_usage or self.job.include_usage:
            body["usage"] = self.run.usage() if self.job.continuous_usage else usage
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def _best(self) -> list[Choice]:
        """The choices to return, prompt by prompt; with best_of > n those of highest mean
        log-probability.
        """
        n, made = self.job.n, self.job.sampling.n
        if made == n:
            return self.run.choices
        groups = (
            self.run.choices[start : start + made]
            for start in range(0, len(self.run.choices), made)
        )
        return [
            choice
            for group in groups
            for choice in sorted(group, key=lambda choice: choice.mean_logprob, reverse=True)[:n]
        ]

    def _token_ids(self, piece: ChoiceDelta) -> dict[str, Any]:
        return (
            {"token_ids": [token.id for token in piece.tokens]} if self.job.return_token_ids else {}
        )

    def _choice(self, index: int, choice: Choice, piece: ChoiceDelta) -> dict[str, Any]:
        raise NotImplementedError

    def _whole_extra(self) -> dict[str, Any]:
        return {}

    def _entries(self, choice: Choice, piece: ChoiceDelta) -> list[dict[str, Any]]:
        raise NotImplementedError


class CompletionFormat(Format):
    whole_object = chunk_object = "text_completion"

    def _choice(
        self, index: int, choice: Choice, piece: ChoiceDelta, *, echo: bool = True
    ) -> dict[str, Any]:
        """echo: this is where the prompt is repeated, if it is to be."""
        text, tokens, echoed = piece.text, piece.tokens, 0
        if self.job.prompt_only:
            text, tokens = "", []
        if self.job.echo:
            prompt = self.run.echoes[choice.prompt]
            echoed = len(prompt.text)
            if echo:
                text = prompt.text + text
        logprobs = None
        if self.job.top_logprobs is not None:
            logprobs = self._logprobs(
                prompt.tokens() if self.job.echo and echo else [], tokens, echoed
            )
        entry = {
            "index": index,
            "text": text,
            "finish_reason": "length" if self.job.prompt_only else piece.finish,
            "logprobs": logprobs,
        }
        if self.job.return_token_ids and echo:
            entry["prompt_token_ids"] = choice.request.prompt
        return entry | self._token_ids(ChoiceDelta(tokens=tokens))

    def _entries(self, choice: Choice, piece: ChoiceDelta) -> list[dict[str, Any]]:
        return [self._choice(choice.index, choice, piece, echo=not choice.started)]

    def _logprobs(self, prompt: list[Token], output: list[Token], shift: int) -> dict[str, Any]:
        tokens = prompt + output
        return {
            "tokens": [self._text(token.id) for token in tokens],
            "token_logprobs": [
                _finite(token.logprobs.logprob) if token.logprobs else None for token in tokens
            ],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [
                *(token.offset for token in prompt),
                *(token.offset + shift for token in output),
            ],
        }

    def _top(self, token: Token) -> dict[str, float] | None:
        """Token text -> log-probability of the most likely ones and of the token itself."""
        if (entry := token.logprobs) is None:
            return None
        count = self.job.top_logprobs
        top = {
            self._text(id): _finite(value)
            for id, value in zip(entry.top_ids[:count], entry.top_logprobs[:count], strict=True)
        }
        return top | {self._text(token.id): _finite(entry.logprob)}

    def _text(self, token: int) -> str:
        """A token as a JSON key; `bytes:\\x..` (OpenAI's form) where it is no whole character: no
        two may collide.
        """
        data = self._token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatFormat(Format):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _choice(self, index: int, choice: Choice, piece: ChoiceDelta) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "finish_reason": piece.finish,
            "logprobs": self._logprobs(piece.tokens),
        } | self._token_ids(piece)

    def _whole_extra(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.job.prompts[0].ids} if self.job.return_token_ids else {}

    def _entries(self, choice: Choice, piece: ChoiceDelta) -> list[dict[str, Any]]:
        """role first, then content, then the reason of the end, each in a chunk of its own."""
        entries = []
        if not choice.started:
            entries.append(self._delta(choice, {"role": "assistant", "content": ""}))
            if self.job.return_token_ids:
                entries[0]["prompt_token_ids"] = choice.request.prompt
        if piece.text or (
            piece.tokens and (self.job.top_logprobs is not None or self.job.return_token_ids)
        ):
            entry = self._delta(choice, {"content": piece.text}) | self._token_ids(piece)
            entries.append(entry | {"logprobs": self._logprobs(piece.tokens)})
        if piece.finish is not None:
            entries.append(self._delta(choice, {}, piece.finish))
        return entries

    def _delta(
        self, choice: Choice, delta: dict[str, str], finish: str | None = None
    ) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "finish_reason": finish, "logprobs": None}

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if self.job.top_logprobs is None:
            return None
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: Token) -> dict[str, Any]:
        entry, count = token.logprobs, self.job.top_logprobs
        if entry is None:
            return self._spelled(token.id, LOWEST) | {"top_logprobs": []}
        top = zip(entry.top_ids[:count], entry.top_logprobs[:count], strict=True)
        return self._spelled(token.id, entry.logprob) | {
            "top_logprobs": [self._spelled(*each) for each in top]
        }

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._token_bytes(token)
        return {
            "token": data.decode(errors="replace"),
            "logprob": _finite(logprob),
            "bytes": list(data),
        }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
