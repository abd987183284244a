"""Commits finished steps: appends tokens, detects ends, counts rows."""

from __future__ import annotations

import logging
import math

import numpy as np

from jitney.engine.common.errors import ErrorInfo
from jitney.engine.common.outputs import FinishReason, PromptLogprobs, SequenceOutput, TokenLogprobs
from jitney.engine.core.scheduler.open_sequences import OpenSequences
from jitney.engine.core.scheduler.plan import REJECTED, Chunk, Plan, StepResult
from jitney.engine.core.scheduler.queues import WaitingQueue
from jitney.engine.core.scheduler.sequence import Matcher, Sequence

_log = logging.getLogger("jitney.core")

_NAN = ErrorInfo("nan_logits", "the model's logits were not finite for this request")


class Results:
    """Applies the results of steps to the sequences that they were planned for."""

    def __init__(self, sequences: OpenSequences):
        self._sequences = sequences
        self._pages = sequences.pages
        # Whether the queue counts tokens; if not, the call for each token is skipped.
        self._charges = type(sequences.live.queue).charge is not WaitingQueue.charge

    def commit(self, plan: Plan, result: StepResult, now: float) -> None:
        """Apply the result of each chunk, and count in the plan what became of its rows. An
        exception for one sequence ends only that sequence.
        """
        self._commit_decode(plan, result, now)
        row, scored = plan.n_decode, 0
        for number, chunk in enumerate(plan.prompt_chunks, plan.n_decode):
            entries: list[TokenLogprobs] = []
            if chunk.scored and result.prompt_logprobs is not None:
                entries = result.prompt_logprobs[scored : scored + chunk.scored]
            self._commit_prompt(plan, number, result, row, entries, now)
            row += chunk.logit_rows
            scored += chunk.scored

    def _commit_decode(self, plan: Plan, result: StepResult, now: float) -> None:
        """Apply the decode rows, each of which has one logit row."""
        fresh = 0
        for row, chunk in enumerate(plan.chunks[: plan.n_decode]):
            seq = chunk.seq
            if chunk.draft and not self._accept(plan, chunk, result.tokens[row]):
                continue
            if seq.finish is not None:
                self._count_dropped(plan, chunk)
                if result.tokens[row] < 0:
                    self._pages.withdraw(seq)
                continue
            if chunk.recomputed:
                plan.recomputed += 1
            else:
                fresh += 1
            if chunk.sits_out:
                continue
            try:
                self._append(chunk, result, row, now)
            except Exception:
                self._drop(seq)
        plan.decode += fresh - plan.accepted

    def _accept(self, plan: Plan, chunk: Chunk, token: int) -> bool:
        """Process a row that read a draft. -> whether its token counts. It does not if the sequence
        has lost its seat meanwhile: the same token is then sampled again later.
        """
        seq = chunk.seq
        seq.drafting -= 1
        is_open = seq.finish is None
        counts = token != REJECTED and not chunk.sits_out
        if not counts or (is_open and seq not in self._sequences.seats.decoding):
            plan.rejected += 1
            # The output of the row before it, if any, is the newest one.
            newest = self._sequences.outputs[-1:]
            if newest and (newest[0].request_id, newest[0].index) == seq.key:
                newest[0].rejected += 1
            return False
        if is_open:
            seq.scheduled += 1
            seq.in_flight += 1
            plan.accepted += not chunk.recomputed
            self._sequences.seats.reorder()
        return True

    def _commit_prompt(
        self,
        plan: Plan,
        number: int,
        result: StepResult,
        row: int,
        entries: list[TokenLogprobs],
        now: float,
    ) -> None:
        """Apply the result of the plan's chunk `number`. row: index of its logit row, if it has
        one. entries: log-probabilities of its scored rows, which its siblings share.
        """
        chunk = plan.chunks[number]
        seq = chunk.seq
        ended = seq.finish is not None
        if ended:
            self._count_dropped(plan, chunk)
        else:
            self._count_rows(plan, chunk)
        broken = result.broken is not None and result.broken[number]
        if chunk.sample and result.tokens[row] < 0:
            broken = True
        try:
            if broken or any(math.isnan(entry.logprob) for entry in entries):
                self._fail_prompt(seq, chunk)
                return
            if chunk.scored:
                self._score(seq, chunk, entries)
            if chunk.sample and not ended and not chunk.sits_out:
                self._append(chunk, result, row, now)
            if chunk.pools and not ended:
                self._pool(chunk, result, number, now)
        except Exception:
            self._drop(seq)

    def _drop(self, seq: Sequence) -> None:
        """End a sequence whose result raised an exception."""
        _log.exception(
            "request %s, sequence %d: its result could not be taken in", seq.request.id, seq.index
        )
        if seq.finish is None:
            self._sequences.end(seq, "error")

    @staticmethod
    def _count_dropped(plan: Plan, chunk: Chunk) -> None:
        """Count the rows of a sequence that ended after their launch, by itself or from outside."""
        if chunk.seq.finish in ("stop", "length"):
            plan.past_end += chunk.count
        else:
            plan.cancelled += chunk.count

    @staticmethod
    def _count_rows(plan: Plan, chunk: Chunk) -> None:
        """Count rows by kind. A prompt chunk's row that reads an output token for the first time
        counts as a decode row.
        """
        fresh = chunk.start + chunk.recomputed
        prefill = max(0, min(chunk.end, chunk.seq.n_prompt) - fresh)
        plan.recomputed += chunk.recomputed
        plan.prefill += prefill
        plan.decode += chunk.count - chunk.recomputed - prefill

    def _score(self, seq: Sequence, chunk: Chunk, entries: list[TokenLogprobs]) -> None:
        """Store the log-probabilities of the prompt tokens after the chunk's scored positions."""
        if len(entries) != chunk.scored:
            raise ValueError("the step brought no log-probabilities of the prompt")
        most = seq.request.sampling.prompt_logprobs
        seq.prompt_logprobs += [_trimmed(entry, most) for entry in entries]
        self._pages.keep_scores(seq, chunk.scored)

    def _append(self, chunk: Chunk, result: StepResult, row: int, now: float) -> None:
        """Append a new token, end the sequence if the token ends it, and emit the output."""
        seq, token = chunk.seq, result.tokens[row]
        seq.in_flight -= 1
        if token < 0:
            self._fail(seq)
            return
        tokens = seq.tokens
        output = SequenceOutput(seq.request_id, seq.index, [token])
        if chunk.draft:
            output.accepted = 1
        if seq.logprobs is not None:
            output.logprobs = [_trimmed(_logprobs_of(result)[row], seq.logprobs)]
        tokens.append(token)
        if self._charges:
            self._sequences.class_of(seq).queue.charge(seq, 1)
        if seq.first_token_at is None:
            self._first_token(seq, output, now)
        if len(tokens) >= seq.limit or token in seq.stop_ids:
            finish = _end_of(seq, token)
            if finish is not None:
                self._sequences.close(seq, finish)
                output.finish = finish
                output.stop_token = token if finish == "stop" else None
        self._sequences.outputs.append(output)
        if seq.matcher is not None and output.stop_token is None:
            seq.drafts = result.drafts.get(row, [])
            self._match(seq, seq.matcher, output)

    def _pool(self, chunk: Chunk, result: StepResult, number: int, now: float) -> None:
        """Add the hidden states of the plan's chunk `number` to its prompt's vector. The sequence
        ends with the prompt.
        """
        if result.pooled is None:
            raise ValueError("the step brought no hidden states")
        seq = chunk.seq
        pooled = result.pooled[number].astype(np.float64)
        # After a preemption a prompt is computed again from its first row on.
        if seq.pooled is not None and chunk.start and seq.request.pooling == "mean":
            pooled += seq.pooled
        seq.pooled = pooled
        if chunk.end < seq.n_prompt:
            return
        seq.in_flight -= 1
        output = SequenceOutput(seq.request_id, seq.index)
        if seq.request.pooling == "classify":
            output.embedding = pooled.astype(np.float32).tobytes()
        else:
            output.embedding = _of_length_one(pooled).tobytes()
        self._first_token(seq, output, now)
        self._sequences.close(seq, "stop")
        output.finish = "stop"
        self._sequences.outputs.append(output)

    def _match(self, seq: Sequence, matcher: Matcher, output: SequenceOutput) -> None:
        """Advance the sequence's grammar, and end the sequence if the text is complete."""
        matcher.take(seq.tokens, seq.n_prompt, last=seq.finish is not None)
        if matcher.complete:
            if seq.finish is None:
                self._sequences.close(seq, "stop")
            output.finish = "stop"

    @staticmethod
    def _first_token(seq: Sequence, output: SequenceOutput, now: float) -> None:
        """Fill in the fields that only the first token's output has."""
        seq.first_token_at = now
        output.cached_tokens = seq.cached_tokens
        if seq.boarded_at is not None:
            output.queued_s = max(0.0, seq.boarded_at - seq.request.arrival)
            output.prefill_s = max(0.0, now - seq.boarded_at)
        if seq.request.sampling.prompt_logprobs is not None:
            if len(seq.prompt_logprobs) != seq.n_prompt:
                raise ValueError("log-probabilities of the prompt are missing")
            output.prompt_logprobs = PromptLogprobs.of(seq.prompt_logprobs)

    def _fail(self, seq: Sequence) -> None:
        """Withdraw the pages of a sequence with a non-finite row, and end it if it is open."""
        self._pages.withdraw(seq)
        if seq.finish is None:
            self._sequences.end(seq, "error", _NAN)

    def _fail_prompt(self, seq: Sequence, chunk: Chunk) -> None:
        """Fail a sequence after a non-finite row; if the row is of the prompt, its siblings share
        that prompt and fail too.
        """
        self._fail(seq)
        if chunk.start < seq.n_prompt:
            for sibling in self._sequences.requests.open_of(seq.request_id):
                self._fail(sibling)


def _end_of(seq: Sequence, token: int) -> FinishReason | None:
    """The finish reason if the token just appended ends the sequence, else None. The device also
    bans end tokens before min_tokens.
    """
    if token in seq.stop_ids and seq.n_output >= seq.request.sampling.min_tokens:
        return "stop"
    return "length" if len(seq.tokens) >= seq.limit else None


def _of_length_one(vector: np.ndarray) -> np.ndarray:
    """Normalise to length one: float64 [E] -> float32 [E]."""
    length = np.linalg.norm(vector)
    if length:
        vector = vector / length
    return vector.astype(np.float32)


def _logprobs_of(result: StepResult) -> list[TokenLogprobs]:
    """The log-probabilities of a step; raises ValueError if the runner returned none."""
    if result.logprobs is None:
        raise ValueError("the step brought no log-probabilities")
    return result.logprobs


def _trimmed(entry: TokenLogprobs, most: int | None) -> TokenLogprobs:
    """The entry with only its `most` likeliest alternatives; the device always computes the maximum
    number.
    """
    return TokenLogprobs(entry.logprob, entry.top_ids[:most], entry.top_logprobs[:most])
