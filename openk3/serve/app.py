"""The server: an OpenAI-compatible API and the web workspace around one model.

`create_app` puts the parts together; `run` serves them until it is told to stop. From the outside in, a request passes
`access` (id, log line, metrics), `limits` (who may ask, how much), `validation` and `openai_types` (what may be
asked), then `chat` or `completions`, which hand it to the engine through `generation` and answer whole or through
`sse`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from openk3 import __version__
from openk3.serve import chat, completions, errors, openapi, status, tokens
from openk3.serve.access import CLIENT_CLOSED_REQUEST, Access
from openk3.serve.anthropic import messages
from openk3.serve.limits import BodyLimit, HostCheck
from openk3.serve.loading import ModelSlot
from openk3.serve.metrics import Metrics
from openk3.serve.responses import routes as responses
from openk3.serve.responses.store import ResponseStore
from openk3.weights.store import cache_root

if TYPE_CHECKING:
    from openk3.engine.config import EngineConfig
    from openk3.llm import LLM

# A million tokens of text are about 5 MB, escaped JSON in another script three times that.
MAX_BODY_BYTES = 32 << 20

log = logging.getLogger("openk3.serve")


def create_app(
    loader: Callable[[], LLM],
    *,
    model_name: str,
    web: bool = True,
    store_path: Path | None = None,
    responses_path: Path | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    allowed_hosts: Iterable[str] = (),
    owns_model: bool = True,
) -> FastAPI:
    """Return the application. Once it is started the model loads in the background; then it is ``app.state.llm``.

    Args:
        loader: returns the model; called once, in a thread of its own.
        model_name: the model id in the API.
        web: serve the web workspace at ``/`` too.
        store_path: SQLite file of the web workspace's conversations; None: in the cache directory.
        responses_path: SQLite file of stored responses; None: in the cache directory.
        max_body_bytes: a request body of more bytes is refused with 413.
        allowed_hosts: host names, besides the loopback, that requests may be addressed to and web pages may come from;
            ``"*"`` for any.
        owns_model: close the model at shutdown. False for a model that others use as well.
    """
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        slot.start()
        yield
        slot.close()
        app.state.responses.close()

    # No generated documentation pages: they load scripts from foreign servers.
    app = FastAPI(title="OpenK3", version=__version__, lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    slot = ModelSlot(app.state, model_name, loader, owns_model=owns_model)
    app.state.slot = slot
    app.state.metrics = metrics
    app.state.responses = ResponseStore(responses_path or cache_root() / "responses.sqlite3")
    metrics.watch(lambda: slot.llm)

    errors.install(app)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    parts = (
        *(chat.router, completions.router, responses.router, messages.router, tokens.router),
        *(status.router, openapi.router),
    )
    routes = [route for part in parts for route in part.routes if isinstance(route, APIRoute)]
    app.state.openapi = cache(lambda: openapi.document("OpenK3", __version__, routes))
    app.state.api_routes = routes
    for router in (*parts, status.fallback_router(routes)):
        app.include_router(router)
    if web:
        from openk3.serve.web import mount

        path = store_path or default_store_path()
        mount(app, lambda: slot.llm, path, metrics=metrics, load_error=lambda: slot.reason or None)

    # Added last, run first.
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(HostCheck, allowed_hosts=tuple(allowed_hosts))
    app.add_middleware(Access, metrics=metrics, endpoints=frozenset(route.path_format for route in routes))
    return app


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def run(
    model: str = "smollm2-135m",
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    model_name: str | None = None,
    web: bool = True,
    store_path: Path | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    allowed_hosts: Iterable[str] = (),
    num_threads: int | None = None,
    engine: EngineConfig | None = None,
    grace_s: float = 30.0,
) -> None:
    """Serve `model` until Ctrl-C or SIGTERM, then take no new requests and let running ones finish for `grace_s`.

    A second Ctrl-C does not wait for them. After the first it returns; after SIGTERM the process ends by that signal.

    Args:
        model: alias, directory, GGUF file or Hugging Face id, as for `openk3.load`.
        host: address to listen on. Other than the loopback ones it makes the server, which knows no passwords,
            reachable for everyone who can reach the machine.
        port: TCP port, 0 for any free one.
        model_name: the model id in the API; None: `model`, or its file name if it is a path.
        num_threads: CPU threads; None: as many as the machine has cores.
        engine: the engine's settings; None: the defaults.
        grace_s: how long running replies may take after the signal, in seconds.

    The rest is as for `create_app`. Raises SystemExit if the port is taken.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("openk3", "uvicorn"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").addFilter(not_a_websocket)
    hosts = list(allowed_hosts)
    if host in ("0.0.0.0", "::"):
        if not hosts:
            log.warning(
                "listening on all addresses, but answering only to localhost: name the allowed hosts to be reachable"
            )
    else:
        hosts.append(host)

    def loader() -> LLM:
        from openk3.llm import load

        return load(model, num_threads=num_threads, engine=engine)

    app = create_app(
        loader,
        model_name=model_name or default_model_name(model),
        web=web,
        store_path=store_path,
        max_body_bytes=max_body_bytes,
        allowed_hosts=hosts,
    )
    # The access line is ours (access.py): uvicorn's would hold query strings. A server must outwait its clients'
    # pools of idle connections, or they find them closed just as they send: those keep a connection for 5 to 15
    # seconds.
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=math.ceil(grace_s),
    )
    with suppress(KeyboardInterrupt):  # raised again by uvicorn when it has shut down
        uvicorn.Server(config).run()


def not_a_websocket(record: logging.LogRecord) -> bool:
    """A log filter: uvicorn notes WebSocket connections with their query strings, which hold the tabs' ids."""
    return "WebSocket" not in record.getMessage() and record.msg not in ("connection open", "connection closed")


def default_model_name(model: str) -> str:
    """An alias or Hugging Face id is its own name; a path on this machine is nobody's business but its last part."""
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def default_store_path() -> Path:
    return cache_root() / "conversations.sqlite3"
