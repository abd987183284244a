"""Small chat templates with peculiarities of well-known models' templates, which refuse or leave
out inputs that other templates accept.
"""

from __future__ import annotations

_ALTERNATE = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}\
{% endif %}"""

#: Refuses system messages and two successive messages of one role; trims texts.
_GEMMA_2 = (
    _ALTERNATE
    + """<turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}</turn>
{% endfor %}{% if add_generation_prompt %}<turn>model
{% endif %}"""
)

#: Like _GEMMA_2, without trimming or a generation prompt.
_MIXTRAL = (
    _ALTERNATE
    + """\
{%- if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content + eos_token }}\
{% endif %}{% endfor %}"""
)

_SHORT_IDS = (
    "{%- if ID | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
)
_MISTRAL_BODY = """\
{%- set ns = namespace(n=0) %}
{%- for m in loop_messages %}{% if m.role != 'tool' and not m.tool_calls %}
{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}
{%- set ns.n = ns.n + 1 %}{% endif %}{% endfor %}
{%- for m in loop_messages %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- if system and loop.last %}[INST]{{ system + '\\n\\n' + m.content }}[/INST]
{%- else %}[INST]{{ m.content }}[/INST]{% endif %}
{%- elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}CALL_ID\
{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{% endfor %}]{{ eos_token }}
{%- elif m.role == 'assistant' %}EMPTY{{ m.content + eos_token }}
{%- elif m.role == 'tool' %}RESULT_ID[TOOL_RESULTS]{{ m.content | tojson }} {{ m.tool_call_id }}\
[/TOOL_RESULTS]
{%- else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"""
_SPLIT_SYSTEM = """\
{%- set loop_messages = messages %}{% set system = '' %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set loop_messages = messages[1:] %}{% endif %}
{%- set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}"""


def _mistral(head: str, empty: str) -> str:
    text = (head + _MISTRAL_BODY).replace("EMPTY", empty)
    text = text.replace("CALL_ID", _SHORT_IDS.replace("ID", "c.id"))
    return text.replace("RESULT_ID", _SHORT_IDS.replace("ID", "m.tool_call_id"))


#: Requires call ids of nine characters; accepts a system text only before a user's text at the end,
#: no text beside calls, no user message after a result.
_NEMO = _mistral(_SPLIT_SYSTEM, "")
#: Puts the system text at the beginning; refuses an assistant message without text.
_MISTRAL_SMALL = _mistral(
    _SPLIT_SYSTEM + "[SYSTEM_PROMPT]{{ system }}[/SYSTEM_PROMPT]{% set system = '' %}",
    "{%- if not m.content %}{{ raise_exception('say something') }}{% endif %}",
)

#: Accepts one call per message, without text; puts tools in the first message after the system's.
_LLAMA_3 = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif -%}
<h>system</h>Knowledge: 2023. {{ system }}<eot>
{%- if tools %}{% if not messages %}{{ raise_exception('no first user message') }}{% endif -%}
<h>user</h>{{ tools | tojson }} {{ messages[0].content | trim }}<eot>
{%- set messages = messages[1:] %}{% endif %}
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif -%}
<h>assistant</h>{"name": "{{ m.tool_calls[0].function.name }}", "parameters": \
{{ m.tool_calls[0].function.arguments | tojson }}}<eot>
{%- elif m.role == 'tool' %}<h>ipython</h>{{ m.content | tojson }}<eot>
{%- else %}<h>{{ m.role }}</h>{{ m.content | trim }}<eot>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<h>assistant</h>{% endif %}"""

#: Iterates over a call's arguments.
_QWEN_CODER = """\
{%- if messages[0].role == 'system' %}<im>system
{{ messages[0].content }}</im>
{% endif %}
{%- for tool in tools or [] %}<function><name>{{ tool.function.name }}</name>
{%- for name, field in tool.function.parameters.properties | items %}<p>{{ name }}</p>{% endfor %}
{%- endfor %}
{%- for m in messages %}{% if not loop.first or m.role != 'system' %}<im>{{ m.role }}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<function={{ c.function.name }}>
{%- for key, value in c.function.arguments | items %}<{{ key }}>{{ value }}</{{ key }}>{% endfor %}
{%- endfor %}</im>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<im>assistant
{% endif %}"""

#: Requires tools, if only an empty list, with descriptions.
_HERMES = """\
{%- for tool in tools %}{{ tool.function.name + ': ' + tool.function.description }}
{%- for name, field in tool.function.parameters.properties | items %}
{{- name + ' ' + field.description }}{% endfor %}
{% endfor %}
{%- for m in messages %}<im>{{ m.role }}
{%- if m.tool_calls %}
{%- for c in m.tool_calls %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}\
</tool_call>{% endfor %}
{%- else %}{{ m.content }}{% endif %}</im>
{% endfor %}{% if add_generation_prompt %}<im>assistant
{% endif %}"""

#: Keeps only the last system text, at the beginning; accepts calls only beside null content, with
#: arguments as text; ignores tools.
_R1_DISTILL = """\
{%- set ns = namespace(system='') %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
{%- if m.role == 'user' %}<U>{{ m.content }}
{%- elif m.role == 'assistant' and m.content is none %}<A>
{%- for c in m.tool_calls %}<call>{{ c.function.name + '\\n' + c.function.arguments }}</call>
{%- endfor %}
{%- elif m.role == 'assistant' %}<A>{{ m.content.split('</think>')[-1] }}<end>
{%- elif m.role == 'tool' %}<output>{{ m.content }}</output>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<A><think>
{% endif %}"""

#: Puts all system texts at the beginning; renders an empty text beside calls as a separate turn.
_DEEPSEEK = """\
{%- set ns = namespace(system='') %}
{%- for m in messages %}{% if m.role == 'system' %}
{%- set ns.system = ns.system + ('\\n' if ns.system else '') + m.content %}{% endif %}{% endfor %}
{{- ns.system }}
{%- for m in messages %}
{%- if m.role == 'user' %}<U>{{ m.content }}
{%- elif m.role == 'tool' %}<output>{{ m.content }}</output>
{%- elif m.role == 'assistant' %}
{%- if m.content is not none %}<A>{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }}<sep>
{%- if c.function.arguments is string %}{{ c.function.arguments }}
{%- else %}{{ c.function.arguments | tojson }}{% endif %}</call>
{%- endfor %}<end>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<A>{% endif %}"""

#: Keeps text beside calls only until a final answer; accepts one call per message, a result only
#: after a call, and only the first system text.
_GPT_OSS = """\
{%- if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% endif -%}
<|start|>developer<|message|>
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for tool in tools or [] %}// {{ tool.function.description + '\\n' + tool.function.name }}
{%- endfor %}
{%- set last = namespace(name=none) %}
{%- for m in loop_messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- set ns = namespace(final=false) %}
{%- for later in loop_messages[loop.index:] %}
{%- if later.role == 'assistant' and not later.tool_calls %}{% set ns.final = true %}{% endif %}
{%- endfor %}
{%- if m.content and not ns.final %}<|channel|>analysis<|message|>{{ m.content }}{% endif %}
{%- set last.name = m.tool_calls[0].function.name %}
{{- ' to=functions.' + last.name }}{{ m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}<|channel|>final<|message|>{{ m.content }}<|end|>
{%- set last.name = none %}
{%- elif m.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('a result without a call') }}{% endif %}
{{- last.name + ' to=assistant' }}{{ m.content | tojson }}<|end|>
{%- elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

#: Ignores tools and calls.
_PHI = """\
{%- for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

#: Refuses a conversation without a user message, and a system text that is not the first message.
_QWEN_LATER = """\
{%- set ns = namespace(asked=false) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = true %}{% endif %}{% endfor %}
{%- if not ns.asked %}{{ raise_exception('nobody asks') }}{% endif %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif -%}
<im>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</im>
{% endfor %}{% if add_generation_prompt %}<im>assistant
{% endif %}"""

#: Renders names of calls without their arguments.
_NAMES_ONLY = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{%- for c in m.tool_calls or [] %} ran {{ c.function.name }}{% endfor %}
{% endfor %}"""

#: Name -> template.
SMALL_TEMPLATES = {
    "gemma 2": _GEMMA_2,
    "mixtral": _MIXTRAL,
    "nemo": _NEMO,
    "mistral small": _MISTRAL_SMALL,
    "llama 3": _LLAMA_3,
    "qwen coder": _QWEN_CODER,
    "hermes": _HERMES,
    "r1 distill": _R1_DISTILL,
    "deepseek": _DEEPSEEK,
    "gpt-oss": _GPT_OSS,
    "phi": _PHI,
    "later qwen": _QWEN_LATER,
    "names only": _NAMES_ONLY,
}
