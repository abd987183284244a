"""Finds the model that `--model` names on this machine, fetching it if need be; jax-free."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from jitney.engine.common.errors import ConfigError, ModelError, did_you_mean
from jitney.engine.common.requests import JsonObject, JsonValue, Pooling
from jitney.engine.config import Config
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.fetch import (
    Progress,
    Repository,
    fetch_smollm2,
    fetched_smollm2,
    no_progress,
)
from jitney.engine.core.weights.checkpoints.files import MAX_TOKENIZER_BYTES, read_json, safe_file
from jitney.engine.core.weights.checkpoints.hf_config import read_hf_config
from jitney.engine.core.weights.checkpoints.layer_configs import (
    EncoderConfig,
    RopeConfig,
)
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.pooling_config import (
    folder_dimensions,
    folder_pooling,
    gguf_pooling,
    read_pooling,
)
from jitney.engine.core.weights.checkpoints.turn_ends import turn_ends

_log = logging.getLogger("jitney.core")

_DEFAULT_MODEL = "smollm2-135m"
#: Configuration of the default model, for use before it is fetched.
_DEFAULT_CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    n_layers=30,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    windows=(0,) * 30,
    context_length=8192,
    ropes=(RopeConfig(100000.0),),
    rms_eps=9.999999747378752e-06,  # 1e-5 in float32
    tie_embeddings=True,
    bos_id=1,
    eos_ids=(2,),
)
#: Adapters by name: their folders.
_NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})
#: Files of a model folder that are part of its identity; others (README, images) are not.
_SUFFIXES = frozenset((".safetensors", ".json", ".jinja", ".model", ".txt"))
#: Larger files are hashed by their size and this number of blocks of this size, evenly spread from
#: the first byte to the last: reading all would take as long as loading.
_WHOLE_BYTES = 16 << 20
_BLOCKS, _BLOCK_BYTES = 64, 64 << 10
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model found on this machine."""

    kind: Literal["hf", "gguf", "tiny"]
    #: Folder (hf) or file (gguf), empty for tiny.
    path: str
    #: Shown to API clients.
    name: str
    config: ModelConfig
    #: Its weights are loaded; False: random ones take their place (`load_format` dummy).
    has_weights: bool = True

    @classmethod
    def of(cls, config: Config, progress: Progress = no_progress) -> ModelSource:
        """The model that the settings name; see `resolve`."""
        model = config.model
        revision, weights = model.revision or None, model.load_format != "dummy"
        return cls.resolve(model.id, revision=revision, weights=weights, progress=progress)

    @classmethod
    def draft_of(
        cls, config: Config, target: ModelConfig, progress: Progress = no_progress
    ) -> ModelSource | None:
        """The draft model that the settings name, if any, or the EAGLE-3 head for target; see
        `resolve`. Raises ConfigError for one that cannot draft.
        """
        name = config.engine.draft_model
        if not name:
            return None
        weights = config.model.load_format != "dummy"
        if config.engine.speculative == "eagle3":
            return cls.of_eagle3(name, target, weights=weights, progress=progress)
        source = cls.resolve(name, weights=weights, progress=progress)
        if source.config.encoder is not None or source.config.recurrent is not None:
            raise ConfigError(
                f"draft_model {name}: {source.config.architecture} cannot draft: give a model that "
                "generates, and whose layers all attend"
            )
        return source

    @classmethod
    def of_eagle3(
        cls,
        name: str,
        target: ModelConfig,
        *,
        weights: bool = True,
        progress: Progress = no_progress,
    ) -> ModelSource:
        """The EAGLE-3 head for target in a folder or repository, fetched if need be; see
        `resolve`. Raises ConfigError for one of another model.
        """
        from jitney.engine.core.weights.checkpoints.eagle3 import read_eagle3

        folder = Path(name).expanduser()
        if _is_repository(name):
            folder = Repository(name, None).fetch(progress, weights=weights)
        return cls("hf", str(folder), name, read_eagle3(folder, target), weights)

    @classmethod
    def resolve(
        cls,
        model: str,
        *,
        revision: str | None = None,
        weights: bool = True,
        progress: Progress = no_progress,
    ) -> ModelSource:
        """Find `model`, fetching it if need be, and read its configuration (not its weights).

        revision: branch, tag or commit of a repository. weights: whether they will be loaded, and
        are fetched. progress(stage, done, total, detail) is called meanwhile. Raises ModelError.
        """
        kind, _, family = model.partition(":")
        path = Path(model).expanduser()
        if revision is not None and not _is_repository(model):
            raise ModelError(
                "a revision is only meaningful with a Hugging Face repository id, not with "
                f"{model!r}"
            )
        if model == _DEFAULT_MODEL:
            source = _gguf_source(fetch_smollm2(progress), _DEFAULT_MODEL)
        elif kind == "tiny-random":
            source = cls("tiny", "", model, tiny_config(family or "llama"))
        elif model and path.is_dir():  # Path("") is the current folder
            source = _hf_source(path, path.resolve().name, weights)
        elif path.is_file():
            source = _gguf_source(path)
        elif _is_repository(model):
            fetched = Repository(model, revision).fetch(progress, weights=weights)
            source = _hf_source(fetched, model, weights)
        else:
            raise ModelError(
                f"no model {model!r}: give {_DEFAULT_MODEL}, a model folder, a .gguf file, "
                "a Hugging Face repository id (owner/name) or tiny-random"
                f"{did_you_mean(model, (_DEFAULT_MODEL, 'tiny-random'))}"
            )
        return source if weights else replace(source, has_weights=False)

    @classmethod
    def local(cls, model: str) -> ModelSource | None:
        """The model as `resolve` finds it; None if that could fetch it. Raises ModelError."""
        if _is_repository(model) or (model == _DEFAULT_MODEL and fetched_smollm2() is None):
            return None
        return cls.resolve(model)

    @classmethod
    def is_here(cls, model: str, revision: str | None = None) -> bool:
        """Whether the model runs without a network. Raises ModelError if there is no such model."""
        source = cls.of_shapes(model, revision)
        return source is not None and (source.path != "" or source.name != _DEFAULT_MODEL)

    @classmethod
    def of_shapes(cls, model: str, revision: str | None = None) -> ModelSource | None:
        """The model as far as its shapes are known without fetching anything, else None.

        The default model has no file before it is fetched, so how its matrices are stored is not
        known. Raises ModelError.
        """
        if _is_repository(model):
            folder = Repository(model, revision).cached()
            return None if folder is None else _hf_source(folder, model)
        if model == _DEFAULT_MODEL and fetched_smollm2() is None:
            return cls("tiny", "", _DEFAULT_MODEL, _DEFAULT_CONFIG)
        return cls.resolve(model)

    @property
    def is_built_in(self) -> bool:
        """Whether it is the default model."""
        return self.name == _DEFAULT_MODEL

    def stated_pooling(self) -> Pooling | None:
        """The pooling that the model's files state, or None. Raises ModelError."""
        match self.kind:
            case "hf":
                return folder_pooling(Path(self.path))
            case "gguf":
                from jitney.engine.core.weights.checkpoints.gguf import GGUFFile

                return gguf_pooling(GGUFFile(self.path).metadata)
            case "tiny":
                return None

    def stated_dimensions(self) -> tuple[int, ...] | None:
        """Lengths that vectors may be cut to by the model's files; empty: any; None: unstated."""
        return folder_dimensions(Path(self.path)) if self.kind == "hf" else None

    def identity(self, adapters: Mapping[str, str] = _NO_ADAPTERS) -> str:
        """SHA-256 (hexadecimal) of the content of the model's files and of its adapters' (folders
        by name), wherever they lie; of large files, some 4 MB are read.
        """
        own = _own_identity(self)
        if not adapters:
            return own
        total = hashlib.sha256(own.encode())
        for name, folder in adapters.items():
            total.update(f"{name}\0{_folder_digest(Path(folder).expanduser())}\n".encode())
        return total.hexdigest()


