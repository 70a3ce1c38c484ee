"""The web chat: a page at ``/`` of the server that talks to the loaded model in the same process.

`mount` is the whole interface. Inside: `store` (SQLite), `settings`, `prompt` and `uploads` know nothing of the page;
`replies` writes answers; `render` makes safe HTML; `page` and its parts draw; `gate` guards the door.
"""

from __future__ import annotations

from openk3.serve.web.mount import mount
from openk3.serve.web.store import StoreError

__all__ = ["StoreError", "mount"]
