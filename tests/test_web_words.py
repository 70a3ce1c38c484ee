"""The parts of the web chat that turn words into other words: settings, uploads, prompts, Markdown, and the colours."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.chat.history import check_tool_history
from openk3.chat.messages import validate_messages
from openk3.serve.web.export import as_json, as_markdown, file_name
from openk3.serve.web.message_view import ReplyRenderer, user_view
from openk3.serve.web.prompt import model_messages
from openk3.serve.web.records import Attachment, Conversation, Message, ReplyStats, Said, Thinking, ToolUse
from openk3.serve.web.render import StreamingMarkdown, render_blocks
from openk3.serve.web.settings import FIELDS, SYSTEM_PROMPT_LIMIT, ChatSettings, SettingError
from openk3.serve.web.sidebar import snippet
from openk3.serve.web.theme import ASSETS
from openk3.serve.web.uploads import MAX_FILE_BYTES, UploadError, clean_name, read_file
from openk3.serve.web.words import COOKIE, EN, ZH, Words, words_for

# settings


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("temperature", "2.1", "Temperature: enter a number from 0 to 2."),
        ("temperature", "warm", "Temperature: enter a number."),
        ("temperature", "nan", "Temperature: enter a number from 0 to 2."),
        ("temperature", "", "Temperature: enter a number."),
        ("top_p", "0", "Top p: enter a number from 0.01 to 1."),
        ("top_k", "1.5", "Top k: enter a whole number."),
        ("top_k", "-1", "Top k: enter a number from 0 to 1000."),
        ("max_tokens", "0", "Max tokens: enter a number from 1 to 1048576."),
        ("seed", "x", "Seed: enter a number or leave it empty."),
        ("system_prompt", "x" * (SYSTEM_PROMPT_LIMIT + 1), "System prompt: keep it below 20,000 characters."),
        ("min_p", "0.1", "min_p: there is no such setting."),
    ],
)
def test_settings_out_of_range_say_what_is_allowed(name: str, raw: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        ChatSettings().changed(name, raw)
    assert str(error.value) == message


def test_settings_survive_the_file_and_old_files_survive_them() -> None:
    changed = ChatSettings().changed("seed", "5").changed("top_k", "0").changed("system_prompt", " hi ")
    assert (changed.seed, changed.top_k, changed.system_prompt) == (5, 0, "hi")
    assert ChatSettings.from_json(changed.to_json()) == changed
    assert changed.changed("seed", "").seed is None
    assert ChatSettings.from_json('{"temperature": 99, "top_k": 7, "gone": 1}') == ChatSettings(top_k=7)


def test_the_engine_takes_every_setting_the_page_allows() -> None:
    from openk3.engine.request import SamplingParams

    for field in FIELDS:
        for value in (field.minimum, field.maximum):
            SamplingParams(**ChatSettings().changed(field.name, value).sampling())


# uploads


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "“a.txt” is empty."),
        (b" \n", "“a.txt” is empty."),
        (b"%PDF-1.7 text", "“a.txt”: the PDF cannot be read"),
        (b"PK\x03\x04rest", "“a.txt”: the Word document is damaged"),
        (b"\x89PNG\r\n", "“a.txt”: it is an image; what can be read is"),
        (b"a\0b", "“a.txt”: it is not text"),
        (b"x" * (MAX_FILE_BYTES + 1), "“a.txt” is too large (16.0 MB). The limit is 16.0 MB per file."),
    ],
)
def test_refused_files_say_why(data: bytes, message: str) -> None:
    with pytest.raises(UploadError) as error:
        read_file("/home/me/a.txt", data)
    assert str(error.value).startswith(message)


def test_text_files_are_decoded() -> None:
    assert read_file("n.md", b"\xef\xbb\xbfone\r\ntwo\r\xe4\xb8\xad") == Attachment("n.md", "one\ntwo\n中")


def test_documents_become_text() -> None:
    page = b"<html><head><title>t</title><script>x()</script></head><body><h1>Lease</h1><p>Rent: 900</p></body></html>"
    text = read_file("lease.html", page).text
    assert "# Lease" in text and "Rent: 900" in text and "x()" not in text


def test_names_are_fit_to_show() -> None:
    assert clean_name("C:\\docs\\a\u202egnp.txt\n") == "agnp.txt"
    assert clean_name("../..") == ".."
    assert clean_name("") == "file.txt"
    long = clean_name("x" * 200 + ".csv")
    assert len(long) <= 80 and long.endswith("….csv")


# prompts


def message(role: str, content: str, *files: Attachment, status: str = "complete") -> Message:
    return Message(1, "c", role, content, files, status)  # type: ignore[arg-type]


def test_files_stand_before_the_question_in_a_fence_of_their_own() -> None:
    file = Attachment("a.md", "```\ncode\n````\n")
    (turn,) = model_messages(ChatSettings(), [message("user", "Why?", file)])
    assert turn == {"role": "user", "content": "File `a.md`:\n`````\n```\ncode\n````\n`````\n\nWhy?"}


def test_failed_replies_leave_no_gap_in_the_turns() -> None:
    chat = [
        message("user", "one"),
        message("assistant", "", status="failed"),
        message("user", "two"),
        message("assistant", "half", status="stopped"),
        message("user", "three"),
    ]
    turns = model_messages(ChatSettings(system_prompt="Be kind."), chat)
    assert [(t["role"], t["content"]) for t in turns] == [
        ("system", "Be kind."),
        ("user", "one\n\ntwo"),
        ("assistant", "half"),
        ("user", "three"),
    ]
    assert validate_messages(turns) == turns


# Markdown


def html(text: str) -> str:
    return "".join(render_blocks(text))


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "text <b onclick=x>bold</b>",
        "[a](javascript:alert(1)) [b](data:text/html,x) [c](vbscript:x) [d](file:///etc) [e](/local) <javascript:x>",
        '```html" onload="x\n<script>\n```',
        "![p](http://192.0.2.1/x.png) ![q](data:image/svg+xml,<svg>)",
        '[x](https://e.org/"onmouseover="alert(1))',
        '[x]: https://e.org "t\\"onclick=x"\n\n[x]',
        "| <i>a</i> |\n|---|\n| <script> |",
    ],
)
def test_nothing_in_a_text_becomes_active(text: str) -> None:
    tags = set(re.findall(r"<([a-z0-9]+)", html(text)))
    assert tags <= {
        *("p", "a", "span", "div", "pre", "code", "button", "table", "thead", "tbody", "tr", "th", "td", "br", "h2"),
        *("em", "strong", "ul", "ol", "li", "blockquote", "hr"),
    }
    assert all(href.startswith("https://e.org") for href in re.findall(r'href="([^"]*)"', html(text)))
    attributes = {name for tag in re.findall(r"<[a-z][^>]*>", html(text)) for name in re.findall(r'([\w-]+)="', tag)}
    assert attributes <= {"class", "href", "rel", "type", "aria-label", "tabindex", "style"}


def test_code_is_highlighted_locally() -> None:
    block = html("```python\ndef f(): return '<'\n```")
    assert '<span class="k">def</span>' in block and "&lt;" in block and 'class="code-copy"' in block
    assert "<span>text</span>" in html("```\nplain\n```") and "<span>nonsense</span>" in html("```nonsense\nx\n```")


TEXT = """# Title

