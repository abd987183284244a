"""Fill-in-the-middle prompts and the special tokens for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

#: Tokens before the prefix, the suffix and the middle.
_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
#: Tokens that end the middle, besides the model's end tokens.
_ENDS = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<fim_pad>",
    "<file_sep>",
    "▁<EOT>",
)
#: Tokens before a repository's name and before each of its files.
_FILE_MARKS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))


class _Vocabulary(Protocol):
    """The part of a tokenizer that this module uses."""

    def token_to_id(self, token: str, /) -> int | None: ...

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...

    @property
    def bos_id(self) -> int | None: ...


class FillIn(NamedTuple):
    """The fill-in-the-middle tokens of a vocabulary."""

    #: Tokens before each part of the prompt.
    prefix: int
    suffix: int
    middle: int
    #: Tokens that end the answer.
    ends: tuple[int, ...]
    #: Tokens of a repository and of a file in it; None: the model has none.
    marks: tuple[int, int] | None

    @classmethod
    def of(cls, vocabulary: _Vocabulary) -> FillIn | None:
        """The tokens of a vocabulary; None if it has none."""
        for names in _NAMES:
            ids = _ids_of(vocabulary, names)
            if len(ids) == len(names):
                prefix, suffix, middle = ids
                ends = tuple(_ids_of(vocabulary, _ENDS))
                return cls(prefix, suffix, middle, ends, _marks(vocabulary))
        return None

    def prompt(
        self,
        vocabulary: _Vocabulary,
        before: str,
        after: str,
        others: Sequence[tuple[str, str]] = (),
    ) -> list[int]:
        """The prompt for the text between `before` and `after`. others: (name, text) of other
        files, given as context. Raises RequestError.
        """

        def encode(text: str) -> list[int]:
            return vocabulary.encode(text, add_special_tokens=False)

        first = vocabulary.encode("")[:1]
        ids = first if first == [vocabulary.bos_id] else []  # tokenizers need not add BOS
        if self.marks is not None and others:
            repository, file = self.marks
            ids += [repository, *encode("repository\n")]
            for name, text in others:
                ids += [file, *encode(f"{name}\n{text}\n")]
            ids += [file, *encode("file\n")]
        elif others:
            ids += encode("\n\n".join([text for _, text in others]) + "\n\n")
        ids += [self.prefix, *encode(before), self.suffix, *encode(after), self.middle]
        return ids


def _marks(vocabulary: _Vocabulary) -> tuple[int, int] | None:
    for names in _FILE_MARKS:
        ids = _ids_of(vocabulary, names)
        if len(ids) == len(names):
            return ids[0], ids[1]
    return None


def _ids_of(vocabulary: _Vocabulary, names: Sequence[str]) -> list[int]:
    """Ids of the names that the vocabulary has."""
    ids = [vocabulary.token_to_id(name) for name in names]
    return [id for id in ids if id is not None]
