"""The one error every reader of checkpoints raises, so that a command line or a server can show it as it is."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be found, fetched or read.

    The message is one sentence that names the file, tensor or option and says what to do about it.
    """


def reason(error: BaseException) -> str:
    """An exception's own words on one line, short enough to stand inside another message."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 200 else words[:199] + "…"
