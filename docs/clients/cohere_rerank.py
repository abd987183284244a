"""Cohere's client (rerank) against a Jitney server."""

from __future__ import annotations

import cohere
from checks import Checks, expect

checks = Checks(__doc__)
DOCUMENTS = ["Paris is the capital of France.", "Bread is made of flour.", "The capital is Paris."]


@checks.add
def rerank_v2() -> None:
    client = cohere.ClientV2(api_key=checks.key, base_url=checks.url)
    answer = client.rerank(
        model=checks.model, query="What is the capital of France?", documents=DOCUMENTS, top_n=2
    )
    scores = [result.relevance_score for result in answer.results]
    expect(len(scores) == 2 and scores == sorted(scores, reverse=True), answer)


@checks.add
def rerank_v1() -> None:
    client = cohere.Client(api_key=checks.key, base_url=checks.url)
    answer = client.rerank(model=checks.model, query="What is bread?", documents=DOCUMENTS)
    expect({result.index for result in answer.results} == {0, 1, 2}, answer)


checks.run()
