"""A chat on disk: one JSON object with the messages and the model that spoke, written whole or not at all.

It looks like ``{"format": "openk3-chat", "version": 1, "model": "smollm2-135m", "messages": [...]}``.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openk3.chat.messages import Message, validate_messages

_FORMAT, _VERSION = "openk3-chat", 1


@dataclass(frozen=True)
class SavedChat:
    """What `load_chat` read: the messages, and the name of the model that wrote the replies."""

    messages: list[Message]
    model: str


def save_chat(path: str | Path, messages: Sequence[Message], model: str) -> None:
    """Write a chat to `path`; a file that is already there is replaced in one step, and only if it is a saved chat.

    Raises:
        ValueError: `path` holds something else, or there is no message to save.
        OSError: the file cannot be written.
    """
    file = Path(path).expanduser()
    checked = validate_messages(list(messages))
    if file.exists():
        try:
            load_chat(file)
        except ValueError as error:
            raise ValueError(f"{file} is there and is not a saved chat; choose another name ({error})") from None
    saved = {"format": _FORMAT, "version": _VERSION, "model": model, "messages": checked}
    try:
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    except OSError as error:  # in the user's words, not with the name of a file nobody asked for
        raise OSError(error.errno, error.strerror, str(file)) from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            json.dump(saved, handle, ensure_ascii=False, indent=2)
            handle.write("\n")
            handle.flush()
            os.fsync(handle.fileno())
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink()
        raise


def load_chat(path: str | Path) -> SavedChat:
    """Read a chat that `save_chat` wrote and check every message in it.

    Raises:
        ValueError: not such a file, of a newer version, or with a message that is not valid; the text names the file.
        OSError: the file cannot be read.
    """
    file = Path(path).expanduser()
    try:
        saved = json.loads(file.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:  # broken UTF-8 and broken JSON are both ValueErrors
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(saved, dict) or saved.get("format") != _FORMAT:
        raise ValueError(f"{file} is not a chat saved by k3")
    if saved.get("version") != _VERSION:
        raise ValueError(f"{file} has format version {saved.get('version')!r}; this k3 reads version {_VERSION}")
    try:
        return SavedChat(validate_messages(saved.get("messages")), str(saved.get("model", "")))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
