"""Eighty kinds of bad input: which test shows each, on which of the routes that generate, or why a
route cannot meet it. Paths of tests are below `tests/`; what each must be answered stands with it.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).parents[3]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
ROUTES = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)

BAD = "engine/server/test_bad_inputs.py::"
HOSTILE = "engine/server/test_hostile_clients.py::"
SERVER = "engine/server/test_server.py::"
FIELD = BAD + "test_a_bad_field_is_named"
NUMBER = BAD + "test_numbers_that_are_not_finite_name_their_field"
BODY = BAD + "test_bodies_that_are_no_json_object"
ITEMS = {RESPONSES: BAD + "test_bad_responses"}
BLOCKS = {MESSAGES: BAD + "test_bad_conversations_in_blocks"}
TOOLS = {CHAT: "engine/server/test_tools.py::test_bad_fields_are_named"}
TEXTS = {"/tokenize": "engine/server/test_text_tools.py::test_mistakes_are_named"}
GRAMMARS = "engine/server/test_grammars.py::"
BATCHES = "engine/server/test_batches.py::"


@dataclass(frozen=True)
class Kind:
    """One kind of bad input."""

    number: int
    what: str
    #: Tests whose cases name a route: they are looked at.
    each: tuple[str, ...] = ()
    #: Route -> the test that is of it alone.
    one: dict[str, str] = field(default_factory=dict[str, str])
    #: Tests of what is answered before a route is looked for, or of no route.
    any: tuple[str, ...] = ()
    #: Route -> why it cannot meet it.
    never: dict[str, str] = field(default_factory=dict[str, str])


def never(why: str, *routes: str) -> dict[str, str]:
    return dict.fromkeys(routes or ROUTES, why)


KINDS = (
    Kind(1, "an empty body, null, a list, a text, a number", (BODY,), TEXTS),
    Kind(2, "JSON that is cut off", (BODY,), TEXTS),
    Kind(3, "something behind the JSON, or two of them", (BODY,)),
    Kind(4, "equal keys", (BAD + "test_of_equal_keys_the_last_counts",)),
    Kind(5, "a hundred thousand levels", (BODY,)),
    Kind(6, "a byte over the cap, with a length and without", (BAD + "test_a_body_over_the_cap",)),
    Kind(
        7,
        "a Content-Length that is negative, no number, or given twice",
        any=(SERVER + "test_broken_and_slow_requests_are_answered_and_closed",),
    ),
    Kind(
        8,
        "a Content-Length beside chunks",
        any=(
            SERVER + "test_broken_and_slow_requests_are_answered_and_closed",
            BAD + "test_two_framings_are_refused",
        ),
    ),
    Kind(9, "a compressed body", (BAD + "test_media_types",)),
    Kind(10, "another Content-Type, or none", (BAD + "test_media_types",)),
    Kind(
        11,
        "a huge header, ten thousand headers",
        any=(
            SERVER + "test_broken_and_slow_requests_are_answered_and_closed",
            BAD + "test_headers_that_are_too_large",
        ),
    ),
    Kind(
        12,
        "a blank in a header's name, a zero in its value",
        any=(SERVER + "test_broken_and_slow_requests_are_answered_and_closed",),
    ),
    Kind(13, "a Host with a path or a fragment", any=(BAD + "test_bad_hosts",)),
    Kind(14, "two Hosts, or none", any=(BAD + "test_bad_hosts",)),
    Kind(
        15,
        "no key, a wrong one, two, a huge one, one in the query",
        (
            BAD + "test_bad_keys",
            HOSTILE + "test_a_key_in_the_query_is_none",
            HOSTILE + "test_a_key_of_a_megabyte_is_too_large",
        ),
    ),
    Kind(
        16,
        "a page of another site",
        (HOSTILE + "test_a_page_of_another_site_cannot_have_it_compute",),
    ),
    Kind(17, "another method", (HOSTILE + "test_only_a_post_generates",)),
    Kind(
        18,
        "a head or a body byte by byte, by hundreds at once",
        (HOSTILE + "test_a_client_that_sends_half_and_is_silent_is_told",),
        any=(
            SERVER + "test_a_head_that_drips_is_cut_off",
            HOSTILE + "test_a_crowd_of_slow_sockets_leaves_room_for_others",
        ),
    ),
    Kind(
        19,
        "a connection without a word",
        any=(SERVER + "test_broken_and_slow_requests_are_answered_and_closed",),
    ),
    Kind(
        20,
        "a connection that is half closed",
        (HOSTILE + "test_a_client_that_sends_half_and_is_silent_is_told",),
    ),
    Kind(
        21,
        "an X-Request-Id that is huge, breaks a line, or is another's",
        (
            HOSTILE + "test_a_request_s_id_is_harmless",
            HOSTILE + "test_two_requests_of_one_id_are_two",
        ),
    ),
    Kind(
        22,
        "ten thousand ranges of a file",
        any=(HOSTILE + "test_ten_thousand_ranges_of_a_file_cost_nothing",),
        never=never("only files have ranges"),
    ),
    Kind(
        23,
        "paths that climb",
        any=(BAD + "test_routes_and_methods",),
        never=never("such a path is none of these"),
    ),
    Kind(
        24,
        "a model that is empty, no text, unknown, huge",
        (FIELD, BAD + "test_an_unknown_model_is_404_and_hardly_repeated"),
        TEXTS,
    ),
    Kind(
        25,
        "no prompt, an empty one, null",
        one={COMPLETIONS: BAD + "test_bad_prompts", CHAT: BAD + "test_bad_messages"}
        | ITEMS
        | BLOCKS
        | TEXTS,
    ),
    Kind(
        26,
        "a list of prompts with an empty one, or of two kinds",
        one={COMPLETIONS: BAD + "test_bad_prompts"},
        never=never("it takes one conversation", CHAT, RESPONSES, MESSAGES),
    ),
    Kind(
        27,
        "token ids that are negative, too large, no integers",
        one={
            COMPLETIONS: BAD + "test_bad_prompts",
            "/detokenize": "engine/server/test_text_tools.py::test_mistakes_are_named",
        },
        never=never("its prompt is text", CHAT, RESPONSES, MESSAGES),
    ),
    Kind(28, "a prompt beyond the context", (BAD + "test_a_prompt_beyond_the_context",), TEXTS),
    Kind(
        29,
        "700 kB of one letter, of blanks, of zeros",
        (BAD + "test_huge_texts_are_refused_before_they_are_tokenised",),
    ),
    Kind(
        30,
        "700 kB of one emoji, of combining marks, from right to left",
        (BAD + "test_huge_texts_are_refused_before_they_are_tokenised",),
    ),
    Kind(31, "pictures, sounds, files and addresses", (HOSTILE + "test_nothing_is_fetched",)),
    Kind(32, "max_tokens out of range, no integer, infinite", (FIELD, NUMBER)),
    Kind(
        33,
        "max_tokens and max_completion_tokens that differ",
        one={
            COMPLETIONS: BAD + "test_fields_of_the_sibling_route_are_refused",
            CHAT: "engine/server/test_answers.py::test_max_completion_tokens_wins",
        }
        | ITEMS
        | BLOCKS,
    ),
    Kind(34, "n out of range, no integer", (FIELD,)),
    Kind(
        35,
        "best_of out of range",
        one={
            COMPLETIONS: BAD + "test_completion_combinations",
            CHAT: BAD + "test_fields_of_the_sibling_route_are_refused",
        }
        | ITEMS
        | BLOCKS,
    ),
    Kind(
        36,
        "best_of below n, or streamed",
        one={
            COMPLETIONS: BAD + "test_completion_combinations",
            CHAT: BAD + "test_fields_of_the_sibling_route_are_refused",
        }
        | ITEMS
        | BLOCKS,
    ),
    Kind(37, "temperature out of range, no number, NaN, infinite", (FIELD, NUMBER)),
    Kind(38, "top_p, min_p, typical_p, top_k likewise", (FIELD, NUMBER)),
    Kind(39, "penalties likewise", (FIELD, NUMBER)),
    Kind(40, "a seed of more than 64 bits", (FIELD,)),
    Kind(41, "a seed that is no integer", (FIELD,)),
    Kind(42, "allowed_token_ids that are none, unknown, too many", (FIELD,)),
    Kind(
        43,
        "tokens allowed and banned so that none is left",
        (FIELD,),
        any=("engine/server/test_fields.py::test_words_that_leave_no_token_are_refused",),
    ),
    Kind(
        44,
        "stop strings that are empty, too many, too long, no texts",
        (FIELD,),
        {MESSAGES: BAD + "test_bad_messages_of_blocks"},
    ),
    Kind(45, "stop_token_ids that are unknown, negative, too many", (FIELD,)),
    Kind(
        46,
        "logprobs out of range",
        one={
            COMPLETIONS: BAD + "test_completion_combinations",
            CHAT: BAD + "test_chat_combinations",
        }
        | ITEMS
        | BLOCKS,
    ),
    Kind(
        47,
        "top_logprobs out of range, or without logprobs",
        one={
            COMPLETIONS: BAD + "test_fields_of_the_sibling_route_are_refused",
            CHAT: BAD + "test_chat_combinations",
        }
        | ITEMS
        | BLOCKS,
    ),
    Kind(48, "stream that is no boolean, stream_options without it", (FIELD,)),
    Kind(49, "ignore_eos without a length", (HOSTILE + "test_an_answer_without_an_end_ends",)),
    Kind(
        50,
        "messages that are none, too many, of no known role or content",
        one={CHAT: BAD + "test_bad_messages"} | ITEMS | BLOCKS | TEXTS,
        never=never("it takes no messages", COMPLETIONS),
    ),
    Kind(
        51,
        "parts of messages of no known type, tool messages without a call",
        one={CHAT: BAD + "test_bad_messages"} | ITEMS | BLOCKS,
        never=never("it takes no messages", COMPLETIONS),
    ),
    Kind(
        52,
        "tools that are too many, of one name, of a bad schema",
        one={COMPLETIONS: BAD + "test_fields_of_the_sibling_route_are_refused"}
        | TOOLS
        | ITEMS
        | BLOCKS,
    ),
    Kind(53, "tool_choice without tools, or of none of them", (FIELD,), TOOLS | ITEMS | BLOCKS),
    Kind(
        54,
        "patterns without an end, too long, with what cannot be done",
        (HOSTILE + "test_a_pattern_is_compiled_or_refused_in_time",),
    ),
    Kind(
        55,
        "grammars that are empty, endless or refer to nothing",
        (GRAMMARS + "test_what_cannot_be_kept_to_is_refused_by_name",),
        ITEMS | BLOCKS,
    ),
    Kind(
        56,
        "a bad grammar behind a good one",
        any=(GRAMMARS + "test_a_process_checks_them_and_what_it_said_is_kept",),
    ),
    Kind(
        57,
        "two forms of an answer at once",
        (GRAMMARS + "test_what_cannot_be_kept_to_is_refused_by_name",),
        ITEMS | BLOCKS,
    ),
    Kind(
        58,
        "a chat template, or variables that are its own",
        (BAD + "test_what_we_do_not_do_is_refused_by_name",),
        TOOLS | ITEMS | BLOCKS | TEXTS,
    ),
    Kind(59, "a cache_salt that is empty, huge, no word", (FIELD,)),
    Kind(60, "a cache_salt that is a number", (FIELD,)),
    Kind(61, "a priority where there is none, or out of range", (FIELD,)),
    Kind(
        62,
        "timeout_ms out of range; a deadline that passes",
        (FIELD, HOSTILE + "test_what_the_engine_refuses_is_a_status_everywhere"),
    ),
    Kind(
        63,
        "names of users that are huge, or lines of a log",
        (FIELD, BAD + "test_the_log_has_one_harmless_line"),
        {MESSAGES: BAD + "test_bad_messages_of_blocks"},
    ),
    Kind(64, "names that are code", (HOSTILE + "test_names_that_are_code_stay_text",)),
    Kind(65, "unknown fields", (HOSTILE + "test_unknown_fields_are_listed_and_change_nothing",)),
    Kind(
        66,
        "fifty thousand unknown fields, one of half a megabyte",
        (HOSTILE + "test_unknown_fields_are_listed_and_change_nothing",),
    ),
    Kind(
        67,
        "an earlier response that is not there",
        one={RESPONSES: HOSTILE + "test_responses_that_refer_to_nothing"},
        never=never("it refers to nothing", COMPLETIONS, CHAT, MESSAGES),
    ),
    Kind(
        68,
        "a response of another key",
        one={RESPONSES: HOSTILE + "test_a_response_of_another_key_is_nobody_s"},
        never=never("it refers to nothing", COMPLETIONS, CHAT, MESSAGES),
    ),
    Kind(
        69,
        "files without a name, empty, too large, for nothing",
        one={"/v1/files": BATCHES + "test_bad_uploads"},
        any=(BATCHES + "test_the_limit_is_that_of_the_file_and_not_of_the_form",),
        never=never("it takes no files"),
    ),
    Kind(
        70,
        "lines of a batch that are bad, or of one id",
        one={"/v1/batches": BATCHES + "test_a_bad_line_fails_alone"},
        any=(BATCHES + "test_a_file_that_is_no_file_of_requests",),
        never=never("a line is answered as a request of its own"),
    ),
    Kind(
        71,
        "the page and its figures without a key, or asked for without an end",
        any=(
            HOSTILE + "test_the_page_and_the_figures_need_the_key",
            HOSTILE + "test_queries_of_the_page_are_read_or_refused",
        ),
        never=never("it is not the page"),
    ),
    Kind(
        72,
        "a viewer too many",
        any=("dashboard/test_app.py::test_the_thirty_third_viewer_is_told_to_come_back",),
        never=never("it is not the page"),
    ),
    Kind(
        73,
        "a viewer that does not read",
        any=("dashboard/test_feed.py::test_a_slow_viewer_starts_again_from_a_key_frame",),
        never=never("it is not the page"),
    ),
    Kind(
        74,
        "clients that do not read",
        any=(
            "engine/server/test_slow_clients.py::test_who_does_not_read_is_let_go_and_costs_little",
            "engine/server/test_slow_clients.py::test_nobody_notices_a_crowd_of_dead_readers",
        ),
    ),
    Kind(
        75,
        "the same request hundreds of times at once",
        (HOSTILE + "test_the_same_request_hundreds_of_times_and_most_leave",),
    ),
    Kind(
        76,
        "all of them leave at once",
        (HOSTILE + "test_the_same_request_hundreds_of_times_and_most_leave",),
        any=(SERVER + "test_a_storm_of_cancellations",),
    ),
    Kind(
        77,
        "more than may wait",
        (HOSTILE + "test_what_the_engine_refuses_is_a_status_everywhere",),
    ),
    Kind(
        78,
        "SIGTERM beside bad inputs",
        any=("engine/cli/test_serve.py::test_sigterm_beside_bad_inputs_ends_with_status_0",),
    ),
    Kind(
        79,
        "a start with keys that others can read, a port in use, files that are code or endless",
        any=(
            "engine/cli/test_cli.py::test_keys_come_from_a_file_that_is_ours_alone",
            "engine/cli/test_cli.py::test_a_port_in_use_is_one_line_before_anything_loads",
            "engine/config/test_config.py::test_an_open_host_needs_a_key_or_a_decision",
            "engine/core/weights/checkpoints/test_model_config.py"
            "::test_auto_map_of_a_known_architecture_is_data_only",
            HOSTILE + "test_a_tokenizer_of_a_gigabyte_is_not_read",
        ),
        never=never("nothing is served"),
    ),
    Kind(
        80,
        "a cache that others can write to; a profile from outside",
        any=(
            "engine/config/test_cache_folder.py::test_a_folder_that_others_can_write_to_is_refused",
            HOSTILE + "test_nobody_profiles_from_outside",
        ),
        never=never("nothing is served"),
    ),
)


@cache
def functions(file: str) -> frozenset[str]:
    """The tests of a file."""
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@cache
def module(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem + "_looked_at", TESTS / file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def values(test: str, name: str) -> Iterator[Any]:
    """What a test's parameter of this name may be."""
    file, _, function = test.partition("::")
    for mark in getattr(getattr(module(file), function), "pytestmark", ()):
        names = mark.args[0] if mark.name == "parametrize" else ()
        names = [each.strip() for each in names.split(",")] if isinstance(names, str) else names
        if name in names:
            place = list(names).index(name)
            for case in mark.args[1]:
                yield case if len(names) == 1 else case[place]