A paragraph with **bold**, `code` and [a link](https://example.com).
A second line.

1. one

2. two
   - nested

   more of two

10. ten

```python
def f():

    return 1
```

| a | b |
|---|--:|
| 1 | 2 |

> quoted
> twice

Heading
-------

中文，第一句。
***
last 🙂"""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, len(TEXT)), max_size=60))
def test_any_chunking_renders_like_the_whole(cuts: list[int]) -> None:
    stream = StreamingMarkdown()
    for end in sorted({*cuts, len(TEXT)}):
        blocks = stream.update(TEXT[:end])
    assert blocks == render_blocks(TEXT)


def test_settled_blocks_stay_as_they_are() -> None:
    stream = StreamingMarkdown()
    seen: list[str] = []
    for end in range(len(TEXT) + 1):
        blocks = stream.update(TEXT[:end])
        assert len(blocks) >= len(seen) - 1
        seen = blocks
    assert seen == render_blocks(TEXT)


def test_windows_line_ends_stream_too() -> None:
    text = TEXT.replace("\n", "\r\n")
    stream = StreamingMarkdown()
    for end in range(0, len(text) + 1, 7):
        stream.update(text[:end])
    assert stream.update(text) == render_blocks(TEXT)


# colours


def luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio as WCAG 2 defines it."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_enough_contrast(theme: str) -> None:
    css = (ASSETS / "chat.css").read_text(encoding="utf-8")
    blocks = re.findall(r"^:root[^{]*\{(.*?)^\}", css, re.M | re.S)[:2]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", blocks[0]))
    if theme == "dark":
        colours |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", blocks[1]))
    pairs = [("text", bg) for bg in ("bg", "bg-side", "bg-raised", "bg-bubble", "bg-selected", "bg-code")]
    pairs += [("text-soft", bg) for bg in ("bg", "bg-side", "bg-raised", "bg-code")]
    pairs += [("accent", "bg"), ("on-accent", "accent"), ("on-accent", "accent-hover"), ("danger", "bg-danger")]
    pairs += [("danger", "bg-side"), ("bg", "danger"), ("bg", "text")]
    pairs += [(f"code-{kind}", "bg-code") for kind in ("keyword", "string", "number", "name", "comment")]
    for text, background in pairs:
        ratio = contrast(colours[text], colours[background])
        assert ratio >= 4.5, f"{theme}: {text} on {background} has a contrast of {ratio:.2f}"
    assert contrast(colours["line-strong"], colours["bg-raised"]) >= 3, "borders of inputs must be seen"


# calls in prompts


def test_calls_are_told_with_their_results_round_by_round() -> None:
    reply = Message(
        2,
        "c",
        "assistant",
        "It is 5.",
        work=(
            Thinking("hm", 1.0),
            Said("I compute."),
            ToolUse("a", "calculator", '{"expression": "2+3"}', 0, "done", "5"),
            ToolUse("b", "datetime", "{}", 0, "denied", "no"),
            ToolUse("c", "calculator", '{"expression": "5"}', 1, "skipped"),
            ToolUse("d", "calculator", '{"expr', 1, "skipped"),
        ),
    )
    turns = model_messages(ChatSettings(), [message("user", "2+3?"), reply])
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert turns[1]["content"] == "I compute." and turns[1]["reasoning_content"] == "hm"
    assert [call["id"] for call in turns[1]["tool_calls"]] == ["a", "b"]
    assert [turn["content"] for turn in turns if turn["role"] == "tool"] == ["5", "no", "This call was not run."]
    assert [call["id"] for call in turns[4]["tool_calls"]] == ["c"], "a call that was cut cannot be told"
    assert turns[-1] == {"role": "assistant", "content": "It is 5."}
    validate_messages(turns)
    check_tool_history(turns)


def test_long_files_are_named_where_they_can_be_searched() -> None:
    long, short = Attachment("long.md", "word " * 5000), Attachment("short.md", "brief")
    question = message("user", "Why?", long, short)
    (turn,) = model_messages(ChatSettings(tools=("search_documents",)), [question])
    assert "brief" in turn["content"] and "word word" not in turn["content"]
    assert "File `long.md`: 25000 characters. Look things up in it with search_documents." in turn["content"]
    (turn,) = model_messages(ChatSettings(), [question])
    assert "word word" in turn["content"]


# words


def test_both_languages_have_the_same_values_in_each_phrase() -> None:
    for field in fields(Words):
        english, chinese = (sorted(re.findall(r"{(\w*)", getattr(words, field.name))) for words in (EN, ZH))
        assert english == chinese, field.name


@pytest.mark.parametrize(
    ("accepted", "cookie", "code"),
    [
        ("", None, "en"),
        ("zh-TW,zh;q=0.9,en;q=0.8", None, "zh-CN"),
        ("de-DE,de;q=0.9,en;q=0.5,zh;q=0.7", None, "zh-CN"),
        ("fr;q=x,en;q=0.5", None, "en"),
        ("fr", None, "en"),
        ("zh", "en", "en"),
        ("en", "zh", "zh-CN"),
        ("zh", "xx", "en"),
    ],
)
def test_the_language_is_the_chosen_one_or_the_browsers(accepted: str, cookie: str | None, code: str) -> None:
    cookies = {COOKIE: cookie} if cookie else {}
    assert words_for({"accept-language": accepted}, cookies).code == code


def test_errors_speak_the_readers_language() -> None:
    with pytest.raises(SettingError) as error:
        ChatSettings().changed("temperature", "3")
    assert error.value.say(ZH) == "温度：请输入 0 到 2 之间的数字。"


# exports and search results


def test_exports_hold_everything() -> None:
    conversation = Conversation("c", "A/B: *test*?", ChatSettings(seed=1), 0.0, 1.0, head_id=2)
    question = Message(1, "c", "user", "Why?", (Attachment("a.txt", "text"),))
    work = (Thinking("hm\nhm"), ToolUse("a", "calculator", "{}", 0, "done", "5"))
    answer = Message(2, "c", "assistant", "So.", parent_id=1, work=work, stats=ReplyStats(3))
    text = as_markdown(conversation, [question, answer], EN)
    assert text.startswith("# A/B: *test*?\n\n## You\n\nFile `a.txt`:\n```\ntext\n```\n\nWhy?\n\n## Answer\n\n")
    assert "> **Thought**\n>\n> hm\n> hm\n\n> **calculator** `{}`\n>\n> 5\n\nSo.\n" in text
    data = json.loads(as_json(conversation, [question, answer]))
    assert data["settings"]["seed"] == 1 and data["head_id"] == 2
    assert [(m["id"], m["parent_id"], m["content"]) for m in data["messages"]] == [(1, None, "Why?"), (2, 1, "So.")]
    assert data["messages"][0]["attachments"][0]["text"] == "text"
    assert data["messages"][1]["work"][1] | {"seconds": None} == {
        "kind": "tool", "id": "a", "name": "calculator", "arguments": "{}", "round": 0, "status": "done",
        "result": "5", "seconds": None,
    }  # fmt: skip
    assert file_name(conversation, "md") == "AB test.md"
    assert file_name(replace(conversation, title="???"), "json") == "conversation.json"


def test_snippets_show_the_place_that_was_found() -> None:
    text = "start " * 30 + "the Needle is\nhere " + "end " * 50
    assert "the Needle is here" in snippet(text, "needle")
    assert snippet(text, "needle").startswith("…") and snippet("short", "x") == "short"


def test_nothing_in_a_message_becomes_markup() -> None:
    evil = '"><img src=x onerror=alert(1)>'
    call = ToolUse(evil, evil, json.dumps({"a": evil}), 0, "asking", evil)
    message = Message(1, "c", "assistant", evil, work=(Thinking(evil), Said(evil), call), status="streaming")
    view = ReplyRenderer().view(message, EN)
    html = "".join(view.blocks) + view.foot + "".join(user_view(replace(message, role="user"), EN).blocks)
    assert "<img" not in html and html.count("&lt;img") >= 6
