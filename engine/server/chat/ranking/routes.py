"""The routes that rank documents by a query, and that score pairs of texts."""

from __future__ import annotations

import time
import uuid

from starlette.requests import Request
from starlette.responses import Response

from jitney.engine.server.chat.endpoints import read_body
from jitney.engine.server.chat.ranking.bodies import (
    RankedDocument,
    RankedResult,
    RankingApiVersion,
    RankingBody,
    RankingMeta,
    RankingTokens,
    RankingUsage,
    RerankAnswer,
    RerankBody,
    ScoreAnswer,
    ScoreBody,
    ScoredPair,
)
from jitney.engine.server.chat.ranking.scoring import Scoring
from jitney.engine.server.chat.request import RequestBuilder, RouteKind
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.jsonio import json_answer
from jitney.engine.server.http.routing import HttpRoute
from jitney.engine.server.http.service import Service

_RERANK = RouteKind("rerank-", "documents")
_SCORE = RouteKind("score-", "text_2", names={"query": "text_1"})
#: Cohere's second version, whose answers do not repeat the documents.
_COHERE = "/v2/rerank"


async def _rerank(service: Service, request: Request) -> Response:
    body = await read_body(service, request, RerankBody)
    context = Context.of(request)
    scores = await _scores(service, body, context, _RERANK)
    order = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n]
    shows = body.return_documents
    if shows is None:
        shows = request.url.path != _COHERE
    results = [RankedResult(place, scores[place]) for place in order]
    if shows:
        for result in results:
            result.document = RankedDocument(body.documents[result.index])
    tokens = context.prompt_tokens
    answer = RerankAnswer(
        id=_id(_RERANK),
        model=service.name_in_answers(body.model),
        results=results,
        usage=RankingUsage(tokens, tokens),
        meta=RankingMeta(RankingApiVersion(), RankingTokens(tokens)),
    )
    return json_answer(answer)


async def _score(service: Service, request: Request) -> Response:
    body = await read_body(service, request, ScoreBody)
    context = Context.of(request)
    scores = await _scores(service, body, context, _SCORE)
    tokens = context.prompt_tokens
    answer = ScoreAnswer(
        id=_id(_SCORE),
        created=int(time.time()),
        model=service.name_in_answers(body.model),
        data=[ScoredPair(place, score) for place, score in enumerate(scores)],
        usage=RankingUsage(tokens, tokens),
    )
    return json_answer(answer)


async def _scores(
    service: Service, body: RankingBody, context: Context, kind: RouteKind
) -> list[float]:
    builder = RequestBuilder(service, body.generation(), context)
    return await Scoring(builder, body, kind).scores()


def _id(kind: RouteKind) -> str:
    return kind.id_prefix + uuid.uuid4().hex


def _route(path: str, like: str) -> HttpRoute:
    """A route that ranks. like: whose form it has."""
    summary = f"documents in the order in which they fit a query, as {like} has it"
    return HttpRoute(
        f"POST {path}", _rerank, summary, generates=True, body=RerankBody, answer=RerankAnswer
    )


def _score_route(path: str, summary: str) -> HttpRoute:
    return HttpRoute(
        f"POST {path}", _score, summary, generates=True, body=ScoreBody, answer=ScoreAnswer
    )


RANKING_ROUTES = (
    _route("/v1/rerank", "Jina"),
    _route(_COHERE, "Cohere"),
    _route("/rerank", "vLLM"),
    _score_route("/v1/score", "how well pairs of texts fit, as vLLM has it"),
    _score_route("/score", "the same as /v1/score"),
)