#: Kinds that /v1/embeddings cannot meet: what they are about it has none of.
NO_VECTORS = {
    **dict.fromkeys((32, 33, 34, 35, 36, 49), "its answer has no length"),
    **dict.fromkeys((37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47), "it chooses no token"),
    48: "it does not stream",
    **dict.fromkeys((50, 51, 58), "it takes no messages"),
    **dict.fromkeys((52, 53), "it calls no tools"),
    **dict.fromkeys((54, 55, 57), "its answer has one form"),
    **dict.fromkeys((59, 60), "it has no cache_salt"),
    **dict.fromkeys((67, 68), "it refers to nothing"),
}
#: Kinds whose test of /v1/embeddings is of it alone.
VECTORS = dict.fromkeys((25, 26, 27), "engine/server/test_embeddings.py::test_a_bad_field_is_named")


def test_all_eighty_are_there():
    assert [kind.number for kind in KINDS] == list(range(1, 81))
    assert len({kind.what for kind in KINDS}) == 80


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.number} {kind.what}")
def test_every_kind_has_tests_on_every_route(kind: Kind):
    of_vectors = [VECTORS[kind.number]] if kind.number in VECTORS else []
    for test in (*kind.each, *kind.one.values(), *kind.any, *of_vectors):
        file, _, function = test.partition("::")
        assert function.startswith("test_") and function in functions(file), test
    assert kind.each or kind.one or kind.any
    shown = set(kind.one) | set(kind.never)
    for test in kind.each:
        paths = set(values(test, "path"))
        assert paths, f"{test} has no routes"
        shown |= paths
    if not kind.any and not kind.never.keys() >= set(ROUTES):
        shown |= {EMBEDDINGS} if kind.number in NO_VECTORS or kind.number in VECTORS else set()
        missing = {*ROUTES, EMBEDDINGS} - shown
        assert not missing, f"not shown on {missing}"
    assert all(kind.never.values())
