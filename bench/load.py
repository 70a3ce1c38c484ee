"""Load: many clients at once that stream, call tools, leave early, send nonsense and read slowly, against `k3 serve`.

    python -m bench.load --model smollm2-135m --clients 100 --seconds 300 --json load.json

Prints (and writes) answers by status, latencies, and what the server held before and after: memory, file handles,
pages of the cache. The memory of the cache is committed as its pages are first used, which would hide a leak: the cache
is kept small here (`--kv-cache-mb`), so that all of it is in use early. Anything but 2xx, 4xx and deliberate 503s, or
pages in use when nothing runs, is a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_LOOKS = 20  # at the server's memory and handles, over the whole time
_KINDS = ("whole", "stream", "tools", "leave", "bad", "slow")


async def one_request(client: httpx.AsyncClient, model: str, kind: str, rng: random.Random) -> int:
    """Send one request of that kind; its status, 499 where this client left."""
    text = f"Tell me about {rng.choice(['tides', 'owls', 'rain', 'bread'])} number {rng.randrange(50)}."
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 16}
    url = "/v1/chat/completions"
    if kind == "bad":
        return (await client.post(url, json=body | {"temperature": 99})).status_code
    if kind == "tools":
        body |= {"tools": [_TOOL], "tool_choice": "required", "max_tokens": 40}
    if kind in ("whole", "tools"):
        return (await client.post(url, json=body)).status_code
    async with client.stream("POST", url, json=body | {"stream": True}) as response:
        async for _ in response.aiter_lines():
            if kind == "leave":
                return 499
            if kind == "slow":
                await asyncio.sleep(0.05)
        return response.status_code


async def load(url: str, model: str, clients: int, seconds: float, pid: int) -> dict[str, Any]:
    """Run the clients and return what there was to see; memory is compared with that after a fifth of the time."""
    statuses: Counter[str] = Counter()
    latencies: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def person(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() < end:
                kind = rng.choice(_KINDS)
                begin = time.perf_counter()
                try:
                    status = str(await one_request(client, model, kind, rng))
                except httpx.HTTPError as error:
                    status = type(error).__name__
                statuses[status] += 1
                latencies[kind].append(time.perf_counter() - begin)
                if status == "503":
                    await asyncio.sleep(1)

        people = [asyncio.create_task(person(number)) for number in range(clients)]
        held = []
        for _ in range(_LOOKS):
            await asyncio.sleep(seconds / _LOOKS)
            held.append(_held(pid))
        await asyncio.gather(*people)
    async with httpx.AsyncClient(base_url=url) as client:
        for _ in range(200):
            health = (await client.get("/health")).json()
            if health["running"] == health["waiting"] == 0:
                break
            await asyncio.sleep(0.05)
        used = re.search(r'openk3_kv_pages\{state="used"\} (\S+)', (await client.get("/metrics")).text)
    return {
        "statuses": dict(statuses),
        "median_s": {kind: statistics.median(times) for kind, times in latencies.items() if times},
        "warm": held[_LOOKS // 5],
        "after": _held(pid),
        "rss_kb": [one["rss_kb"] for one in held],
        "idle": health["running"] == health["waiting"] == 0,
        "pages_used_when_idle": float(used[1]) if used else None,
    }


def _held(pid: int) -> dict[str, int]:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    return {"rss_kb": int(found[1]) if found else 0, "handles": len(list(Path(f"/proc/{pid}/fd").iterdir()))}


def run(model: str, clients: int, seconds: float, *options: str) -> dict[str, Any]:
    """Start a server on `model`, load it, and stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = "from openk3.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", "-m", model, "-p", str(port), "--name", "load", "--no-web"]
    with tempfile.TemporaryDirectory() as state:
        environment = os.environ | {"OPENK3_STATE": state}
        server = subprocess.Popen([*command, *options], env=environment, stderr=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(1200):
                try:
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
            return asyncio.run(load(url, "load", clients, seconds, server.pid))
        finally:
            server.terminate()
            server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--kv-cache-mb", type=int, default=256)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = ("--weights", given.weights, "--kv-cache-mb", str(given.kv_cache_mb))
    result = run(given.model, given.clients, given.seconds, *options)
    result |= {"model": given.model, "clients": given.clients, "seconds": given.seconds, "cores": os.cpu_count()}
    text = json.dumps(result, indent=2)
    if given.json:
        given.json.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
