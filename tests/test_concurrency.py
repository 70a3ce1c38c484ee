"""Fifty clients at once on the real default model, a third of whom leave in the middle.

Whoever stays gets exactly the text of the same request run alone; whoever leaves costs nothing afterwards: no request,
no page, no word in the log. A second crowd meets a tiny model whose cache is far too small for it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai import AsyncOpenAI
from serving import debug_app, debug_llm, idle, live, until

from openk3.serve.app import create_app

if TYPE_CHECKING:
    from openk3.llm import LLM

MODEL = "smollm2-135m"
CLIENTS = 50
CHATS = [
    "Name three colours.",
    "What is the capital of France?",
    "Say hello in Spanish.",
    "Is water wet?",
]
TEXTS = [
    "The quick brown fox",
    "Once upon a time, there was",
    "def add(a, b):\n    return",
    "Roses are red, violets",
]
KINDS = len(CHATS) + len(TEXTS)


def kind_of(client: int) -> tuple[str, dict[str, Any]]:
    """One of `KINDS` requests: endpoint and body. Lengths differ, so that they end at different steps."""
    number = client % KINDS
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 5 + number % 5, "stream": True}
    if number % 2:
        return "chat", body | {"messages": [{"role": "user", "content": CHATS[number // 2]}]}
    return "text", body | {"prompt": TEXTS[number // 2]}


async def stay(api: AsyncOpenAI, client: int) -> str:
    """Read a stream to its end, in small pauses now and then, and return the text."""
    endpoint, body = kind_of(client)
    pieces, reasons = [], []
    if endpoint == "chat":
        async for chunk in await api.chat.completions.create(**body):
            pieces.append(chunk.choices[0].delta.content or "")
            reasons.append(chunk.choices[0].finish_reason)
    else:
        async for chunk in await api.completions.create(**body):
            pieces.append(chunk.choices[0].text)
            reasons.append(chunk.choices[0].finish_reason)
            if client % 5 == 0:
                await asyncio.sleep(0.01)
    assert [reason for reason in reasons if reason] in (["stop"], ["length"])
    assert reasons[-1] is not None
    return "".join(pieces)


async def leave(api: AsyncOpenAI, client: int, dice: random.Random, end_ids: tuple[int, ...]) -> bool:
    """Begin a reply that would go on for long, and go: after some pieces, or at any moment. True if pieces came."""
    endpoint, body = kind_of(client)
    body |= {"max_tokens": 2000, "logit_bias": {str(i): -100 for i in end_ids}}
    create = api.chat.completions.create if endpoint == "chat" else api.completions.create
    if client % 2:
        try:
            async with asyncio.timeout(dice.uniform(0.0, 2.0)):
                async for _ in await create(**body):
                    pass
        except TimeoutError:
            return False
        raise AssertionError("a reply without end has ended")
    pieces = dice.randint(2, 6)
    async with await create(**body) as stream:
        async for _ in stream:
            pieces -= 1
            if pieces == 0:
                break
    return True


async def test_fifty_clients_a_third_of_whom_leave(smollm2: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    dice = random.Random(0)
    before = smollm2.stats()
    app = create_app(lambda: smollm2, model_name=MODEL, web=False, owns_model=False)
    with live(app) as url:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as api:
            leavers = [client for client in range(CLIENTS) if client % 3 == 2]
            tasks = [
                leave(api, client, dice, smollm2.tokenizer.eos_token_ids) if client in leavers else stay(api, client)
                for client in range(CLIENTS)
            ]
            results = await asyncio.gather(*tasks)
            await asyncio.to_thread(until, lambda: idle(smollm2))
            alone = [await stay(api, client) for client in range(KINDS)]
        scrape = (await asyncio.to_thread(httpx.get, f"{url}/metrics")).text

    stayed = [client for client in range(CLIENTS) if client not in leavers]
    assert {client: results[client] for client in stayed} == {client: alone[client % KINDS] for client in stayed}
    assert len(set(alone)) == KINDS

    after = smollm2.stats()
    smollm2.loop.engine.check_integrity()
    assert (after.running, after.waiting) == (0, 0)
    assert after.pages_used == after.pages_pinned == before.pages_pinned
    gone = after.finished["cancelled"] - before.finished.get("cancelled", 0)
    surely = sum(results[client] is True for client in leavers)
    assert 0 < surely <= gone <= len(leavers)
    assert after.finished.get("error", 0) == before.finished.get("error", 0)
    ended = sum(after.finished.values()) - sum(before.finished.values())
    assert ended == len(stayed) + gone + len(alone)
    assert 'openk3_requests{state="running"} 0.0' in scrape

    gc.collect()  # a task whose failure nobody saw would say so now
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_crowd_on_few_pages(caplog: pytest.LogCaptureFixture) -> None:
    """Preempted, recomputed and cut off by turns, the replies are still those of an idle machine."""
    from openk3.engine.config import EngineConfig
    from openk3.llm import load

    dice = random.Random(1)
    bodies: list[dict[str, Any]] = [
        {
            "model": "debug",
            "prompt": [dice.randrange(32, 127) for _ in range(dice.randint(1, 90))],
            "max_tokens": dice.randint(1, 40),
            "temperature": dice.choice([0.0, 1.0]),
            "seed": number,
            "n": dice.choice([1, 1, 2]),
        }
        for number in range(21)
    ]

    async def ask(api: AsyncOpenAI, number: int) -> list[str] | None:
        if number % 3 == 2:
            try:
                async with asyncio.timeout(dice.uniform(0.0, 1.0)):
                    await api.completions.create(**bodies[number])
            except TimeoutError:
                return None
        return [choice.text for choice in (await api.completions.create(**bodies[number])).choices]

    with load(debug_llm().model_dir, engine=EngineConfig(num_pages=20, max_num_seqs=12)) as llm:
        with live(create_app(lambda: llm, model_name="debug", web=False, owns_model=False)) as url:
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as api:
                crowded = await asyncio.gather(*(ask(api, number) for number in range(21)))
                await asyncio.to_thread(until, lambda: idle(llm))
        stats = llm.stats()
        llm.loop.engine.check_integrity()
    assert stats.preemptions > 0
    assert stats.pages_used == 0
    with live(debug_app()) as url:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as api:
            for number, texts in enumerate(crowded):
                if texts is not None:
                    reply = await api.completions.create(**bodies[number])
                    assert texts == [choice.text for choice in reply.choices]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
