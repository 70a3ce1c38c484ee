"""The page at ``/usage``: what the server has done, how it is doing now, and the keys to its API.

Everything is read from the engine's own statistics, the server's metrics and the stored answers at the moment it is
shown, and again every two seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from nicegui import ui

from openk3.serve.keys.ledger import Ledger
from openk3.serve.keys.store import KeyStore
from openk3.serve.metrics import Metrics
from openk3.serve.web import theme
from openk3.serve.web.keys_panel import DAYS, KeysPanel, ledger_table
from openk3.serve.web.markup import Markup, element
from openk3.serve.web.records import ReplyStats
from openk3.serve.web.store import Store
from openk3.serve.web.widgets import Text, box
from openk3.serve.web.words import Words

if TYPE_CHECKING:
    from openk3.engine.engine import EngineStats
    from openk3.llm import LLM

REFRESH_S = 2.0
RECENT_REPLIES = 50


@dataclass(frozen=True)
class Sources:
    """Where the page reads from.

    `key_id` is that of the reader's own key, which lets a reader see what it has used. Whoever needs no key sits at the
    machine itself and manages them all.
    """

    get_llm: Callable[[], LLM | None]
    metrics: Metrics
    store: Store
    keys: KeyStore
    ledger: Ledger
    key_id: str | None


class UsagePage:
    """One tab of the page."""

    def __init__(self, words: Words, sources: Sources) -> None:
        self._words = words
        self._sources = sources
        theme.apply(words)
        with box("div", "usage"):
            with box("header", "usage-head"):
                Text("h1", words.usage, "welcome-title")
                Text("a", words.back_to_chat, "foot-link", href="/", data_icon="arrow_back")
            Text("p", words.usage_since, "welcome-text")
            self._tiles = ui.html("", tag="section")
            if sources.key_id is None:
                with box("section"):
                    KeysPanel(words, sources.keys, sources.ledger)
            self._tables = [ui.html("", tag="section") for _ in range(2)]
        self._show()
        ui.timer(REFRESH_S, self._show)

    def _show(self) -> None:
        llm = self._sources.get_llm()
        tiles = figures(llm.stats() if llm else None, self._sources.store.recent_stats(RECENT_REPLIES), self._words)
        rows = self._sources.ledger.rows(days=DAYS, owner=self._sources.key_id)
        names = {key.id: key.name for key in self._sources.keys.list()}
        requests = _requests(self._sources.metrics.requests_by_endpoint(), self._words)
        sections = (_tiles(tiles), ledger_table(rows, names, self._words), requests)
        for place, html in zip((self._tiles, *self._tables), sections, strict=True):
            if place.content != html:
                place.set_content(html)


def figures(stats: EngineStats | None, replies: Sequence[ReplyStats], words: Words) -> list[tuple[str, str]]:
    """Label and value of each figure; "–" where there is nothing to be measured yet."""
    nothing = "–"
    first = [reply.ttft_s for reply in replies if reply.ttft_s is not None]
    speeds = [reply.tokens_per_second for reply in replies if reply.tokens_per_second is not None]
    chat = [
        (words.median_first_token, words.seconds.format(f"{median(first):.2f}") if first else nothing),
        (words.median_speed, words.say("speed", speed=median(speeds)) if speeds else nothing),
    ]
    if stats is None:
        return [(words.the_model, words.loading), *chat]
    hits = stats.prefix_hit_tokens / stats.prefix_query_tokens if stats.prefix_query_tokens else None
    return [
        (words.requests, f"{sum(stats.finished.values()):,}"),
        (words.running_now, f"{stats.running:,}"),
        (words.waiting_now, f"{stats.waiting:,}"),
        (words.tokens_read, f"{stats.prompt_tokens:,}"),
        (words.tokens_written, f"{stats.generated_tokens:,}"),
        (words.cache_hits, nothing if hits is None else f"{hits:.0%}"),
        *chat,
        (words.memory_pages, f"{stats.pages_used / stats.pages_total:.0%}" if stats.pages_total else nothing),
    ]


def _tiles(figures: Iterable[tuple[str, str]]) -> Markup:
    tiles = (element("div", element("dt", label), element("dd", value), class_="tile") for label, value in figures)
    return element("dl", *tiles, class_="tiles")


def _requests(counts: Sequence[tuple[str, str, int]], words: Words) -> Markup:
    heading = element("h2", words.http_requests, class_="panel-title")
    if not counts:
        return heading + element("p", words.no_requests, class_="empty")
    head = element("tr", *(element("th", name, scope="col") for name in (words.endpoint, words.status, words.count)))
    rows = (
        element("tr", element("td", endpoint), element("td", status), element("td", f"{count:,}", class_="count"))
        for endpoint, status, count in counts
    )
    table = element("table", element("thead", head), element("tbody", *rows), class_="usage-table")
    return heading + element("div", table, class_="usage-scroll")