def _is_repository(model: str) -> bool:
    """True for owner/name with nothing of that name on this machine."""
    return (
        _REPOSITORY.fullmatch(model) is not None
        and not model.endswith(".gguf")
        and ".." not in model
        and not Path(model).exists()
    )


def _hf_source(folder: Path, name: str, weights: bool = True) -> ModelSource:
    values = read_json(folder, "config.json")
    generation = read_json(folder, "generation_config.json", missing_ok=True)
    config = read_hf_config(values, generation)
    if config.encoder is not None:
        encoder = _encoder_of(folder, config.encoder)
        return ModelSource("hf", str(folder), name, replace(config, encoder=encoder))
    # A GGUF file, such as the default model, has no safetensors.
    from jitney.engine.core.weights.checkpoints.safetensors import lacks_head

    if weights and not config.tie_embeddings and lacks_head(folder):
        if "text_config" not in values:
            _log.warning(
                "%s holds no output head: its vectors are right, text that it generates means "
                "nothing",
                name,
            )
        config = replace(config, tie_embeddings=True)
    ends = [id for id in _folder_ends(folder, config) if 0 <= id < config.vocab_size]
    return ModelSource("hf", str(folder), name, config.with_ends(*ends))


def _encoder_of(folder: Path, encoder: EncoderConfig) -> EncoderConfig:
    """The encoder's settings with those of further files."""
    if encoder.pooling != "classify":
        return replace(encoder, pooling=read_pooling(folder))
    if encoder.token_types == 1:
        return encoder
    separator = _separator_id(folder)
    if separator is None:
        raise ModelError("tokenizer.json has no separator, by which the texts of a pair are found")
    return replace(encoder, separator_id=separator)


