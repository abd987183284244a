"""What the path of a request names."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request

from jitney.engine.api.batches.keeper import StoreKeeper
from jitney.engine.api.batches.store import BatchStore
from jitney.engine.api.context import Context
from jitney.engine.api.errors import HttpError, echo


async def find_or_404[T](
    keeper: StoreKeeper,
    request: Request,
    kind: str,
    find: Callable[[BatchStore, str, str], T | None],
) -> T:
    """The file, batch or job that the path names, as `{kind}_id`. Raises HttpError 404 if it is not
    there, or not theirs.
    """
    param = f"{kind}_id"
    id = request.path_params[param]
    thing = await keeper.do(find, id, Context.of(request.scope).tenant)
    if thing is None:
        raise HttpError(404, f"no {kind} {echo(id)}", code="not_found", param=param)
    return thing
