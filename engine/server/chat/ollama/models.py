"""Models as Ollama's routes describe them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.requests import JsonDict
from jitney.engine.server.chat.ollama.answers import (
    Capability,
    OllamaDetails,
    OllamaModel,
    OllamaRunningModel,
    OllamaShowAnswer,
)
from jitney.engine.server.chat.ollama.format import rfc3339
from jitney.engine.server.http.model_cards import ModelCard

if TYPE_CHECKING:
    from jitney.engine.core import Tokenizer
    from jitney.engine.server.chat.conversation.formats import TurnFormat

#: The tag of a name that has none.
_TAG = ":latest"
#: Class name of a model -> the family's name, as GGUF files spell it.
_FAMILY = re.compile(r"(\w+?)(?:For[A-Z]|LMHead|Model$)")
#: expires_at of a model that is never unloaded: clients need a date.
_NEVER = "9999-12-31T23:59:59Z"
_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


def without_tag(name: str) -> str:
    """A name without the default tag."""
    return name.removesuffix(_TAG)


def listed(card: ModelCard, info: EngineInfo | None) -> OllamaModel:
    """A model of /api/tags. info: of its engine; None: not known."""
    return OllamaModel(
        name=card.id,
        model=card.id,
        size=0 if info is None else info.model.weight_bytes,
        digest="" if info is None else info.config_digest,
        details=_details(info, card.parent or ""),
        modified_at=rfc3339(datetime.fromtimestamp(card.created, UTC)),
    )


def running(card: ModelCard, info: EngineInfo | None) -> OllamaRunningModel:
    """A model of /api/ps. info: as above."""
    size = 0 if info is None else info.model.weight_bytes
    is_on_cpu = info is None or info.device.platform == "cpu"
    return OllamaRunningModel(
        name=card.id,
        model=card.id,
        size=size,
        digest="" if info is None else info.config_digest,
        details=_details(info, ""),
        expires_at=_NEVER,
        size_vram=0 if is_on_cpu else size,
        context_length=card.max_model_len or 0,
    )


def described(
    info: EngineInfo, tokenizer: Tokenizer, turns: TurnFormat, created: int, parent: str = ""
) -> OllamaShowAnswer:
    """The answer of /api/show."""
    defaults = [f"{name} {value}" for name, value in info.model.sampling_defaults.items()]
    return OllamaShowAnswer(
        parameters="\n".join(defaults),
        template=tokenizer.chat_template,
        details=_details(info, parent),
        model_info=_gguf_names(info),
        capabilities=_capabilities(info, tokenizer, turns),
        modified_at=rfc3339(datetime.fromtimestamp(created, UTC)),
    )


def _details(info: EngineInfo | None, parent: str) -> OllamaDetails:
    family = "" if info is None else _family(info)
    return OllamaDetails(
        parent_model=parent,
        format="",
        family=family,
        families=[family] if family else [],
        parameter_size="" if info is None else _in_units(info.model.parameters),
        quantization_level="" if info is None else info.formats.weights,
    )


def _family(info: EngineInfo) -> str:
    match = _FAMILY.match(info.model.architecture)
    return (match[1] if match else info.model.architecture).lower()


def _in_units(count: int) -> str:
    """Such as 134.5M; empty for 0."""
    for unit, letter in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count or "")


def _gguf_names(info: EngineInfo) -> JsonDict:
    """The model's sizes by the names that GGUF files give them, which clients look for."""
    family, model = _family(info), info.model
    return {
        "general.architecture": family,
        "general.basename": model.name,
        "general.parameter_count": model.parameters,
        f"{family}.context_length": model.context_length,
        f"{family}.embedding_length": model.embedding_size,
        f"{family}.vocab_size": model.vocab_size,
    }


def _capabilities(info: EngineInfo, tokenizer: Tokenizer, turns: TurnFormat) -> list[Capability]:
    writes = not info.model.encoder
    can: dict[Capability, bool] = {
        "completion": writes,
        "tools": writes and tokenizer.has_chat_template and turns.tools is not None,
        "thinking": writes and turns.thinks,
        "insert": tokenizer.fill_in is not None,
        "embedding": info.model.pooling not in (None, "classify"),
    }
    return [name for name, is_so in can.items() if is_so]
