"""Treatment of fields that a body does not declare, on all routes.

A name that is not in `FIELDS` is ignored and listed in the header `x-ignored-params`. A hint, which
helps other providers' servers, is accepted and listed there too unless its value is the default.
A refused field would change the answer: 400 `unsupported_parameter`, unless its value asks for
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonObject, JsonValue


class Rule(NamedTuple):
    """The treatment of a field that a body does not declare."""

    #: Any value is accepted; else refused.
    is_hint: bool
    #: Neutral values, which ask for nothing or for the default behaviour. null always is one.
    neutral: tuple[JsonValue, ...] = ()

    def allows(self, value: JsonValue) -> bool:
        """Whether the value is neutral. 1 and true differ."""
        return value is None or (type(value), value) in [(type(ok), ok) for ok in self.neutral]


def hint(*neutral: JsonValue) -> Rule:
    """A field that is accepted and has no effect."""
    return Rule(is_hint=True, neutral=neutral)


def refused(*neutral: JsonValue) -> Rule:
    """A field that is an error unless its value is one of these."""
    return Rule(is_hint=False, neutral=neutral)


_KEEPS_THOUGHTS: JsonValue = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

FIELDS: Mapping[str, Rule] = {
    "access_programs": refused(),
    "add_generation_prompt": refused(),
    "add_special_tokens": hint(False),
    "audio": refused(),
    "background": refused(False),
    "background_options": refused(),
    "best_of": refused(1),
    "betas": hint([]),
    "billing_policy": hint(),
    "cache_control": hint(),
    "cache_prompt": hint(True),
    "chat_template": refused(),
    "chat_template_kwargs": refused({}),
    "compaction": refused(),
    "container": hint(),
    "context_management": hint([], {}, {"edits": []}, _KEEPS_THOUGHTS),
    "continue_final_message": refused(False),
    "conversation": refused(),
    "diagnostics": hint(),
    "documents": refused([]),
    "dry_multiplier": refused(0, 0.0),
    "dynatemp_range": refused(0, 0.0),
    "early_stopping": refused(False),
    "ebnf": refused(),
    "echo": refused(False),
    "fallback_credit_token": hint(),
    "fallbacks": hint([]),
    "function_call": refused("none"),
    "functions": refused([]),
    "grammar": refused(""),
    "guided_decoding_backend": hint(),
    "guided_whitespace_pattern": refused(),
    "image": refused(),
    "include_reasoning": hint(True, False),
    "inference_geo": hint(),
    "input": refused(),
    "instructions": refused(),
    "json_schema": refused(),
    "length_penalty": refused(1, 1.0),
    "logits_processors": refused([]),
    "logprobs": refused(False),
    "max_completion_tokens": refused(),
    "max_output_tokens": refused(),
    "mcp_servers": hint([]),
    "messages": refused(),
    "mirostat": refused(0),
    "mm_processor_kwargs": hint({}),
    "modalities": refused(["text"]),
    "moderation": refused(),
    "n_predict": refused(-1),
    "num_ctx": refused(),
    "num_predict": refused(-1),
    "output_config": refused({}),
    "output_format": refused(),
    "parallel_tool_calls": hint(True, False),
    "personality": hint(),
    "prediction": hint(),
    "previous_response_id": refused(),
    "prompt": refused(),
    "prompt_cache_key": hint(),
    "prompt_cache_options": hint({}),
    "prompt_cache_retention": hint("in_memory", "in-memory"),
    "prompt_embeds": refused(),
    "reasoning": hint({}),
    "reasoning_effort": hint("none"),
    "regex": refused(),
    "service_tier": hint("auto", "default", "standard_only"),
    "spaces_between_special_tokens": hint(True),
    "speed": hint("standard"),
    "store": hint(False),
    "suffix": refused(""),
    "system": refused(),
    "text": refused({}),
    "tfs_z": refused(1, 1.0),
    "thinking": hint(),
    "thinking_token_budget": refused(),
    "thread": refused(),
    "tool_choice": refused("none", "auto"),
    "tools": refused([]),
    "top_logprobs": refused(0),
    "top_n_sigma": refused(-1, -1.0),
    "truncation": hint("disabled"),
    "typical_p": refused(1, 1.0),
    "use_beam_search": refused(False),
    "user_profile_id": hint(),
    "verbosity": hint("medium"),
    "web_search_options": hint(),
    "workspace_id": hint(),
    "xtc_probability": refused(0, 0.0),
}

#: Fields that only OpenAI's routes implement, and the other APIs refuse -> neutral values.
OPENAI_ONLY: Mapping[str, tuple[JsonValue, ...]] = {
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "n": (1,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "structured_outputs": (),
}


def rules_of(
    declared: Collection[str], own: Mapping[str, tuple[JsonValue, ...]]
) -> dict[str, Rule]:
    """A body's rules. declared: its fields; own: refused ones, with their neutral values."""
    shared = {name: rule for name, rule in FIELDS.items() if name not in declared}
    return shared | {name: refused(*neutral) for name, neutral in own.items()}


def ignored_fields(
    raw: JsonObject, rules: Mapping[str, Rule], declared: Collection[str]
) -> list[str]:
    """Fields that change nothing: hints and unknown names. Raises RequestError for refused ones."""
    for name, rule in rules.items():
        if not rule.is_hint and not rule.allows(raw.get(name)):
            raise RequestError(
                f"{name} is not supported here", code="unsupported_parameter", param=name
            )
    return [name for name, value in raw.items() if _changes_nothing(name, value, rules, declared)]


def _changes_nothing(
    name: str, value: JsonValue, rules: Mapping[str, Rule], declared: Collection[str]
) -> bool:
    if name in rules:
        return rules[name].is_hint and not rules[name].allows(value)
    return name not in declared
