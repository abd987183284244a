"""What a finished step means for its sequences: tokens appended, ends detected, every row's fate written down."""

from __future__ import annotations

import logging

from jitney.engine.errors import ErrorInfo
from jitney.engine.pages import PagePool
from jitney.engine.plan import Chunk, Plan, StepResult
from jitney.engine.roster import Roster
from jitney.engine.sequence import Sequence
from jitney.engine.types import FinishReason, SequenceOutput, TokenLogprobs

log = logging.getLogger("jitney.core")

NAN = ErrorInfo("nan_logits", "the model's logits were not finite for this request")


class Committer:
    """The second half of the scheduler: `commit` a step's result to the sequences it was planned for."""

    def __init__(self, roster: Roster, pool: PagePool):
        self.roster, self.pool, self.counts = roster, pool, roster.queue.counts

    def commit(self, plan: Plan, result: StepResult, now: float) -> None:
        """Give each chunk its logit rows; an exception over one sequence ends that sequence alone."""
        n_decode, decoded = plan.n_decode, 0
        for row, chunk in enumerate(plan.chunks[:n_decode]):  # of one logit row each
            seq = chunk.seq
            if seq.finish is not None:
                self._count_dropped(plan, chunk)
                continue
            if chunk.recomputed:
                plan.recomputed += 1
            else:
                decoded += 1
            try:
                self._append(seq, result, row, now)
            except Exception:
                self._drop(seq)
        plan.decode += decoded
        row = n_decode
        for chunk in plan.chunks[n_decode:]:
            if chunk.seq.finish is not None:
                self._count_dropped(plan, chunk)
            else:
                self._commit_prompt(plan, chunk, result, row, now)
            row += chunk.logit_rows

    def _commit_prompt(self, plan: Plan, chunk: Chunk, result: StepResult, row: int, now: float) -> None:
        """Give a prompt chunk its logit rows, the first of which is `row`."""
        seq = chunk.seq
        self._count_rows(plan, chunk)
        try:
            if chunk.scored:
                self._score(seq, chunk, result, row)
            if chunk.sample and seq.finish is None:
                self._append(seq, result, row + chunk.scored, now)
        except Exception:
            self._drop(seq)

    def _drop(self, seq: Sequence) -> None:
        """Taking in a sequence's result failed: end it."""
        log.exception("request %s, sequence %d: its result could not be taken in", seq.request.id, seq.index)
        if seq.finish is None:
            self.roster.end(seq, "error")

    @staticmethod
    def _count_dropped(plan: Plan, chunk: Chunk) -> None:
        """Rows of a sequence that ended after they were launched: by itself, or ended from outside."""
        if chunk.seq.finish in ("stop", "length"):
            plan.past_end += chunk.count
        else:
            plan.cancelled += chunk.count

    @staticmethod
    def _count_rows(plan: Plan, chunk: Chunk) -> None:
        """Rows by kind; a row of a prompt chunk that feeds back an output token for the first time is a decode row."""
        fresh = chunk.start + chunk.recomputed
        prefill = max(0, min(chunk.end, chunk.seq.n_prompt) - fresh)
        plan.recomputed += chunk.recomputed
        plan.prefill += prefill
        plan.decode += chunk.count - chunk.recomputed - prefill

    def _score(self, seq: Sequence, chunk: Chunk, result: StepResult, row: int) -> None:
        """Keep the log-probabilities of the prompt tokens that follow the chunk's scored positions."""
        rows = slice(row, row + chunk.scored)
        if min(result.tokens[rows]) < 0:
            self._fail(seq)
            return
        most = seq.request.sampling.prompt_logprobs
        seq.prompt_logprobs += [trimmed(entry, most) for entry in logprobs_of(result)[rows]]

    def _append(self, seq: Sequence, result: StepResult, row: int, now: float) -> None:
        """One new token: append it, see whether it ends the sequence, emit both."""
        token = result.tokens[row]
        seq.in_flight -= 1
        if token < 0:
            self._fail(seq)
            return
        tokens = seq.tokens
        output = SequenceOutput(seq.request_id, seq.index, [token])
        if seq.logprobs is not None:
            output.logprobs = [trimmed(logprobs_of(result)[row], seq.logprobs)]
        tokens.append(token)
        if self.counts:
            self.roster.queue.charge(seq, 1)
        if seq.first_token_at is None:
            self._first_token(seq, output, now)
        if len(tokens) >= seq.limit or token in seq.stop_ids:
            finish = end_of(seq, token)
            if finish is not None:
                self.roster.close(seq, finish)
                output.finish = finish
                output.stop_token = token if finish == "stop" else None
        self.roster.outputs.append(output)

    @staticmethod
    def _first_token(seq: Sequence, output: SequenceOutput, now: float) -> None:
        """Fill in what is told once, with the first token."""
        seq.first_token_at = now
        output.cached_tokens = seq.cached_tokens
        if seq.boarded_at is not None:
            output.queued_s = max(0.0, seq.boarded_at - seq.request.arrival)
            output.prefill_s = max(0.0, now - seq.boarded_at)
        if seq.request.sampling.prompt_logprobs is not None:
            output.prompt_logprobs = seq.prompt_logprobs

    def _fail(self, seq: Sequence) -> None:
        """A row was not finite: end the sequence, and let nobody share the pages that may have caused it."""
        self.pool.withdraw(seq.pages)
        seq.shares = False
        self.roster.end(seq, "error", NAN)


def end_of(seq: Sequence, token: int) -> FinishReason | None:
    """Whether a token just appended ends the sequence; min_tokens also bans the ends on the device."""
    if token in seq.stop_ids and seq.n_output >= seq.request.sampling.min_tokens:
        return "stop"
    return "length" if len(seq.tokens) >= seq.limit else None


def logprobs_of(result: StepResult) -> list[TokenLogprobs]:
    """The log-probabilities of a step; ValueError if the runner brought none though a sequence asked for them."""
    if result.logprobs is None:
        raise ValueError("the step brought no log-probabilities")
    return result.logprobs


def trimmed(entry: TokenLogprobs, most: int | None) -> TokenLogprobs:
    """The entry with its `most` likeliest alternatives; the device always computes the largest number."""
    if most is None or len(entry.top_ids) <= most:
        return entry
    return TokenLogprobs(entry.logprob, entry.top_ids[:most], entry.top_logprobs[:most])
