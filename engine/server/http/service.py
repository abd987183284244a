"""The state that all routes share: engine, tokenizer, limits, counters, and the drain."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.errors import RequestError, retry_after_s
from jitney.engine.common.tasks import until
from jitney.engine.config import ConfigReport
from jitney.engine.server.chat.model_text import ModelText, ModelTurns
from jitney.engine.server.chat.responses.store import ResponseStore
from jitney.engine.server.http.errors import ErrorReply, HttpError
from jitney.engine.server.http.metrics import ServerMetrics
from jitney.engine.server.http.model_cards import ModelCard
from jitney.engine.server.http.quotas import Quotas, RetryTimes
from jitney.engine.server.http.server_context import ServerContext
from jitney.engine.server.http.settings import ServerSettings
from jitney.engine.server.process.client import EngineClient

if TYPE_CHECKING:
    from jitney.engine.config import ResolvedConfig
    from jitney.engine.core import Tokenizer
    from jitney.engine.server.http.context import Context
    from jitney.engine.server.process.trace_recorder import Recorder

_log = logging.getLogger("jitney.api")

#: Requests read beyond the capacity of seats and queue; least Retry-After of an unread one.
_MOST_READ, _LEAST_RETRY_S = 64, 1.0


class Service(ServerContext):
    """One served model. It is loading until the tokenizer is set."""

    metrics: ServerMetrics
    quotas: Quotas

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        settings: ServerSettings,
        model_name: str,
    ):
        super().__init__(settings)
        self.client = client
        self.tokenizer = tokenizer
        #: Names that requests may use for the model; answers use the first.
        self.model_names = settings.server.served_model_name or (model_name,)
        self.metrics = ServerMetrics(self)
        server = settings.server
        self.quotas = Quotas(server.key_max_concurrent, server.key_tokens_per_minute)
        #: Stored responses of /v1/responses.
        self.responses = ResponseStore(
            server.responses_kept, server.responses_bytes, server.responses_ttl_s
        )
        # Retry times of requests that were refused unread.
        self._returns = RetryTimes()
        self._drain_begun = asyncio.Event()
        #: Texts of the model: limits, tokens, prompts, grammars.
        self.text = ModelText(self.ready, settings)
        #: The model's chat format.
        self.turns = ModelTurns(self.ready, settings, self.text)
        #: Writes the trace of requests; None: off.
        self._recorder: Recorder | None = None
        #: The settings, and the origin of each; None: not known.
        self.resolved: ResolvedConfig | None = None

    @property
    def model_name(self) -> str:
        """The model's name in answers."""
        return self.model_names[0]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Model names that select an adapter; none until the engine is ready."""
        info = self.client.info
        return () if info is None else tuple(info.model.adapters)

    @property
    def listed_names(self) -> tuple[str, ...]:
        return (*self.model_names, *self.adapters)

    @property
    def running_names(self) -> tuple[str, ...]:
        """See `ServerContext`: none while the model is loaded, or the engine asleep."""
        return () if self.unready() is not None else self.model_names

    @property
    def engine_info(self) -> EngineInfo | None:
        return self.client.info

    def card(self, name: str) -> ModelCard:
        """See `ServerContext`; an adapter's names the model that it changes, as vLLM's does."""
        info = self.client.info
        is_adapter = self.adapter_number(name)
        return ModelCard(
            id=name,
            created=self.created,
            root=name if is_adapter else self.model_name,
            parent=self.model_name if is_adapter else UNSET,
            max_model_len=info.model.context_length if info else None,
        )

    def adapter_number(self, model: str | None) -> int:
        """The number of the adapter that a request names as its model; 0: the model itself."""
        info = self.client.info
        if info is None or model is None:
            return 0
        return info.model.adapters.get(model, 0)

    def check_model(self, name: str | None) -> None:
        """Raises HttpError 404 for a name that is none of the model's or of its adapters."""
        if name is not None and name not in self.listed_names:
            raise HttpError.no_model(name, "; /v1/models lists what there is")

    def name_in_answers(self, model: str | None) -> str:
        """The model's name in the answer to a request that uses this name."""
        return model if model and self.adapter_number(model) else self.model_name

    def begin_drain(self) -> None:
        super().begin_drain()
        self._drain_begun.set()

    async def until_drain(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work until a drain begins, which raises RequestError `draining`."""
        if await until(self._drain_begun.wait(), work):
            raise RequestError("the server is shutting down", code="draining")

    def close(self) -> None:
        """Release the threads; a tokenisation that still runs is not waited for."""
        self.text.close()

    def observe_requests(self) -> None:
        """Record the requests that end and trace them, as the settings `record` and `otel` say.
        Raises ConfigError.
        """
        server, listeners = self.settings.server, self.client.history.listeners
        if server.record:
            from jitney.engine.server.process.trace_recorder import Recorder

            self._recorder = Recorder(server.record, engine=lambda: self.client.info)
            listeners.append(self._recorder.ended)
        if server.otel:
            from jitney.engine.server.http.tracing import Tracing

            self.tracing = Tracing()
            listeners.append(self.tracing.ended)

    def end_observing(self) -> None:
        """Write the records and spans of the last requests."""
        for listener in filter(None, (self._recorder, self.tracing)):
            listener.close()

    @contextmanager
    def generating(self, context: Context) -> Iterator[None]:
        """See `ServerContext`. Raises RequestError queue_full before the body is read if seats and
        queue are full, or if the engine admits nothing: reading a body that will be refused takes
        time from other requests.
        """
        info = self.client.info
        if info is not None and not context.background:
            most = self._most_open(info, admitted=context.admitted)
            if self._open.are_too_many(context.tenant, most):
                wait = self._retry_in(most)
                raise RequestError(
                    f"{most} requests are open or being read already; retry in {wait:.1f} s",
                    code="queue_full",
                    retry_after=wait,
                )
        with self._open.one(context.tenant), self.quotas.open(context.tenant):
            yield

    def rejected(self, error: RequestError | HttpError) -> None:
        """See `ServerContext`: count it by its code."""
        code = error.info.code if isinstance(error, RequestError) else error.code
        self.metrics.rejected.labels(code or "invalid_request").inc()

    def _retry_in(self, most: int) -> float:
        """Retry time of an unread request in seconds: requests return at the rate the queue
        drains.
        """
        counters = self.client.counters
        if counters.predicted_wait <= 0:  # refused requests have returned, or never will
            self._returns.until = 0.0
        wait = max(_LEAST_RETRY_S, counters.predicted_wait)
        each = wait / (counters.waiting or most)
        return self._returns.next(self.quotas.clock(), wait, each)

    def _most_open(self, info: EngineInfo, *, admitted: bool) -> int:
        """The most generation requests that may be open, those that are being read included. A few
        are read even while the engine accepts none: they may be retries. admitted: for one that
        no predicted wait refuses.
        """
        counters, queue, history = self.client.counters, info.queue, self.client.history
        most = info.sizes.seats + queue.max_waiting_requests
        longest = (not admitted and queue.max_predicted_wait_s) or math.inf
        if counters.predicted_wait > longest or counters.waiting >= queue.max_waiting_requests:
            most = min(most, history.n_open - history.n_open_background)
        return most + _MOST_READ

    @property
    def internal_seats(self) -> int:
        info, _ = self.ready()
        return info.sizes.seats

    def trouble(self, code: str, cause: str) -> None:
        """See `ServerContext`: an incident on the page."""
        self.client.history.incidents.trouble(code, cause)

    def check_background(self) -> None:
        """Raise RequestError where batches cannot run: static batches cannot be preempted."""
        info = self.client.info
        if info is not None and info.queue.policy != "continuous":
            raise RequestError("batches need a server with the policy continuous")

    def opening(self, key: str) -> AbstractContextManager[None]:
        return self.quotas.open(key)

    def unready(self) -> RequestError | None:
        """The reason why no request can be served now, or None."""
        if self.draining or self.client.state == "draining":
            return RequestError("the server is shutting down", code="draining")
        if self.client.state == "dead":
            return RequestError("the engine is gone", code="engine_dead")
        if self.client.state == "sleeping":
            return RequestError("the engine is asleep: POST /wake_up wakes it", code="sleeping")
        is_loaded = self.client.info is not None and self.tokenizer is not None
        if self.client.state == "ready" and is_loaded:
            return None
        code, message = "loading", "the model is still loading"
        if self.client.state == "restarting":
            code, message = "restarting", "the engine died and is being started again"
        progress = self.client.progress
        if progress is not None:
            message += f": {progress.stage} {progress.so_far}"
        return RequestError(message, code=code)

    def unstarted(self) -> RequestError | None:
        """The reason why the engine has not been ready yet, or None."""
        return None if self.client.info is not None else self.unready()

    def stalled(self) -> RequestError | None:
        """The reason why a running engine makes no progress, or None."""
        age = self.client.last_step_age()
        if age > self.settings.server.heartbeat_s:
            return RequestError(
                f"the engine has not finished a step for {age:.0f} s", code="engine_dead"
            )
        return None

    def ready(self) -> tuple[EngineInfo, Tokenizer]:
        """The running engine and its tokenizer. Raises RequestError when there is none."""
        reason = self.unready()
        if reason is not None:
            raise reason
        info, tokenizer = self.client.info, self.tokenizer
        assert info is not None and tokenizer is not None  # `unready` has just checked
        return info, tokenizer

    def answered(self, context: Context, reply: ErrorReply | None) -> None:
        """Record refusals with a retry time for the page, except those of batch lines."""
        if reply is None or context.background:
            return
        generates = context.route is not None and context.route.generates
        if reply.status != 429 and not (reply.status == 503 and generates):
            return
        retry_s = retry_after_s(reply.headers, 0.0) or None
        incidents = self.client.history.incidents
        incidents.refused(reply.status, reply.code or "", retry_s, context.tenant)

    def config_report(self) -> ConfigReport:
        """Every setting with value and origin, secrets counted. Raises HttpError 404 if unknown."""
        if self.resolved is None:
            raise HttpError(404, "the settings of this server are not known", code="not_found")
        info = self.client.info
        digest = "" if info is None else info.config_digest
        return ConfigReport.of(self.resolved, config_digest=digest)

    @property
    def info(self) -> EngineInfo:
        """Facts of the running engine. Raises RequestError when there is none."""
        info, _ = self.ready()
        return info

    @property
    def longest_context(self) -> int:
        info = self.client.info
        return 0 if info is None else info.model.context_length
