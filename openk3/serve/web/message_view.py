"""One message as the browser gets it: blocks of HTML, and a foot with its actions and, below an answer, what it cost.

A message is rendered to text here and patched into the page by its script (assets/thread.js), block by block: elements
that the server knows one by one would make a long conversation slow, for all of them are drawn again whenever one
changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

from openk3.serve.web.markup import Markup, action, element
from openk3.serve.web.records import OPEN, Attachment, Message, ReplyStats, Said, Thinking, ToolUse, Work
from openk3.serve.web.render import StreamingMarkdown, render_blocks
from openk3.serve.web.toolbox import TOOLS
from openk3.serve.web.words import EN, ZH, Words

LIVE_THINKING = 4_000  # characters of the reasoning that are shown while it grows
BRIEF = 60


@dataclass(frozen=True, slots=True)
class View:
    """What is shown of a message: `kind` is its class, `label` its accessible name."""

    id: int
    kind: str
    label: str
    blocks: tuple[str, ...]
    foot: str
    busy: bool = False


def seconds_text(seconds: float, words: Words) -> str:
    """A span of time as people read it: "0.02 s", "3 s", "2 min 5 s"."""
    if seconds < 1:
        return words.seconds.format(f"{seconds:.2f}" if seconds < 0.1 else f"{seconds:.1f}")
    if seconds < 60:
        return words.seconds.format(f"{seconds:.0f}")
    return words.minutes.format(int(seconds) // 60, int(seconds) % 60)


def stats_text(stats: ReplyStats, words: Words) -> str:
    """The line under an answer: speed, time to first token, and token counts, as far as they are known."""
    parts = []
    if stats.tokens_per_second is not None:
        parts.append(words.say("speed", speed=stats.tokens_per_second))
    if stats.ttft_s is not None:
        parts.append(words.say("first_token", seconds=stats.ttft_s))
    if stats.prompt_tokens is not None:
        cached = words.say("cached", count=stats.cached_tokens) if stats.cached_tokens else ""
        parts.append(words.say("prompt_tokens", count=stats.prompt_tokens) + cached)
    parts.append(words.say("answer_tokens", count=stats.completion_tokens))
    return " · ".join(parts)


def notice_text(message: Message, words: Words) -> str:
    """The sentence under an answer that did not end by itself; empty for one that did, or has not ended."""
    if message.status == "failed":
        return message.error
    if message.status == "stopped":
        return words.stopped
    if message.status == "interrupted":
        return words.interrupted
    if message.status == "complete" and message.stats and message.stats.finish_reason == "length":
        return words.cut
    if message.status == "complete" and not message.content:
        return words.empty_answer
    return ""


def chips(files: tuple[Attachment, ...], words: Words) -> Markup:
    """The files of a message."""
    items = []
    for file in files:
        size = words.say("tokens", count=file.tokens) if file.tokens is not None else ""
        name = element("span", file.name, class_="chip-name")
        items.append(
            element("li", name, element("span", size, class_="chip-size"), class_="chip", data_icon="description")
        )
    return element("ul", *items, class_="chips", aria_label=words.attached_files) if items else Markup("")


def versions(message: Message, words: Words) -> Markup:
    """The switch between a message's versions; nothing if it has only one."""
    ids = message.siblings
    if len(ids) < 2 or message.id not in ids:
        return Markup("")
    place = ids.index(message.id)
    before = ids[place - 1] if place else None
    after = ids[place + 1] if place + 1 < len(ids) else None
    return element(
        "span",
        action(words.previous_version, "chevron_left", "select", data_to=before, disabled=before is None),
        element("span", f"{place + 1}/{len(ids)}", class_="version"),
        action(words.next_version, "chevron_right", "select", data_to=after, disabled=after is None),
        class_="versions",
        role="group",
        aria_label=words.versions,
    )


def user_view(message: Message, words: Words) -> View:
    """A user's message."""
    plain = element("div", message.content, class_="plain")
    bubble = element("div", chips(message.attachments, words), plain, class_="bubble")
    bar = element(
        "div",
        versions(message, words),
        action(words.copy_message, "content_copy", "copy"),
        action(words.edit_message, "edit", "edit"),
        class_="message-bar",
    )
    return View(message.id, "message-user", words.you, (bubble,), bar)


class ReplyRenderer:
    """Renders one answer again and again while it grows; of its Markdown only the last block is parsed anew."""

    def __init__(self) -> None:
        self._markdown = StreamingMarkdown()
        self._parts = 0

    def view(self, message: Message, words: Words) -> View:
        """The answer as far as it has come."""
        streaming = message.status == "streaming"
        blocks = [block for part in message.work for block in part_blocks(part, words.code, streaming)]
        blocks += self._answer(message, streaming)
        if streaming and not message.content and not _shows_life(message):
            dots = (element("span", class_="dot") for _ in range(3))
            blocks.append(
                element("div", element("span", words.reading, class_="visually-hidden"), *dots, class_="waiting")
            )
        foot = "" if streaming else _foot(message, words)
        return View(message.id, "message-assistant", words.answer, tuple(blocks), foot, streaming)

    def _answer(self, message: Message, streaming: bool) -> list[str]:
        if not streaming:
            return [_block(html) for html in render_blocks(message.content)]
        if len(message.work) != self._parts:  # what was written was set aside, and the answer begins anew
            self._parts, self._markdown = len(message.work), StreamingMarkdown()
        return [_block(html) for html in self._markdown.update(message.content)]


