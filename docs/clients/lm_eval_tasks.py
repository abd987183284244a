"""lm-eval (the evaluation harness) against a Jitney server, with tasks that lie on this machine.

Log-likelihoods come from /v1/completions with echo and logprobs.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import requests
from checks import Checks, Skipped, expect
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

checks = Checks(__doc__)
_folder = tempfile.TemporaryDirectory()
_QUESTIONS = [
    {"question": "The sky is", "choices": ["blue", "a kind of fish"], "answer": 0},
    {"question": "Grass is", "choices": ["made of glass", "green"], "answer": 1},
    {"question": "Two and two is", "choices": ["four", "a horse"], "answer": 0},
    {"question": "The sun is very", "choices": ["paper", "hot"], "answer": 1},
]
_TEXTS = ["The quick brown fox jumps over the lazy dog.", "It rained all day in Paris."]


def _write_tasks() -> TaskManager:
    """Three tasks over two local files."""
    place = Path(_folder.name)
    questions, texts = place / "questions.jsonl", place / "texts.jsonl"
    questions.write_text("\n".join(map(json.dumps, _QUESTIONS)))
    texts.write_text("\n".join(json.dumps({"text": text}) for text in _TEXTS))
    _write(
        place / "choices.yaml",
        _over("jitney_choices", questions)
        | {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
    )
    _write(
        place / "perplexity.yaml",
        _over("jitney_perplexity", texts)
        | {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
    )
    _write(
        place / "answers.yaml",
        _over("jitney_answers", questions)
        | {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{choices[answer]}}",
            "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 16, "temperature": 0},
            "metric_list": [{"metric": "exact_match"}],
        },
    )
    return TaskManager(include_path=_folder.name, include_defaults=False)


def _over(name: str, file: Path) -> dict[str, Any]:
    """Settings that all tasks over a local file share."""
    files = {"test": str(file)}
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "test_split": "test",
    }


def _write(file: Path, task: dict[str, Any]) -> None:
    file.write_text(json.dumps(task))  # JSON is YAML


_tasks = _write_tasks()


def _evaluate(task: str, model: str = "local-completions", **settings: Any) -> dict[str, Any]:
    """The figures of the task."""
    route = "chat/completions" if "chat" in model else "completions"
    arguments = {
        "model": checks.model,
        "base_url": f"{checks.base_url}/{route}",
        "tokenizer": checks.tokenizer or None,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
        "max_retries": 1,
        "max_length": 2048,
    }
    results = simple_evaluate(
        model=model,
        model_args=arguments | settings,
        tasks=[task],
        task_manager=_tasks,
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template="chat" in model,
    )
    return {"figures": results["results"][task], "samples": results["samples"][task]}


@checks.add
def log_likelihoods() -> str:
    results = _evaluate("jitney_choices")
    for sample, question in zip(results["samples"], _QUESTIONS, strict=True):
        for answer, text in zip(sample["filtered_resps"], question["choices"], strict=True):
            expected = _log_likelihood(question["question"], f" {text}")
            expect(math.isclose(answer[0], expected, abs_tol=0.02), (answer, expected))
    accuracy = results["figures"]["acc,none"]
    expect(accuracy >= 0.5, f"accuracy {accuracy}")
    return f"accuracy {accuracy:.2f}"


def _log_likelihood(prompt: str, answer: str) -> float:
    """Log-likelihood of the answer after the prompt, from prompt_logprobs of the prompt with and
    without the answer.
    """
    url, body = checks.base_url, {"model": checks.model, "max_tokens": 1, "prompt_logprobs": 0}
    headers = {"Authorization": f"Bearer {checks.key}"}
    scores = []
    for text in (prompt, prompt + answer):
        sent = body | {"prompt": text}
        response = requests.post(
            f"{url}/completions", json=sent, headers=headers, timeout=60
        ).json()
        tokens = response["choices"][0]["prompt_logprobs"][1:]
        scores.append(sum(next(iter(token.values()))["logprob"] for token in tokens))
    return scores[1] - scores[0]


@checks.add
def rolling_log_likelihoods() -> str:
    figures = _evaluate("jitney_perplexity")["figures"]
    perplexity = figures["word_perplexity,none"]
    expect(1 < perplexity < 10_000, figures)
    return f"word perplexity {perplexity:.0f}"


@checks.add
def generate_until() -> None:
    for sample in _evaluate("jitney_answers")["samples"]:
        text = sample["filtered_resps"][0]
        expect(text and "\n" not in text and "." not in text, text)


@checks.add
def chat_generate_until() -> None:
    found = _evaluate("jitney_answers", model="local-chat-completions")
    expect(all(sample["filtered_resps"][0] for sample in found["samples"]), found)


@checks.add
def tokenizer_of_the_server() -> str:
    """lm-eval can leave tokenising to the server."""
    if requests.get(f"{checks.url}/tokenizer_info", timeout=10).status_code == 404:
        raise Skipped("the server has no /tokenizer_info")
    figures = _evaluate("jitney_choices", tokenizer_backend="remote", tokenizer=None)["figures"]
    return f"accuracy {figures['acc,none']:.2f}"


checks.run()
