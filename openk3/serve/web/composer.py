"""Where the user writes: the text box, attached files, send or stop, and how full the context is.

The text lives in the browser until it is sent (see assets/chat.js), so typing never waits for the server, and a
message that cannot be sent yet is not lost. Files go to the server at once, where they are checked, and wait here as
chips.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from nicegui import events, ui

from openk3.serve.web.records import Attachment
from openk3.serve.web.uploads import MAX_FILE_BYTES, MAX_FILES, UploadError, read_file
from openk3.serve.web.widgets import Text, box, icon_button, set_attributes
from openk3.serve.web.words import Words

Notify = Callable[[str], None]
CountTokens = Callable[[str], int | None]


class Composer:
    """The form at the bottom. `notify` shows a sentence to the user, `count_tokens` measures a file for the model."""

    def __init__(self, words: Words, notify: Notify, count_tokens: CountTokens) -> None:
        self._words = words
        self._notify = notify
        self._count_tokens = count_tokens
        self._attachments: list[Attachment] = []
        with box("div", "composer-area"):
            with box("div", "composer", data_limit=str(MAX_FILE_BYTES)) as self._box:
                self._chips = box("ul", "chips", aria_label=words.files_to_send, hidden=True)
                area = box("textarea", "composer-text", id="composer-text", rows="1", enterkeyhint="send")
                set_attributes(area, aria_label=words.message, autocomplete="off", placeholder=words.write_a_message)
                with box("div", "composer-bar"):
                    icon_button(words.attach, "attach_file", script="openk3.pickFiles()")
                    picker = box("input", "visually-hidden", type="file", id="composer-file", tabindex="-1")
                    set_attributes(picker, multiple=True, aria_hidden="true")
                    self.tools_place = box("span", "tools-place")
                    self._state = Text("span", "", "composer-state")
                    box("span", "spacer")
                    self._send = icon_button(words.send, "arrow_upward", script="openk3.send()", classes="send")
                    self._stop = icon_button(words.stop, None, script="openk3.stop()", classes="send stop")
            with box("div", "composer-foot"):
                Text("span", words.fineprint, "fineprint")
                self._meter = box(
                    "span", "meter", role="meter", aria_label=words.context_used, aria_valuemin="0", hidden=True
                )
                with self._meter:
                    with box("span", "meter-track", aria_hidden="true"):
                        self._fill = box("span", "meter-fill")
                    self._meter_text = Text("span", "", "meter-text")
        upload = ui.upload(multiple=True, auto_upload=True, max_file_size=MAX_FILE_BYTES, on_upload=self._received)
        upload.classes("hidden-upload")
        set_attributes(upload, aria_hidden="true")
        set_attributes(self._box, data_upload=str(upload.id))
        self._upload = upload
        self.show_state(ready=False, busy=False)

    def show_state(self, *, ready: bool, busy: bool) -> None:
        """`ready`: the model is loaded; `busy`: a reply is being written, so the button stops it instead of sending."""
        set_attributes(self._box, data_busy="true" if busy else None)
        set_attributes(self._send, hidden=True if busy else None, disabled=None if ready else True)
        set_attributes(self._stop, hidden=None if busy else True)
        state = "" if ready else self._words.model_is_loading
        if self._state.text != state:
            self._state.set_text(state)

    def show_context(self, used: int | None, total: int | None) -> None:
        """Fill the meter: `used` of `total` tokens after the last answer; hidden while either is unknown."""
        known = used is not None and total is not None and total > 0
        set_attributes(self._meter, hidden=None if known else True)
        if used is None or total is None or not known:
            return
        share = min(1.0, used / total)
        self._fill.style(f"width: {share:.1%}")
        set_attributes(self._fill, data_level="high" if share > 0.9 else None)
        title = self._words.say("context_share", share=share)
        set_attributes(self._meter, aria_valuemax=str(total), aria_valuenow=str(used), title=title)
        self._meter_text.set_text(self._words.say("context_tokens", used=used, total=total))

    # files

    async def _received(self, event: events.UploadEventArguments) -> None:
        try:
            if len(self._attachments) >= MAX_FILES:
                raise UploadError("too_many_files", limit=MAX_FILES)
            attachment = await asyncio.to_thread(read_file, event.file.name, await event.file.read())
        except UploadError as error:
            self._notify(error.say(self._words))
            return
        finally:
            self._upload.reset()
        tokens = await asyncio.to_thread(self._count_tokens, attachment.text)
        self._attachments.append(Attachment(attachment.name, attachment.text, tokens))
        self._draw_chips()

    def _draw_chips(self) -> None:
        self._chips.clear()
        set_attributes(self._chips, hidden=None if self._attachments else True)
        with self._chips:
            for index, attachment in enumerate(self._attachments):
                with box("li", "chip", data_icon="description"):
                    Text("span", attachment.name, "chip-name")
                    if attachment.tokens is not None:
                        Text("span", self._words.say("tokens", count=attachment.tokens), "chip-size")
                    label = self._words.say("remove", name=attachment.name)
                    icon_button(label, "close", partial(self._remove, index), classes="small")

    def _remove(self, index: int) -> None:
        del self._attachments[index]
        self._draw_chips()

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """The files that go with the next message."""
        return tuple(self._attachments)

    def clear(self) -> None:
        """Forget the files and empty the text box: the message was taken."""
        self._attachments.clear()
        self._draw_chips()
        ui.run_javascript("openk3.clearDraft()")
