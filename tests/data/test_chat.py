"""Chat templates: rendered as transformers renders them, and kept from doing harm."""

import json
import time

import pytest

from minitext.config.data import DataConfig
from minitext.data.chat import Chat, open_template, read_chat, write_chat
from minitext.data.tokenizer import ByteTokenizer
from minitext.errors import UserError

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_BEGINNING = """{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- for m in messages %}
    {%- if m.role == "skip" %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- "<|" + m["role"] + "|>\n" + m["content"] | trim + eos_token }}
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{{ ns.count }} {{ messages | tojson }}
"""
ALTERNATING = """{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{% generation %}[{{ m['content'] }}]{% endgeneration %}{% endfor -%}
"""
TALK = [
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": "Is 1 < 2 & 'yes' in <b>?\nÄ 日本"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def chat(template, tmp_path):
    return Chat(template, SPECIAL, frozenset([0]), tmp_path / "run" / "published")


@pytest.mark.parametrize(
    ("template", "messages"),
    [(CHATML, TALK[1:]), (WITH_BEGINNING, TALK), (ALTERNATING, TALK[1:])],
)
def test_it_is_rendered_as_by_transformers(template, messages, tmp_path):
    from transformers.utils.chat_template_utils import render_jinja_template

    want, _ = render_jinja_template(
        [messages],
        chat_template=template,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert chat(template, tmp_path).render(messages) == want[0]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% for i in 'x' * 10**9 %}{% endfor %}", "memory"),
        ("{{ 'x' * 10**8 }}{{ 'x' * 10**8 }}", ""),
        (
            "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
            "too long",
        ),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "__class__"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "__init__"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "itself"),
        ("{{ " + "(" * 50_000, ""),
        ("{% for %}", ""),
        ("{% include '/etc/passwd' %}", ""),
        (ALTERNATING, "System role not supported"),
        (None, "no chat template"),
    ],
)
def test_a_template_that_does_harm_is_one_line(template, reason, tmp_path):
    began = time.monotonic()
    with pytest.raises(UserError) as error:
        chat(template, tmp_path).render(TALK)
    line = str(error.value)
    assert reason in line and str(tmp_path / "run") in line
    assert "\n" not in line and len(line) < 400
    assert time.monotonic() - began < 30


def test_what_a_folder_says(tmp_path):
    tokenizer = ByteTokenizer()
    assert read_chat(tmp_path, tokenizer)[:3] == (None, {}, {tokenizer.eod_id})
    said = {"chat_template": "old", "eos_token": {"content": "</s>"}, "model_max_length": 5}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    found = read_chat(tmp_path, tokenizer)
    assert found[:3] == ("old", SPECIAL, {7, tokenizer.eod_id})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    (tmp_path / "chat_template.jinja").write_text("new")
    found = read_chat(tmp_path, tokenizer)
    assert found.template == "new" and found.stops == {8, 9, tokenizer.eod_id}
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_chat(tmp_path, tokenizer).template == "b"


@pytest.mark.parametrize("said", [None, {"eos_token": None, "bos_token": "<s>"}])
def test_a_run_renders_alike_when_it_resumes(said, tmp_path):
    """Also beside a tokenizer_config.json that came with the model and names no token that ends a text."""
    if said is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    cfg = DataConfig(source="conversations", path="a.jsonl")
    first = open_template(cfg, ByteTokenizer(), tmp_path)
    write_chat(tmp_path, first, {ByteTokenizer().eod_id})
    again = read_chat(tmp_path, ByteTokenizer())
    assert again == first
    assert again.render(TALK[:3]) == first.render(TALK[:3])


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * 300_000])
def test_a_file_that_is_no_template_is_refused(content, tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(content)
    with pytest.raises(UserError, match="chat_template.jinja"):
        read_chat(tmp_path, ByteTokenizer())
