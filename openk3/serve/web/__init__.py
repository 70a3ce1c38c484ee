"""The web chat: a page at ``/`` of the server that talks to the loaded model in the same process.

`mount` is the whole interface. Inside: `store` (SQLite; its `schema` and `records`), `settings`, `prompt`, `export` and
`uploads` know nothing of the page; `replies` writes answers, one `running` each, with the `toolbox`; `render` and
`message_view` make safe HTML; `page` and its parts draw; `words` are what it says; `gate` guards the door.
"""

from __future__ import annotations

from openk3.serve.web.mount import mount
from openk3.serve.web.records import StoreError

__all__ = ["StoreError", "mount"]
