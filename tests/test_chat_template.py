"""Handwritten templates against Transformers' renderer, what the sandbox refuses, and what a broken template says."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from openk3.chat.template import ChatTemplate

CHATML = """{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TOOLS = """{{- bos_token }}
{%- if tools is not none %}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- tools | tojson(indent=2) }}
{%- endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}
    {%- elif m.role == 'tool' %}<result>{{ m.content }}</result>
    {%- else %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}
    {%- endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}{%- set rest = messages -%}
{%- endif -%}
{%- for m in rest -%}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (first if loop.first else '') }}
    {%- if m.content is string -%}{{ m.content | trim }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""

LANGUAGE = """{%- set ns = namespace(n=0, last=none) %}
{%- macro show(x) %}[{{ x }}]{% endmacro %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.n = ns.n + 1 %}{%- set ns.last = m.content %}
    {%- if ns.n > 2 %}{% break %}{% endif %}
    {{- show(m.content.split(' ')[0]) }}
    {%- generation %}{% set ns.n = ns.n %}{{ m.content[::-1] }}{% endgeneration %}
{%- endfor %}
{{ ns.n }} {{ ns.last }} {{ dict(a=1)['a'] }} {{ dict.fromkeys(['k'], 2) }}
{{ {'ü': '<&>', 'b': [1, none, true]} | tojson }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}
{{ messages | map(attribute='role') | join(',') }} {{ undefined_name }} {{ messages[0].nothing is defined }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ strftime_now('%Y') | length }}
    {% if true %}
  indented
    {% endif %}
tail"""

REASONING = "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": "Hello there"}],
    "system": [{"role": "system", "content": "S"}, {"role": "user", "content": " spaced "}],
    "turns": [
        {"role": "user", "content": "你好，世界 🌍"},
        {"role": "assistant", "content": "def f(x):\n\treturn x  # <tag> & {{ braces }}\n"},
        {"role": "user", "content": "x"},
    ],
}
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "w", "arguments": {"city": "北京", "n": 1.5}}}],
    },
    {"role": "tool", "content": '{"t": 4}'},
]
TOOL_LIST = [
    {
        "type": "function",
        "function": {"name": "w", "description": "Wetter <b>", "parameters": {"type": "object", "properties": {}}},
    }
]


def transformers_render(source: str, messages: list[dict[str, Any]], tools: Any, generation: bool) -> str:
    rendered, _ = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=generation, **SPECIAL
    )
    return str(rendered[0])


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("source", [CHATML, TOOLS, GEMMA, LANGUAGE], ids=["chatml", "tools", "gemma", "language"])
def test_equals_transformers(source: str, chat: str, generation: bool) -> None:
    ours = ChatTemplate(source, SPECIAL).render(CHATS[chat], None, generation)  # type: ignore[arg-type]
    assert ours == transformers_render(source, CHATS[chat], None, generation)


@pytest.mark.parametrize("tools", [None, TOOL_LIST])
def test_tools_equal_transformers(tools: Any) -> None:
    ours = ChatTemplate(TOOLS, SPECIAL).render(TOOL_CHAT, tools)  # type: ignore[arg-type]
    assert ours == transformers_render(TOOLS, TOOL_CHAT, tools, True)
    assert '"北京"' in ours


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_equals_transformers(field: str) -> None:
    chat: list[dict[str, Any]] = [{"role": "assistant", "content": "c", field: "because"}]
    ours = ChatTemplate(REASONING, SPECIAL).render(chat)  # type: ignore[arg-type]
    assert ours == transformers_render(REASONING, chat, None, True) == "because|because|c"


def test_refusal_of_the_template_is_quoted() -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ValueError, match=r"^chat template: Roles must alternate user/assistant"):
        ChatTemplate(GEMMA, SPECIAL).render(twice)  # type: ignore[arg-type]


def test_syntax_error_names_the_line() -> None:
    with pytest.raises(ValueError, match=r"^chat template: line 2: "):
        ChatTemplate("fine\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ dict.__class__ }}{{ dict.__class__.__mro__ }}",
        "{{ namespace(__init__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% include 'x' %}",
        "{{ messages[0].content + 1 }}",
        "{{ undefined_name.attribute }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_hostile_or_broken_template_is_a_value_error(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match=r"^chat template: "):
        ChatTemplate(source).render(messages)  # type: ignore[arg-type]
    assert messages == [{"role": "user", "content": "x"}]
