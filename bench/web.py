"""How the web workspace moves: a conversation of 500 messages, opened, scrolled and streamed into, in Chromium.

    python -m bench.web

Prints, for each step, the frame times that a reader sees (milliseconds between animation frames) and the browser's long
tasks (main thread blocked for 50 ms and more); JSON goes to bench/results/web.json. The model, a tiny random one that
reads 128k tokens and writes faster than anybody reads, runs on the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from playwright.sync_api import Page, sync_playwright

from openk3.config import preset
from openk3.llm import load
from openk3.serve.app import create_app
from openk3.serve.web.records import ReplyStats
from openk3.serve.web.settings import ChatSettings
from openk3.serve.web.store import Store

MESSAGES = 500
ANSWER = """Here is what matters, **point {n}**:

- The first thing is to *read* the input once, and to keep what is needed.
- The second is to say what happened, with `numbers`, not adjectives.

```python
def step(values: list[float], rate: float) -> list[float]:
    return [value * (1 - rate) + {n} for value in values]
```

| name | value |
|---|---|
| first | {n} |
| second | 2 |

That is all there is to it: a paragraph of ordinary length, as models write them, which wraps over some lines on a
screen and over many more on a phone.
"""

WATCH = """() => {
  window.frames_ = []; window.tasks_ = []; let last = performance.now(); window.watching_ = true;
  const step = (now) => {
    if (!window.watching_) return;
    window.frames_.push(now - last);
    last = now;
    requestAnimationFrame(step);
  };
  requestAnimationFrame((now) => { last = now; requestAnimationFrame(step); });
  window.observer_ = new PerformanceObserver((list) => window.tasks_.push(...list.getEntries().map((e) => e.duration)));
  window.observer_.observe({ entryTypes: ["longtask"] });
}"""
STOP = "() => { window.watching_ = false; window.observer_.disconnect(); return [window.frames_, window.tasks_]; }"


def write_model(folder: Path) -> None:
    """The debug preset with random weights, the default model's tokenizer and a long context."""
    import torch

    from openk3.model import K3ForCausalLM

    source = Path(load("smollm2-135m").model_dir)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder / name)
    config = preset("debug")
    config.vocab_size, config.max_position_embeddings, config.eos_token_id = 49152, 131_072, None
    torch.manual_seed(0)
    K3ForCausalLM(config).eval().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def fill(store: Store) -> str:
    """A conversation of `MESSAGES` messages; its id."""
    conversation = store.create("Five hundred messages", ChatSettings(temperature=0.6, seed=1, max_tokens=250))
    for n in range(MESSAGES // 2):
        reply = store.begin_turn(conversation.id, f"Question {n}: what matters here, and why?")
        store.save_reply(
            replace(reply, content=ANSWER.format(n=n), status="complete", stats=ReplyStats(120, 80, 0, 0.1, 50.0))
        )
    return conversation.id


@contextmanager
def served(model: Path, path: Path) -> Iterator[str]:
    with load(model) as llm, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        app = create_app(lambda: llm, model_name="debug", store_path=path, owns_model=False)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(30)


def watched(page: Page, act: Any) -> dict[str, float]:
    """Do something and say how the page moved meanwhile."""
    page.evaluate(WATCH)
    begun = time.perf_counter()
    act()
    seconds = time.perf_counter() - begun
    frames, tasks = page.evaluate(STOP)
    frames.sort()
    return {
        "seconds": round(seconds, 2),
        "frames": len(frames),
        "frame_median_ms": round(statistics.median(frames), 1),
        "frame_p95_ms": round(frames[int(0.95 * (len(frames) - 1))], 1),
        "frame_max_ms": round(frames[-1], 1),
        "long_tasks": len(tasks),
        "longest_task_ms": round(max(tasks, default=0.0), 1),
    }


def scroll_to_top(page: Page) -> None:
    page.mouse.move(600, 400)
    while (
        page.locator(".message").count() < MESSAGES
        or page.evaluate("document.querySelector('.scroller').scrollTop") > 0
    ):
        page.mouse.wheel(0, -2500)
        page.wait_for_timeout(30)


def stream(page: Page) -> None:
    page.evaluate("openk3.pin()")
    page.fill("#composer-text", "Write a long story about a river and the people who live by it.")
    page.press("#composer-text", "Enter")
    page.wait_for_selector(".composer[data-busy]")
    page.wait_for_selector(".composer:not([data-busy])", timeout=120_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/web.json"))
    args = parser.parse_args()
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path, model = Path(folder) / "chat.sqlite3", Path(folder) / "model"
        model.mkdir()
        write_model(model)
        store = Store(path)
        conversation_id = fill(store)
        with served(model, path) as url:
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.goto(url)
            page.wait_for_selector(".model-name:not(:empty)")
            link = f"a[data-conversation='{conversation_id}']"

            def open_it() -> None:
                page.click(link)
                page.wait_for_selector(".message .code")

            figures: dict[str, Any] = {
                "open": watched(page, open_it),
                "scroll_up_through_all": watched(page, lambda: scroll_to_top(page)),
            }
            figures["dom_nodes"] = page.evaluate("document.querySelectorAll('*').length")
            figures["stream_into_500"] = watched(page, lambda: stream(page))
            shown = page.locator(".message").count()
            stats = store.messages(conversation_id)[-1].stats
            assert shown == MESSAGES + 2 and stats is not None
            figures |= {"messages_shown": shown, "tokens_per_second": stats.tokens_per_second, "ttft_s": stats.ttft_s}
            figures |= {"chromium": browser.version, "cores": os.cpu_count(), "machine": platform.machine()}
            browser.close()
        store.close()
    print(json.dumps(figures, indent=2))
    args.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
