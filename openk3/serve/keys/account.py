"""What one request takes of the server: its places in the queue, the tokens of its key, its line in the ledger."""

from __future__ import annotations

from openk3.serve.keys.ledger import Ledger, Usage
from openk3.serve.keys.limiter import Limiter
from openk3.serve.keys.store import ApiKey
from openk3.serve.queue import RequestQueue


class Account:
    """What one request costs its key, if it has one.

    Args:
        queue: where the request waits for the engine; None for one that nobody waits for, which counts neither there
            nor towards the limits of the minute.
    """

    def __init__(
        self, key: ApiKey | None, endpoint: str, limiter: Limiter, ledger: Ledger, queue: RequestQueue | None
    ) -> None:
        self._key = key
        self._endpoint = endpoint
        self._limiter = limiter
        self._ledger = ledger
        self._queue = queue
        self._inside = 0
        self.used = Usage(0)

    def enter(self, choices: int, seats: int) -> None:
        """Take places in the queue before an engine that computes `seats` choices at a time, until `leave`.

        Raises:
            ApiError: 503, too many others are waiting.
        """
        if self._queue is not None:
            self._queue.enter(choices, seats)
            self._inside += choices

    def leave(self) -> None:
        """Give the places up. Idempotent."""
        if self._queue is not None and self._inside:
            self._queue.leave(self._inside)
            self._inside = 0

    def begin(self, prompt_tokens: int) -> None:
        """Charge a prompt to the minute's limit as it is handed to the model."""
        self._charge(prompt_tokens)

    def end(self, model: str, usage: Usage) -> None:
        """Charge the reply, and enter all of it in the ledger."""
        self._charge(usage.completion_tokens)
        self._ledger.record("" if self._key is None else self._key.id, self._endpoint, model, usage)
        self.used = self.used + usage

    def _charge(self, tokens: int) -> None:
        bucket = None if self._key is None or self._queue is None else self._limiter.bucket(self._key, "tokens")
        if bucket is not None:
            bucket.level -= tokens
