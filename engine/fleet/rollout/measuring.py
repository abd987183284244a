"""Counts the tokens of an answer as it passes, without parsing it twice or storing it."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: A non-empty piece of text in an event, in any of the API's forms.
_PIECE = re.compile(
    rb'"(?:content|text|delta|thinking|reasoning_content|response|reasoning|arguments|partial_json)"'
    rb': ?"(?!")'
)
#: Token counts of a usage; start of a usage, and the bytes after it that contain its counts.
_OUTPUT = re.compile(rb'"(?:completion_tokens|output_tokens|eval_count)": ?(\d{1,9})')
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens|prompt_eval_count)": ?(\d{1,9})')
_USAGE, _USAGE_BYTES = re.compile(rb'"(?:usage|prompt_eval_count)"'), 512


@dataclass(slots=True)
class UsageWatch:
    """Counts the tokens of an answer as it passes, from its last usage."""

    #: Prompt and output tokens by the last usage; None without a usage.
    prompt: int | None = None
    output: int | None = None
    #: Pieces of text so far.
    pieces: int = 0
    #: Last bytes so far, since a usage may be split between two parts.
    _tail: bytes = b""

    @property
    def tokens(self) -> int:
        """Output tokens; without a usage, the pieces of text."""
        return self.pieces if self.output is None else self.output

    def see(self, part: bytes) -> int:
        """Read the next part of the answer. Returns the number of pieces of text in it."""
        pieces = len(_PIECE.findall(part))
        self.pieces += pieces
        seen = self._tail + part
        for usage in _USAGE.finditer(seen):
            at = usage.start()
            output = _OUTPUT.search(seen, at, at + _USAGE_BYTES)
            prompt = _PROMPT.search(seen, at, at + _USAGE_BYTES)
            self.output = int(output[1]) if output else self.output
            self.prompt = int(prompt[1]) if prompt else self.prompt
        self._tail = seen[-_USAGE_BYTES:]
        return pieces
