"""Tokenizers from folders, GGUF files and code: ids, bytes and chat prompts against independent
numbers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from encoder_folders import tokenizer_of, write_encoder
from hypothesis import given, settings
from hypothesis import strategies as st
from places import DATA
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import gguf_tokenizer_mapping

from jitney.engine.common.errors import ModelError, RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.core.text.fast_tokenizers import _tiny_fast, byte_characters
from jitney.engine.core.text.gguf_tokenizers import _fast_from_gguf, _gguf_rust, _named_tokens
from jitney.engine.core.text.gguf_words import _PRE_TOKENIZERS
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.sources import ModelSource

SENTENCEPIECE = json.loads((DATA / "reference_sentencepiece.json").read_text())
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.load(ModelSource.resolve("tiny-random"))


# tiny-random


def test_tiny_ids_by_hand(tiny: Tokenizer):
    pairs = [first + second for first in "etaoinshrdlucm" for second in "etaoinshrdlucmgpyk"]
    ids = [
        ord("h"),
        260 + pairs.index("el"),
        260 + pairs.index("lo"),
        32,
        195,
        169,
        259,
    ]  # pairs with e merge first
    assert tiny.encode("hello é<|im_end|>") == ids
    assert (
        tiny.decode(ids) == "hello é"
        and tiny.decode(ids, skip_special_tokens=False) == "hello é<|im_end|>"
    )
    assert tiny.decode(ids[:-2]) == "hello \ufffd"
    assert [tiny.token_bytes(id) for id in ids] == [
        b"h",
        b"el",
        b"lo",
        b" ",
        b"\xc3",
        b"\xa9",
        b"<|im_end|>",
    ]


def test_tiny_fits_its_model(tiny: Tokenizer):
    config = tiny_config()
    assert tiny.vocab_size == config.vocab_size == 512
    assert (tiny.bos_id, tiny.eos_ids, tiny.special_ids) == (
        257,
        (259,),
        frozenset(range(256, 260)),
    )
    assert (tiny.id_to_token(257), tiny.id_to_token(512), tiny.token_bytes(512)) == (
        "<|bos|>",
        None,
        b"",
    )


@given(text=st.text(max_size=60))
def test_every_text_comes_back(tiny: Tokenizer, text: str):
    ids = tiny.encode(text)
    assert tiny.decode(ids, skip_special_tokens=False) == text
    assert b"".join(tiny.token_bytes(id) for id in ids) == text.encode()


def test_tiny_chat_prompt(tiny: Tokenizer):
    assert (
        tiny.apply_chat_template(CHAT) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (
        tiny.apply_chat_template(CHAT, add_generation_prompt=False)
        == "<|im_start|>user\nhi<|im_end|>\n"
    )


def test_threads_share_a_tokenizer(tiny: Tokenizer):
    texts = [f"some text number {i} " * (i % 7) for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tiny.encode, texts)) == [tiny.encode(text) for text in texts]


# A model folder


def save_folder(folder: Path, **options) -> ModelSource:
    fast: Any = _tiny_fast().as_transformers()
    for name, value in options.items():
        setattr(fast, name, value)
    fast.save_pretrained(str(folder))
    return ModelSource("hf", str(folder), "saved", tiny_config())


def test_a_folder_gives_the_tokenizer_saved_there(tiny: Tokenizer, tmp_path: Path):
    source = save_folder(tmp_path)
    found = Tokenizer.load(source)
    text = "the rain in <|im_start|>Spain\n日本 😀"
    assert found.encode(text) == tiny.encode(text)
    assert (found.eos_ids, found.special_ids, found.vocab_size) == (
        tiny.eos_ids,
        tiny.special_ids,
        512,
    )
    assert found.apply_chat_template(CHAT) == tiny.apply_chat_template(CHAT)


def test_end_tokens_of_config_and_tokenizer_are_joined(tmp_path: Path):
    source = save_folder(tmp_path, eos_token="<|bos|>")
    assert Tokenizer.load(source).eos_ids == (259, 257)


def test_code_named_by_a_folder_is_not_run(tmp_path: Path):
    source = save_folder(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert Tokenizer.load(source).vocab_size == 512
    assert not (tmp_path / "ran").exists()


def test_unsound_tokenizer_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = save_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    with (
        monkeypatch.context() as patch,
        pytest.raises(ModelError, match=r"tokenizer\.json is larger than 0 MiB"),
    ):
        patch.setattr("jitney.engine.core.text.fast_tokenizers.MAX_TOKENIZER_BYTES", 1000)
        Tokenizer.load(source)
    for text in ("", "{}", "[" * 10_000, '{"version": "1.0", "model": {"type": "BPE"}}'):
        path.write_text(text)
        with pytest.raises(ModelError, match="cannot be read") as caught:
            Tokenizer.load(source)
        assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.load(source)
    path.symlink_to("/etc/passwd")
    with pytest.raises(ModelError, match="leads out"):
        Tokenizer.load(source)


# Encoders read pairs of texts


TEXT: JsonDict = {"Sequence": {"id": "A", "type_id": 0}}
_BOS: JsonDict = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
BYTES: JsonDict = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def template(single: list[JsonDict], tokens: int = 1) -> JsonDict:
    token = {"id": "<|bos|>", "ids": [257] * tokens, "tokens": ["<|bos|>"] * tokens}
    pieces = {"single": single, "pair": [TEXT, {"Sequence": {"id": "B", "type_id": 1}}]}
    return {"type": "TemplateProcessing", **pieces, "special_tokens": {"<|bos|>": token}}


@pytest.mark.parametrize(
    "processor",
    [
        template([_BOS] * 200_000 + [TEXT]),
        template([TEXT] * 200_000),
        template([_BOS, TEXT], tokens=200_000),
        {"type": "Sequence", "processors": [BYTES | {"use_regex": True}] * 200_000},
    ],
    ids=["marks", "copies", "tokens", "processors"],
)
def test_a_post_processor_of_many_pieces_is_refused(processor: JsonDict, tmp_path: Path):
    source = save_folder(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": processor}))
    with pytest.raises(ModelError, match=r"tokenizer\.json: post_processor has [24]00,00\d pieces"):
        Tokenizer.load(source)


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "XLMRobertaModel"])
def test_pairs_are_joined_by_the_model_s_template(architecture: str, tmp_path: Path):
    """Cut as the `tokenizers` library cuts the second text; files' own cutting and filling is
    off.
    """
    source = ModelSource("hf", str(write_encoder(tmp_path / "m", architecture)), "m", tiny_config())
    found = Tokenizer.load(source)
    query, document = "t10 t11 t12", " ".join(f"t{id}" for id in range(20, 50))
    library = tokenizer_of(architecture)
    assert found.encode(document) == library.encode(document).ids
    assert found.encode_pair(query, document) == library.encode(query, document).ids
    for most in (8, 9, 20, 36, 37, 38, 200):
        library.enable_truncation(most, strategy="only_second")
        assert found.encode_pair(query, document, most) == library.encode(query, document).ids
    special = len(found.encode_pair("", ""))
    with pytest.raises(RequestError, match="query has 3 tokens") as caught:
        found.encode_pair(query, document, special + 3)
    assert caught.value.info.code == "context_length_exceeded"
    assert len(found.encode_pair(query, "", special + 4)) == special + 3


# Chat templates come from strangers


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages.foo.bar }}", "refused"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}{{ m.update({'a': 1}) }}{% endfor %}", "refused"),
    ],
)
def test_template_failures_belong_to_the_request(template: str, words: str, tmp_path: Path):
    tokenizer = Tokenizer.load(save_folder(tmp_path, chat_template=template))
    with pytest.raises(RequestError) as caught:
        tokenizer.apply_chat_template(CHAT)
    assert (
        words in str(caught.value)
        and caught.value.info.param == "messages"
        and "\n" not in str(caught.value)
    )


@pytest.mark.parametrize("name", ["chat_template", "messages"])
def test_requests_cannot_bring_their_own_template(tiny: Tokenizer, name: str):
    variables: dict[str, Any] = {name: "{{ 1 }}"}
    with pytest.raises(RequestError, match=f"{name} cannot be set"):
        tiny.apply_chat_template(CHAT, **variables)


def test_templates_see_tools_and_variables(tmp_path: Path):
    template = "{{ tools | length }} {{ thinking }} {{ bos_token }}"
    tokenizer = Tokenizer.load(save_folder(tmp_path, chat_template=template))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert tokenizer.apply_chat_template(CHAT, tools=tools, thinking=True) == "1 True <|bos|>"


def test_a_model_without_template(tmp_path: Path):
    tokenizer = Tokenizer.load(save_folder(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template(CHAT)


# GGUF metadata


def byte_metadata(pre: str | None, **changes) -> dict:
    """A vocabulary of the 256 bytes and two marks, without merges."""
    spelled = byte_characters()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.tokens": [spelled[byte] for byte in range(256)] + ["<s>", "</s>", "<tool>"],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 4],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
    }
    return {key: value for key, value in metadata.items() if value is not None} | {
        f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()
    }


#: What a pre-tokenizer cuts, and a mark between the words it makes.
TEXTS = (
    "It's 2026,  I'LL\n\n go é_x",
    "Señor getHTTPServer 中a文，v1.25//x   y\tf(x) naïve!\n\n",
)
MARK = "|"
#: How pre-tokenizers of which transformers has no pattern cut TEXTS, by hand from their rules:
#: digits in one, one by one, or by threes; the case of contractions; line ends; scripts.
CUTS = {
    "gpt-2": (
        "It|'s| 2026|,| | I|'|LL|\n\n| go| é|_|x",
        "Señor| getHTTPServer| 中a文|，|v|1|.|25|//|x|  | y|\t|f|(|x|)| naïve|!|\n\n",
    ),
    "smollm": (
        "It|'s| |2|0|2|6|,| | I|'|LL|\n\n| go| é|_|x",
        "Señor| getHTTPServer| 中a文|，|v|1|.|2|5|//|x|  | y|\t|f|(|x|)| naïve|!|\n\n",
    ),
    "seed-coder": (
        "It|'s| |2|0|2|6|,| | I|'LL|\n\n| go| é|_x",
        "Señor| getHTTPServer| 中a文|，v|1|.|2|5|//|x|  | y|\tf|(x|)| naïve|!|\n\n",
    ),
    "deepseek-v3": (
        "It|'s| |202|6|,| | I|'LL|\n\n| go| é|_x",
        "Señor| getHTTPServer| |中|a|文|，|v|1|.|25|//|x|  | y|\tf|(x|)| naïve|!\n\n",
    ),
    "deepseek-coder": (
        "It|'|s| |2|0|2|6|,| | I|'|LL|\n|\n| go| é|_|x",
        "Señor| getHTTPServer| |中|a|文|，|v|1|.|2|5|//|x|  | y|\tf|(|x|)| naïve|!|\n|\n",
    ),
    "deepseek-llm": (
        "It|'|s| |2|0|2|6|,| | I|'|LL|\n|\n| go| é|_|x",
        "Se|ñ|or| getHTTPServer| |中|a|文|，|v|1|.|2|5|//|x|  | y|\tf|(|x|)| na|ï|ve|!|\n|\n",
    ),
}


BACK = {character: byte for byte, character in byte_characters().items()}


@cache
def cutter(pre: str) -> Any:
    """The pre-tokenizer of a file that names it so."""
    return _fast_from_gguf(byte_metadata(pre)).rust.pre_tokenizer


def cut(pre: str, text: str) -> list[str]:
    """The words of a text as it is cut for a file of this pre-tokenizer."""
    words = cutter(pre).pre_tokenize_str(text)
    return [bytes(BACK[character] for character in word).decode() for word, _ in words]


@pytest.mark.parametrize("pre", CUTS)
def test_words_are_cut_as_the_pre_tokenizer_says(pre: str):
    assert [cut(pre, text) for text in TEXTS] == [cuts.split(MARK) for cuts in CUTS[pre]]


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(
        st.sampled_from("aZéß中あ한9² .,'!/_\t\r\n～ǅʰ\u0301") | st.characters(codec="utf-8")
    )
)
def test_words_are_cut_as_transformers_does(text: str):
    """Of the names that both know: the patterns that transformers has for GGUF files."""
    theirs = gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS
    both = theirs.keys() & _PRE_TOKENIZERS.keys()
    assert {"llama-bpe", "tekken", "qwen2", "deepseek-r1-qwen", "smaug-bpe", "qwen35"} <= both
    assert {"lfm2", "pixtral", "gpt-4o"} <= both
    for pre in both:
        split = Split(Regex(theirs[pre]), "isolated")
        assert cut(pre, text) == [word for word, _ in split.pre_tokenize_str(text)]


def test_the_letters_of_deepseek_llm_are_cased():
    """Its long class: below the scripts that are cut again, letters that have a case."""
    kept = {code for code in range(0x80, 0x800) if len(cut("deepseek-llm", f"é{chr(code)}é")) == 1}
    cased = {code for code in kept if unicodedata.category(chr(code)) in ("Lu", "Ll", "Lt")}
    assert kept == cased and {*map(ord, "ßΣяԱǅȝ")} <= kept
    assert kept.isdisjoint(map(ord, "ƻʰא９"))


def test_qwen_composes_characters():
    tokenizer = Tokenizer(_fast_from_gguf(byte_metadata("qwen2")))
    assert tokenizer.encode("e\u0301") == list("é".encode())
    assert Tokenizer(_fast_from_gguf(byte_metadata("gpt-2"))).encode("e\u0301") == list(
        "e\u0301".encode()
    )


def test_special_tokens_of_gguf_files():
    tokenizer = Tokenizer(_fast_from_gguf(byte_metadata("llama-bpe")), eos_ids=(5,))
    assert tokenizer.encode("a</s><tool>") == [256, 97, 257, 258]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]
    assert tokenizer.decode([256, 97, 258, 257]) == "a<tool>"
    assert (tokenizer.special_ids, tokenizer.eos_ids) == (frozenset({256, 257}), (5, 257))
    quiet = byte_metadata("llama-bpe", ggml__add_bos_token=False, ggml__add_eos_token=True)
    assert Tokenizer(_fast_from_gguf(quiet)).encode("a") == [97, 257]
    assert Tokenizer(_fast_from_gguf(byte_metadata("gpt-2"))).encode("a") == [97]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ggml__model": "bert"}, "'bert' is not supported; known: gpt2, llama"),
        ({"ggml__pre": "viking"}, "'viking' is not supported; known: gpt-2"),
        ({"ggml__pre": ["x"]}, "cannot be built"),
        ({"ggml__tokens": []}, "tokens must be a list"),
        ({"ggml__tokens": ["a", "a"]}, "twice"),
        ({"ggml__token_type": [1]}, "token_type"),
        ({"ggml__merges": ["a b"]}, "cannot be built"),
        ({"ggml__merges": [1]}, "cannot be built"),
        ({"ggml__bos_token_id": 259}, "outside the vocabulary of 259"),
        ({"ggml__model": "llama"}, "scores"),
    ],
)
def test_gguf_tokenizers_that_would_be_wrong_are_refused(changes: dict, words: str):
    with pytest.raises(ModelError, match=words) as caught:
        _fast_from_gguf(byte_metadata("gpt-2", **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("turned", [False, True])
def test_sentencepiece_ids_equal_sentencepiece(turned: bool):
    """turned: ids from last to first, so that scores, not ids, must decide what merges first."""
    last = len(SENTENCEPIECE["tokens"]) - 1
    place = (lambda id: last - id) if turned else (lambda id: id)
    tokenizer = Tokenizer(
        _fast_from_gguf(
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.bos_token_id": place(1),
                "tokenizer.ggml.eos_token_id": place(2),
                "tokenizer.ggml.unknown_token_id": place(0),
                **{
                    f"tokenizer.ggml.{key}": SENTENCEPIECE[key][:: -1 if turned else 1]
                    for key in ("tokens", "scores", "token_type")
                },
            }
        )
    )
    for text, original in SENTENCEPIECE["texts"].items():
        ids = [place(id) for id in original]
        shown = text.replace("▁", " ")
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == shown
        assert b"".join(tokenizer.token_bytes(id) for id in ids).decode() == (
            " " + shown if text else ""
        )
        assert tokenizer.encode(text) == [place(1), *ids]


def test_a_sentencepiece_vocabulary_with_merges_has_the_same_ids():
    """As Gemma 4's files have one: which pairs merge first is told, and no space is added."""
    scored = dict(zip(SENTENCEPIECE["tokens"], SENTENCEPIECE["scores"], strict=True))
    merges = [
        f"{token[:cut]} {token[cut:]}"
        for token in sorted(scored, key=scored.__getitem__, reverse=True)
        for cut in range(1, len(token))
        if token[:cut] in scored and token[cut:] in scored
    ]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": SENTENCEPIECE[key] for key in ("tokens", "token_type")},
    }
    tokenizer = Tokenizer(_fast_from_gguf(metadata))
    for text, ids in SENTENCEPIECE["texts"].items():
        spaced = f" {text}" if text else ""
        assert tokenizer.encode(spaced) == [1, *ids], text
        assert tokenizer.decode(ids) == spaced.replace("▁", " ")


