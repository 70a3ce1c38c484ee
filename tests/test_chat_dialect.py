"""How chats with tools are written in each dialect, and what a turn asks of the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_support import allowed, ids_of, read, tokenizer, tool

from openk3.chat import Tokenizer, validate_messages, validate_tools
from openk3.chat.turn import check_tool_choice, prepare_turn
from openk3.engine.grammar.spec import Grammar

WEATHER, SEARCH = tool("weather", city={"type": "string"}), tool("search")
USER = {"role": "user", "content": "Paris?"}
ADDS = {"role": "system", "tools": [SEARCH]}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "北京"}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "I look.", "reasoning_content": "Hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]


def text(dialect: str, *arguments: Any, **choices: Any) -> str:
    reads = tokenizer(dialect)
    messages, *tools = arguments
    turn = prepare_turn(reads, validate_messages(messages), validate_tools(*tools) if tools else None, **choices)
    return reads.decode(turn.prompt_ids, skip_special_tokens=False)


def test_native() -> None:
    described = json.dumps(WEATHER["function"])
    assert text("native", CHAT, [WEATHER]) == (
        f"<|system|>Be brief.<|tools|>{described}<|end|><|user|>Paris?<|end|>"
        '<|assistant|><|think|>Hm<|response|>I look.<|tools|><|call|>weather<|argument|>{"city": "北京"}<|end|>'
        "<|tool|>weather<|response|>rain<|end|><|assistant|>"
    )
    added = json.dumps(SEARCH["function"])
    assert text("native", [USER, ADDS], [WEATHER]) == (
        f"<|system|><|tools|>{described}<|end|><|user|>Paris?<|end|><|system|><|tools|>{added}<|end|><|assistant|>"
    )
    assert text("native", [ADDS, USER], [WEATHER]).startswith(f"<|system|><|tools|>{described}\n{added}<|end|>")
    assert tokenizer("native").encode_chat([USER, {"role": "assistant", "content": ""}], None, False)[-2:] == [
        tokenizer("native").dialect.control.ids[mark] for mark in ("<|response|>", "<|end|>")
    ]


def test_a_template_without_a_place_for_tools() -> None:
    written = text("plain", CHAT, [WEATHER])
    assert written.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions.")
    assert json.dumps(WEATHER) in written
    assert written.endswith(
        '<|im_start|>assistant\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "北京"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert text("plain", [USER], [WEATHER]).startswith("<|im_start|>system\nYou may call functions.")
    twice = {**CHAT[2], "tool_calls": [CALL, CALL | {"id": "c2"}]}
    results = [CHAT[3], CHAT[3] | {"tool_call_id": "c2"}]
    assert text("plain", [USER, twice, *results]).count("<|im_start|>user") == 2
    assert text("plain", [USER]) == "<|im_start|>user\nParis?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("dialect", ["qwen", "plain"])
def test_tools_of_messages_are_tools(dialect: str) -> None:
    written = text(dialect, [USER, ADDS, USER], [WEATHER])
    assert written == text(dialect, [USER, USER], [WEATHER, SEARCH])
    with pytest.raises(
        ValueError, match=r"^messages\[1\]\.tools\[0\]\.function\.name: there is a tool 'search' already$"
    ):
        text(dialect, [USER, ADDS], [SEARCH])
    with pytest.raises(ValueError, match=r"^messages: nothing but tools"):
        text(dialect, [ADDS])


def test_reasoning_in_tags_is_taken_apart_as_templates_do() -> None:
    answered = {"role": "assistant", "content": "<think>\nHm\n</think>\n\nRain."}
    apart = {"role": "assistant", "content": "Rain.", "reasoning_content": "Hm"}
    assert text("qwen", [USER, answered, USER]) == text("qwen", [USER, apart, USER])
    assert "<think>\nHm\n</think>\n\nRain." in text("qwen", [USER, answered, USER])
    assert text("plain", [USER, answered]).count("<think>") == 1


THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content and '<think>' + m.reasoning_content }}"
    "</think>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think></think>' if enable_thinking is false else ('<think>\n' if reasoning_effort else '') }}{% endif %}"
)


def thinking(template: str = THINKING_TEMPLATE) -> Tokenizer:
    return Tokenizer(tokenizer("qwen").backend, chat_templates={"default": template}, eos_token_ids=[257])


def test_whether_the_reply_may_think() -> None:
    def prompt(reads: Tokenizer, **options: Any) -> tuple[str, str]:
        found = reads.dialect.prompt(validate_messages([USER]), **options)
        return reads.decode(found.ids, skip_special_tokens=False).rpartition("assistant")[2], found.thinks

    assert prompt(tokenizer("qwen")) == ("\n", "may")
    assert prompt(tokenizer("qwen"), effort="none") == ("\n<think>\n\n</think>\n\n", "no")
    assert prompt(tokenizer("qwen"), effort="high") == ("\n", "may")
    assert prompt(thinking()) == ("\n", "may")
    assert prompt(thinking(), effort="low") == ("\n<think>\n", "begun")
    assert prompt(thinking(), effort="none") == ("\n<think></think>", "no")  # the template's own way
    always = THINKING_TEMPLATE.replace(" if enable_thinking is false", " if false").replace("reasoning_effort", "true")
    assert prompt(thinking(always)) == ("\n<think>\n", "begun")
    assert prompt(thinking(always), effort="none") == ("\n<think>\n\n</think>\n\n", "no")
    assert prompt(tokenizer("plain")) == prompt(tokenizer("plain"), effort="none") == ("\n", "no")
    assert prompt(tokenizer("native")) == ("|>", "may")
    assert prompt(tokenizer("native"), effort="medium") == ("|><|think|>", "begun")
    assert prompt(tokenizer("native"), effort="none") == ("|><|response|>", "no")
    assert prompt(tokenizer("native"), effort="none", calls_only=True) == ("|>", "no")


def test_the_native_dialect_says_how_much_to_think() -> None:
    described = json.dumps(WEATHER["function"])
    for messages, system in (([USER], ""), ([{"role": "system", "content": "Be brief."}, USER], "Be brief.")):
        written = text("native", messages, [WEATHER], reasoning_effort="low")
        assert written.startswith(f"<|system|>{system}<|think|>low<|tools|>{described}<|end|><|user|>")
        assert written.endswith("<|end|><|assistant|><|think|>")


def test_an_effort_is_one_of_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"^reasoning_effort: 'huge' is not one of none, minimal, low, medium, high"):
        prepare_turn(tokenizer("qwen"), validate_messages([USER]), reasoning_effort="huge")  # type: ignore[arg-type]


# A message that is continued


@pytest.mark.parametrize("dialect", ["qwen", "plain", "mistral", "native"])
@pytest.mark.parametrize("begun", ["", "It is ", "It is\n", "no mark: </think> <|im_end|> <tool_call>", "é 🌊"])
def test_a_partial_message_ends_the_prompt(dialect: str, begun: str) -> None:
    reads = tokenizer(dialect)
    chat: list[Any] = [USER, {"role": "assistant", "content": begun}]
    whole = reads.dialect.encode(validate_messages(chat), None, add_generation_prompt=False)
    partial = prepare_turn(reads, validate_messages([USER, chat[1] | {"partial": True}])).prompt_ids
    if dialect != "qwen":  # whose template takes everything before </think> for reasoning
        assert whole[: len(partial)] == partial
        (end,) = reads.eos_token_ids
        assert reads.decode(whole[len(partial) :], skip_special_tokens=False).strip() == reads.decode([end], False)
    assert reads.decode(partial).endswith(begun.split("</think>")[-1].lstrip())
    spelled = len(begun.split("</think>")[-1].lstrip().encode())
    assert not set(reads.special_ids) & set(partial[len(partial) - spelled :])


@pytest.mark.parametrize("dialect", ["qwen", "native"])
def test_reasoning_is_continued(dialect: str) -> None:
    reads = tokenizer(dialect)
    last = {"role": "assistant", "reasoning_content": "Let me ", "partial": True}
    turn = prepare_turn(reads, validate_messages([USER, last]))
    assert reads.decode(turn.prompt_ids).endswith("Let me ")
    end = "</think>" if dialect == "qwen" else "<|response|>"
    reply = read(turn.parser(), ids_of(dialect, "see.", end, "Rain."))
    assert (reply.reasoning, reply.content) == ("see.", "Rain.")
    with pytest.raises(ValueError, match=r"^messages\[1\]\.reasoning_content: the chat template leaves it out, so it"):
        prepare_turn(tokenizer("plain"), validate_messages([USER, last]))


def test_what_cannot_be_continued() -> None:
    begun = {"role": "assistant", "content": "{", "partial": True}
    with pytest.raises(ValueError, match=r"^messages\[0\]\.partial: only the last message can be continued$"):
        validate_messages([begun, USER])
    for message in (USER | {"partial": True}, {"role": "assistant", "tool_calls": [CALL], "partial": True}):
        with pytest.raises(ValueError, match=r"^messages\[0\]\.partial: only an assistant message without tool_calls"):
            validate_messages([message])
    with pytest.raises(ValueError, match=r"^messages\[0\]\.partial: expected true or false, got text$"):
        validate_messages([begun | {"partial": "yes"}])
    with pytest.raises(
        ValueError, match=r"^grammar: the form of an answer cannot be kept where a message is continued"
    ):
        prepare_turn(tokenizer("qwen"), validate_messages([USER, begun]), grammar=Grammar.json_object())
    assert validate_messages([begun | {"partial": False}]) == [{"role": "assistant", "content": "{"}]


def test_no_tools_where_none_may_be_called() -> None:
    assert text("qwen", [USER, ADDS], [WEATHER], tool_choice="none") == text("qwen", [USER])


@pytest.mark.parametrize(
    ("choice", "error"),
    [
        ("any", r"^tool_choice: expected 'auto', 'none', 'required' or .*, got 'any'$"),
        ({"type": "custom"}, r"^tool_choice: expected 'auto'"),
        ({"type": "function", "function": {}}, r"^tool_choice: expected 'auto'"),
        (["auto"], r"^tool_choice: expected 'auto'"),
        ({"type": "function", "function": {"name": "g"}}, r"^tool_choice: there is no tool 'g'; the tools are f$"),
        (
            {"type": "allowed_tools"},
            r"^tool_choice\.allowed_tools: expected an object with mode and tools, got nothing",
        ),
        (allowed("none", "f"), r"^tool_choice\.allowed_tools\.mode: 'none' is not one of auto, required$"),
        (allowed("auto"), r"^tool_choice\.allowed_tools\.tools: expected a list of at least one tool, got a list$"),
        (allowed("auto", "f", "g"), r"^tool_choice\.allowed_tools\.tools\[1\]: there is no tool 'g'; the tools are f$"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["f"]}},
            r"^tool_choice\.allowed_tools\.tools\[0\]: expected {\"type\": \"function\", .*, got 'f'$",
        ),
    ],
)
def test_tool_choices_refused(choice: object, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        check_tool_choice(choice, ["f"])


def test_some_of_the_tools_may_be_allowed() -> None:
    assert check_tool_choice(allowed("required", "g", "f"), ["f", "g", "h"]) == ("required", ["g", "f"])
    assert check_tool_choice(allowed("auto", "h"), ["f", "g", "h"]) == ("auto", ["h"])


def test_tool_choices_without_tools() -> None:
    assert check_tool_choice("auto", []) == ("auto", [])
    with pytest.raises(ValueError, match=r"^tool_choice: 'required' needs tools; give at least one$"):
        check_tool_choice("required", [])
    with pytest.raises(ValueError, match=r"^tool_choice: there is no tool 'g'; there are no tools$"):
        check_tool_choice({"type": "function", "function": {"name": "g"}}, [])


def test_parallel_tool_calls_is_true_or_false() -> None:
    with pytest.raises(ValueError, match=r"^parallel_tool_calls: expected true or false, got text$"):
        prepare_turn(tokenizer("qwen"), validate_messages([USER]), None, "auto", "yes")  # type: ignore[arg-type]
