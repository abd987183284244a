"""Chat templates written for tests, one per model family, with the special marks of each family;
and a byte-level tokenizer that renders them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from api_fakes import VOCAB, ByteTokenizer, FakeClient, Script, make_app

from jitney.engine.common.errors import RequestError
from jitney.engine.common.rendered import reason_of
from jitney.engine.core.text.template_worker import TemplateSource, render_source

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEP = "<｜tool▁sep｜>"

_QWEN = """\
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools> in <tool_call></tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_THINKING = """
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking -%}
<think>

</think>

{% endif %}"""

_LLAMA = """\
{%- if tools %}system: Respond in the format {"name": function name, "parameters": dictionary of \
argument name and its value}. {% for tool in tools %}{{ tool | tojson }}{% endfor %}
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<|python_tag|>{"name": "{{ call.function.name }}", \
"parameters": {{ call.function.arguments | tojson }}}{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""

_MISTRAL = """\
{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
{{- call.function | tojson }}{% endfor %}]
{%- else %}[INST]{{ message.content }}[/INST]{% endif %}
{%- endfor %}"""

_DEEPSEEK = """\
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}CALLS_BEGINCALL_BEGIN{{ 'HEAD' }}\
{{ call.function.name + 'BEHIND' + call.function.arguments }}CALL_ENDCALLS_END{% endfor %}
{%- endfor %}{% if tools %}{{ tools | length }}{% endif %}
{%- if add_generation_prompt %}<assistant><think>
{% endif %}"""


def _deepseek(head: str, behind: str) -> str:
    text = _DEEPSEEK.replace("HEAD", head).replace("BEHIND", behind)
    text = text.replace("CALLS_BEGIN", _CALLS_BEGIN).replace("CALLS_END", _CALLS_END)
    return text.replace("CALL_BEGIN", _CALL_BEGIN).replace("CALL_END", _CALL_END)


_HARMONY = """\
<|start|>system<|message|>Reasoning: {{ reasoning_effort | default("medium") }}<|end|>
{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{%- for message in messages %}<|start|>{{ message.role }}<|channel|>final<|message|>\
{{ message.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

_GEMMA = """\
{%- if tools %}Call functions in ```tool_code: {{ tools | tojson }}{% endif %}
{%- for message in messages %}<start_of_turn>{{ message.role }}
{{ message.content }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

_CODER = """\
{%- if tools %}{{ tools | tojson }}<function=NAME><parameter=KEY>{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{%- for key, value in call.function.arguments | items %}
<parameter={{ key }}>
{{ value }}
</parameter>
{%- endfor %}
</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_GEMMA4 = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}<|turn>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<|tool_call>call:{{ call.function.name }}\
{{ call.function.arguments }}<tool_call|>{% endfor %}<turn|>
{% endfor %}
{%- if add_generation_prompt %}<|turn>model
{% endif %}"""

_PLAIN = """\
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""

#: Family -> template.
TEMPLATES = {
    "plain": _PLAIN,
    "hermes": _QWEN,
    "qwen3": _QWEN + _THINKING,
    "llama3_json": _LLAMA,
    "mistral": _MISTRAL,
    "deepseek_v3": _deepseek(f"function{_SEP}", "\\n```json\\n"),
    "deepseek_v31": _deepseek("", _SEP),
    "harmony": _HARMONY,
    "gemma": _GEMMA,
    "gemma4": _GEMMA4,
    "qwen3_coder": _CODER,
}
#: Special tokens of all families.
SPECIALS = (
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    _CALLS_BEGIN,
    _CALLS_END,
    _CALL_BEGIN,
    _CALL_END,
    _SEP,
    "<think>",
    "</think>",
    "<|im_end|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
)
FAMILY_VOCAB = VOCAB + len(SPECIALS)


class FamilyTokenizer(ByteTokenizer):
    """A byte tokenizer with a token for each of `SPECIALS` and the template of a family."""

    vocab_size = FAMILY_VOCAB

    def __init__(self, family: str, specials: Iterable[str] = SPECIALS):
        self.chat_template = TEMPLATES[family]
        self._texts = {VOCAB + number: text.encode() for number, text in enumerate(specials)}
        self.added_tokens = self._ids = {text.decode(): id for id, text in self._texts.items()}
        self.longest_token = max([1, *map(len, self._ids)])
        self._cut = re.compile("(" + "|".join(map(re.escape, self._ids)) + ")")
        self.special_ids = ByteTokenizer.special_ids | set(self._texts)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for part in self._cut.split(text):
            ids += [self._ids[part]] if part in self._ids else part.encode()
        return ids

    def token_bytes(self, id: int) -> bytes:
        return self._texts[id] if id in self._texts else super().token_bytes(id)

    def apply_chat_template(
        self, messages, *, add_generation_prompt: bool = True, tools=None, **variables
    ) -> str:
        source = TemplateSource(self.chat_template, self.special_tokens)
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            return render_source(source, list(messages), tools=tools, **variables)
        except Exception as error:  # like `Tokenizer`
            raise RequestError(reason_of(error), param="messages") from error


def family_app(family: str, text: str, **script: Any) -> tuple[Any, FakeClient]:
    """An app whose model belongs to a family and writes this text. script: fields of `Script`."""
    tokenizer = FamilyTokenizer(family)
    script = {"tokens": tokenizer.encode(text)} | script
    client = FakeClient(Script(**script), vocab_size=FAMILY_VOCAB, context_length=4096)
    return make_app(client, tokenizer=tokenizer), client
