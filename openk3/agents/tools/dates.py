"""The datetime tool: what time it is somewhere, the time between two moments, and a moment so much later or earlier."""

from __future__ import annotations

import calendar
import difflib
import functools
import zoneinfo
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Any

from openk3.agents.tools.tool import Tool

_UNITS = ("seconds", "minutes", "hours", "days", "weeks", "months", "years")


def run(
    operation: str,
    timezone: str = "UTC",
    start: str | None = None,
    end: str | None = None,
    amount: int | None = None,
    unit: str | None = None,
    **rest: Any,
) -> str:
    """Do one operation; the arguments are described in the tool's schema.

    Raises:
        ValueError: an unknown zone, a date that is none, or an argument that is missing.
    """
    zone = time_zone(timezone)
    if operation == "now":
        return _shown(datetime.now(zone), timezone)
    if start is None:
        raise ValueError(f"start: missing; {operation} needs a date or time such as 2026-12-01 or 2026-12-01T09:30")
    moment, whole_day = moment_of(start, zone, "start")
    if operation == "convert":
        return _shown(moment.astimezone(zone), timezone)
    if operation == "add":
        if amount is None or unit is None:
            raise ValueError("amount and unit: add needs both, such as 30 and days")
        later = add(moment, amount, unit)
        if whole_day and unit in ("days", "weeks", "months", "years"):
            return f"{later.date().isoformat()} ({later:%A})"
        return _shown(later, timezone)
    other, other_whole_day = moment_of(end, zone, "end") if end is not None else (datetime.now(zone), False)
    return difference(moment, other, dates_only=whole_day and other_whole_day)


@functools.cache
def _zones() -> dict[str, str]:
    """Every name a zone may be called by, in lower case, to the zone: its own, and that of its city."""
    names = sorted(zoneinfo.available_timezones())
    cities = {name.rpartition("/")[2].replace("_", " ").lower(): name for name in names if "/" in name}
    return cities | {name.lower(): name for name in names}


def time_zone(name: str) -> tzinfo:
    """Return a zone by its IANA name, the name of its city, or an offset such as +02:00.

    Raises:
        ValueError: there is none; the text names the closest.
    """
    if name.strip().lower() in ("utc", "z", "gmt"):
        return UTC
    if name[:1] in "+-" and (offset := _offset(name)) is not None:
        return offset
    key = name.strip().lower()
    if key not in _zones():
        near = difflib.get_close_matches(key.replace("_", " "), _zones(), n=1, cutoff=0.7)
        hint = f"did you mean {_zones()[near[0]]}?" if near else "give an IANA name such as Europe/Berlin"
        raise ValueError(f"timezone: there is no zone {name!r}; {hint}")
    return zoneinfo.ZoneInfo(_zones()[key])


def _offset(text: str) -> tzinfo | None:
    try:
        return datetime.fromisoformat(f"2000-01-01T00:00{text}").tzinfo
    except ValueError:
        return None


def moment_of(text: str, zone: tzinfo, field: str) -> tuple[datetime, bool]:
    """A moment in ISO 8601, and whether it is a whole day; without an offset of its own it is in `zone`.

    Raises:
        ValueError: it is none; the text begins with `field`.
    """
    text = text.strip()
    try:
        if text.lower() in ("now", "today"):
            now = datetime.now(zone)
            return (now, False) if text.lower() == "now" else (datetime.combine(now.date(), time(), zone), True)
        try:
            return datetime.combine(date.fromisoformat(text), time(), zone), True
        except ValueError:
            moment = datetime.fromisoformat(text)
            return (moment if moment.tzinfo else moment.replace(tzinfo=zone)), False
    except ValueError:
        raise ValueError(
            f"{field}: {text[:60]!r} is no date or time in ISO 8601, such as 2026-12-01 or 2026-12-01T09:30+01:00"
        ) from None


def add(moment: datetime, amount: int, unit: str) -> datetime:
    """The moment so much later. Days and longer keep the time of day; a month's end stays one where days are missing.

    Raises:
        ValueError: beyond the years 1 to 9999.
    """
    try:
        if unit in ("seconds", "minutes", "hours"):  # time that passes, whatever clocks are put to
            return (moment.astimezone(UTC) + timedelta(**{unit: amount})).astimezone(moment.tzinfo)
        if unit in ("days", "weeks"):
            return moment + timedelta(**{unit: amount})
        months = moment.month - 1 + amount * (12 if unit == "years" else 1)
        year, month = moment.year + months // 12, months % 12 + 1
        return moment.replace(year=year, month=month, day=min(moment.day, calendar.monthrange(year, month)[1]))
    except (OverflowError, ValueError, IndexError):
        raise ValueError(f"amount: {amount} {unit} lead beyond the years 1 to 9999") from None


def difference(start: datetime, end: datetime, *, dates_only: bool) -> str:
    """The time from one moment to another, in the units that people would use, and in one."""
    if dates_only:
        days = (end.date() - start.date()).days
        sign = "-" if days < 0 else ""
        parts = _calendar_parts(min(start.date(), end.date()), max(start.date(), end.date()))
        whole = ", ".join(f"{n} {unit if n != 1 else unit[:-1]}" for n, unit in parts if n)
        return f"{days} {'days' if abs(days) != 1 else 'day'}" + (
            f" ({sign}{whole})" if whole and abs(days) > 6 else ""
        )
    seconds = (end.astimezone(UTC) - start.astimezone(UTC)).total_seconds()
    rest = round(abs(seconds))
    said = []
    for name, size in (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1)):
        count, rest = divmod(rest, size)
        if count:
            said.append(f"{count} {name if count != 1 else name[:-1]}")
    return f"{'-' if seconds < 0 else ''}{', '.join(said) or '0 seconds'} ({seconds:.0f} seconds in all)"


def _calendar_parts(start: date, end: date) -> list[tuple[int, str]]:
    months = (end.year - start.year) * 12 + end.month - start.month
    begin = datetime.combine(start, time())
    if add(begin, months, "months").date() > end:
        months -= 1
    return [
        (months // 12, "years"),
        (months % 12, "months"),
        ((end - add(begin, months, "months").date()).days, "days"),
    ]


def _shown(moment: datetime, zone: str) -> str:
    return f"{moment.isoformat(timespec='seconds')} ({moment:%A}, {zone})"


DATETIME = Tool(
    name="datetime",
    description=(
        "Tells the current date and time in a time zone (now), the time between two moments (difference), a moment so "
        "much later or earlier (add), or a moment in another time zone (convert). Use it whenever a question depends "
        "on today's date, a weekday or a span of time."
    ),
    parameters={
        "type": "object",
        "properties": {
            "operation": {"type": "string", "enum": ["now", "difference", "add", "convert"]},
            "timezone": {
                "type": "string",
                "description": "IANA name such as Europe/Berlin; UTC if left out. For convert, the zone to show.",
            },
            "start": {"type": "string", "description": "For difference, add and convert: ISO 8601, or 'today'."},
            "end": {"type": "string", "description": "For difference: ISO 8601, or 'today'; now if left out."},
            "amount": {"type": "integer", "description": "For add: how many units; negative for earlier."},
            "unit": {"type": "string", "enum": list(_UNITS), "description": "For add."},
        },
        "required": ["operation"],
        "additionalProperties": False,
    },
    function=run,
)
