"""The API keys on the page at ``/usage``: which there are, a new one, the end of an old one, and what each has used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from nicegui import events, ui

from openk3.serve.keys.ledger import Ledger, LedgerRow, Usage
from openk3.serve.keys.store import ApiKey, KeyStore
from openk3.serve.web.markup import Markup, element
from openk3.serve.web.widgets import Text, box, button, icon_button, set_attributes, value_of
from openk3.serve.web.words import Words

DAYS = 30


class KeysPanel:
    """A table of the keys with a form for a new one. A key's text is shown once, for it is not kept."""

    def __init__(self, words: Words, keys: KeyStore, ledger: Ledger) -> None:
        self._words = words
        self._keys = keys
        self._ledger = ledger
        Text("h2", words.keys, "panel-title")
        Text("p", words.keys_help, "welcome-text")
        with box("div", "key-form"):
            name = box("input", "input", type="text", maxlength="100", aria_label=words.key_name)
            set_attributes(name, placeholder=words.key_name)
            create = button(words.create_key, classes="primary")
        for control, kind in ((create, "click"), (name, "keydown.enter")):
            control.on(kind, self._create, js_handler=value_of(name.id))
        self._once = box("div", "key-once", role="status", hidden=True)
        self._table = box("div", "usage-scroll")
        self.show()

    def show(self) -> None:
        """Show the keys as they are now."""
        keys = self._keys.list()
        used = used_by(self._ledger.rows(days=DAYS))
        words = self._words
        self._table.clear()
        with self._table:
            if not keys:
                Text("p", words.no_keys, "empty")
                return
            with box("table", "usage-table"):
                with box("thead"), box("tr"):
                    for label in (words.key_name, words.created, words.limits, words.used_30_days, ""):
                        Text("th", label, scope="col")
                with box("tbody"):
                    for key in keys:
                        self._row(key, used.get(key.id))

    def _row(self, key: ApiKey, used: Usage | None) -> None:
        words = self._words
        with box("tr", "" if key.revoked_at is None else "revoked"):
            Text("td", key.name)
            Text("td", datetime.fromtimestamp(key.created_at, UTC).date().isoformat())
            Text("td", limits_text(key, words))
            Text("td", used_text(used, words))
            with box("td", "count"):
                if key.revoked_at is None:
                    button(words.revoke, lambda: self._ask_revoke(key), classes="quiet")
                else:
                    Text("span", words.revoked)

    def _create(self, event: events.GenericEventArguments) -> None:
        words = self._words
        name = " ".join(str(event.args).split())
        try:
            _, text = self._keys.create(name)
        except ValueError:
            ui.notify(words.key_needs_a_name, position="top", classes="toast")
            return
        self._once.clear()
        set_attributes(self._once, hidden=None)
        with self._once:
            Text("p", words.key_once)
            with box("div", "key-text"):
                code = Text("code", text)
                icon_button(words.copy, "content_copy", script=f"openk3.copy(getElement({code.id}).textContent)")
        self.show()

    async def _ask_revoke(self, key: ApiKey) -> None:
        words = self._words
        with ui.dialog() as dialog, box("div", "dialog", role="document"):
            Text("h2", words.revoke_title, "dialog-title")
            Text("p", words.say("revoke_text", name=key.name), "dialog-text")
            with box("div", "dialog-buttons"):
                button(words.cancel, dialog.close, classes="quiet")
                button(words.revoke, lambda: dialog.submit(True), classes="danger")
        set_attributes(dialog, aria_label=words.revoke_title)
        if await dialog:
            self._keys.revoke(key.id)
            self.show()
        dialog.delete()


def limits_text(key: ApiKey, words: Words) -> str:
    """The limits of a key in one line."""
    limits = (
        ("per_minute_requests", key.requests_per_minute),
        ("per_minute_tokens", key.tokens_per_minute),
        ("per_day_tokens", key.tokens_per_day),
    )
    return " · ".join(words.say(phrase, count=limit) for phrase, limit in limits if limit is not None) or words.no_limit


def used_by(rows: Iterable[LedgerRow]) -> Mapping[str, Usage]:
    """What each owner has used."""
    sums: defaultdict[str, Usage] = defaultdict(lambda: Usage(0))
    for row in rows:
        sums[row.owner] += row.usage
    return sums


def used_text(usage: Usage | None, words: Words) -> str:
    """Requests and tokens in one line; nothing if there are none."""
    if usage is None:
        return "–"
    tokens = usage.prompt_tokens + usage.completion_tokens
    return f"{words.say('requests_count', count=usage.requests)} · {words.say('tokens', count=tokens)}"


def ledger_table(rows: Sequence[LedgerRow], names: Mapping[str, str], words: Words) -> Markup:
    """What was used day by day, the latest first; `names` are those of the keys by id."""
    heading = element("h2", words.ledger, class_="panel-title")
    if not rows:
        return heading + element("p", words.no_requests, class_="empty")
    labels = (
        words.day,
        words.key_name,
        words.endpoint,
        words.model,
        words.count,
        words.tokens_read,
        words.tokens_written,
    )
    head = element("tr", *(element("th", label, scope="col") for label in labels))
    body = (
        element(
            "tr",
            *(
                element("td", cell)
                for cell in (row.day, names.get(row.owner, row.owner) or "–", row.endpoint, row.model)
            ),
            *(
                element("td", f"{count:,}", class_="count")
                for count in (row.usage.requests, row.usage.prompt_tokens, row.usage.completion_tokens)
            ),
        )
        for row in reversed(rows)
    )
    table = element("table", element("thead", head), element("tbody", *body), class_="usage-table")
    return heading + element("div", table, class_="usage-scroll")
