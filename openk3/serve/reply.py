"""What every reply of the OpenAI endpoints carries: id, time, model and fingerprint, around choices and usage."""

from __future__ import annotations

import time
import uuid
from typing import Any

from openk3.serve.loading import ModelSlot


class ReplyHead:
    """The head of one reply, the same in all of its chunks. `prefix` begins the id: ``chatcmpl`` or ``cmpl``."""

    def __init__(self, prefix: str, slot: ModelSlot) -> None:
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = slot.name
        self._fingerprint = slot.fingerprint

    def whole(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return self._around(kind, choices) | {"usage": usage}

    def chunk(self, kind: str, choices: list[dict[str, Any]], include_usage: bool) -> dict[str, Any]:
        """One chunk of a stream. Where usage was asked for, all chunks but the last have it as null."""
        return self._around(kind, choices) | ({"usage": None} if include_usage else {})

    def usage_chunk(self, kind: str, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream whose client asked for usage: no choices."""
        return self._around(kind, []) | {"usage": usage}

    def _around(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }
