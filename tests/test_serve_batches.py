"""Batches: every line is answered once, whatever happens to the process; and several chats in one request."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, ConflictError, NotFoundError, OpenAI
from serving import MODEL, client, debug_app, debug_llm, live, until

from openk3.serve.batches.lines import read_lines
from openk3.serve.batches.store import BatchStore, LineResult
from openk3.serve.keys.store import KeyStore
from openk3.serve.state.server import open_database

COMPLETIONS = "/v1/completions"
FINAL = ("completed", "failed", "expired", "cancelled")
NO_END = {"255": -100}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with live(debug_app(state_folder=tmp_path_factory.mktemp("state"))) as url:
        yield url


@pytest.fixture
def openai(url: str) -> OpenAI:
    return client(url)


def line(custom_id: object, endpoint: str = COMPLETIONS, **body: Any) -> str:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 2, "seed": 1, "logit_bias": NO_END} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body})


def start(openai: OpenAI, lines: list[str], endpoint: Any = COMPLETIONS, **options: Any) -> Any:
    file = openai.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return openai.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


def ended(openai: OpenAI, batch_id: str) -> Any:
    until(lambda: openai.batches.retrieve(batch_id).status in FINAL)
    return openai.batches.retrieve(batch_id)


def read(openai: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(row) for row in openai.files.content(file_id).text.splitlines()]


def test_a_batch_from_file_to_file(openai: OpenAI) -> None:
    lines = [line(f"n{i}", prompt=f"abc{i}") for i in range(12)]
    made = start(openai, lines, metadata={"job": "nightly"})
    assert made.status == "validating"
    batch = ended(openai, made.id)
    assert (batch.status, batch.error_file_id, batch.metadata) == ("completed", None, {"job": "nightly"})
    assert batch.request_counts.model_dump() == {"total": 12, "completed": 12, "failed": 0}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    rows = read(openai, batch.output_file_id)
    assert [row["custom_id"] for row in rows] == [f"n{i}" for i in range(12)]
    for i, row in enumerate(rows):
        assert row["response"]["status_code"] == 200
        assert row["response"]["request_id"].startswith("req_")
        alone = openai.completions.create(model=MODEL, prompt=f"abc{i}", max_tokens=2, seed=1, logit_bias=NO_END)
        assert row["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
    assert len({row["id"] for row in rows}) == 12
    assert openai.batches.list(limit=1).data[0].id == batch.id
    assert openai.files.retrieve(batch.output_file_id).purpose == "batch_output"


def test_errors_belong_to_their_lines(openai: OpenAI) -> None:
    lines = [
        line("good"),
        "{not json",
        '["a list"]',
        line(7),
        line("good"),  # used before
        line("elsewhere", "/v1/chat/completions"),
        line("stream", stream=True),
        line("hot", temperature=9),
        line("other model", model="gpt"),
        "",
        json.dumps({"custom_id": "extra", "method": "POST", "url": COMPLETIONS, "body": {}, "more": 1}),
        line("good too"),
    ]
    batch = ended(openai, start(openai, lines).id)
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 11, "completed": 2, "failed": 9}
    assert [row["custom_id"] for row in read(openai, batch.output_file_id)] == ["good", "good too"]
    errors = read(openai, batch.error_file_id)
    assert [row["custom_id"] for row in errors] == [
        *(None, None, None, "good", "elsewhere", "stream", "hot", "other model", "extra")
    ]
    said = [row["error"]["message"] if row["error"] else row["response"]["body"]["error"]["message"] for row in errors]
    for message, words in zip(
        said,
        [
            *("Line 2: the line is not valid JSON", "not a JSON object", "'custom_id' is missing", "earlier line"),
            *("'url' is \"/v1/chat/completions\"", "'body.stream'", "'temperature'", '"gpt" does not exist'),
            'unknown field "more"',
        ],
        strict=True,
    ):
        assert words in message
    assert [row["response"]["status_code"] for row in errors if row["response"]] == [400, 404]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endpoint": "/v1/files"}, "'endpoint': \"/v1/files\" is none of"),
        ({"completion_window": "8d"}, "'completion_window'"),
        ({"completion_window": "soon"}, "'completion_window'"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
)
def test_refused_batches(openai: OpenAI, options: dict[str, Any], words: str) -> None:
    file = openai.files.create(file=("in.jsonl", line("a").encode()), purpose="batch")
    given = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"} | options
    with pytest.raises(BadRequestError, match=words):
        openai.batches.create(**given)


def test_files_that_are_no_batch(openai: OpenAI) -> None:
    other = openai.files.create(file=("in.jsonl", b"x"), purpose="vision")
    with pytest.raises(BadRequestError, match='its purpose must be "batch"'):
        openai.batches.create(input_file_id=other.id, endpoint=COMPLETIONS, completion_window="24h")
    with pytest.raises(NotFoundError, match="There is no file"):
        openai.batches.create(input_file_id="file-0", endpoint=COMPLETIONS, completion_window="24h")
    batch = ended(openai, start(openai, [" ", ""]).id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "empty_file")
    with pytest.raises(ConflictError, match="failed and cannot be cancelled"):
        openai.batches.cancel(batch.id)
    with pytest.raises(NotFoundError, match="There is no batch"):
        openai.batches.retrieve("batch_0")


def test_cancel_keeps_what_was_done(openai: OpenAI) -> None:
    made = start(openai, [line(f"n{i}", max_tokens=60) for i in range(200)])
    until(lambda: openai.batches.retrieve(made.id).request_counts.completed >= 3)
    assert openai.batches.cancel(made.id).status == "cancelling"
    batch = ended(openai, made.id)
    assert batch.status == "cancelled"
    done = read(openai, batch.output_file_id)
    assert len(done) == batch.request_counts.completed < 200
    assert openai.batches.cancel(made.id).status == "cancelled"  # again does no harm
    until(lambda: debug_llm().stats().running == 0)


def test_a_batch_expires(tmp_path: Path) -> None:
    with live(debug_app(state_folder=tmp_path)) as url:
        openai = client(url)
        made = start(openai, [line(f"n{i}", max_tokens=100) for i in range(100)])
        until(lambda: openai.batches.retrieve(made.id).request_counts.completed >= 1)
    database = open_database(tmp_path)
    database.change("UPDATE batches SET expires_at = ?", (int(time.time()) - 1,))
    with live(debug_app(state_folder=tmp_path)) as url:
        openai = client(url)
        batch = ended(openai, made.id)
        assert batch.status == "expired"
        done, late = read(openai, batch.output_file_id), read(openai, batch.error_file_id)
        assert len(done) + len(late) == 100
        assert done
        assert {row["error"]["code"] for row in late} == {"batch_expired"}


def test_batches_belong_to_keys_and_count_for_them(tmp_path: Path) -> None:
    keys = KeyStore(open_database(tmp_path))
    made_keys = [keys.create("Ada", requests_per_minute=4), keys.create("Bob")]
    with live(debug_app(state_folder=tmp_path)) as url:
        ada, bob = (OpenAI(base_url=f"{url}/v1", api_key=text, max_retries=0) for _, text in made_keys)
        made = start(ada, [line(f"n{i}") for i in range(5)])
        for call in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(NotFoundError):
                call(made.id)
        assert list(bob.batches.list()) == []
        batch = ended(ada, made.id)
        assert batch.request_counts.completed == 5  # the lines are no requests of the minute
        with pytest.raises(NotFoundError):
            bob.files.content(batch.output_file_id)
        said = httpx.get(f"{url}/v1/usage", headers={"x-api-key": made_keys[0][1]}).json()["data"]
        assert [(row["endpoint"], row["requests"], row["prompt_tokens"]) for row in said] == [(COMPLETIONS, 5, 15)]
        long = start(ada, [line(f"n{i}", max_tokens=100) for i in range(200)])
        keys.revoke(made_keys[0][0].id)
        store = BatchStore(open_database(tmp_path))
        until(lambda: store.require(long.id).status == "cancelled")


def test_people_go_first(openai: OpenAI) -> None:
    """While a batch holds its places, a request of a person is admitted before any line that waits."""
    llm = debug_llm()
    seen: list[int] = []
    submit = llm.loop.submit

    def watched(*arguments: Any, priority: int = 0, **options: Any) -> Any:
        seen.append(priority)
        return submit(*arguments, priority=priority, **options)

    llm.loop.submit = watched  # type: ignore[method-assign]
    try:
        batch = start(openai, [line(f"n{i}", priority=5) for i in range(3)])
        ended(openai, batch.id)
        openai.completions.create(model=MODEL, prompt="a", max_tokens=1, extra_body={"priority": -(2**31)})
    finally:
        llm.loop.submit = submit  # type: ignore[method-assign]
    assert len(seen) == 4
    assert max(seen[:3]) < seen[3] == -(2**31)


def test_a_line_has_one_result(tmp_path: Path) -> None:
    store = BatchStore(open_database(tmp_path))
    batch = store.create(
        owner="", model="m", endpoint="e", input_file_id="f", completion_window="24h", window_s=9, metadata=None
    )
    store.add_result(batch.id, LineResult(3, True, {"first": 1}))
    store.add_result(batch.id, LineResult(3, False, {"second": 2}))
    assert (store.require(batch.id).completed, store.require(batch.id).failed) == (1, 0)
    assert list(store.results(batch.id, succeeded=True)) == ['{"first": 1}']
    for number in (5, 1, 4):
        store.add_result(batch.id, LineResult(number, True, {"n": number}))
    assert [json.loads(row).get("n", 3) for row in store.results(batch.id, succeeded=True, at_a_time=2)] == [1, 3, 4, 5]


def test_lines_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openk3.serve.batches.lines.MAX_LINE_BYTES", 1000)
    path = tmp_path / "in"
    path.write_bytes(b"\xef\xbb\xbf" + line("a").encode() + b"\r\n" + b"x" * 5000 + b"\n\n" + line("b").encode())
    lines = list(read_lines(path, COMPLETIONS))
    assert [(each.number, each.custom_id, each.error is None) for each in lines] == [
        *((0, "a", True), (1, None, False), (2, "b", True))
    ]


# Several chats in one request


def chats(url: str, *bodies: dict[str, Any]) -> httpx.Response:
    requests = [{"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2} | b for b in bodies]
    return httpx.post(f"{url}/v1/chat/completions/batch", json={"requests": requests}, timeout=60)


def test_chats_are_answered_together(url: str) -> None:
    response = chats(url, {"seed": 1}, {"temperature": 9}, {"seed": 1})
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion.batch"
    assert [(item["index"], item["status_code"]) for item in body["data"]] == [(0, 200), (1, 400), (2, 200)]
    first, wrong, third = (item["body"] for item in body["data"])
    assert first["choices"] == third["choices"]
    assert wrong["error"]["param"] == "temperature"
    assert body["usage"]["total_tokens"] == 2 * first["usage"]["total_tokens"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"requests": []}, "requests"),
        ({"requests": [{}] * 129}, "requests"),
        ({"requests": [{}, {"stream": True}]}, "'requests[1].stream'"),
        ({}, "requests"),
    ],
)
def test_refused_chats(url: str, body: dict[str, Any], words: str) -> None:
    response = httpx.post(f"{url}/v1/chat/completions/batch", json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_a_client_that_goes_away_ends_its_chats(url: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{url}/v1/chat/completions/batch",
            json={
                "requests": [{"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "logit_bias": NO_END}]
                * 40
            },
            timeout=0.3,
        )
    until(lambda: debug_llm().stats().running + debug_llm().stats().waiting == 0)


# kill -9

SERVER = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
import serving, uvicorn
app = serving.debug_app(state_folder=Path(sys.argv[1]))
config = uvicorn.Config(app, port=int(sys.argv[2]), log_config=None, access_log=False)
uvicorn.Server(config).run()
"""


def serve(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    from test_serve_run import free_port

    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(folder), str(port)])
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    until(ready, 120)
    return process, url


@pytest.mark.slow
def test_kill_9_in_the_middle_of_everything(tmp_path: Path) -> None:
    """Files, keys, usage and a running batch outlive kills; no line is lost, done twice, or half there."""
    _, text = KeyStore(open_database(tmp_path)).create("Ada", tokens_per_day=10**9)
    lines = [line(f"n{i}", prompt=f"abc{i}", max_tokens=40) for i in range(300)]
    batch_id = file_id = ""
    known_tokens = 0
    for kill in range(5):
        process, url = serve(tmp_path)
        openai = OpenAI(base_url=f"{url}/v1", api_key=text, max_retries=0)
        if not batch_id:
            file_id = openai.files.create(file=("keep.txt", b"keep" * 1000), purpose="user_data").id
            batch_id = start(openai, lines).id
        before = openai.batches.retrieve(batch_id).request_counts.completed
        until(lambda: openai.batches.retrieve(batch_id).request_counts.completed >= min(before + 20, 300))  # noqa: B023
        assert openai.files.content(file_id).read() == b"keep" * 1000
        today = httpx.get(f"{url}/v1/usage", headers={"x-api-key": text}).json()["tokens_today"]
        assert today >= known_tokens  # what was told once is not forgotten
        known_tokens = today
        time.sleep(0.05 * kill)
        process.send_signal(signal.SIGKILL)
        process.wait()
    process, url = serve(tmp_path)
    openai = OpenAI(base_url=f"{url}/v1", api_key=text, max_retries=0)
    batch = ended(openai, batch_id)
    rows = read(openai, batch.output_file_id)
    assert batch.status == "completed"
    assert [row["custom_id"] for row in rows] == [f"n{i}" for i in range(300)]
    assert batch.request_counts.model_dump() == {"total": 300, "completed": 300, "failed": 0}
    assert {path.name for path in (tmp_path / "files").iterdir()} == {file.id for file in openai.files.list()}
    process.terminate()
    process.wait(30)


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    """One of them works the batches off; when it is gone the other goes on."""
    with live(debug_app(state_folder=tmp_path)) as first:
        with live(debug_app(state_folder=tmp_path)) as second:
            assert ended(client(second), start(client(second), [line("a")]).id).request_counts.completed == 1
        made = start(client(first), [line("a")])
        assert ended(client(first), made.id).request_counts.completed == 1
