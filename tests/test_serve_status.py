"""Models, health, metrics, request ids, and what the log says and does not say."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import CONTEXT, MODEL, client, debug_app, debug_llm, idle, live, until

from openk3.serve.app import create_app, default_model_name

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(debug_app()) as url:
        yield url


def metrics(url: str) -> dict[str, float]:
    """Samples by name and labels, as they are written."""
    response = httpx.get(f"{url}/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    rows = [line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in rows}


def test_models(url: str) -> None:
    (card,) = client(url).models.list().data
    assert (card.id, card.object, card.owned_by) == (MODEL, "model", "openk3")
    assert card.created > 1_700_000_000
    assert client(url).models.retrieve(MODEL) == card
    assert httpx.get(f"{url}/v1/models/{MODEL}").json()["max_model_len"] == CONTEXT
    response = httpx.get(f"{url}/v1/models/org/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_names_with_slashes() -> None:
    name = "some-org/Model-1.5B"
    with live(create_app(debug_llm, model_name=name, web=False, owns_model=False)) as url:
        assert httpx.get(f"{url}/v1/models/{name}").json()["id"] == name
        assert client(url).models.retrieve(name).id == name
        reply = client(url).completions.create(model=name, prompt="x", max_tokens=1)
        assert reply.model == name


def test_default_names(tmp_path: Path) -> None:
    (tmp_path / "weights-1.5.gguf").touch()
    assert default_model_name("qwen2.5-coder-0.5b") == "qwen2.5-coder-0.5b"
    assert default_model_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert default_model_name(str(tmp_path / "weights-1.5.gguf")) == "weights-1.5"
    assert default_model_name(f"{tmp_path}/") == tmp_path.name


def test_health(url: str) -> None:
    response = httpx.get(f"{url}/health")
    assert (response.status_code, response.json()) == (
        200,
        {"status": "ok", "model": MODEL, "running": 0, "waiting": 0},
    )
    assert httpx.head(f"{url}/health").status_code == 200


def test_request_ids(url: str) -> None:
    first, second = (httpx.get(f"{url}/health").headers["x-request-id"] for _ in range(2))
    assert re.fullmatch(r"req_[0-9a-f]{32}", first)
    assert first != second
    assert httpx.get(f"{url}/nothing", headers={"X-Request-Id": "my-id.7"}).headers["x-request-id"] == "my-id.7"
    for strange in ("with space", "x" * 129, "a,b"):
        answer = httpx.get(f"{url}/health", headers={"X-Request-Id": strange}).headers["x-request-id"]
        assert answer.startswith("req_")
    reply = client(url).chat.completions.create(**CHAT)
    assert reply._request_id is not None and reply._request_id.startswith("req_")


def test_metrics(url: str) -> None:
    before = metrics(url)
    assert before["openk3_model_ready"] == 1
    body = CHAT | {"temperature": 0, "messages": [{"role": "user", "content": "a prompt with some full pages in it"}]}
    bias = {"logit_bias": {"255": -100}}
    for _ in range(2):
        client(url).chat.completions.create(**body | bias)
    list(client(url).chat.completions.create(**body | bias, stream=True, n=2))
    httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"temperature": 9})
    httpx.get(f"{url}/v1/../secret/path")
    httpx.get(f"{url}/v1/responses/resp_1")
    httpx.get(f"{url}/v1/responses/resp_2")
    until(lambda: idle(debug_llm()))
    after = metrics(url)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown('openk3_http_requests_total{endpoint="/v1/chat/completions",status="200"}') == 3
    assert grown('openk3_http_requests_total{endpoint="/v1/chat/completions",status="400"}') == 1
    # By the route, whatever the ids: a label for every id would fill the memory of whoever scrapes.
    assert grown('openk3_http_requests_total{endpoint="/v1/responses/{response_id}",status="404"}') == 2
    assert not any("resp_1" in name for name in after)
    assert grown('openk3_tokens_total{kind="completion"}') == 20
    assert grown('openk3_tokens_total{kind="prompt"}') == 4 * len(debug_llm().tokenizer.encode_chat(body["messages"]))
    assert grown('openk3_requests_finished_total{reason="length"}') == 4
    assert grown("openk3_prefix_cache_query_tokens_total") == grown('openk3_tokens_total{kind="prompt"}')
    assert grown("openk3_prefix_cache_hit_tokens_total") > 0.5 * grown("openk3_prefix_cache_query_tokens_total")
    assert grown("openk3_prefix_cache_evicted_pages_total") == grown("openk3_preemptions_total") == 0
    assert grown("openk3_time_to_first_token_seconds_count") == 4
    assert grown("openk3_time_per_output_token_seconds_count") == 16
    assert after['openk3_requests{state="running"}'] == after['openk3_requests{state="waiting"}'] == 0
    assert after['openk3_kv_pages{state="used"}'] == after["openk3_kv_pages_pinned"] == 0
    assert after['openk3_kv_pages{state="cached"}'] > 0
    total = sum(after[f'openk3_kv_pages{{state="{state}"}}'] for state in ("free", "cached", "used"))
    assert total == debug_llm().stats().pages_total
    # Whatever paths clients try, the labels stay few.
    assert not [name for name in after if "secret" in name]


def test_the_log_has_no_prompt(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "hunter2"
    bodies = [
        CHAT | {"messages": [{"role": "user", "content": secret}], "user": secret},
        CHAT | {"messages": [{"role": secret, "content": secret}]},
        CHAT | {"messages": [{"role": "user", "content": secret * 100}]},
        CHAT | {"stop": [secret, ""]},
    ]
    for body in bodies:
        response = httpx.post(f"{url}/v1/chat/completions?q={secret}", json=body)
        assert response.headers["x-request-id"] in caplog.text
    httpx.get(f"{url}/v1/{secret}?{secret}")
    httpx.post(f"{url}/v1/completions", content=f'{{"prompt": "{secret}'.encode())
    # The clients' loggers are not ours, and uvicorn's access log is switched off, though pytest hears it all the same.
    others = ("httpx", "httpcore", "uvicorn.access")
    ours = [record for record in caplog.records if not record.name.startswith(others)]
    assert "POST /v1/chat/completions 200" in caplog.text
    assert not [record for record in ours if secret in record.getMessage()]
