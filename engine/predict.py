"""How long an answer will be, learnt from the answers before it: no model, a few numbers per class of prompts."""

from __future__ import annotations

#: What is expected before anything was seen, in tokens, and how many answers that guess weighs.
FIRST_GUESS, WEIGHT = 256.0, 4.0
#: What an answer's weight is multiplied by with each later answer of its class: about the last 100 count.
FADE = 0.99


class FadingMean:
    """A mean in which old values fade, drawn towards a guess that weighs as much as WEIGHT values."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count = self.total = 0.0

    def add(self, value: float) -> None:
        self.count = self.count * FADE + 1.0
        self.total = self.total * FADE + value

    def towards(self, guess: float) -> float:
        """The mean with WEIGHT further values of `guess`."""
        return (self.total + WEIGHT * guess) / (self.count + WEIGHT)


class OutputLengths:
    """Mean output tokens of ended sequences by prompt-length class (powers of two), drawn towards the mean of all."""

    def __init__(self) -> None:
        self._all = FadingMean()
        self._classes: dict[int, FadingMean] = {}

    def observe(self, n_prompt: int, n_output: int) -> None:
        """A sequence ended by itself after so many tokens."""
        self._all.add(n_output)
        self._classes.setdefault(n_prompt.bit_length(), FadingMean()).add(n_output)

    def expect(self, n_prompt: int, most: int) -> int:
        """Output tokens to expect, at least 1 and at most `most`."""
        overall = self._all.towards(FIRST_GUESS)
        seen = self._classes.get(n_prompt.bit_length())
        return max(1, min(most, round(seen.towards(overall) if seen else overall)))
