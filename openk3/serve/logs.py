"""The server's log on stderr: a JSON object per line for machines, or plain lines for a person at a terminal.

A record's own fields (`extra={"fields": {...}}`) are keys of the object; plain lines show the message alone.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["auto", "json", "plain"]


class JsonLines(logging.Formatter):
    """One JSON object per record: ``time`` (ISO, UTC), ``level``, ``message``, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(form: LogFormat = "auto") -> None:
    """Log to stderr, plainly where that is a terminal and `form` is ``auto``."""
    if form == "json" or (form == "auto" and not sys.stderr.isatty()):
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
    else:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("openk3", "uvicorn"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").addFilter(not_a_websocket)


def not_a_websocket(record: logging.LogRecord) -> bool:
    """A log filter: uvicorn notes WebSocket connections with their query strings, which hold the tabs' ids."""
    return "WebSocket" not in record.getMessage() and record.msg not in ("connection open", "connection closed")
