"""vLLM's flags, for people whose fingers know them: each is one of our settings under another name,
or is refused with the name of what to use instead.

The names are those of `vllm serve` (v0.8 to v0.32); the table is all there is to know of them, and
docs/from_vllm.md is written from it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from jitney.engine.config.layers import settings

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmMgG])?")
#: What vLLM's numbers may end with.
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
    #: Values that we call otherwise.
    values: Mapping[str, str] = MappingProxyType({})
    #: Values that we do not have -> why, or what to use instead.
    refused: Mapping[str, str] = MappingProxyType({})
    #: From vLLM's value to ours, where it is not just a word. Raises ValueError.
    convert: Callable[[str], str] | None = None
    #: Of a switch: the setting's value when it is given; None: it takes a value.
    switch: bool | None = None


@dataclass(frozen=True, slots=True)
class _AlwaysSo:
    """A flag that asks for what cannot be had otherwise here: accepted."""

    #: What is always so.
    reason: str
    #: Values that ask for it; empty: it takes none.
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _RefusedFlag:
    """A flag that we do not have."""

    #: Why, or what to use instead.
    reason: str


def _whole(text: str) -> str:
    """32k is 32,000, and 32K is 32,768."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise ValueError("must be a whole number, such as 4096 or 32k")
    scale = _UNITS.get(found[2], 1)
    return str(round(float(found[1]) * scale))


def _context(text: str) -> str:
    """-1 and auto: as much as there is; here the model's own."""
    return "0" if text in ("-1", "auto") else _whole(text)


def _gib(text: str) -> str:
    return str(int(_whole(text)) / _GIB)


def _origins(text: str) -> str:
    """A JSON list."""
    try:
        return ",".join(map(str, msgspec.json.decode(text, type=list)))
    except msgspec.MsgspecError:
        raise ValueError('must be a JSON list, such as ["https://example.org"]') from None


def _adapter(text: str) -> str:
    """NAME=FOLDER, or an object of JSON with name and path."""
    if not text.startswith("{"):
        return text
    try:
        told = msgspec.json.decode(text, type=dict[str, str])
        return f"{told['name']}={told['path']}"
    except (msgspec.MsgspecError, KeyError):
        raise ValueError("must be NAME=FOLDER, or an object with name and path") from None


_TEXT_ONLY = _RefusedFlag("models here read text only")
_NO_DRAFTS = _RefusedFlag("there is no speculative decoding")
_BY_JAX = _RefusedFlag(
    "hosts are joined by jax: give --coordinator, --n-hosts and --host-id (docs/devices.md)"
)
_NO_PLUGINS = _RefusedFlag("no code is loaded from outside")
_ONE_FAMILY_CONFIG = _RefusedFlag(
    "a model's configuration is read from its own files and not changed"
)
_OWN_TOKENIZER = _RefusedFlag("a model's tokenizer is read from its own files")
_COMPILED = _RefusedFlag(
    "every step is compiled before the first request, for --seat-buckets and --token-buckets"
)
_OTHER_LEVEL = {"critical": "error", "trace": "debug"}

