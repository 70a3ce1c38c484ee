"""How chats with tools are written in each dialect, and what a turn asks of the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_support import tokenizer, tool

from openk3.chat import validate_messages, validate_tools
from openk3.chat.turn import check_tool_choice, prepare_turn
from openk3.engine.request import SamplingParams

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


def test_whether_the_prompt_begins_the_reasoning() -> None:
    dialect = tokenizer("qwen").dialect
    for end, thinks in (("<think>\n", True), ("<think>", True), ("<think>\n\n</think>\n\n", False), ("", False)):
        assert dialect.begins_thinking(dialect.control.encode(f"<|im_start|>assistant\n{end}")) is thinks
    plain = tokenizer("plain").dialect
    assert not plain.begins_thinking(plain.control.encode("<think>"))


@pytest.mark.parametrize(
    ("dialect", "required", "named"),
    [
        ("qwen", '<tool_call>\n{"name": "', '<tool_call>\n{"name": "search", "arguments":'),
        ("plain", '<tool_call>\n{"name": "', '<tool_call>\n{"name": "search", "arguments":'),
        ("mistral", '[TOOL_CALLS] [{"name": "', '[TOOL_CALLS] [{"name": "search", "arguments":'),
        ("native", "<|tools|><|call|>", "<|tools|><|call|>search<|argument|>"),
    ],
)
def test_a_required_call_is_begun_in_the_prompt(dialect: str, required: str, named: str) -> None:
    plain = text(dialect, [USER], [WEATHER, SEARCH])
    assert text(dialect, [USER], [WEATHER, SEARCH], tool_choice="required") == plain + required
    choice = {"type": "function", "function": {"name": "search"}}
    assert text(dialect, [USER], [WEATHER, SEARCH], tool_choice=choice) == plain + named


def test_no_tools_where_none_may_be_called() -> None:
    assert text("qwen", [USER, ADDS], [WEATHER], tool_choice="none") == text("qwen", [USER])


def test_one_call_ends_at_its_mark() -> None:
    reads = tokenizer("qwen")
    end = reads.dialect.control.ids["</tool_call>"]
    messages, tools = validate_messages([USER]), validate_tools([WEATHER])
    params = SamplingParams(stop_token_ids=(7,), temperature=0)
    for choices, ids in (({}, (7,)), ({"parallel_tool_calls": False}, (7, end))):
        turn = prepare_turn(reads, messages, tools, **choices)
        assert turn.sampling(params) == SamplingParams(stop_token_ids=ids, temperature=0)
    assert prepare_turn(reads, messages, None, parallel_tool_calls=False).sampling(params) == params


@pytest.mark.parametrize(
    ("choice", "error"),
    [
        ("any", r"^tool_choice: expected 'auto', 'none', 'required' or .*, got 'any'$"),
        ({"type": "custom"}, r"^tool_choice: expected 'auto'"),
        ({"type": "function", "function": {}}, r"^tool_choice: expected 'auto'"),
        (["auto"], r"^tool_choice: expected 'auto'"),
        ({"type": "function", "function": {"name": "g"}}, r"^tool_choice: there is no tool 'g'; the tools are f$"),
    ],
)
def test_tool_choices_refused(choice: object, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        check_tool_choice(choice, ["f"])


def test_tool_choices_without_tools() -> None:
    assert check_tool_choice("auto", []) == ("auto", None)
    with pytest.raises(ValueError, match=r"^tool_choice: 'required' needs tools; give at least one$"):
        check_tool_choice("required", [])
    with pytest.raises(ValueError, match=r"^tool_choice: there is no tool 'g'; there are no tools$"):
        check_tool_choice({"type": "function", "function": {"name": "g"}}, [])


def test_parallel_tool_calls_is_true_or_false() -> None:
    with pytest.raises(ValueError, match=r"^parallel_tool_calls: expected true or false, got text$"):
        prepare_turn(tokenizer("qwen"), validate_messages([USER]), None, "auto", "yes")  # type: ignore[arg-type]
