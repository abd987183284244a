"""Renders the prompts of a pipeline's stages in worker processes, which can be killed
(`engine.fleet.compositions.stage_template_worker`).
"""

from __future__ import annotations

from collections.abc import Mapping

from jitney.engine.common.rendered import Rendered
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.worker_pool import WorkerPool
from jitney.engine.fleet.compositions.stage_template_worker import StageTemplates, StageText
from jitney.engine.server import HttpError

_MODULE = "jitney.engine.fleet.compositions.stage_template_worker"
#: Most seconds that a template may take; most characters of its text.
_TIMEOUT_S = 2.0
_MOST_CHARS = 1 << 20


class StageRenderer:
    """Renders the templates of one pipeline, by their names."""

    def __init__(self, templates: Mapping[str, str]):
        setup = StageTemplates(dict(templates))
        work = "renders a pipeline's prompts"
        #: The processes; started before the first request, so that it does not wait for them.
        self.workers = WorkerPool(work, _MODULE, setup, Rendered, _TIMEOUT_S)

    async def render(self, name: str, variables: JsonDict) -> str:
        """The text of a template. Raises HttpError, 400, if it cannot be rendered; RequestError."""
        stage_text = StageText(name, variables, _MOST_CHARS, 2 * _TIMEOUT_S)
        try:
            rendered = await self.workers.ask(stage_text)
        except TimeoutError:
            raise HttpError(400, f"its template took longer than {_TIMEOUT_S:g} s") from None
        except EOFError:
            raise HttpError(400, "its template's process ended over it, twice") from None
        if rendered.too_long:
            raise HttpError(
                400,
                f"its template makes {rendered.too_long} characters; {_MOST_CHARS} at most",
                code="context_length_exceeded",
            )
        if rendered.refusal:
            raise HttpError(400, f"its template failed: {rendered.refusal}")
        return rendered.text
