"""Flags of `vllm serve` (v0.8 to v0.32): each sets one of our settings, is accepted, or is refused
with an alternative. docs/from_vllm.md has the same table.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from jitney.engine.config import settings

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmMgG])?")
#: Suffixes of vLLM's numbers.
_UNITS = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
}
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A flag that is a setting of ours."""

    #: The setting's flat name.
    setting: str
    #: vLLM's value -> ours, where they differ.
    values: Mapping[str, str] = MappingProxyType({})
    #: Unsupported value -> reason, or what to use instead.
    refused: Mapping[str, str] = MappingProxyType({})
    #: Converts other values. Raises ValueError.
    convert: Callable[[str], str] | None = None
    #: The value that a switch sets; None: the flag takes a value.
    switch: bool | None = None


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A flag that asks for what Jitney always does."""

    #: What Jitney does.
    reason: str
    #: Accepted values; empty: the flag takes none.
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Refused:
    """An unsupported flag."""

    #: Why it is unsupported, or what to use instead.
    reason: str


@dataclass(frozen=True, slots=True)
class _MappedObject:
    """A flag whose value is a JSON object of settings of ours."""

    #: vLLM's key -> the setting.
    fields: Mapping[str, _Mapped]


type _Meaning = _Mapped | _MappedObject | _Accepted | _Refused


def _whole(text: str) -> str:
    """Parse a number; 32k is 32,000 and 32K is 32,768."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError("must be a whole number, such as 4096 or 32k")
    scale = _UNITS.get(match[2], 1)
    return str(round(float(match[1]) * scale))


def _context(text: str) -> str:
    """Parse a context length; -1 and auto are the model's own."""
    return "0" if text in ("-1", "auto") else _whole(text)


def _gib(text: str) -> str:
    return str(int(_whole(text)) / _GIB)


def _origins(text: str) -> str:
    try:
        return ",".join(map(str, msgspec.json.decode(text, type=list)))
    except msgspec.MsgspecError:
        raise ValueError('must be a JSON list, such as ["https://example.org"]') from None


def _adapter(text: str) -> str:
    """Parse NAME=FOLDER, or a JSON object with name and path."""
    if not text.startswith("{"):
        return text
    try:
        adapter = msgspec.json.decode(text, type=dict[str, str])
        return f"{adapter['name']}={adapter['path']}"
    except (msgspec.MsgspecError, KeyError):
        raise ValueError("must be NAME=FOLDER, or an object with name and path") from None


_TEXT_ONLY = _Refused("models here read text only")
#: vLLM's names of ways to draft, where they differ from ours.
_METHODS = {
    "draft_model": "draft",
    "deepseek_mtp": "mtp",
    "glm4_moe_lite_mtp": "mtp",
    "qwen3_5_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
}
_DRAFTS = _MappedObject(
    {
        "method": _Mapped("speculative", values=_METHODS),
        "model": _Mapped("draft_model"),
        "num_speculative_tokens": _Mapped("speculative_tokens"),
        "prompt_lookup_max": _Mapped("prompt_lookup_max"),
        "prompt_lookup_min": _Mapped("prompt_lookup_min"),
    }
)
_BY_JAX = _Refused(
    "hosts are joined by jax: give --coordinator, --n-hosts and --host-id (docs/devices.md)"
)
_NO_PLUGINS = _Refused("no code is loaded from outside")
_ONE_FAMILY_CONFIG = _Refused("a model's configuration is read from its own files only")
_OWN_TOKENIZER = _Refused("a model's tokenizer is read from its own files")
_COMPILED = _Refused(
    "every step is compiled before the first request, for --seat-buckets and --token-buckets"
)
_OTHER_LEVEL = {"critical": "error", "trace": "debug"}