def _separator_id(folder: Path) -> int | None:
    """Id of the special token that the tokenizer's files call the separator."""
    text = read_json(folder, "tokenizer_config.json", missing_ok=True).get("sep_token", "[SEP]")
    if isinstance(text, dict):
        text = text.get("content")
    tokenizer = read_json(folder, "tokenizer.json", missing_ok=True, limit=MAX_TOKENIZER_BYTES)
    tokens = _added_tokens(tokenizer.get("added_tokens"))
    return next((id for token, id, _ in tokens if token == text), None)


def _folder_ends(folder: Path, config: ModelConfig) -> list[int]:
    """Tokens that end a turn by the tokenizer's files: its end token, and those known by text.

    config.json of chat models often names only the end token of their base model.
    """
    settings = read_json(folder, "tokenizer_config.json", missing_ok=True)
    tokenizer = read_json(folder, "tokenizer.json", missing_ok=True, limit=MAX_TOKENIZER_BYTES)
    special: dict[str, int] = {}
    others: dict[str, int] = {}
    for text, id, is_special in _added_tokens(tokenizer.get("added_tokens")):
        (special if is_special else others)[text] = id
    own = settings.get("eos_token")
    if isinstance(own, dict):
        own = own.get("content")
    ends = [id for text, id in (others | special).items() if text == own]
    template = _folder_template(folder, settings)
    return ends + turn_ends(special, others, template, {*config.eos_ids, *ends})


def _added_tokens(entries: JsonValue) -> Iterator[tuple[str, int, bool]]:
    """(text, id, whether it is a special token) of the sound entries of `added_tokens`."""
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict):
            text, id = entry.get("content"), entry.get("id")
            if isinstance(text, str) and type(id) is int:
                yield text, id, entry.get("special") is True


def _folder_template(folder: Path, settings: JsonObject) -> str:
    """The text of all chat templates of a folder; settings: tokenizer_config.json."""
    stored = settings.get("chat_template")
    named = stored if isinstance(stored, list) else [{"template": stored}]
    texts = [entry.get("template") for entry in named if isinstance(entry, dict)]
    file = safe_file(folder, "chat_template.jinja", missing_ok=True)
    if file is not None:
        texts.append(file.read_text(errors="replace"))
    return "\n".join([text for text in texts if isinstance(text, str)])


def _gguf_source(path: Path, name: str = "") -> ModelSource:
    """A GGUF file. name: "": the file's."""
    from jitney.engine.core.weights.checkpoints.gguf import GGUFFile, model_name
    from jitney.engine.core.weights.checkpoints.gguf_config import config_of

    if path.suffix != ".gguf":
        raise ModelError(f"{path.name} is neither a model folder nor a .gguf file")
    return ModelSource("gguf", str(path), name or model_name(path), config_of(GGUFFile(path)))


def _own_identity(source: ModelSource) -> str:
    if source.kind == "tiny":
        return hashlib.sha256(source.name.encode()).hexdigest()
    path = Path(source.path)
    if source.kind == "gguf":
        from jitney.engine.core.weights.checkpoints.gguf import split_files

        files = split_files(path)
        if len(files) == 1:
            return _file_digest(path)
        return hashlib.sha256("\n".join(map(_file_digest, files)).encode()).hexdigest()
    return _folder_digest(path)


def _folder_digest(path: Path) -> str:
    files = [file for file in path.iterdir() if file.suffix in _SUFFIXES and file.is_file()]
    total = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        total.update(f"{file.name}\0{_file_digest(file)}\n".encode())
    return total.hexdigest()


def _file_digest(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb") as file:
        for start, length in _blocks(size):
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of what is read of a file of `size` bytes."""
    if size <= _WHOLE_BYTES:
        yield 0, size
        return
    last = size - _BLOCK_BYTES
    for number in range(_BLOCKS):
        yield last * number // (_BLOCKS - 1), _BLOCK_BYTES