def test_named_tokens_are_special_whatever_their_type():
    """As transformers makes them; files may say that an end token is an ordinary one."""
    metadata = byte_metadata("gpt-2")
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.token_type"] = [1] * len(tokens)
    metadata["tokenizer.ggml.eos_token_id"] = len(tokens) - 1
    bare, _ = _gguf_rust(metadata, tokens)
    named = {
        f"{name}_token": tokens[id] for name, id in _named_tokens(metadata, len(tokens)).items()
    }
    theirs: Any = PreTrainedTokenizerFast(tokenizer_object=bare, **named)
    ours = _fast_from_gguf(metadata)
    assert ours.special_tokens == theirs.special_tokens_map
    added = ours.rust.get_added_tokens_decoder()
    assert str(added) == str(theirs.backend_tokenizer.get_added_tokens_decoder())
    assert len(tokens) - 1 in added
    assert Tokenizer(ours).eos_ids == (theirs.eos_token_id,)


def test_smollm2_equals_the_reference(smollm2, reference):
    """Prompts, chat prompts and texts of the reference made with the original tokenizer."""
    tokenizer = Tokenizer.load(smollm2)
    for item in reference:
        assert tokenizer.encode(item["prompt"]) == item["prompt_ids"]
        assert (
            tokenizer.decode(item["output_ids"], skip_special_tokens=False) == item["output_text"]
        )
        assert (
            b"".join(map(tokenizer.token_bytes, item["output_ids"])).decode() == item["output_text"]
        )
    asked = next(item["prompt"] for item in reference if "capital of France?" in item["prompt"])
    assert (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}]
        )
        == asked
    )
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == ((2,), 49152)


def test_every_pre_tokenizer_is_reachable():
    assert {"default", *CUTS} <= set(_PRE_TOKENIZERS)
    for pre in [*_PRE_TOKENIZERS, None]:
        assert Tokenizer(_fast_from_gguf(byte_metadata(pre))).decode(list(b"ok")) == "ok"


def test_importing_the_tokenizer_is_light():
    """The API process answers /livez before transformers is loaded, and never loads jax."""
    script = (
        "import sys, jitney.engine.core.text.tokenizer, "
        "jitney.engine.core.weights.checkpoints.sources; "
        "print([name for name in ('jax', 'flax', 'torch', 'transformers', 'tokenizers') if name in "
        "sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True
        ).stdout.strip()
        == "[]"
    )
