"""Chooses and checks the chat templates of a model or file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jitney.engine.common.errors import ConfigError

#: Most characters of a chat template's file.
_MOST_CHARS = 1 << 20
#: Names of templates: for all chats, and for chats with tools.
_DEFAULT, _TOOL_USE = "default", "tool_use"
_INSTEAD = "write the template to use to a file and name it with --chat-template"


def read_template(file: str) -> str:
    """The template in a file. Raises ConfigError."""
    try:
        with Path(file).open(encoding="utf-8") as stream:
            text = stream.read(_MOST_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {file} cannot be read: {error}") from None
    if not text.strip() or len(text) > _MOST_CHARS:
        raise ConfigError(f"chat_template {file} must have 1 to {_MOST_CHARS} characters")
    _check(text, f"chat_template {file}")
    return text


def used_templates(templates: str | Mapping[str, str] | None) -> str | dict[str, str] | None:
    """The templates that chats use: one, or two by transformers' names, without and with tools.
    Raises ConfigError if none is the default or one has an error.
    """
    if isinstance(templates, Mapping):
        used = {name: templates[name] for name in (_DEFAULT, _TOOL_USE) if name in templates}
        if _DEFAULT not in templates and len(templates) == 1:
            [templates] = templates.values()
        elif _DEFAULT not in templates:
            names = ", ".join(sorted(templates))
            raise ConfigError(
                f"the model has the chat templates {names} but none named {_DEFAULT}; {_INSTEAD}"
            )
        else:
            for name, text in used.items():
                _check(text, f"the model's chat template {name}", _INSTEAD)
            return used
    if templates:
        _check(templates, "the model's chat template", _INSTEAD)
    return templates


def _check(template: str, name: str, advice: str = "") -> None:
    """Raise ConfigError, with the line, for a template that the sandbox's Jinja cannot read."""
    from jinja2 import TemplateSyntaxError

    from jitney.engine.core.text.chat_sandbox import compiled

    try:
        compiled(template)
        return
    except TemplateSyntaxError as error:
        reason = f"{name}, line {error.lineno}: {(error.message or '').rstrip('.')}"
    except Exception as error:  # from Python's compiler, which runs after Jinja's
        reason = f"{name} cannot be compiled: {error}"
    raise ConfigError("; ".join(filter(None, (reason, advice))))