#: vLLM's flag -> what becomes of it. Flags that have the same name and meaning here need no line.
_VLLM_FLAGS: dict[str, _Mapped | _AlwaysSo | _RefusedFlag] = {
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
    "--enable-auto-tool-choice": _AlwaysSo("a model may call the tools that a request brings"),
    "--trust-remote-code": _RefusedFlag("no code of a model's is ever run"),
    "--download-dir": _RefusedFlag("set JITNEY_CACHE, the cache folder, in the environment"),
    "--task": _AlwaysSo("it generates", ("auto", "generate")),
    "--runner": _AlwaysSo("it generates", ("auto", "generate")),
    "--seed": _RefusedFlag(
        "each request has a `seed`; one without it is drawn at random, whatever the server was "
        "started with"
    ),
    "--tokenizer": _OWN_TOKENIZER,
    "--tokenizer-mode": _AlwaysSo("a model's tokenizer is read from its own files", ("auto",)),
    "--tokenizer-revision": _OWN_TOKENIZER,
    "--skip-tokenizer-init": _OWN_TOKENIZER,
    "--code-revision": _RefusedFlag("no code of a model's is ever run"),
    "--hf-overrides": _ONE_FAMILY_CONFIG,
    "--hf-config-path": _ONE_FAMILY_CONFIG,
    "--config-format": _AlwaysSo("configurations are Hugging Face's or GGUF's", ("auto", "hf")),
    "--rope-scaling": _ONE_FAMILY_CONFIG,
    "--rope-theta": _ONE_FAMILY_CONFIG,
    "--override-generation-config": _RefusedFlag(
        "use --default-temperature, --default-top-p, --default-top-k, --default-min-p and "
        "--default-repetition-penalty"
    ),
    "--generation-config": _Mapped("generation_config", values={"vllm": "none"}),
    "--hf-token": _RefusedFlag("set HF_TOKEN in the environment"),
    "--disable-sliding-window": _RefusedFlag("a model's windows are part of it"),
    "--enable-sleep-mode": _AlwaysSo("an administrator may send POST /sleep and /wake_up"),
    "--model-impl": _AlwaysSo("models are our own", ("auto", "vllm")),
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
    "--prefix-caching-hash-algo": _RefusedFlag(
        "prefixes are found by their tokens; no hash is chosen"
    ),
    "--scheduling-policy": _Mapped("order"),
    "--enable-chunked-prefill": _AlwaysSo("prompts are read in chunks beside who decodes"),
    "--no-enable-chunked-prefill": _RefusedFlag(
        "prompts are always read in chunks: --prefill-share says how much of a step they may take"
    ),
    "--long-prefill-token-threshold": _RefusedFlag("use --prefill-share or --target-itl-ms"),
    "--max-long-partial-prefills": _RefusedFlag("use --prefill-share or --target-itl-ms"),
    "--max-num-partial-prefills": _RefusedFlag("use --prefill-share or --target-itl-ms"),
    "--scheduler-delay-factor": _RefusedFlag("use --policy dynamic with --max-wait-ms"),
    "--num-scheduler-steps": _RefusedFlag("the host works while the device computes the next step"),
    "--multi-step-stream-outputs": _RefusedFlag("tokens are sent as they come"),
    "--async-scheduling": _AlwaysSo("the host works while the device computes the next step"),
    "--preemption-mode": _AlwaysSo("who loses a seat is computed again", ("recompute",)),
    "--swap-space": _RefusedFlag("nothing is swapped: who loses a seat is computed again"),
    "--cpu-offload-gb": _RefusedFlag("weights stay on the device: use --weights int8 or int4"),
    "--calculate-kv-scales": _AlwaysSo("8-bit KV gets its factors from the checkpoint or at start"),
    # device
    "--tensor-parallel-size": _Mapped("tensor_parallel"),
    "-tp": _Mapped("tensor_parallel"),
    "--pipeline-parallel-size": _AlwaysSo("a model is split by its heads alone", ("1",)),
    "-pp": _AlwaysSo("a model is split by its heads alone", ("1",)),
    "--data-parallel-size": _AlwaysSo("one server is one engine", ("1",)),
    "-dp": _AlwaysSo("one server is one engine", ("1",)),
    "--enable-expert-parallel": _RefusedFlag(
        "use --expert-parallel N, N as many as --tensor-parallel"
    ),
    "--distributed-executor-backend": _BY_JAX,
    "--nnodes": _Mapped("n_hosts"),
    "--node-rank": _Mapped("host_id"),
    "--master-addr": _BY_JAX,
    "--master-port": _BY_JAX,
    "--headless": _BY_JAX,
    "--api-server-count": _AlwaysSo("one process answers HTTP, another computes", ("1",)),
    "--worker-cls": _NO_PLUGINS,
    "--disable-custom-all-reduce": _RefusedFlag("XLA chooses how devices exchange"),
    "--attention-backend": _RefusedFlag("use --kernels"),
    "--enforce-eager": _COMPILED,
    "--no-enforce-eager": _AlwaysSo("every step is compiled before the first request"),
    "--max-seq-len-to-capture": _COMPILED,
    "--compilation-config": _COMPILED,
    "-O": _COMPILED,
    "--cudagraph-capture-sizes": _RefusedFlag("use --seat-buckets and --token-buckets"),
    "--cuda-graph-sizes": _RefusedFlag("use --seat-buckets and --token-buckets"),
    # adapters
    "--enable-lora": _AlwaysSo("adapters are served where --adapters names some"),
    "--lora-modules": _Mapped("adapters", convert=_adapter),
    "--max-loras": _RefusedFlag("every step serves all adapters: leave it out"),
    "--max-lora-rank": _RefusedFlag("adapters have the ranks that they have: leave it out"),
    # what is not there
    "--enable-prompt-adapter": _RefusedFlag("there are no prompt adapters"),
    "--speculative-config": _NO_DRAFTS,
    "--speculative-model": _NO_DRAFTS,
    "--num-speculative-tokens": _NO_DRAFTS,
    "--limit-mm-per-prompt": _TEXT_ONLY,
    "--mm-processor-kwargs": _TEXT_ONLY,
    "--allowed-local-media-path": _TEXT_ONLY,
    "--kv-transfer-config": _RefusedFlag("pages stay with the engine that computed them"),
    "--logits-processors": _NO_PLUGINS,
    "--logits-processor-pattern": _NO_PLUGINS,
    "--logprobs-mode": _AlwaysSo(
        "log-probabilities are the model's own, before penalties", ("raw_logprobs",)
    ),
    "--guided-decoding-backend": _AlwaysSo("llguidance makes the masks", ("auto", "guidance")),
    "--structured-outputs-config": _RefusedFlag(
        "llguidance makes the masks; there is nothing to set"
    ),
    # the endpoint
    "--api-key": _RefusedFlag(
        "a key on a command line can be read by others of this machine: use --api-key-file FILE, "
        "or JITNEY_API_KEYS in the environment"
    ),
    "--allowed-origins": _Mapped("cors_origins", convert=_origins),
    "--allow-credentials": _RefusedFlag("the endpoint takes keys and no cookies"),
    "--allowed-methods": _RefusedFlag("use --cors-origins; methods follow from the routes"),
    "--allowed-headers": _RefusedFlag(
        "use --cors-origins; the headers that the routes read are allowed"
    ),
    "--ssl-ca-certs": _RefusedFlag("clients show a key, not a certificate"),
    "--ssl-cert-reqs": _AlwaysSo("clients show a key, not a certificate", ("0",)),
    "--ssl-ciphers": _RefusedFlag("the ciphers are Python's own"),
    "--enable-ssl-refresh": _RefusedFlag("a new certificate needs a new start"),
    "--uds": _RefusedFlag("it listens on --host and --port"),
    "--middleware": _NO_PLUGINS,
    "--tool-parser-plugin": _NO_PLUGINS,
    "--reasoning-parser-plugin": _NO_PLUGINS,
    "--enable-reasoning": _AlwaysSo("thoughts are told apart where the model marks them"),
    "--response-role": _AlwaysSo("it answers as the assistant", ("assistant",)),
    "--chat-template-content-format": _AlwaysSo(
        "templates are given a message's text as a string", ("auto", "string")
    ),
    "--trust-request-chat-template": _RefusedFlag("a request brings no template"),
    "--return-tokens-as-token-ids": _RefusedFlag("each request has `return_token_ids`"),
    "--enable-request-id-headers": _AlwaysSo("every answer has an x-request-id"),
    "--enable-prompt-tokens-details": _AlwaysSo("usage says what came from the prefix cache"),
    "--enable-force-include-usage": _RefusedFlag("each request has `stream_options.include_usage`"),
    "--disable-fastapi-docs": _AlwaysSo("there are no pages of documentation"),
    "--h11-max-incomplete-event-size": _RefusedFlag("the head of a request may have 64 KiB"),
    "--h11-max-header-count": _AlwaysSo("a request may have 256 headers", ("256",)),
    # logs
    "--uvicorn-log-level": _Mapped("log_level", values=_OTHER_LEVEL),
    "--disable-uvicorn-access-log": _RefusedFlag("use --log-level warning"),
    "--disable-log-requests": _AlwaysSo("the log never holds texts"),
    "--no-enable-log-requests": _AlwaysSo("the log never holds texts"),
    "--enable-log-requests": _RefusedFlag("the log never holds texts"),
    "--enable-log-outputs": _RefusedFlag("the log never holds texts"),
    "--max-log-len": _RefusedFlag("the log never holds texts"),
    "--disable-log-stats": _AlwaysSo("figures are at /metrics and on the page, not in the log"),
    "--log-config-file": _RefusedFlag("use --log-level"),
    "--otlp-traces-endpoint": _RefusedFlag(
        "use --otel, and OTEL_EXPORTER_OTLP_TRACES_ENDPOINT in the environment"
    ),
    "--collect-detailed-traces": _RefusedFlag("use --otel: every phase is a span"),
    "--show-hidden-metrics-for-version": _RefusedFlag("use --metrics-compat vllm"),
}


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Have the parser understand them; its help does not list them."""
    for flag, what in _VLLM_FLAGS.items():
        options: dict[str, Any] = {"action": _OfVllm, "what": what}
        if not _takes_value(what):
            options["nargs"] = 0
        elif isinstance(what, _RefusedFlag):
            options["nargs"] = "?"
        elif isinstance(what, _Mapped) and settings()[what.setting].several:
            options["nargs"] = "+"
        # One of ours may have the name too, and fewer values; help goes on listing it.
        parser._option_string_actions.pop(flag, None)
        parser.add_argument(
            flag, dest=_dest(what), default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options
        )


def _takes_value(what: _Mapped | _AlwaysSo | _RefusedFlag) -> bool:
    match what:
        case _Mapped(switch=switch):
            return switch is None
        case _AlwaysSo(values=values):
            return bool(values)
        case _RefusedFlag():
            return True


def _dest(what: _Mapped | _AlwaysSo | _RefusedFlag) -> str:
    return what.setting if isinstance(what, _Mapped) else argparse.SUPPRESS


class _OfVllm(argparse.Action):
    """Sets what the flag means here, or ends the program with what to use instead."""

    def __init__(self, *args: Any, what: _Mapped | _AlwaysSo | _RefusedFlag, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._what = what

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        words = [values] if isinstance(values, str) else list(values or ())
        text = " ".join(words)
        match self._what:
            case _RefusedFlag(reason=reason):
                parser.error(f"{option_string} is vLLM's: {reason}")
            case _AlwaysSo(reason=reason, values=allowed):
                if allowed and text not in allowed:
                    parser.error(f"{option_string} {text}: {reason}")
            case _Mapped() as mapped:
                value = mapped.switch
                if value is None:
                    ours = [self._ours(parser, mapped, option_string, word) for word in words]
                    value = ",".join(ours)
                setattr(namespace, self.dest, value)

    def _ours(
        self, parser: argparse.ArgumentParser, mapped: _Mapped, flag: str | None, text: str
    ) -> str:
        """The value of our setting that a value of theirs is."""
        if text in mapped.refused:
            parser.error(f"{flag} {text}: {mapped.refused[text]}")
        if mapped.convert is not None:
            try:
                return mapped.convert(text)
            except ValueError as error:
                parser.error(f"{flag}: {error}")
        return mapped.values.get(text, text)


def _table() -> str:
    """The rows of docs/from_vllm.md: flags that lead to the same share one."""
    flags: dict[str, list[str]] = {}
    for flag, what in _VLLM_FLAGS.items():
        flags.setdefault(_said(what), []).append(f"`{flag}`")
    return "\n".join(f"| {', '.join(alike)} | {said} |" for said, alike in flags.items())


def _said(what: _Mapped | _AlwaysSo | _RefusedFlag) -> str:
    match what:
        case _Mapped(setting=setting, switch=False):
            return f"`--no-{setting.replace('_', '-')}`"
        case _Mapped():
            return _said_of_mapped(what)
        case _AlwaysSo(reason=reason, values=values):
            words = ", ".join(f"`{value}`" for value in values)
            return f"accepted{' with ' + words if words else ''}: {reason}"
        case _RefusedFlag(reason=reason):
            return f"refused: {reason}"


def _said_of_mapped(mapped: _Mapped) -> str:
    said = f"`{settings()[mapped.setting].flag}`"
    others = [f"`{theirs}` is `{ours}`" for theirs, ours in mapped.values.items()]
    others += [f"not `{theirs}`: {why}" for theirs, why in mapped.refused.items()]
    return "; ".join([said, *others])
