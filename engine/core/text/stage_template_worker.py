"""Templates of a pipeline's stages rendered in a process of their own: `python -P -m
jitney.engine.core.text.stage_template_worker`, started by
`jitney.engine.fleet.compositions.stage_templates`.

The templates are the operator's, but what they run over is a client's, and may make them run for
ever; a process can be ended.

The first message in is a `StageTemplates`, then come `StageText`s; each is answered by one
`Rendered` (`jitney.engine.common.worker_pipe`).
"""

from __future__ import annotations

import sys

import msgspec
from jinja2 import StrictUndefined, Template, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jitney.engine.common.requests import JsonDict
from jitney.engine.common.worker_pipe import WorkerPipe, limit_memory
from jitney.engine.core.text.template_worker import Rendered, reason_of

#: Most bytes of memory that rendering may take.
_MORE_MEMORY = 1 << 30


class StageTemplates(msgspec.Struct, frozen=True):
    """The templates of a pipeline: Jinja by name."""

    templates: dict[str, str]


class StageText(msgspec.Struct, frozen=True):
    """A text to be made."""

    #: Name of the template.
    name: str
    variables: JsonDict
    #: More characters of text are an error.
    most_chars: int
    #: Seconds after which this process ends by itself, should nobody be left to end it.
    limit_s: float


def variables_of(template: str) -> set[str]:
    """The variables that a template asks for. Raises ValueError for one that does not parse."""
    environment = _environment()
    try:
        asked = meta.find_undeclared_variables(environment.parse(template))
    except TemplateError as error:
        raise ValueError(reason_of(error)) from None
    return asked - set(environment.globals)


def _environment() -> ImmutableSandboxedEnvironment:
    """Nothing of the machine can be reached from it; a variable that is not there is an error."""
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


def _main() -> int:
    """Render until standard input ends."""
    pipe = WorkerPipe()
    first = pipe.read()
    if first is None:
        return 0
    source = msgspec.msgpack.decode(first, type=StageTemplates)
    environment = _environment()
    templates = {name: environment.from_string(text) for name, text in source.templates.items()}
    limit_memory(_MORE_MEMORY)
    pipe.send(Rendered())
    decoder = msgspec.msgpack.Decoder(StageText)
    while (request := pipe.read()) is not None:
        wanted = decoder.decode(request)
        pipe.send(_rendered(templates[wanted.name], wanted))
    return 0


def _rendered(template: Template, wanted: StageText) -> Rendered:
    return Rendered.within(
        lambda: template.render(wanted.variables), wanted.limit_s, wanted.most_chars
    )


if __name__ == "__main__":
    sys.exit(_main())