#: vLLM's flag -> its treatment. Flags with the same name and meaning here are not listed.
_VLLM_FLAGS: dict[str, _Meaning] = {
    # model
    "--max-model-len": _Mapped("context", convert=_context),
    "--quantization": _Mapped(
        "weights",
        values={
            "awq": "auto",
            "awq_marlin": "auto",
            "compressed-tensors": "auto",
            "gguf": "auto",
            "gptq": "auto",
            "gptq_marlin": "auto",
            "none": "plain",
            "None": "plain",
        },
        refused={
            "bitsandbytes": "use --weights int8 or int4, which quantise on load",
            "experts_int8": "use --weights int8, which quantises all matrices",
        },
    ),
    "-q": _Mapped("weights", values={"awq": "auto", "gptq": "auto", "gguf": "auto"}),
    "--dtype": _Mapped(
        "dtype",
        values={"float": "float32"},
        refused={
            "half": "float16 is not computed here; use bfloat16 or float32",
            "float16": "float16 is not computed here; use bfloat16 or float32",
        },
    ),
    "--load-format": _Mapped("load_format", values={"safetensors": "auto", "gguf": "auto"}),
    "--enable-auto-tool-choice": _Accepted("a model may call the tools of a request"),
    "--trust-remote-code": _Refused("no code of a model's is ever run"),
    "--download-dir": _Refused("set JITNEY_CACHE, the cache folder, in the environment"),
    "--task": _Accepted("it generates", ("auto", "generate")),
    "--runner": _Accepted("it generates", ("auto", "generate")),
    "--seed": _Refused("requests set `seed`; without it a seed is drawn at random"),
    "--tokenizer": _OWN_TOKENIZER,
    "--tokenizer-mode": _Accepted("a model's tokenizer is read from its own files", ("auto",)),
    "--tokenizer-revision": _OWN_TOKENIZER,
    "--skip-tokenizer-init": _OWN_TOKENIZER,
    "--code-revision": _Refused("no code of a model's is ever run"),
    "--hf-overrides": _ONE_FAMILY_CONFIG,
    "--hf-config-path": _ONE_FAMILY_CONFIG,
    "--config-format": _Accepted("configurations are Hugging Face's or GGUF's", ("auto", "hf")),
    "--rope-scaling": _ONE_FAMILY_CONFIG,
    "--rope-theta": _ONE_FAMILY_CONFIG,
    "--override-generation-config": _Refused(
        "use --default-temperature, --default-top-p, --default-top-k, --default-min-p and "
        "--default-repetition-penalty"
    ),
    "--generation-config": _Mapped("generation_config", values={"vllm": "none"}),
    "--hf-token": _Refused("set HF_TOKEN in the environment"),
    "--disable-sliding-window": _Refused("a model's attention windows cannot be changed"),
    "--enable-sleep-mode": _Accepted("an administrator may send POST /sleep and /wake_up"),
    "--model-impl": _Accepted("models are Jitney's own code", ("auto", "vllm")),
    # memory and scheduling
    "--max-num-seqs": _Mapped("max_seats", convert=_whole),
    "--max-num-batched-tokens": _Mapped("token_budget", convert=_whole),
    "--gpu-memory-utilization": _Mapped("memory_share"),
    "--kv-cache-memory-bytes": _Mapped("memory_gib", convert=_gib),
    "--kv-cache-dtype": _Mapped(
        "kv_dtype",
        values={"fp8_e4m3": "fp8", "bfloat16": "auto"},
        refused={"fp8_e5m2": "fp8 here is e4m3: use --kv-dtype fp8"},
    ),
    "--block-size": _Mapped("page_size"),
    "--num-gpu-blocks-override": _Mapped("pages"),
    "--enable-prefix-caching": _Mapped("prefix_cache", switch=True),
    "--no-enable-prefix-caching": _Mapped("prefix_cache", switch=False),
    "--prefix-caching-hash-algo": _Refused("prefixes are found by their tokens; no hash is chosen"),
    "--scheduling-policy": _Mapped("order"),
    "--enable-chunked-prefill": _Accepted("prompts are computed in chunks beside decoding"),
    "--no-enable-chunked-prefill": _Refused(
        "prompts are always computed in chunks; --prefill-share limits their part of a step"
    ),
    "--long-prefill-token-threshold": _Refused("use --prefill-share or --target-itl-ms"),
    "--max-long-partial-prefills": _Refused("use --prefill-share or --target-itl-ms"),
    "--max-num-partial-prefills": _Refused("use --prefill-share or --target-itl-ms"),
    "--scheduler-delay-factor": _Refused("use --policy dynamic with --max-wait-ms"),
    "--num-scheduler-steps": _Refused("the host always plans while the device computes"),
    "--multi-step-stream-outputs": _Refused("each token is sent as soon as it is computed"),
    "--async-scheduling": _Accepted("the host always plans while the device computes"),
    "--preemption-mode": _Accepted("preempted sequences are recomputed", ("recompute",)),
    "--swap-space": _Refused("nothing is swapped: preempted sequences are recomputed"),
    "--cpu-offload-gb": _Refused("weights stay on the device: use --weights int8 or int4"),
    "--calculate-kv-scales": _Accepted("8-bit KV scales come from the checkpoint or the start"),
    # device
    "--tensor-parallel-size": _Mapped("tensor_parallel"),
    "-tp": _Mapped("tensor_parallel"),
    "--pipeline-parallel-size": _Accepted("there is no pipeline parallelism", ("1",)),
    "-pp": _Accepted("there is no pipeline parallelism", ("1",)),
    "--data-parallel-size": _Accepted("one server is one engine", ("1",)),
    "-dp": _Accepted("one server is one engine", ("1",)),
    "--enable-expert-parallel": _Refused(
        "use --expert-parallel N, with N as in --tensor-parallel N"
    ),
    "--distributed-executor-backend": _BY_JAX,
    "--nnodes": _Mapped("n_hosts"),
    "--node-rank": _Mapped("host_id"),
    "--master-addr": _BY_JAX,
    "--master-port": _BY_JAX,
    "--headless": _BY_JAX,
    "--api-server-count": _Accepted("one process answers HTTP, another computes", ("1",)),
    "--worker-cls": _NO_PLUGINS,
    "--disable-custom-all-reduce": _Refused("XLA chooses the collectives"),
    "--attention-backend": _Refused("use --kernels"),
    "--enforce-eager": _COMPILED,
    "--no-enforce-eager": _Accepted("every step is compiled before the first request"),
    "--max-seq-len-to-capture": _COMPILED,
    "--compilation-config": _COMPILED,
    "-O": _COMPILED,
    "--cudagraph-capture-sizes": _Refused("use --seat-buckets and --token-buckets"),
    "--cuda-graph-sizes": _Refused("use --seat-buckets and --token-buckets"),
    # adapters
    "--enable-lora": _Accepted("--adapters names adapters"),
    "--lora-modules": _Mapped("adapters", convert=_adapter),
    "--max-loras": _Refused("every step serves all adapters: leave it out"),
    "--max-lora-rank": _Refused("ranks are read from the adapters: leave it out"),
    # unsupported
    "--enable-prompt-adapter": _Refused("there are no prompt adapters"),
    "--speculative-config": _DRAFTS,
    "--speculative-model": _Mapped("draft_model"),
    "--num-speculative-tokens": _Mapped("speculative_tokens"),
    "--ngram-prompt-lookup-max": _Mapped("prompt_lookup_max"),
    "--ngram-prompt-lookup-min": _Mapped("prompt_lookup_min"),
    "--limit-mm-per-prompt": _TEXT_ONLY,
    "--mm-processor-kwargs": _TEXT_ONLY,
    "--allowed-local-media-path": _TEXT_ONLY,
    "--kv-transfer-config": _Refused("pages stay with the engine that computed them"),
    "--logits-processors": _NO_PLUGINS,
    "--logits-processor-pattern": _NO_PLUGINS,
    "--logprobs-mode": _Accepted(
        "log-probabilities are the model's own, before penalties", ("raw_logprobs",)
    ),
    "--guided-decoding-backend": _Accepted("llguidance makes the masks", ("auto", "guidance")),
    "--structured-outputs-config": _Refused("llguidance makes the masks; there is nothing to set"),
    # the endpoint
    "--api-key": _Refused(
        "other users can read a key on a command line: use --api-key-file FILE, or "
        "JITNEY_API_KEYS in the environment"
    ),
    "--allowed-origins": _Mapped("cors_origins", convert=_origins),
    "--allow-credentials": _Refused("the endpoint uses keys, no cookies"),
    "--allowed-methods": _Refused("use --cors-origins; methods follow from the routes"),
    "--allowed-headers": _Refused(
        "use --cors-origins; the headers that the routes read are allowed"
    ),
    "--ssl-ca-certs": _Refused("clients use a key, no certificate"),
    "--ssl-cert-reqs": _Accepted("clients use a key, no certificate", ("0",)),
    "--ssl-ciphers": _Refused("Python's default ciphers are used"),
    "--enable-ssl-refresh": _Refused("a new certificate needs a new start"),
    "--uds": _Refused("it listens on --host and --port"),
    "--middleware": _NO_PLUGINS,
    "--tool-parser-plugin": _NO_PLUGINS,
    "--reasoning-parser-plugin": _NO_PLUGINS,
    "--enable-reasoning": _Accepted("reasoning is separated if the model marks it"),
    "--response-role": _Accepted("it answers as the assistant", ("assistant",)),
    "--chat-template-content-format": _Accepted(
        "templates get a message's text as a string", ("auto", "string")
    ),
    "--trust-request-chat-template": _Refused("requests cannot set a template"),
    "--return-tokens-as-token-ids": _Refused("requests set `return_token_ids`"),
    "--enable-request-id-headers": _Accepted("every response has an x-request-id"),
    "--enable-prompt-tokens-details": _Accepted("usage counts tokens from the prefix cache"),
    "--enable-force-include-usage": _Refused("requests set `stream_options.include_usage`"),
    "--disable-fastapi-docs": _Refused("/docs and /openapi.json are always served"),
    "--h11-max-incomplete-event-size": _Refused("request headers may have 64 KiB"),
    "--h11-max-header-count": _Accepted("a request may have 256 headers", ("256",)),
    # logs
    "--uvicorn-log-level": _Mapped("log_level", values=_OTHER_LEVEL),
    "--disable-uvicorn-access-log": _Refused("use --log-level warning"),
    "--disable-log-requests": _Accepted("the log never holds texts"),
    "--no-enable-log-requests": _Accepted("the log never holds texts"),
    "--enable-log-requests": _Refused("the log never holds texts"),
    "--enable-log-outputs": _Refused("the log never holds texts"),
    "--max-log-len": _Refused("the log never holds texts"),
    "--disable-log-stats": _Accepted("figures are at /metrics and on the page, not in the log"),
    "--log-config-file": _Refused("use --log-level"),
    "--otlp-traces-endpoint": _Refused(
        "use --otel, and OTEL_EXPORTER_OTLP_TRACES_ENDPOINT in the environment"
    ),
    "--collect-detailed-traces": _Refused("use --otel: every phase is a span"),
    "--show-hidden-metrics-for-version": _Refused("use --metrics-compat vllm"),
}


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags to a parser, without help."""
    for flag, meaning in _VLLM_FLAGS.items():
        # Replaces a flag of ours with the same name; the help goes on listing that.
        parser._option_string_actions.pop(flag, None)
        parser.add_argument(
            flag,
            action=_VllmFlag,
            meaning=meaning,
            nargs=_nargs(meaning),
            dest=meaning.setting if isinstance(meaning, _Mapped) else argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def _nargs(meaning: _Meaning) -> int | str | None:
    match meaning:
        case _Refused():
            return "?"
        case _Accepted(values=()) | _Mapped(switch=bool()):
            return 0
        case _Mapped(setting=name) if settings()[name].several:
            return "+"
        case _:
            return None


class _VllmFlag(argparse.Action):
    """Sets the flag's setting, or exits naming what to use instead."""

    def __init__(self, *args: Any, meaning: _Meaning, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._meaning = meaning

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        words = [values] if isinstance(values, str) else list(values or ())
        text = " ".join(words)
        match self._meaning:
            case _Refused(reason=reason):
                parser.error(f"{option_string} is vLLM's: {reason}")
            case _Accepted(reason=reason, values=allowed):
                if allowed and text not in allowed:
                    parser.error(f"{option_string} {text}: {reason}")
            case _Mapped() as mapped:
                value = mapped.switch
                if value is None:
                    ours = [self._ours(parser, mapped, option_string, word) for word in words]
                    value = ",".join(ours)
                setattr(namespace, self.dest, value)
            case _MappedObject(fields=fields):
                for key, value in self._entries(parser, option_string, text).items():
                    if key not in fields:
                        parser.error(
                            f"{option_string}: {key} is not supported; there are "
                            f"{', '.join(fields)}"
                        )
                    name = f"{option_string} {key}"
                    ours = self._ours(parser, fields[key], name, str(value))
                    setattr(namespace, fields[key].setting, ours)

    @staticmethod
    def _entries(
        parser: argparse.ArgumentParser, flag: str | None, text: str
    ) -> dict[str, str | int]:
        try:
            return msgspec.json.decode(text, type=dict[str, str | int])
        except msgspec.MsgspecError:
            parser.error(f"{flag} {text}: must be a JSON object of texts and whole numbers")

    def _ours(
        self, parser: argparse.ArgumentParser, mapped: _Mapped, flag: str | None, text: str
    ) -> str:
        """Our value for one of vLLM's."""
        if text in mapped.refused:
            parser.error(f"{flag} {text}: {mapped.refused[text]}")
        if mapped.convert is not None:
            try:
                return mapped.convert(text)
            except ValueError as error:
                parser.error(f"{flag}: {error}")
        return mapped.values.get(text, text)


def _table() -> str:
    """The rows of docs/from_vllm.md; flags with the same meaning share one."""
    flags: dict[str, list[str]] = {}
    for flag, meaning in _VLLM_FLAGS.items():
        flags.setdefault(_in_words(meaning), []).append(f"`{flag}`")
    return "\n".join(f"| {', '.join(alike)} | {words} |" for words, alike in flags.items())


def _in_words(meaning: _Meaning) -> str:
    match meaning:
        case _Mapped(setting=setting, switch=False):
            return f"`--no-{setting.replace('_', '-')}`"
        case _Mapped(setting=setting, values=values, refused=refused):
            words = [f"`{settings()[setting].flag}`"]
            words += [f"`{theirs}` is `{ours}`" for theirs, ours in values.items()]
            words += [f"not `{theirs}`: {reason}" for theirs, reason in refused.items()]
            return "; ".join(words)
        case _MappedObject(fields=fields):
            words = [f"`{key}`: {_in_words(mapped)}" for key, mapped in fields.items()]
            return "a JSON object; " + "; ".join(words)
        case _Accepted(reason=reason, values=values):
            words = ", ".join(f"`{value}`" for value in values)
            return f"accepted{' with ' + words if words else ''}: {reason}"
        case _Refused(reason=reason):
            return f"refused: {reason}"
