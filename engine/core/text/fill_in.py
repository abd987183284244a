"""Filling in the middle: the special tokens for it in a vocabulary, and the prompt with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

#: Before what comes first, before what comes last, and before what is asked for.
_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
#: Tokens that end what was filled in, beside the model's own.
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
#: What stands before each file of a repository, and before the first of them.
_FILE_MARKS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))


class _Vocabulary(Protocol):
    """What this module needs of a tokenizer."""

    def token_to_id(self, token: str, /) -> int | None: ...

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...

    @property
    def bos_id(self) -> int | None: ...


class OtherFile(NamedTuple):
    """A text that the model should know of."""

    name: str
    text: str


class FillIn(NamedTuple):
    """The tokens of one vocabulary."""

    #: What stands before each part of the prompt.
    prefix: int
    suffix: int
    middle: int
    #: What ends the answer.
    ends: tuple[int, ...]
    #: Marks of a repository and of a file in it; None if the model knows none.
    marks: tuple[int, int] | None

    @classmethod
    def of(cls, vocabulary: _Vocabulary) -> FillIn | None:
        """How the model is asked; None if it was not taught to."""
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
        others: Sequence[OtherFile] = (),
    ) -> list[int]:
        """The tokens that ask for what stands between two texts. Raises RequestError."""

        def encode(text: str) -> list[int]:
            return vocabulary.encode(text, add_special_tokens=False)

        ids = _beginning(vocabulary)
        if self.marks is not None and others:
            repository, file = self.marks
            ids += [repository, *encode("repository\n")]
            for other in others:
                ids += [file, *encode(f"{other.name}\n{other.text}\n")]
            ids += [file, *encode("file\n")]
        elif others:
            ids += encode("\n\n".join([other.text for other in others]) + "\n\n")
        ids += [self.prefix, *encode(before), self.suffix, *encode(after), self.middle]
        return ids


def _marks(vocabulary: _Vocabulary) -> tuple[int, int] | None:
    for names in _FILE_MARKS:
        ids = _ids_of(vocabulary, names)
        if len(ids) == len(names):
            return ids[0], ids[1]
    return None


def _ids_of(vocabulary: _Vocabulary, names: Sequence[str]) -> list[int]:
    """Of those that it has."""
    ids = [vocabulary.token_to_id(name) for name in names]
    return [id for id in ids if id is not None]


def _beginning(vocabulary: _Vocabulary) -> list[int]:
    """The token that the model's texts begin with, where its tokenizer puts one."""
    first = vocabulary.encode("")[:1]
    return first if first == [vocabulary.bos_id] else []
