"""The web chat in a real browser: what a person does with it, on the real engine with a tiny random model."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from serving import until
from web_browser import ANSWER, BLOCK, BOX, ask, chromium, expect, needs_browser, settle, watched_page
from web_chat import LONG, SHORT, Chat, finished, served_chat

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = needs_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def chat() -> Iterator[Chat]:
    with tempfile.TemporaryDirectory() as directory, served_chat(Path(directory) / "chat.sqlite3") as chat:
        yield chat


@pytest.fixture
def page(browser: Browser, chat: Chat) -> Iterator[Page]:
    with watched_page(browser, chat.url) as page:
        yield page


def test_an_answer_streams_in_and_shows_what_it_cost(page: Page, chat: Chat) -> None:
    page.goto(chat.url)
    expect(page.locator(".model-name")).to_have_text(re.compile("^openk3-endless"))
    ask(page, "Tell me everything\nabout rivers")
    expect(page.locator(".message-user .plain")).to_have_text("Tell me everything\nabout rivers")
    expect(page.locator(BOX)).to_have_value("")
    expect(page.locator(BLOCK)).not_to_be_empty()
    expect(page.locator(".composer")).to_have_attribute(
        "data-busy", re.compile(".")
    )  # text before the answer is complete
    page.click("[aria-label='Stop the answer']")
    settle(page)
    expect(page.locator(".stats")).to_have_text(
        re.compile(r"^[\d.]+ tokens/s · first token [\d.]+ s · \d+ prompt.* · [\d,]+ answer tokens$")
    )
    expect(page.locator(".meter")).to_contain_text("of 8,192 tokens")
    expect(page.locator(".notice")).to_have_text("Stopped.")
    expect(page.locator("h1")).to_have_text("Tell me everything")
    assert re.search(r"/c/[0-9a-f]{32}$", page.url)
    stored = chat.store.messages(page.url[-32:])
    assert [m.status for m in stored] == ["complete", "stopped"] and stored[1].content


def test_escape_stops_and_shift_enter_makes_a_line(page: Page, chat: Chat) -> None:
    conversation = chat.conversation(settings=LONG)
    page.goto(chat.link(conversation))
    page.fill(BOX, "one")
    page.press(BOX, "Shift+Enter")
    page.keyboard.type("two")
    expect(page.locator(BOX)).to_have_value("one\ntwo")
    choosing = "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true, cancelable: true})"
    assert page.evaluate(f"document.querySelector('{BOX}').dispatchEvent({choosing})"), (
        "an input method keeps its Enter"
    )
    page.reload()
    expect(page.locator(BOX)).to_have_value("one\ntwo")
    page.locator(BOX).focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    expect(page.locator(BLOCK)).not_to_be_empty()
    page.keyboard.press("Escape")
    settle(page)
    question, answer = chat.store.messages(conversation.id)
    assert question.content == "one\ntwo" and answer.status == "stopped"


def test_regenerating_adds_a_version_with_a_switch(page: Page, chat: Chat) -> None:
    conversation = chat.conversation("first", "answer one", "second", "answer two")
    page.goto(chat.link(conversation))
    expect(page.locator(".message-assistant")).to_have_count(2)
    page.locator(".message-assistant").last.locator("[aria-label='Regenerate answer']").click()
    expect(page.locator(".message-assistant").last).not_to_contain_text("answer two")
    settle(page)
    messages = chat.store.messages(conversation.id)
    assert [m.role for m in messages] == ["user", "assistant"] * 2
    assert messages[1].content == "answer one" and messages[3].content != "answer two"
    assert messages[3].stats is not None and messages[3].stats.completion_tokens == SHORT.max_tokens
    last = page.locator(".message-assistant").last
    expect(last.locator(".version")).to_have_text("2/2")
    expect(last.get_by_label("Next version")).to_be_disabled()
    last.get_by_label("Previous version").click()
    expect(last.locator(".prose")).to_have_text("answer two")
    expect(last.locator(".version")).to_have_text("1/2")
    page.reload()
    expect(page.locator(ANSWER).last).to_have_text("answer two")


def test_edit_needs_a_save_and_answers_anew(page: Page, chat: Chat) -> None:
    conversation = chat.conversation("first", "answer one", "second", "answer two")
    page.goto(chat.link(conversation))
    page.locator(".message-user").first.hover()
    page.locator("[aria-label='Edit message']").first.click()
    area = page.locator(".editor-text")
    expect(area).to_be_focused()
    area.fill("thrown away")
    page.keyboard.press("Escape")
    expect(page.locator(".message-user .plain").first).to_have_text("first")
    page.locator(".message-user").first.hover()
    page.locator("[aria-label='Edit message']").first.click()
    expect(area).to_have_value("first")
    area.fill("first, better")
    page.get_by_role("button", name="Save and ask again").click()
    expect(page.locator(".message")).to_have_count(2)
    settle(page)
    messages = chat.store.messages(conversation.id)
    assert [m.content for m in messages if m.role == "user"] == ["first, better"]
    assert len(messages) == 2 and messages[1].status == "complete"
    page.locator(".message-user").first.hover()
    page.get_by_label("Previous version").first.click()
    expect(page.locator(".message")).to_have_count(4)
    expect(page.locator(ANSWER).last).to_have_text("answer two")


def pick(page: Page, row: Locator, item: str) -> None:
    """Pick an item of a conversation's menu."""
    row.hover()
    row.get_by_label("More for").click()
    page.get_by_role("menuitem", name=item).click()


