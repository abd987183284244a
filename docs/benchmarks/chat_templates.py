"""Checks chat templates with the conversations of tests/support/conversations.py: each text must
reach the prompt exactly once and in order, and all tools must be named.

    python docs/benchmarks/chat_templates.py --templates FOLDER [--faults]

FOLDER has templates as files *.jinja, such as vendor/llama.cpp/models/templates in the source
archive of llama_cpp_python. The table shows for each template how many conversations are right, how
many are refused (the template raised an error, which the client gets as a 400) and how many are
wrong, and which abilities the template lacks. It is written to chat_templates.json beside this
file. --faults: print each conversation that is not right.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "support"))

from conversations import TALKS, SandboxedTemplate, Talk  # noqa: E402

from jitney.engine.common.errors import RequestError  # noqa: E402
from jitney.engine.server.chat.conversation.template_abilities import ChatAbilities  # noqa: E402

VERDICTS = ("right", "refused", "wrong")


async def judged(talk: Talk, template: SandboxedTemplate, can: ChatAbilities) -> tuple[str, str]:
    """The verdict on one conversation, and its reason."""
    try:
        prompt = await talk.prompt(template, can, [])
    except RequestError as error:
        return "refused", str(error)
    faults = talk.faults(prompt)
    return ("wrong", "; ".join(faults)) if faults else ("right", "")


def abilities_of(can: ChatAbilities) -> dict[str, Any]:
    """The abilities as JSON."""
    if can.refusal:
        return {"refusal": can.refusal}
    shown: dict[str, Any] = {"plain": dataclasses.asdict(can.plain)}
    if can.with_tools is not None and can.with_tools != can.plain:
        shown["with_tools"] = dataclasses.asdict(can.with_tools)
    shown["shows_tools"] = can.with_tools is not None
    shown["needs_complete_tools"] = can.needs_complete_tools
    return shown


async def measured(file: Path, *, faults: bool) -> dict[str, Any]:
    """The JSON entry of one template."""
    template = SandboxedTemplate.of(file.read_text())
    can = await template.abilities()
    verdicts: Counter[str] = Counter()
    for talk in TALKS:
        verdict, reason = await judged(talk, template, can)
        verdicts[verdict] += 1
        if faults and verdict != "right":
            print(f"  {verdict}: {talk.name}: {reason}")
    counts = {verdict: verdicts[verdict] for verdict in VERDICTS}
    print(f"{file.stem:50} {counts}")
    return {"template": file.stem} | counts | {"abilities": abilities_of(can)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--templates", type=Path, required=True)
    parser.add_argument("--faults", action="store_true")
    arguments = parser.parse_args()
    files = sorted(arguments.templates.glob("*.jinja"))
    lines = [asyncio.run(measured(file, faults=arguments.faults)) for file in files]
    total = {verdict: sum(line[verdict] for line in lines) for verdict in VERDICTS}
    print(f"{len(files)} templates, {len(TALKS)} conversations: {total}")
    rows = ",\n".join(json.dumps(line) for line in lines)
    head = json.dumps({"conversations": len(TALKS), "total": total})[1:-1]
    Path(__file__).with_suffix(".json").write_text(f'{{{head}, "templates": [\n{rows}\n]}}\n')
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
