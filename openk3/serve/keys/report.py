"""What `k3 keys` and `k3 usage` show, as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from openk3.serve.keys.ledger import LedgerRow
from openk3.serve.keys.store import ApiKey


def keys_text(keys: Sequence[ApiKey]) -> str:
    """A table of keys: never a secret."""
    if not keys:
        return "no keys: the server is open to this machine, and to no other"
    rows: list[Sequence[Any]] = [("id", "name", "made", "status", "requests/min", "tokens/min", "tokens/day")]
    for key in keys:
        limits = (key.requests_per_minute, key.tokens_per_minute, key.tokens_per_day)
        shown = ("-" if limit is None else f"{limit:,}" for limit in limits)
        status = "works" if key.revoked_at is None else f"revoked {_day(key.revoked_at)}"
        rows.append((key.id, key.name, _day(key.created_at), status, *shown))
    return _table(rows, left=4)


def usage_text(rows: Sequence[LedgerRow], names: dict[str, str]) -> str:
    """A table of usage with a line of totals.

    Args:
        names: of the keys, by id.
    """
    if not rows:
        return "nothing was used in these days"
    head = ("day", "key", "endpoint", "model", "requests", "prompt", "cached", "completion")
    table: list[Sequence[Any]] = [head]
    totals = [0, 0, 0, 0]
    for row in rows:
        used = row.usage
        counts = (used.requests, used.prompt_tokens, used.cached_tokens, used.completion_tokens)
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        key = names.get(row.owner, row.owner) or "-"
        table.append((row.day, key, row.endpoint, row.model, *(f"{count:,}" for count in counts)))
    table.append(("total", "", "", "", *(f"{total:,}" for total in totals)))
    return _table(table, left=4)


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def _table(rows: Sequence[Sequence[Any]], left: int) -> str:
    """Columns side by side, the first `left` of them flush left, the others right."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            f"{cell!s:<{width}}" if i < left else f"{cell!s:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