def test_rename_and_delete_ask_first(page: Page, chat: Chat) -> None:
    kept, doomed = chat.conversation("kept", "a"), chat.conversation("doomed", "b")
    page.goto(chat.link(doomed))
    row = page.locator(".conversation", has=page.locator(f"[data-conversation='{doomed.id}']"))
    pick(page, row, "Rename")
    expect(page.locator(".q-dialog input")).to_have_value("doomed")
    page.fill(".q-dialog input", "named anew")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator("h1")).to_have_text("named anew")
    expect(row).to_contain_text("named anew")
    pick(page, row, "Delete")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".q-dialog")).to_have_count(0)
    assert chat.store.conversation(doomed.id)
    pick(page, row, "Delete")
    page.locator(".q-dialog .dialog").get_by_role("button", name="Delete").click()
    expect(row).to_have_count(0)
    expect(page.locator(".welcome")).to_be_visible()
    assert chat.store.conversation(doomed.id) is None and chat.store.messages(doomed.id) == []
    assert chat.store.conversation(kept.id)


def test_reload_in_mid_stream_goes_on_and_two_tabs_agree(page: Page, chat: Chat) -> None:
    conversation = chat.conversation("before", "earlier answer", settings=LONG)
    page.goto(chat.link(conversation))
    ask(page, "go on for long")
    expect(page.locator(BLOCK).last).not_to_be_empty()
    page.reload()
    expect(page.locator(".message")).to_have_count(4)
    expect(page.locator(ANSWER).first).to_have_text("earlier answer")
    expect(page.locator(".composer")).to_have_attribute("data-busy", "true")
    length = len(page.locator(ANSWER).last.inner_text())
    until(lambda: len(page.locator(ANSWER).last.inner_text()) > length)

    other = page.context.new_page()
    other.goto(chat.link(conversation))
    expect(other.locator(".composer")).to_have_attribute("data-busy", "true")
    other.fill(BOX, "me too")
    other.press(BOX, "Enter")
    expect(other.locator(".message-user")).to_have_count(2)
    other.click("[aria-label='Stop the answer']")
    settle(page)
    settle(other)
    expect(other.locator(BOX)).to_have_value("me too")
    assert page.locator(ANSWER).last.inner_text() == other.locator(ANSWER).last.inner_text()
    assert [m.status for m in chat.store.messages(conversation.id)] == ["complete"] * 3 + ["stopped"]


def test_dark_and_light_follow_the_system_until_chosen(browser: Browser, chat: Chat) -> None:
    with watched_page(browser, chat.url, color_scheme="dark") as page:
        page.goto(chat.url)
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        page.emulate_media(color_scheme="light")
        expect(page.locator("html")).to_have_attribute("data-theme", "light")
        page.click(".theme")
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        page.reload()
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        expect(page.locator("body")).to_have_class(re.compile("body--dark"))
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(map(int, re.findall(r"\d+", background)[:3])) < 60


