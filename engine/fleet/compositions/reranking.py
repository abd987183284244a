"""Sorts documents by how well they fit a query, by a model's own rerank route."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jitney.engine.common.requests import JsonDict
from jitney.engine.fleet.compositions.answering import ModelAnswer
from jitney.engine.server import HttpError


def rerank_body(query: str, documents: Sequence[str], keep: int) -> JsonDict:
    """The body of one request that ranks all documents and returns the `keep` best."""
    return {
        "query": query,
        "documents": list(documents),
        "top_n": keep,
        "return_documents": False,
    }


def best_in(answer: ModelAnswer, count: int, keep: int) -> list[tuple[int, float]]:
    """(index, score) of the `keep` best of `count` documents in a rerank answer, the best first;
    equal scores in the order of the request. Raises HttpError for an answer that does not rank
    them.
    """
    try:
        scores = {each["index"]: float(each["relevance_score"]) for each in answer.body["results"]}
    except (LookupError, TypeError, ValueError):
        scores = {}
    places = [place for place in range(count) if math.isfinite(scores.get(place, math.nan))]
    if len(places) < min(keep, count):
        model = answer.body.get("model")
        raise HttpError(502, f"the engine of {model} sent no scores", code="engine_dead")
    places.sort(key=lambda place: -scores[place])
    return [(place, scores[place]) for place in places[:keep]]
