"""Grammars on the default model: every reply is what was asked for, at temperature 0 and 1, streamed and not."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from grammars import NAME, SCHEMAS

from openk3.engine.grammar.spec import Grammar

if TYPE_CHECKING:
    from openk3.llm import LLM


def asked(schema: Any, temperature: float) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Answer in JSON with an example for this schema: {json.dumps(schema)}"}]
    return {
        "messages": messages,
        "grammar": Grammar.json_schema(schema),
        "temperature": temperature,
        "seed": 7,
        "max_tokens": 300,
    }


def check(schema: Any, text: str) -> None:
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))


@pytest.mark.parametrize("temperature", [0, 1])
async def test_every_reply_is_valid(smollm2: LLM, temperature: float) -> None:
    whole = await asyncio.gather(*(smollm2.achat(**asked(schema, temperature)) for schema in SCHEMAS.values()))
    streams = [smollm2.achat_stream(**asked(schema, temperature)) for schema in SCHEMAS.values()]

    async def read(stream: Any) -> str:
        return "".join([piece.text async for piece in stream])

    streamed = await asyncio.gather(*map(read, streams))
    for (name, schema), reply, text in zip(SCHEMAS.items(), whole, streamed, strict=True):
        assert reply.finish_reason == "stop", (name, reply.text)
        check(schema, reply.text)
        assert text == reply.text


def test_regex_choice_and_lark(smollm2: LLM) -> None:
    question = "Is the sky blue? Answer and say how sure you are."
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"temperature": temperature, "max_tokens": 60, "seed": 3}
        reply = smollm2.generate(question, grammar=Grammar.choice(["Yes", "No", "Perhaps 🤔"]), **options)
        assert reply.text in ("Yes", "No", "Perhaps 🤔")
        assert reply.finish_reason == "stop"
        pattern = r"(Yes|No), I am [1-9]\d% sure\."
        reply = smollm2.generate(question, grammar=Grammar.regex(pattern), **options)
        assert re.fullmatch(pattern, reply.text)
        lark = 'start: "Answer: " WORD ("; " WORD){0,2} "."\nWORD: /[A-Za-zé]{1,8}/'
        reply = smollm2.generate(question, grammar=Grammar.lark(lark), **options)
        assert re.fullmatch(r"Answer: [A-Za-zé]{1,8}(; [A-Za-zé]{1,8}){0,2}\.", reply.text)


def test_free_replies_beside_constrained_ones_are_as_alone(smollm2: LLM) -> None:
    free = {"prompt": "The three primary colours are", "temperature": 0.7, "seed": 5, "max_tokens": 20}
    alone = smollm2.generate(**free)  # type: ignore[arg-type]

    async def together() -> Any:
        bound = [smollm2.achat(**asked(SCHEMAS[name], 1)) for name in ("object", "nested", "uuid")]
        return (await asyncio.gather(*bound, smollm2.agenerate(**free)))[-1]  # type: ignore[arg-type]

    assert asyncio.run(together()).token_ids == alone.token_ids


def test_text_that_must_follow_costs_no_choice(smollm2: LLM) -> None:
    """The model's own way to write it, token by token: what `encode` gives."""
    text = '{"temperature_in_celsius": 21}'
    reply = smollm2.generate("Weather:", grammar=Grammar.choice([text]), temperature=1.0, max_tokens=60)
    assert reply.text == text
    assert reply.token_ids == smollm2.tokenizer.encode(text)


TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": NAME, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
    },
    "get_time": {"type": "object", "properties": {"zone": {"type": "string", "pattern": "^UTC[+-][0-9]{1,2}$"}}},
}


def check_call(llm: LLM, temperature: float) -> list[int]:
    """The tokens of a valid call, most of which the model was not asked about."""
    before = llm.stats().steps
    reply = llm.chat(
        [{"role": "user", "content": "How warm is it in Rome, in celsius?"}],
        tools=[{"type": "function", "function": {"name": n, "parameters": TOOLS[n]}} for n in TOOLS],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=temperature,
        seed=5,
        max_tokens=100,
    )
    steps = llm.stats().steps - before
    assert reply.finish_reason == "tool_calls"
    assert reply.text == ""
    (made,) = reply.tool_calls
    check(TOOLS[made.name], made.arguments)
    written = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", llm.tokenizer.decode(reply.token_ids))
    assert written is not None
    call = {"name": made.name, "arguments": made.parsed}
    assert written[1] == json.dumps(call, ensure_ascii=False)  # written as templates write it
    assert steps < len(reply.token_ids) * 2 / 3
    return list(reply.token_ids)


@pytest.mark.parametrize("temperature", [0, 1])
def test_calls_of_tools(smollm2: LLM, temperature: float) -> None:
    check_call(smollm2, temperature)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
def test_calls_of_a_model_with_tokens_for_the_marks(temperature: float) -> None:
    from openk3.llm import load

    with load("qwen2.5-coder-0.5b") as llm:
        tokens = check_call(llm, temperature)
        begin, end = llm.tokenizer.encode("<tool_call></tool_call>")
        assert (tokens[0], tokens[-1]) == (begin, end)