def test_files_become_chips_and_part_of_the_prompt(page: Page, chat: Chat, tmp_path: Path) -> None:
    conversation = chat.conversation()
    page.goto(chat.link(conversation))
    good, binary, large = tmp_path / "notes.txt", tmp_path / "photo.txt", tmp_path / "large.csv"
    good.write_text("the river is 63 km long\n", encoding="utf-8")
    binary.write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    large.write_bytes(b"1,2\n" * 4_500_000)
    page.set_input_files("#composer-file", [good])
    expect(page.locator(".composer .chip")).to_contain_text("notes.txt")
    page.set_input_files("#composer-file", [binary])
    expect(page.locator(".toast").first).to_contain_text("“photo.txt”: it is an image; what can be read is")
    page.set_input_files("#composer-file", [large])
    expect(page.locator(".toast").first).to_contain_text("“large.csv” is too large (17.2 MB).")

    drop = """() => {
        const data = new DataTransfer();
        data.items.add(new File(["dropped text"], "dropped.md", {type: "text/markdown"}));
        for (const kind of ["dragenter", "dragover", "drop"])
            document.querySelector(".thread, .welcome").dispatchEvent(
                new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true}));
    }"""
    page.evaluate(drop)
    expect(page.locator(".composer .chip")).to_have_count(2)
    page.evaluate(drop)
    expect(page.locator(".composer .chip")).to_have_count(3)
    page.locator(".composer [aria-label='Remove dropped.md']").last.click()
    expect(page.locator(".composer .chip")).to_have_count(2)
    ask(page, "How long?")
    expect(page.locator(".message-user .chip")).to_have_count(2)
    expect(page.locator(".composer .chip")).to_have_count(0)
    settle(page)
    user, reply = chat.store.messages(conversation.id)
    assert [a.name for a in user.attachments] == ["notes.txt", "dropped.md"]
    assert user.attachments[0].text == "the river is 63 km long\n"
    assert reply.stats is not None and reply.stats.prompt_tokens is not None
    assert reply.stats.prompt_tokens > 20, "the files' words and the question"


def test_markup_from_users_and_models_stays_text(page: Page, chat: Chat) -> None:
    evil = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script></script><b>bold</b> {{7*7}} `${7*7}`'
    answer = (
        f"{evil}\n\n[link](javascript:window.hacked=1) ![pixel](http://192.0.2.1/p.png) [ok](https://example.com)\n\n"
        '```html"onmouseover=window.hacked=1\n<img src=x onerror=window.hacked=1>\n```\n\n'
        '<iframe src="//192.0.2.1"></iframe>'
    )
    conversation = chat.conversation(evil, answer)
    page.goto(chat.link(conversation))
    expect(page.locator(".message-user .plain")).to_have_text(evil)
    expect(page.locator(ANSWER)).to_contain_text("<b>bold</b> {{7*7}}")
    expect(page.locator(ANSWER)).to_contain_text("[link](javascript:window.hacked=1)")
    expect(page.locator("h1")).to_contain_text("<img src=x")
    assert page.locator(f"{ANSWER} :is(img, script, iframe, b)").count() == 0
    assert page.locator(f"{ANSWER} a").evaluate_all("links => links.map(a => a.href)") == ["https://example.com/"]
    ask(page, evil)
    settle(page)
    expect(page.locator(".message-user .plain").last).to_have_text(evil)
    assert page.evaluate("window.hacked") is None


def test_settings_are_checked_and_kept_with_the_conversation(page: Page, chat: Chat) -> None:
    conversation, other = chat.conversation("one", "1"), chat.conversation("two", "2")
    page.goto(chat.link(conversation))
    expect(page.locator("#settings")).not_to_be_visible()
    page.click(".settings-toggle")
    field = page.locator("#setting-temperature")
    field.fill("7")
    field.blur()
    expect(page.locator("#setting-temperature-help")).to_have_text("Temperature: enter a number from 0 to 2.")
    expect(field).to_have_attribute("aria-invalid", "true")
    field.fill("0.25")
    field.blur()
    expect(field).not_to_have_attribute("aria-invalid", "true")
    expect(page.locator("[data-twin=setting-temperature]")).to_have_value("0.25")
    page.fill("#setting-seed", "7")
    page.fill("#setting-system-prompt", "Be brief. 请用中文。")
    page.locator("#setting-system-prompt").blur()
    until(lambda: chat.store.conversation(conversation.id).settings.system_prompt)
    settings = chat.store.conversation(conversation.id).settings
    assert (settings.temperature, settings.seed, settings.system_prompt) == (0.25, 7, "Be brief. 请用中文。")
    page.click(f"[data-conversation='{other.id}']")
    expect(field).to_have_value("0.6")
    page.reload()
    page.click(f"[data-conversation='{conversation.id}']")
    page.click(".settings-toggle")
    expect(page.locator("#setting-system-prompt")).to_have_value("Be brief. 请用中文。")
    page.get_by_role("button", name="Reset to defaults").click()
    expect(field).to_have_value("0.6")
    assert chat.store.conversation(conversation.id).settings.system_prompt == ""