def _shows_life(message: Message) -> bool:
    last = message.work[-1] if message.work else None
    return (isinstance(last, Thinking) and last.seconds is None) or (isinstance(last, ToolUse) and last.status in OPEN)


def _block(html: str) -> str:
    return f"<div>{html}</div>"


def _foot(message: Message, words: Words) -> str:
    notice = notice_text(message, words)
    failed = message.status == "failed"
    attributes = {"role": "alert", "data_kind": "error"} if failed else {}
    return element("p", notice, class_="notice", hidden=not notice, **attributes) + element(
        "div",
        versions(message, words),
        action(words.copy_answer, "content_copy", "copy", hidden=not message.content),
        action(words.regenerate, "refresh", "regenerate"),
        element("span", stats_text(message.stats, words) if message.stats else "", class_="stats"),
        class_="message-bar",
    )


@lru_cache(maxsize=512)
def part_blocks(part: Work, language: str, streaming: bool) -> tuple[str, ...]:
    """The blocks of what a reply did before it answered; `streaming` while it is being written."""
    words = ZH if language == ZH.code else EN
    if isinstance(part, Said):
        return tuple(_block(html) for html in render_blocks(part.text))
    if isinstance(part, Thinking):
        return (thinking_block(part, words, streaming and part.seconds is None),)
    return (tool_block(part, words, streaming),)


def thinking_block(part: Thinking, words: Words, live: bool) -> Markup:
    """The model's reasoning, folded."""
    if live:
        label = words.thinking
    elif part.seconds is None:
        label = words.thought
    else:
        label = words.say("thought_for", seconds=seconds_text(part.seconds, words))
    text = "…" + part.text[-LIVE_THINKING:] if live and len(part.text) > LIVE_THINKING else part.text
    return element(
        "details",
        element("summary", element("span", label, class_="thinking-label"), data_icon="psychology"),
        element("div", text, class_="thinking-text"),
        class_="thinking",
        data_live=live,
    )


def tool_block(call: ToolUse, words: Words, streaming: bool) -> Markup:
    """A call as a card: what is called, with which arguments, what came back and how long it took."""
    status = call.status if streaming or call.status not in OPEN else "skipped"
    name = words.say(f"tool_{call.name}") if call.name in TOOLS else call.name
    state = words.say(f"tool_{status}")
    if call.seconds is not None:
        state = (
            f"{state} · {seconds_text(call.seconds, words)}"
            if status == "failed"
            else seconds_text(call.seconds, words)
        )
    summary = element(
        "summary",
        element("span", name, class_="tool-name"),
        element("span", _brief(call.arguments), class_="tool-brief"),
        element("span", state, class_="tool-state"),
        data_icon=TOOLS.get(call.name, "build"),
    )
    body = [element("div", words.arguments, class_="tool-label"), _pre(_pretty(call.arguments))]
    if call.result:
        body += [element("div", words.result, class_="tool-label"), _pre(_pretty(call.result))]
    if status == "asking":
        body.append(_question(call, words))
    return element(
        "details",
        summary,
        element("div", *body, class_="tool-body"),
        class_="tool",
        data_status=status,
        data_call=call.id,
        open=status == "asking",
    )


def _question(call: ToolUse, words: Words) -> Markup:
    def button(label: str, do: str, classes: str) -> Markup:
        return element("button", label, type="button", class_=f"button {classes}", data_do=do, data_to=call.id)

    return element(
        "div",
        element("span", words.allow_question, class_="tool-question"),
        element(
            "span",
            button(words.deny, "deny", "quiet"),
            button(words.allow_always, "always", "quiet"),
            button(words.allow, "allow", "primary"),
            class_="tool-buttons",
        ),
        class_="tool-ask",
        role="group",
        aria_label=words.allow_question,
    )


def _pre(text: str) -> Markup:
    return element("pre", text, tabindex="0")


def _pretty(text: str) -> str:
    """JSON on several lines; other text as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return json.dumps(value, indent=2, ensure_ascii=False) if isinstance(value, dict | list) else text


def _brief(arguments: str) -> str:
    """The arguments in one short line."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return ""
    values = value.values() if isinstance(value, dict) else ()
    line = " ".join(", ".join(v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values).split())
    return line if len(line) <= BRIEF else line[: BRIEF - 1] + "…"
