"""Builder of grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Iterable, Mapping

from jitney.engine.common.requests import JsonValue

#: Any text; blanks between two parts; names that are not Python keywords; and Llama's content,
#: whose lines do not begin with a brace: up to the end of the turn, and up to a call.
_TEXTS = rf"""
ANY: /(.|\n)*/
BLANKS: /[ \n]{{0,4}}/
NAME: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ & ~/{"|".join(keyword.kwlist)}/
NO_CALL: /([^\S\n]*([^{{\s][^\n]*)?\n)*[^\S\n]*([^{{\s][^\n]*)?/
NO_CALL_LINES: /([^\S\n]*([^{{\s][^\n]*)?\n)*/
"""


class Lark:
    """A grammar that is being written. Its methods return rules as text, to be joined by blanks."""

    def __init__(self, special_ids: Mapping[str, int], json_rule: Callable[[JsonValue], str]):
        """special_ids: texts that are tokens of their own. json_rule: a schema as a rule."""
        self._ids = special_ids
        self._json_rule = json_rule
        self._rules: list[str] = []
        self._n_names = 0
        #: Text that ends with a marker -> its rule.
        self._up_to: dict[str, str] = {}
        parts = [re.escape(text) for text in sorted(special_ids, key=len, reverse=True)]
        self._cut = re.compile(f"({'|'.join(parts)})") if parts else re.compile("(?!)")

    def literal(self, text: str) -> str:
        """Exactly this text."""
        parts: list[str] = []
        for part in self._cut.split(text):
            if part in self._ids:
                parts.append(f"<[{self._ids[part]}]>")
            elif part:
                parts.append(json.dumps(part, ensure_ascii=False))
        return " ".join(parts)

    def without(self, texts: Iterable[str]) -> str:
        """Text that contains none of these. Special tokens are never part of a text."""
        spelled = [re.escape(text).replace("/", r"\/") for text in texts if text not in self._ids]
        if not spelled:
            return "ANY"
        name = self.new_name("FREE")
        self.define(name, rf"/(.|\n)*/ & ~/(.|\n)*({'|'.join(spelled)})(.|\n)*/")
        return name

    def up_to(self, marker: str, most_tokens: int | None = None, text: str = "ANY") -> str:
        """A text up to and with a marker. most_tokens: for markers that are tokens. text: its
        rule.
        """
        begins_with_token = any(marker.startswith(token) for token in self._ids)
        if begins_with_token and most_tokens is None:
            return f"{text} {self.literal(marker)}"
        if begins_with_token:
            name = self.new_name("limited")
            self._rules.append(f"{name}[max_tokens={most_tokens}]: ANY")
            return f"{name} {self.literal(marker)}"
        ended = f"{text} {json.dumps(marker, ensure_ascii=False)}"
        if ended not in self._up_to:
            self._up_to[ended] = name = self.new_name("up_to")
            self._rules.append(f"{name}[lazy]: {ended}")
        return self._up_to[ended]

    def json(self, schema: JsonValue) -> str:
        """JSON that fits a schema."""
        return self.rule(self._json_rule(schema))

    def one_of(self, rules: Iterable[str]) -> str:
        return f"({' | '.join(rules)})"

    def rule(self, body: str) -> str:
        """Define a rule under a new name, which is returned."""
        name = self.new_name("rule")
        self.define(name, body)
        return name

    def new_name(self, kind: str) -> str:
        """A name for a rule that is defined later, so that it can refer to itself."""
        self._n_names += 1
        return f"{kind}_{self._n_names}"

    def define(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")

    def written(self, start: str) -> str:
        """The whole grammar; start: the rule of the whole text."""
        return "\n".join([f"start: {start}", *self._rules, _TEXTS])
