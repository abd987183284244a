"""Measures how much of the schemas of public MCP servers constrains a forced call.

    python docs/benchmarks/mcp_tools.py TOOLS.json

TOOLS.json has each server's answer to `tools/list` (Model Context Protocol, 2025-06-18): an object
of lists of tools by the server's name. All tools of a server are sent in one request that must call
and is not strict, and then all tools of all servers. The table goes into docs/structured_output.md.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from jitney.engine.core.grammar.setup import Checked, CheckerSetup
from jitney.engine.core.grammar.worker import Checker
from jitney.engine.server.chat.conversation.formats import TurnFormat
from jitney.engine.server.chat.conversation.grammars import Turn
from jitney.engine.server.chat.conversation.tools import Tool, ToolUse

#: Most tools of one request.
MOST_TOOLS = 128
VOCABULARY = 50_000


class Row(NamedTuple):
    """Figures of one request's tools."""

    server: str
    tools: int
    checked: Checked
    milliseconds: float

    def cells(self) -> list[str]:
        error = self.checked.error
        refused = "no" if error is None else error.message
        left_out = ", ".join([f"`{place}`" for place in self.checked.unenforced])
        return [self.server, str(self.tools), refused, left_out, f"{self.milliseconds:.0f}"]


def row(checker: Checker, server: str, tools: list[dict[str, Any]]) -> Row:
    parsed = [Tool(tool["name"], tool.get("description"), tool["inputSchema"]) for tool in tools]
    use = ToolUse.of(parsed, "required", None, parallel=True)
    grammar = Turn(TurnFormat.of(""), "", {}).grammar(use, None)
    assert grammar is not None  # the turn is forced
    started = time.perf_counter()
    checked = checker.check(grammar)
    return Row(server, len(tools), checked, (time.perf_counter() - started) * 1000)


def main() -> None:
    [path] = sys.argv[1:]
    servers: dict[str, list[dict[str, Any]]] = json.loads(Path(path).read_text())
    everything = [tool for tools in servers.values() for tool in tools]
    checker = Checker(CheckerSetup((), VOCABULARY))
    rows = [row(checker, server, tools) for server, tools in servers.items()]
    rows.append(row(checker, "all in one request", everything[:MOST_TOOLS]))
    head = ["server", "tools", "refused", "left out", "ms to check"]
    for cells in (head, ["---"] * len(head), *[each.cells() for each in rows]):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
