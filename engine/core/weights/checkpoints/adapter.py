"""Low-rank adapters (LoRA) as PEFT saves them: a folder of adapter_config.json and
adapter_model.safetensors; jax-free.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from jitney.engine.common.errors import ModelError
from jitney.engine.core.weights.checkpoints.files import read_json
from jitney.engine.core.weights.checkpoints.names import long_name
from jitney.engine.core.weights.checkpoints.safetensors import SafetensorsFolder

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
#: Name of a tensor: the module of the model, and the half (A or B) of the product.
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_HALVES = frozenset("AB")
#: The largest float16; larger numbers or scales mean that an adapter is damaged.
_LARGEST = 65504.0
_LARGEST_RANK = 1 << 16
#: Fields that change what the tensors mean, or the model; they must be absent, false or empty.
_NOT_SERVED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
#: Initialisations that leave the model's own weights as they are. Others, such as "pissa", take
#: from them what A and B begin with; PEFT writes true for an adapter that it has converted.
_INITIALISATIONS = frozenset({"true", "false", "none", "gaussian", "eva", "orthogonal", "mica"})


class _AdapterConfig(msgspec.Struct):
    """The fields of adapter_config.json that are read."""

    #: Columns of A, and rows of B.
    r: int
    #: Numerator of the scale.
    lora_alpha: float
    peft_type: str = ""
    #: The scale is alpha / sqrt(r), not alpha / r.
    use_rslora: bool = False
    bias: str = "none"
    init_lora_weights: str | bool | None = True

    @property
    def scale(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def check(self) -> None:
        """Raise ModelError naming an unsupported option."""
        if self.peft_type != "LORA":
            raise ModelError(f"peft_type is {self.peft_type or 'not given'}; only LORA is served")
        if not 1 <= self.r <= _LARGEST_RANK:
            raise ModelError(f"{_CONFIG}: r must be at least 1 and at most {_LARGEST_RANK}")
        if not 0 < abs(self.scale) <= _LARGEST:
            raise ModelError(
                f"{_CONFIG}: lora_alpha {self.lora_alpha:g} with r {self.r} scales by "
                f"{self.scale:g}; it must be a finite number other than 0, of at most {_LARGEST:g}"
            )
        if self.bias != "none":
            raise ModelError(f"bias {self.bias} is not served, only none")
        if str(self.init_lora_weights).lower() not in _INITIALISATIONS:
            raise ModelError(
                f"init_lora_weights {self.init_lora_weights} is not served, since it changes the "
                "model's own weights; save the adapter with PEFT's "
                "path_initial_model_for_weight_conversion, or serve the merged model"
            )


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter's change of a model's matrices."""

    #: Its name in requests.
    name: str
    #: Scale of every product.
    scale: float
    tensors: SafetensorsFolder
    #: The name in the model of each matrix that it changes, such as model.layers.0.mlp.down_proj ->
    #: those of its A and its B in the file.
    modules: dict[str, dict[str, str]]

    @classmethod
    def read(cls, name: str, folder: str) -> Adapter:
        """The adapter in a folder. Raises ModelError, which begins with its name, for one that is
        not there, is not sound or is of another method.
        """
        try:
            return _read_adapter(name, Path(folder).expanduser())
        except ModelError as error:
            raise ModelError(f"adapter {name}: {error}") from error

    def halves(self, module: str, outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray]:
        """Float32 [inputs, R] and [R, outputs], whose product is added to the matrix; the scale is
        in the second. Raises ModelError for other shapes, and for numbers that are not finite.
        """
        a, b = (self._read(self.modules[module][half]) for half in "AB")
        rank = a.shape[0]
        if a.shape != (rank, inputs) or b.shape != (outputs, rank):
            raise ModelError(
                f"adapter {self.name}: {module} has A {list(a.shape)} and B {list(b.shape)}; the "
                f"model's matrix asks for [R, {inputs}] and [{outputs}, R]"
            )
        with np.errstate(over="ignore"):
            b = self.scale * b
        self._check_numbers(module, "A", a)
        self._check_numbers(module, "B", b)
        return a.T, b.T

    def _read(self, name: str) -> np.ndarray:
        return self.tensors.read(name).astype(np.float32)

    def _check_numbers(self, module: str, half: str, values: np.ndarray) -> None:
        """Raise ModelError for numbers that are not finite: every row is multiplied with all
        adapters, masked by 0, and 0 times NaN is NaN.
        """
        if not (np.abs(values) <= _LARGEST).all():
            raise ModelError(
                f"adapter {self.name}: {_TENSORS}: {self.modules[module][half][:100]}, scaled by "
                f"{self.scale:g}, holds numbers that are not finite, or larger than {_LARGEST:g}"
            )


def stamp_of(folder: str) -> tuple[int, ...]:
    """Numbers that change when a file of an adapter changes or is replaced; none for missing
    files.
    """
    numbers: list[int] = []
    for name in (_CONFIG, _TENSORS):
        try:
            status = (Path(folder).expanduser() / name).stat()
        except OSError:
            return ()
        numbers += status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return tuple(numbers)


def _read_adapter(name: str, folder: Path) -> Adapter:
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder")
    config = _config_of(folder)
    config.check()
    tensors = SafetensorsFolder(folder, shards=(_TENSORS,))
    modules = _modules_of(tensors)
    _check_ranks(config.r, tensors, modules)
    return Adapter(name, config.scale, tensors, modules)


def _check_ranks(rank: int, tensors: SafetensorsFolder, modules: dict[str, dict[str, str]]) -> None:
    """Raises ModelError for a tensor of another rank than the configuration says, whose scale
    would be wrong.
    """
    for halves in modules.values():
        for half, name in halves.items():
            shape = tensors.shapes[name]
            stored = shape[0 if half == "A" else -1] if len(shape) == 2 else None
            if stored != rank:
                raise ModelError(
                    f"{_TENSORS}: {name[:100]} has shape {list(shape)}, but {_CONFIG} says r {rank}"
                )


def _config_of(folder: Path) -> _AdapterConfig:
    fields = read_json(folder, _CONFIG)
    for name in _NOT_SERVED:
        if fields.get(name):
            raise ModelError(f"{name} is not served; train without it, or serve the merged model")
    try:
        return msgspec.convert(fields, _AdapterConfig)
    except msgspec.ValidationError as error:
        raise ModelError(f"{_CONFIG}: {error}") from error


def _modules_of(tensors: SafetensorsFolder) -> dict[str, dict[str, str]]:
    """See `Adapter.modules`."""
    modules: dict[str, dict[str, str]] = {}
    for name in tensors.shapes:
        match = _NAME.fullmatch(name)
        if match is None:
            raise ModelError(f"{_TENSORS} holds {name[:100]}, which is no half of a linear layer's")
        module, half = match.groups()
        halves = modules.setdefault(long_name(module), {})
        if half in halves:
            raise ModelError(
                f"{_TENSORS} holds {halves[half][:100]} a second time, as {name[:100]}"
            )
        halves[half] = name
    for module, halves in modules.items():
        if halves.keys() != _HALVES:
            raise ModelError(f"{_TENSORS} has only one half for {module}")
    if not modules:
        raise ModelError(f"{_TENSORS} is empty")
    return modules
