"""Worker process that renders templates of a pipeline's stages: `python -P -m
jitney.engine.fleet.compositions.stage_template_worker`.

The operator writes the templates; clients send the values of the variables. The first message is a
`StageTemplates`; each following `StageText` is answered by a `Rendered`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec
from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jitney.engine.common.rendered import Rendered, reason_of
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.worker_pipe import answer_requests, limit_memory

#: Most bytes of memory for rendering.
_MORE_MEMORY = 1 << 30


class StageTemplates(msgspec.Struct, frozen=True):
    """The Jinja templates of a pipeline, by name."""

    templates: dict[str, str]


class StageText(msgspec.Struct, frozen=True):
    """A text to render."""

    #: Name of the template.
    name: str
    variables: JsonDict
    #: Most characters of the text; a longer one is an error.
    most_chars: int
    #: Seconds after which the process ends itself.
    limit_s: float


def variables_of(template: str) -> set[str]:
    """The variables that a template uses. Raises ValueError if it does not parse."""
    environment = _environment()
    try:
        variables = meta.find_undeclared_variables(environment.parse(template))
    except TemplateError as error:
        raise ValueError(reason_of(error)) from None
    return variables - set(environment.globals)


def _environment() -> ImmutableSandboxedEnvironment:
    """A sandbox without access to the machine. Missing variables are errors."""
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


def _start(source: StageTemplates) -> tuple[Rendered, Callable[[StageText], Rendered]]:
    environment = _environment()
    templates = {name: environment.from_string(text) for name, text in source.templates.items()}
    limit_memory(_MORE_MEMORY)

    def answer(stage: StageText) -> Rendered:
        template = templates[stage.name]
        return Rendered.within(
            lambda: template.render(stage.variables), stage.limit_s, stage.most_chars
        )

    return Rendered(), answer


if __name__ == "__main__":
    sys.exit(answer_requests(StageTemplates, StageText, _start))
