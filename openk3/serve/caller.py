"""Who a request comes from, known to everything that the request runs through.

The key check sets it at the door (`keys.check`); below, it is found in a context variable, which follows a request into
its tasks and threads, so that nothing in between has to hand it on.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openk3.serve.keys.account import Account
    from openk3.serve.keys.store import ApiKey


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever asks.

    Attributes:
        key: the API key that was shown; None on a server without keys.
        account: where the tokens that the request uses are charged; None outside of a server.
        in_background: nobody waits for the answer, as for the lines of a batch.
    """

    key: ApiKey | None = None
    account: Account | None = None
    in_background: bool = False

    @property
    def owner(self) -> str:
        """What the caller's files, batches and caches are kept under."""
        return "" if self.key is None else self.key.id


_NOBODY = Caller()
_caller: ContextVar[Caller] = ContextVar("openk3_caller", default=_NOBODY)


def caller() -> Caller:
    """Return the caller of the request under way."""
    return _caller.get()


def set_caller(who: Caller) -> None:
    _caller.set(who)
