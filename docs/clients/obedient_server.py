"""`jitney serve` with a model that does what it is told, for agents that no small model can drive.

    python docs/clients/obedient_server.py --port 8000 [...]      # flags of `jitney serve`

The user's newest text holds lines `CALL name {"argument": ...}` and `SAY text`. The model makes the
calls, one a turn, where tools of those names are offered (`CALL *read* {...}` takes a pattern), and
then says the text, in which RESULT is the last result and \\n a line break. All else is the real
server: the engine writes the text token by token, held to it by a grammar. Requests that have a
grammar of their own (`tool_choice: "required"`, `response_format`) are left as they are.
"""

from __future__ import annotations

import fnmatch
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace as with_fields
from safetensors.numpy import save_file
from save_tokenizer import save_tokenizer

from jitney.engine import cli
from jitney.engine.common.requests import JsonDict, SamplingParams
from jitney.engine.core.grammar import grammar
from jitney.engine.server.chat.conversation.tools import ToolUse
from jitney.engine.server.chat.request import Conversation, RequestBuilder

_CALL = re.compile(r"^CALL (\S+) (\{.*\})\s*$", re.MULTILINE)
_SAY = re.compile(r"^SAY (.+)$", re.MULTILINE)
_NOTHING = "I was told nothing."
#: Characters of a tool's result that are repeated.
_RESULT_CHARS = 200


def script(messages: list[JsonDict], use: ToolUse | None) -> tuple[str, str] | str:
    """The next call, as (name, arguments), or the text that ends the conversation."""
    told, made = "", 0
    for message in messages:
        text = str(message["content"] or "")
        if message["role"] == "user" and (_CALL.search(text) or _SAY.search(text)):
            told, made = text, 0
        made += message["role"] == "assistant"
    calls = _CALL.findall(told)
    if made < len(calls) and use is not None:
        pattern, arguments = calls[made]
        names = fnmatch.filter(sorted(use.names), pattern)
        if names:
            return names[0], arguments
    results = [str(each["content"] or "") for each in messages if each["role"] == "tool"]
    said = _SAY.search(told)
    text = said[1].replace("\\n", "\n") if said else _NOTHING
    return text.replace("RESULT", " ".join(results[-1].split())[:_RESULT_CHARS] if results else "")


_held = RequestBuilder._held_to_grammar


async def _obey(
    self: RequestBuilder[Any], conversation: Conversation, prompt: str, sampling: SamplingParams
) -> SamplingParams:
    held = await _held(self, conversation, prompt, sampling)
    use = conversation.tools
    if sampling.grammar is not None or (use is not None and use.is_required):
        return held
    step = script(conversation.messages, use)
    if isinstance(step, tuple):
        step = self.service.turns.call_text(*step)
    written = await self._held_to(held, grammar.choice([step]), "messages")
    return with_fields(written, temperature=1.0)


#: ChatML with tools told and calls written as Qwen3 does, and room for an agent's long prompts.
_TEMPLATE = """{%- if tools %}<|im_start|>system
Call a tool as <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
#: Shapes of one layer's matrices.
_LAYER = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
_FLAGS = (
    *(
        "--served-model-name",
        "obedient,claude-sonnet-4-5",
        "--max-seats",
        "4",
        "--seat-buckets",
        "4",
    ),
    *("--token-budget", "512", "--token-buckets", "64,512", "--no-measured-sizes"),
)


def write_model(folder: Path) -> None:
    """Write a random model of 3 million weights with SmolLM2's tokenizer."""
    save_tokenizer("smollm2-135m", folder)
    random = np.random.default_rng(0)
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in _LAYER.items()}
    shapes["model.embed_tokens.weight"] = (49152, 64)
    tensors = {
        name: (0.05 * random.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
        tensors[f"model.{name}.weight"] = np.ones(64, np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    (folder / "template.jinja").write_text(_TEMPLATE)


def main() -> int:
    """Serve the model until the process is told to stop."""
    RequestBuilder._held_to_grammar = _obey
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        template = ("--chat-template", str(folder / "template.jinja"))
        return cli.main(["serve", name, *_FLAGS, *template, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
