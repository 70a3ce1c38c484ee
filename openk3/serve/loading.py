"""The server's one model: on its way, there, or failed.

Loading takes from a second to minutes (a first start downloads the weights), so the server starts at once and the model
loads in a thread of its own; until then ``/health`` says ``loading`` and the endpoints answer 503. The thread is a
daemon: Ctrl-C during a download ends the program and does not wait for the network.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal, TypeAlias

from starlette.datastructures import State

from openk3 import __version__
from openk3.serve.errors import ApiError, shown

if TYPE_CHECKING:
    from openk3.llm import LLM

log = logging.getLogger("openk3.serve")

Status: TypeAlias = Literal["loading", "ready", "failed", "closed"]


class ModelSlot:
    """Where the served model lives.

    Attributes:
        name: the model id that clients see and send.
        llm: the model, once it is there. It lives in the application's ``state.llm``, for other parts to see.
        created: when the model was ready, in seconds since the epoch; 0 before.
        fingerprint: changes when anything changes that a seed's result may depend on; empty before the model is ready.
    """

    def __init__(self, state: State, name: str, loader: Callable[[], LLM], *, owns_model: bool) -> None:
        self._state = state
        self._state.llm = None
        self.name = name
        self.created = 0
        self.fingerprint = ""
        self._phase: Status = "loading"
        self._failure = ""
        self._loader = loader
        self._owns_model = owns_model
        self._lock = threading.Lock()

    @property
    def llm(self) -> LLM | None:
        llm: LLM | None = self._state.llm
        return llm

    @property
    def status(self) -> Status:
        """``ready`` when requests can be served."""
        llm = self.llm
        return "failed" if llm is not None and llm.loop.closed else self._phase

    @property
    def reason(self) -> str:
        """Why the status is ``failed``, in one sentence; else empty."""
        if self._failure or self.status != "failed":
            return self._failure
        return "the engine has stopped; the server's log says why, and a restart is needed"

    def start(self) -> None:
        """Begin to load, in the background."""
        self._phase, self._failure = "loading", ""
        threading.Thread(target=self._load, name="openk3-load", daemon=True).start()

    def close(self) -> None:
        """Give the model back; one that is still loading is given back as soon as it is there."""
        with self._lock:
            llm, self._state.llm, self._phase = self.llm, None, "closed"
        if llm is not None and self._owns_model:
            llm.close()

    def require(self, model: str | None = None) -> LLM:
        """Return the model, which clients asked for as `model`.

        Raises:
            ApiError: 503 while there is none, 404 if `model` is another one.
        """
        status = self.status
        if status == "failed":
            raise ApiError(503, f"The model is not available: {self.reason}.", code="model_failed")
        llm = self.llm
        if status == "closed" or (llm is None and status == "ready"):
            raise ApiError(503, "The server is shutting down.", code="shutting_down")
        if llm is None:
            raise ApiError(
                503,
                f"The model '{self.name}' is still loading; try again in a few seconds.",
                code="model_loading",
                headers={"Retry-After": "5"},
            )
        if model is not None and model != self.name:
            raise ApiError(
                404,
                f"The model {shown(model)} does not exist here; this server has '{self.name}'.",
                param="model",
                code="model_not_found",
            )
        return llm

    def _load(self) -> None:
        begin = time.perf_counter()
        try:
            llm = self._loader()
        except Exception as error:
            # A ValueError or OSError is written for the user; anything else is a bug, whose name helps more than
            # nothing.
            expected = isinstance(error, ValueError | OSError)
            reason = str(error) if expected else f"{type(error).__name__}: {error}"
            with self._lock:
                if self._phase == "loading":
                    self._phase, self._failure = "failed", reason
            log.error("model %s failed to load: %s", self.name, reason, exc_info=not expected)
            return
        with self._lock:
            if self._phase == "loading":
                self.created = int(time.time())
                self.fingerprint = _fingerprint(self.name, llm)
                self._state.llm, self._phase = llm, "ready"
                log.info("model %s is ready after %.1f s", self.name, time.perf_counter() - begin)
                return
        if self._owns_model:
            llm.close()


def _fingerprint(name: str, llm: LLM) -> str:
    weights = sorted((file.name, file.stat()) for file in llm.model_dir.glob("*.safetensors"))
    parts = [__version__, version("torch"), name, repr(llm.config)]
    parts += [f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in weights]
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
