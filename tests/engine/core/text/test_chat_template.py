"""Which of a model's templates are used, and what is said of one that Jinja cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.core.text.fast_tokenizers import _tiny_fast
from jitney.engine.core.text.gguf_tokenizers import _gguf_templates
from jitney.engine.core.text.template_worker import render_source
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.sources import ModelSource

PLAIN, TOOLS = "plain {{ messages[0].content }}", "tools {{ tools | length }}"
CHAT = [{"role": "user", "content": "hi"}]


def save_folder(folder: Path, chat_template: str | None) -> ModelSource:
    fast = _tiny_fast().as_transformers()
    fast.chat_template = chat_template
    fast.save_pretrained(str(folder))
    return ModelSource("hf", str(folder), "saved", tiny_config())


def named(**templates: str) -> list[dict[str, str]]:
    return [{"name": name, "template": text} for name, text in templates.items()]


def with_templates(folder: Path, templates: object) -> ModelSource:
    """A model folder whose tokenizer_config.json has these templates."""
    source = save_folder(folder, chat_template=None)
    file = folder / "tokenizer_config.json"
    fields = json.loads(file.read_text()) | {"chat_template": templates}
    file.write_text(json.dumps(fields))
    return source


def rendered(tokenizer: Tokenizer) -> list[str]:
    """Without tools, with an empty list, with one: by the worker, and here."""
    source = tokenizer.template_source
    assert source is not None
    given = [{}, {"tools": []}, {"tools": [{}]}]
    texts = [render_source(source, CHAT, **variables) for variables in given]
    assert texts == [tokenizer.apply_chat_template(CHAT, **variables) for variables in given]
    return texts


def test_a_named_template_for_tools_is_used_with_tools(tmp_path: Path):
    templates = named(default=PLAIN, tool_use=TOOLS, rag="{% broken")
    tokenizer = Tokenizer.load(with_templates(tmp_path, templates))
    assert rendered(tokenizer) == ["plain hi", "tools 0", "tools 1"]
    assert (tokenizer.chat_template, tokenizer.tools_template) == (PLAIN, TOOLS)


def test_templates_may_be_files(tmp_path: Path):
    source = save_folder(tmp_path, chat_template=PLAIN)
    (tmp_path / "chat_template.jinja").write_text(PLAIN)
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text(TOOLS)
    assert rendered(Tokenizer.load(source)) == ["plain hi", "tools 0", "tools 1"]
    secret = tmp_path.parent / f"{tmp_path.name}_secret"
    secret.write_text("secret")
    (more / "rag.jinja").symlink_to(secret)
    with pytest.raises(ModelError, match=r"rag\.jinja"):
        Tokenizer.load(source)


def test_one_named_template_is_the_template(tmp_path: Path):
    tokenizer = Tokenizer.load(with_templates(tmp_path, named(only=PLAIN)))
    assert rendered(tokenizer) == ["plain hi"] * 3


def test_a_list_without_a_default_says_what_to_do(tmp_path: Path):
    source = with_templates(tmp_path, named(rag=PLAIN, tool_use=TOOLS))
    with pytest.raises(ConfigError, match=r"rag, tool_use.*--chat-template") as caught:
        Tokenizer.load(source)
    assert "\n" not in str(caught.value)
    file = tmp_path / "mine.jinja"
    file.write_text(PLAIN)
    assert rendered(Tokenizer.load(source, str(file))) == ["plain hi"] * 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\nb\n{% for %}", "line 3: "),
        ("a\n{{ b", "line 2: "),
        ("{% if x %}", "line 1: .*endif"),
        ("\n{{ a | shout }}", "line 2: No filter named 'shout'"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
    ],
)
def test_a_template_with_an_error_is_named_with_its_line(text: str, words: str, tmp_path: Path):
    file = tmp_path / "mine.jinja"
    file.write_text(text)
    good = save_folder(tmp_path / "good", chat_template=None)
    with pytest.raises(ConfigError, match=rf"mine\.jinja.*{words}"):
        Tokenizer.load(good, str(file))
    bad = save_folder(tmp_path / "bad", chat_template=text)
    with pytest.raises(ConfigError, match=rf"the model's chat template.*{words}.*--chat-template"):
        Tokenizer.load(bad)
    listed = with_templates(tmp_path / "listed", named(default=PLAIN, tool_use=text))
    with pytest.raises(ConfigError, match=rf"chat template tool_use.*{words}"):
        Tokenizer.load(listed)


def test_what_only_training_and_transformers_know_is_no_error(tmp_path: Path):
    text = "{% generation %}a{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}"
    assert (
        Tokenizer.load(save_folder(tmp_path, chat_template=text)).apply_chat_template(CHAT) == "a"
    )


def test_a_gguf_file_may_name_several_templates():
    one = {"tokenizer.chat_template": PLAIN}
    assert _gguf_templates({}) is None and _gguf_templates(one) == PLAIN
    more = {"tokenizer.chat_templates": ["tool_use", 5], "tokenizer.chat_template.tool_use": TOOLS}
    assert _gguf_templates(one | more) == {"tool_use": TOOLS, "default": PLAIN}
    assert _gguf_templates(one | {"tokenizer.chat_templates": "tool_use"}) == PLAIN
    assert _gguf_templates(one | {"tokenizer.chat_templates": ["gone"]}) == PLAIN
