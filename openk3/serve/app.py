"""The server: an API in the protocols of OpenAI and Anthropic, and the web workspace, around one model.

`create_app` puts the parts together; `run` serves them until it is told to stop. From the outside in, a request passes
`access` (id, log line, metrics), `limits` and `keys` (who may ask, how much), `validation` and the types of its
protocol (what may be asked), then the protocol's endpoint, which has a chat answered through `running` and
`generation`, and answers whole or through `sse`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from openk3 import __version__
from openk3.agents.mcp_client import McpServers
from openk3.embedder import load_embedder
from openk3.serve import chat, completions, embeddings, errors, openapi, status, tokens
from openk3.serve.access import CLIENT_CLOSED_REQUEST, Access
from openk3.serve.anthropic import messages
from openk3.serve.batches import routes as batches
from openk3.serve.batches.runner import BatchRunner
from openk3.serve.files import routes as files
from openk3.serve.keys import routes as usage
from openk3.serve.keys.check import KeyCheck
from openk3.serve.keys.store import KeyStore
from openk3.serve.limits import BodyLimit, HostCheck, is_loopback
from openk3.serve.loading import ModelSlot
from openk3.serve.logs import LogFormat, set_up_logging
from openk3.serve.mcp_endpoint import McpEndpoint
from openk3.serve.metrics import Metrics
from openk3.serve.queue import MAX_QUEUE, RequestQueue
from openk3.serve.responses import routes as responses
from openk3.serve.state.server import close_state, default_state_folder, open_database, open_state
from openk3.weights.embedders import DEFAULT_EMBEDDER
from openk3.weights.store import cache_root

if TYPE_CHECKING:
    from openk3.agents.tools.tool import Tool
    from openk3.engine.config import EngineConfig
    from openk3.llm import LLM

# A million tokens of text are about 5 MB, escaped JSON in another script three times that.
MAX_BODY_BYTES = 32 << 20
# As in OpenAI's API.
MAX_FILE_BYTES = 512 << 20

log = logging.getLogger("openk3.serve")


def create_app(
    loader: Callable[[], LLM],
    *,
    model_name: str,
    web: bool = True,
    store_path: Path | None = None,
    state_folder: Path | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_file_bytes: int = MAX_FILE_BYTES,
    allowed_hosts: Iterable[str] = (),
    max_queue: int = MAX_QUEUE,
    open_web: bool = True,
    always_keys: bool = False,
    mcp_tools: Mapping[str, Mapping[str, Tool]] | None = None,
    mcp_endpoint: bool = False,
    owns_model: bool = True,
) -> FastAPI:
    """Return the application. Once it is started the model loads in the background; then it is ``app.state.llm``.

    Args:
        loader: returns the model; called once, in a thread of its own.
        model_name: the model id in the API.
        web: serve the web workspace at ``/`` too.
        store_path: SQLite file of the web workspace's conversations; None: in the cache directory.
        state_folder: where files, keys, usage, responses, batches and caches are kept; None: in the cache directory.
        max_body_bytes: a request body of more bytes is refused with 413.
        max_file_bytes: the same for an uploaded file, with its form.
        allowed_hosts: host names, besides the loopback, that requests may be addressed to and web pages may come from;
            ``"*"`` for any.
        max_queue: how many choices may wait for the engine; beyond that requests are refused with 503.
        open_web: the web workspace asks for no key.
        always_keys: the API asks for a key even where none was ever made.
        mcp_tools: tools of MCP servers that requests may switch on, by the servers' names.
        mcp_endpoint: offer built-in tools to MCP clients at ``/mcp``.
        owns_model: close the model at shutdown. False for a model that others use as well.
    """
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        folder = state_folder or default_state_folder()
        open_state(app.state, folder)
        app.state.batch_runner = BatchRunner(app, app.state, folder, model_name)
        slot.start()
        app.state.batch_runner.start()
        async with offered.running() if offered else nullcontext():
            yield
        await app.state.batch_runner.close()
        slot.close()
        close_state(app.state)

    # No generated documentation pages: they load scripts from foreign servers.
    app = FastAPI(title="OpenK3", version=__version__, lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    slot = ModelSlot(app.state, model_name, loader, owns_model=owns_model)
    app.state.slot = slot
    app.state.metrics = metrics
    app.state.queue = RequestQueue(max_queue)
    app.state.embeddings = embeddings.Embeddings(DEFAULT_EMBEDDER, partial(load_embedder, progress=False))
    app.state.mcp_tools = mcp_tools or {}
    metrics.watch(lambda: slot.llm, app.state.queue)

    errors.install(app)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    parts = (
        *(chat.router, completions.router, responses.router, messages.router, tokens.router),
        *(files.router, batches.router, embeddings.router, usage.router, status.router, openapi.router),
    )
    offered = McpEndpoint() if mcp_endpoint else None
    if offered:
        app.router.routes.append(offered.route)
    routes = [route for part in parts for route in part.routes if isinstance(route, APIRoute)]
    app.state.openapi = cache(lambda: openapi.document("OpenK3", __version__, routes))
    app.state.api_routes = routes
    for router in (*parts, status.fallback_router(routes)):
        app.include_router(router)
    if web:
        from openk3.serve.web import mount

        path = store_path or default_store_path()
        mount(app, lambda: slot.llm, path, load_error=lambda: slot.reason or None)

    # Added last, run first.
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes, others={"/v1/files": max_file_bytes})
    app.add_middleware(KeyCheck, state=app.state, open_web=open_web, always=always_keys)
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
    max_queue: int = MAX_QUEUE,
    log_format: LogFormat = "auto",
    mcp_config: Path | None = None,
    mcp_endpoint: bool = False,
    grace_s: float = 30.0,
) -> None:
    """Serve `model` until Ctrl-C or SIGTERM, then take no new requests and let running ones finish for `grace_s`.

    A second Ctrl-C does not wait for them. After the first it returns; after SIGTERM the process ends by that signal.

    Args:
        model: alias, directory, GGUF file or Hugging Face id, as for `openk3.load`.
        host: address to listen on. For others than the loopback ones there has to be an API key, for they make the
            server reachable for everyone who can reach the machine.
        port: TCP port, 0 for any free one.
        model_name: the model id in the API; None: `model`, or its file name if it is a path.
        num_threads: CPU threads; None: as many as the machine has cores.
        engine: the engine's settings; None: the defaults.
        log_format: of the log on stderr; ``auto``: plain lines on a terminal, else JSON lines.
        mcp_config: a file of MCP servers, started with this one, whose tools requests may switch on.
        grace_s: how long running replies may take after the signal, in seconds.

    The rest is as for `create_app`. Raises SystemExit if the port is taken, and ValueError if `host` needs a key.
    """
    set_up_logging(log_format)
    hosts = list(allowed_hosts)
    exposed = not is_loopback(host)
    if exposed:
        require_a_key(host)
    if host in ("0.0.0.0", "::"):
        if not hosts:
            log.warning(
                "listening on all addresses, but answering only to localhost: name the allowed hosts to be reachable"
            )
    elif exposed:
        hosts.append(host)

    def loader() -> LLM:
        from openk3.llm import load

        return load(model, num_threads=num_threads, engine=engine)

    servers = McpServers(mcp_config) if mcp_config else None
    app = create_app(
        loader,
        model_name=model_name or default_model_name(model),
        web=web,
        store_path=store_path,
        max_body_bytes=max_body_bytes,
        allowed_hosts=hosts,
        max_queue=max_queue,
        open_web=not exposed and not hosts,
        always_keys=exposed,
        mcp_tools=servers.by_server if servers else None,
        mcp_endpoint=mcp_endpoint,
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
    with servers or nullcontext(), suppress(KeyboardInterrupt):  # raised again by uvicorn when it has shut down
        uvicorn.Server(config).run()


def require_a_key(host: str) -> None:
    """
    Raises:
        ValueError: no API key was ever made, so that a server on `host` would be open to a whole network.
    """
    database = open_database(default_state_folder())
    try:
        if not KeyStore(database).any():
            raise ValueError(
                f"--host {host} opens the server to others than this machine, and there are no API keys: make one "
                "first with 'k3 keys create NAME'"
            )
    finally:
        database.close()


def default_model_name(model: str) -> str:
    """An alias or Hugging Face id is its own name; a path on this machine is nobody's business but its last part."""
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def default_store_path() -> Path:
    return cache_root() / "conversations.sqlite3"
