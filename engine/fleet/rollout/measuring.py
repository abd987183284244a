"""The tokens of an answer that passes. Nothing is read twice or kept."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: A piece of text that is not empty, in an event of any of the API's forms.
_PIECE = re.compile(
    rb'"(?:content|text|delta|thinking|reasoning_content|response|reasoning|arguments|partial_json)"'
    rb': ?"(?!")'
)
#: The tokens of a usage, and the bytes in which they stand after its name.
_OUTPUT = re.compile(rb'"(?:completion_tokens|output_tokens|eval_count)": ?(\d{1,9})')
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens|prompt_eval_count)": ?(\d{1,9})')
_USAGE, _USAGE_BYTES = re.compile(rb'"(?:usage|prompt_eval_count)"'), 512


@dataclass(slots=True)
class UsageWatch:
    """Tokens of an answer that passes, by its last usage."""

    #: None: no usage says.
    prompt: int | None = None
    output: int | None = None
    #: Pieces of text that came.
    pieces: int = 0
    #: End of the bytes so far: a usage may be cut in two.
    _tail: bytes = b""

    @property
    def tokens(self) -> int:
        """Output tokens; without a usage, the pieces of text."""
        return self.pieces if self.output is None else self.output

    def see(self, part: bytes) -> int:
        """More of the answer. Returns the pieces of text in it."""
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
