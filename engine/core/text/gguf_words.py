"""Word splitting of byte-level BPEs in GGUF files, by `tokenizer.ggml.pre`."""

from __future__ import annotations

from typing import Any, NamedTuple

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonObject


class Words(NamedTuple):
    """Splits a text into words before the merges of a byte-level BPE."""

    #: Regular expressions (Oniguruma) that split the text one after the other; (): GPT-2's.
    patterns: tuple[str, ...] = ()
    #: Then split into single digits.
    digits: bool = False
    #: First normalize the text to Unicode's form C.
    compose: bool = False
    #: Words that are tokens skip the merges.
    whole_words: bool = False
    #: A text begins with BOS unless the file says otherwise.
    begins: bool = False

    def splitter(self) -> Any:
        """The pre-tokenizer of the tokenizers library, which also maps bytes to characters."""
        from tokenizers import Regex, pre_tokenizers

        steps: list[Any] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns
        ]
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return pre_tokenizers.Sequence(steps)


_GPT4_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_BLANKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _BLANKS
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN_PATTERN = (
    f"{_TEKKEN_WORD}{_UPPER}*{_LOWER}+|{_TEKKEN_WORD}{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _BLANKS
)
_GPT4O_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
_GPT4O_PATTERN = (
    f"{_TEKKEN_WORD}{_UPPER}*{_LOWER}+{_GPT4O_END}{_TEKKEN_WORD}{_UPPER}+{_LOWER}*{_GPT4O_END}"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _BLANKS
)
#: Letters that DeepSeek LLM keeps together: cased ones of some scripts.
_DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
#: Chinese, Japanese and Korean characters of DeepSeek's first tokenizers.
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_GPT2 = Words()
_DIGITS = Words(digits=True)
_LLAMA3 = Words((_GPT4_LETTERS + r"\p{N}{1,3}" + _GPT4_REST,), whole_words=True, begins=True)
#: DeepSeek-V3's: a mark before Latin letters goes with them.
_DEEPSEEK3_PATTERN = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _BLANKS
)
_QWEN35_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _BLANKS
)
_QWEN2 = Words((_GPT4_LETTERS + r"\p{N}" + _GPT4_REST,), compose=True)
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "lfm2", "pixtral")
#: `tokenizer.ggml.pre` -> the splitting of the model's tokenizer.json. Names that share one are as
#: in llama.cpp (src/llama-vocab.cpp).
_PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "default", "mellum", "trillion", "exaone4"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "minerva-7b"), _DIGITS),
    **dict.fromkeys(_LLAMA3_NAMES, _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), Words(_LLAMA3.patterns)),
    "gpt-4o": Words((_GPT4O_PATTERN,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "f2llmv2"), _QWEN2),
    "qwen35": Words((_QWEN35_PATTERN,), compose=True),
    "deepseek-v3": Words(
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_PATTERN)
    ),
    "seed-coder": Words(
        (_GPT4_LETTERS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _BLANKS,),
    ),
    "tekken": Words((_TEKKEN_PATTERN,), whole_words=True, begins=True),
    "deepseek-llm": Words(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _DEEPSEEK_CJK,
        ),
        digits=True,
    ),
    "deepseek-coder": Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK), digits=True),
}


def words_of(metadata: JsonObject) -> Words:
    """The word splitting of a GGUF file. Raises ModelError for an unknown name."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"GGUF: tokenizer.ggml.pre {str(pre)[:40]!r} is not supported; "
            f"known: {', '.join(_PRE_TOKENIZERS)}"
        )
    return _PRE_TOKENIZERS[pre]
