"""API keys at the door: who comes in, how much a key may ask for, what the ledger says, and what a full queue does."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic, AuthenticationError
from openai import AuthenticationError as OpenAIAuthenticationError
from openai import OpenAI, RateLimitError
from serving import MODEL, client, debug_app, debug_llm, live, until
from typer.testing import CliRunner

from openk3.cli import app as cli
from openk3.serve.app import require_a_key
from openk3.serve.errors import ApiError
from openk3.serve.keys.ledger import Ledger, Usage
from openk3.serve.keys.limiter import Limiter
from openk3.serve.keys.store import ApiKey, KeyStore
from openk3.serve.logs import JsonLines
from openk3.serve.queue import RequestQueue
from openk3.serve.state.database import Database
from openk3.serve.state.server import open_database


@pytest.fixture
def keys(tmp_path: Path) -> KeyStore:
    """Of the server whose state is in `tmp_path`."""
    return KeyStore(open_database(tmp_path))


def openai(url: str, key: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def say(client: OpenAI, **options: Any) -> Any:
    return client.completions.create(
        **({"model": MODEL, "prompt": "abcde", "max_tokens": 3, "logit_bias": {"255": -100}} | options)
    )


def test_a_server_without_keys_asks_for_none(tmp_path: Path) -> None:
    with live(debug_app(state_folder=tmp_path)) as url:
        assert say(openai(url, "anything")).usage.completion_tokens == 3
        assert httpx.get(f"{url}/v1/models").status_code == 200


def test_from_the_first_key_on_everybody_needs_one(tmp_path: Path, keys: KeyStore) -> None:
    with live(debug_app(state_folder=tmp_path)) as url:
        assert httpx.get(f"{url}/v1/models").status_code == 200
        key, text = keys.create("Ada")  # beside the running server, as `k3 keys create` does
        for headers in ({}, {"Authorization": f"Bearer {text[:-1]}x"}, {"Authorization": "Bearer"}, {"x-api-key": "é"}):
            raw = {name: value.encode() for name, value in headers.items()}
            response = httpx.get(f"{url}/v1/models", headers=raw)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert text[:-1] not in response.text
        assert httpx.get(f"{url}/metrics").status_code == 401
        assert httpx.get(f"{url}/v1/nowhere").status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        assert say(openai(url, text)).usage.completion_tokens == 3
        assert httpx.get(f"{url}/v1/models", headers={"x-api-key": text}).status_code == 200
        with pytest.raises(OpenAIAuthenticationError, match="Incorrect API key"):
            say(openai(url, "k3-00000000-" + "A" * 43))
        with pytest.raises(AuthenticationError):
            Anthropic(base_url=url, api_key="none", max_retries=0).messages.create(
                model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "Hi"}]
            )
        assert keys.revoke(key.id)
        assert not keys.revoke(key.id)
        with pytest.raises(OpenAIAuthenticationError):  # revoking the last key does not open the server
            say(openai(url, text))


def test_a_key_is_kept_as_a_hash(tmp_path: Path, keys: KeyStore) -> None:
    made, text = keys.create("Ada")
    again, other = keys.create("Ada")
    assert made.id != again.id
    assert keys.check(text) == made
    for wrong in ("", text[:-1], text + "A", other[:12] + text[12:], text.upper()):
        assert keys.check(wrong) is None
    secret = text.rpartition("-")[2].encode()
    assert all(secret not in path.read_bytes() for path in tmp_path.iterdir())


def test_a_server_for_others_needs_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENK3_STATE", str(tmp_path))
    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0 opens .* make one first with 'k3 keys create NAME'"):
        require_a_key("0.0.0.0")
    KeyStore(open_database(tmp_path)).create("Ada")
    require_a_key("0.0.0.0")


def test_the_web_page_asks_for_a_key_where_others_can_reach_it(tmp_path: Path, keys: KeyStore) -> None:
    _, text = keys.create("Ada")
    with live(debug_app(state_folder=tmp_path / "open")) as url:
        assert httpx.get(url).status_code == 404  # no web here, but no key needed either
    with live(debug_app(state_folder=tmp_path, open_web=False, always_keys=True)) as url:
        response = httpx.get(url)
        assert response.status_code == 401
        assert response.headers["www-authenticate"].startswith("Basic ")
        assert httpx.get(url, auth=("anybody", text)).status_code == 404
        assert httpx.get(url, auth=("anybody", "wrong")).status_code == 401
        assert httpx.get(url, headers={"Authorization": "Basic %%%"}).status_code == 401
        # The API takes no password of a browser, which sends it along unasked.
        basic = base64.b64encode(f"a:{text}".encode()).decode()
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": f"Basic {basic}"}).status_code == 401


def test_requests_per_minute(tmp_path: Path, keys: KeyStore) -> None:
    _, text = keys.create("Ada", requests_per_minute=2)
    _, free = keys.create("Bob")
    with live(debug_app(state_folder=tmp_path)) as url:
        for remaining in ("1", "0"):
            headers = openai(url, text).completions.with_raw_response.create(model=MODEL, prompt="a").headers
            assert headers["x-ratelimit-limit-requests"] == "2"
            assert headers["x-ratelimit-remaining-requests"] == remaining
        with pytest.raises(RateLimitError, match="limit of 2 requests per minute is reached") as caught:
            say(openai(url, text))
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30
        assert openai(url, text).models.list().data  # reading costs nothing
        assert say(openai(url, free)).usage.completion_tokens == 3


def test_tokens_per_minute_and_day(tmp_path: Path, keys: KeyStore) -> None:
    _, minute = keys.create("Ada", tokens_per_minute=8)
    _, day = keys.create("Bob", tokens_per_day=8)
    with live(debug_app(state_folder=tmp_path)) as url:
        for text, what in ((minute, "8 tokens per minute"), (day, "8 tokens per day")):
            assert say(openai(url, text)).usage.total_tokens == 8
            with pytest.raises(RateLimitError, match=what):
                say(openai(url, text))
    with live(debug_app(state_folder=tmp_path)) as url, pytest.raises(RateLimitError, match="per day"):
        say(openai(url, day))  # a restart does not forget the day


def test_the_ledger(tmp_path: Path, keys: KeyStore) -> None:
    key, text = keys.create("Ada")
    _, other = keys.create("Bob")
    with live(debug_app(state_folder=tmp_path)) as url:
        say(openai(url, text))
        say(openai(url, text), prompt=["abc", "defg"], n=2)
        for _ in say(openai(url, text), stream=True):
            pass
        chat = openai(url, text).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=2
        )
        with pytest.raises(Exception, match="temperature"):
            say(openai(url, text), temperature=9)
        said = httpx.get(f"{url}/v1/usage", headers={"x-api-key": text}).json()
        assert said["key"]["id"] == key.id
        rows = {row["endpoint"]: row for row in said["data"]}
        completions = rows["/v1/completions"]
        assert (completions["requests"], completions["prompt_tokens"]) == (3, 5 + 7 + 5)
        assert completions["completion_tokens"] == 3 + 4 * 3 + 3
        assert completions["model"] == MODEL
        assert rows["/v1/chat/completions"]["prompt_tokens"] == chat.usage.prompt_tokens
        assert set(rows) == {"/v1/completions", "/v1/chat/completions"}
        assert said["tokens_today"] == sum(row["prompt_tokens"] + row["completion_tokens"] for row in said["data"])
        assert httpx.get(f"{url}/v1/usage", headers={"x-api-key": other}).json()["data"] == []
        assert httpx.get(f"{url}/v1/usage?days=0", headers={"x-api-key": other}).status_code == 400


def test_files_belong_to_the_key_that_made_them(tmp_path: Path, keys: KeyStore) -> None:
    texts = [keys.create(name)[1] for name in ("Ada", "Bob")]
    with live(debug_app(state_folder=tmp_path), wait=False) as url:
        ada, bob = (openai(url, text) for text in texts)
        made = ada.files.create(file=("a.txt", b"x"), purpose="batch")
        assert [file.id for file in ada.files.list()] == [made.id]
        assert list(bob.files.list()) == []
        for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(Exception, match="There is no file"):
                call(made.id)
        assert ada.files.content(made.id).read() == b"x"


def test_keys_and_usage_on_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENK3_STATE", str(tmp_path))

    def k3(*arguments: str) -> str:
        result = CliRunner().invoke(cli, list(arguments))
        assert result.exit_code == 0, result.output
        return result.output

    assert "no keys" in k3("keys", "list")
    text = k3("keys", "create", "Ada", "--tokens-per-day", "1000000").strip()
    made = json.loads(k3("keys", "create", "Bob", "--json"))
    store = KeyStore(open_database(tmp_path))
    ada, bob = store.list()
    assert store.check(text) == ada
    assert store.check(made["key"]) == bob
    assert ada.tokens_per_day == 1_000_000
    k3("keys", "revoke", bob.id)
    table = k3("keys", "list")
    assert "1,000,000" in table
    assert "revoked" in table.splitlines()[2]
    assert text.rpartition("-")[2] not in table
    ledger = Ledger(open_database(tmp_path))
    ledger.record(ada.id, "/v1/completions", "tiny", Usage(2, 1000, 10, 30))
    ledger.record(ada.id, "/v1/completions", "tiny", Usage(1, 1, 0, 1))
    ledger.close()
    assert json.loads(k3("usage", "--json"))["usage"] == [
        {
            "key": ada.id,
            "day": json.loads(k3("usage", "--json"))["usage"][0]["day"],
            "endpoint": "/v1/completions",
            "model": "tiny",
            "requests": 3,
            "prompt_tokens": 1001,
            "cached_tokens": 10,
            "completion_tokens": 31,
        }
    ]
    assert k3("usage").splitlines()[1].split()[1:] == ["Ada", "/v1/completions", "tiny", "3", "1,001", "10", "31"]
    for arguments in (
        ("keys", "revoke", "nobody"),
        ("keys", "create", " "),
        ("keys", "create", "x", "--tokens-per-day", "0"),
    ):
        assert CliRunner().invoke(cli, list(arguments)).exit_code == 2


def test_buckets_fill_with_time() -> None:
    now = [0.0]
    limiter = Limiter(lambda: now[0])
    bucket = limiter.bucket(ApiKey("a", "a", 0, tokens_per_minute=60), "tokens")
    assert bucket is not None
    bucket.level -= 90  # a long reply may overdraw it
    assert bucket.remaining == 0
    assert bucket.seconds_to(1) == 31
    now[0] = 31
    assert bucket.seconds_to(1) == 0
    now[0] = 1e6
    bucket.fill()
    assert bucket.level == 60


def test_the_queue_is_bounded() -> None:
    now = [0.0]
    queue = RequestQueue(2, lambda: now[0])
    queue.enter(5, seats=4)  # one of them waits
    queue.enter(1, seats=4)
    with pytest.raises(ApiError) as caught:
        queue.enter(1, seats=4)
    assert (caught.value.status, caught.value.code, caught.value.headers) == (
        503,
        "server_overloaded",
        {"Retry-After": "5"},  # nothing to reckon from yet
    )
    for _ in range(4):  # one every ten seconds
        now[0] += 10
        queue.leave()
        queue.enter(1, seats=4)
    with pytest.raises(ApiError) as caught:
        queue.enter(1, seats=4)
    assert caught.value.headers == {"Retry-After": "8"}  # 30 s for four ends; one of two waiting should be gone
    assert queue.refused == 2
    RequestQueue(0).enter(4, seats=4)


def test_overload_over_http(tmp_path: Path) -> None:
    """With every seat taken and no queue, the next is told when to come back; once there is room, it is served."""
    llm = debug_llm()
    seats = llm.loop.engine.config.max_num_seqs
    app = debug_app(state_folder=tmp_path, max_queue=0)
    with live(app) as url:
        app.state.queue.enter(seats, seats)
        response = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "a"})
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert "openk3_queue_refused_total 1.0" in httpx.get(f"{url}/metrics").text
        app.state.queue.leave(seats)
        for stream in (False, True):
            assert httpx.post(
                f"{url}/v1/completions", json={"model": MODEL, "prompt": "a", "stream": stream}
            ).is_success
        assert httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "a" * 9999}).status_code == 400
        until(lambda: app.state.queue.inside == 0)


def test_the_log_is_json_without_a_word_of_the_prompt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with live(debug_app(state_folder=tmp_path)) as url:
        say(client(url), prompt="hunter2")
        until(lambda: any("/v1/completions" in record.getMessage() for record in caplog.records))
    lines = [JsonLines().format(record) for record in caplog.records]
    assert "hunter2" not in "".join(lines)
    line = next(line for line in map(json.loads, lines) if line.get("endpoint") == "/v1/completions")
    assert line["request_id"].startswith("req_")
    assert {name: line[name] for name in ("level", "method", "status", "prompt_tokens", "completion_tokens")} == {
        "level": "info",
        "method": "POST",
        "status": 200,
        "prompt_tokens": 7,
        "completion_tokens": 3,
    }


def test_the_ledger_outlives_the_process(tmp_path: Path) -> None:
    """What was read once is on the disk: another connection, as after a kill, sees it."""
    ledger = Ledger(Database(tmp_path / "a"))
    ledger.record("", "/v1/completions", "m", Usage(1, 2, 0, 3))
    assert ledger.tokens_today("") == 5
    assert Ledger(Database(tmp_path / "a")).tokens_today("") == 5