def test_a_prompt_that_is_too_long_is_a_friendly_notice(page: Page, chat: Chat) -> None:
    conversation = chat.conversation()
    page.goto(chat.link(conversation))
    ask(page, "long " * 9000)
    notice = page.locator(".notice[role=alert]")
    expect(notice).to_contain_text(re.compile("8,?192"))
    assert "Traceback" not in notice.inner_text()
    assert chat.store.messages(conversation.id)[-1].status == "failed"
    expect(page.locator("[aria-label='Regenerate answer']")).to_be_visible()


def test_new_chat_by_key_back_button_and_code_copy(browser: Browser, chat: Chat) -> None:
    conversation = chat.conversation("code", "```python\nprint('hi')\n```")
    with watched_page(browser, chat.url, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.goto(chat.link(conversation))
        assert page.locator(".code .nb").inner_text() == "print"
        page.click(".code-copy")
        expect(page.locator(".code-copy")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == "print('hi')\n"
        page.click("[aria-label='Copy answer']")
        page.wait_for_function("navigator.clipboard.readText().then(text => text.startsWith('```python'))")
        page.keyboard.press("Control+Shift+O")
        expect(page.locator(".welcome")).to_be_visible()
        expect(page.locator(BOX)).to_be_focused()
        page.go_back()
        expect(page.locator(".message")).to_have_count(2)
        expect(page.locator("[aria-current=page]")).to_have_text("code")


def test_long_histories_open_at_their_end(page: Page, chat: Chat) -> None:
    texts = [f"message {i}" for i in range(100)]
    conversation = chat.conversation(*texts)
    for i in range(61):
        chat.store.create(f"other {i}", SHORT)
    page.goto(chat.link(conversation))
    expect(page.locator(".message")).to_have_count(40)
    expect(page.locator(".message").last).to_be_in_viewport()
    for count in (60, 80, 100):
        first = page.locator(".message").first.get_attribute("data-message")
        page.evaluate("document.querySelector('.scroller').scrollTop = 0")
        expect(page.locator(".message")).to_have_count(count)
        expect(page.locator(f"[data-message='{first}']")).to_be_in_viewport()
    expect(page.locator(".earlier")).not_to_be_visible()
    watch = """() => {
        window.changed = 0;
        const observer = new MutationObserver((changes) => { window.changed += changes.length; });
        for (const message of document.querySelectorAll(".message"))
            observer.observe(message, {subtree: true, childList: true, characterData: true});
    }"""
    page.evaluate(watch)
    ask(page, "one more")
    settle(page)
    expect(page.locator(".message")).to_have_count(102)
    assert page.evaluate("window.changed") == 0, "an answer draws nothing but itself"
    expect(page.locator(".conversation")).to_have_count(60)
    page.get_by_role("button", name="Show all").click()
    expect(page.locator(".conversation")).to_have_count(len(chat.store.conversations()))


def test_on_a_phone_the_list_is_a_drawer_and_nothing_overflows(browser: Browser, chat: Chat) -> None:
    table = "| " + " | ".join(["a column"] * 12) + " |\n" + "|---" * 12 + "|\n" + "| word " * 12 + "|"
    conversation = chat.conversation("wide " * 30, f"{'long' * 60}\n\n{table}\n\n```\n{'x' * 300}\n```")
    options = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    with watched_page(browser, chat.url, **options) as page:
        page.goto(chat.link(conversation))
        expect(page.locator(".message")).to_have_count(2)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("document.querySelector('.scroller').scrollWidth") <= 390
        expect(page.locator("#sidebar")).not_to_be_visible()
        page.tap("[aria-controls=sidebar]")
        expect(page.locator("#sidebar")).to_be_visible()
        page.get_by_role("button", name="New chat").tap()
        expect(page.locator(".welcome")).to_be_visible()
        expect(page.locator("#sidebar")).not_to_be_visible()


def test_the_usage_page_shows_figures_and_manages_keys(page: Page, chat: Chat) -> None:
    conversation = chat.conversation()
    page.goto(chat.link(conversation))
    ask(page, "count this")
    settle(page)
    page.get_by_role("link", name="Usage").click()
    expect(page.locator("h1")).to_have_text("Usage")
    labels, values = (page.locator(f".tile {tag}").all_inner_texts() for tag in ("dt", "dd"))
    tiles = dict(zip(labels, values, strict=True))
    assert int(tiles["Tokens written"].replace(",", "")) >= SHORT.max_tokens
    assert re.fullmatch(r"[\d.]+ tokens/s", tiles["Median speed of an answer"])
    row = page.get_by_role("row", name=re.compile(r"^\d{4}-\d\d-\d\d . web "))
    assert int(row.locator(".count").last.inner_text().replace(",", "")) >= SHORT.max_tokens
    page.get_by_label("Name", exact=True).fill("laptop <b>")
    page.get_by_role("button", name="Create key").click()
    text = page.locator(".key-text code").inner_text()
    key = chat.app.state.keys.check(text)
    assert key is not None and key.name == "laptop <b>"
    page.get_by_role("row", name="laptop <b>").get_by_role("button", name="Revoke").click()
    page.locator(".q-dialog").get_by_role("button", name="Revoke").click()
    expect(page.get_by_role("row", name="laptop <b>")).to_contain_text("revoked")
    assert chat.app.state.keys.check(text) is None
    page.reload()
    expect(page.locator(".key-text")).to_have_count(0)


def test_chinese_readers_get_chinese_and_can_switch(browser: Browser, chat: Chat) -> None:
    with watched_page(browser, chat.url, locale="zh-CN") as page:
        page.goto(chat.url)
        expect(page.get_by_role("button", name="新对话")).to_be_visible()
        expect(page.locator("html")).to_have_attribute("lang", "zh-CN")
        page.click("#language")
        expect(page.get_by_role("button", name="New chat")).to_be_visible()
        expect(page.locator("html")).to_have_attribute("lang", "en")


def test_search_opens_the_message_on_whatever_branch_it_is(page: Page, chat: Chat) -> None:
    texts = [f"ordinary {i}" for i in range(100)]
    texts[5] = "the capybara swims"
    conversation = chat.conversation(*texts)
    first = chat.store.messages(conversation.id)[0]
    chat.store.save_reply(finished(chat.store.begin_edited(first.id, "other"), "another branch"))
    page.goto(chat.url)
    page.keyboard.press("Control+k")
    page.keyboard.type("CAPYBARA")
    row = page.locator(".conversation-link")
    expect(row).to_have_count(1)
    expect(row.locator(".conversation-snippet")).to_have_text("the capybara swims")
    row.click()
    expect(page.locator(".message", has_text="the capybara swims")).to_be_in_viewport()
    page.locator("#search").fill("no such words")
    expect(page.locator(".empty")).to_have_text("Nothing found for “no such words”.")
    page.locator("#search").press("Escape")
    expect(page.locator(".conversation").nth(1)).to_be_visible()


def test_exports_pins_and_the_keyboard(page: Page, chat: Chat) -> None:
    older, newer = chat.conversation("older one", "yes"), chat.conversation("newer one", "**no**")
    page.goto(chat.link(newer))
    row = page.locator(".conversation", has=page.locator(f"[data-conversation='{older.id}']"))
    pick(page, row, "Pin")
    expect(page.locator(".group").first).to_have_text("Pinned")
    expect(page.locator(".conversation").first).to_contain_text("older one")
    row = page.locator(".conversation", has=page.locator(f"[data-conversation='{newer.id}']"))
    with page.expect_download() as download:
        pick(page, row, "Export as Markdown")
    assert download.value.suggested_filename == "newer one.md"
    assert download.value.path().read_text() == "# newer one\n\n## You\n\nnewer one\n\n## Answer\n\n**no**\n"
    page.locator("h1").click()
    page.keyboard.press("Alt+ArrowUp")
    expect(page.locator("h1")).to_have_text("older one")
    page.keyboard.press("Alt+ArrowDown")
    expect(page.locator("h1")).to_have_text("newer one")
    page.locator("h1").click()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help")).not_to_be_visible()
    page.fill(BOX, "")
    page.focus(BOX)
    page.keyboard.type("why?")
    expect(page.locator(BOX)).to_have_value("why?")
