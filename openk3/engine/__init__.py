"""The inference engine: many requests at once over one model, with a paged key/value cache.

From the outside in: `loop` runs the engine in a thread and hands out handles, `engine` advances every request by one
step, `scheduler` decides what a step computes and `pacing` how much of it may be prompts, `pages`, `groups` and `pins`
own the cache's memory, `runner_cpu` and `runner_torch` run the model, `sampler` and `detokenizer` turn logits into
tokens and text, and `grammar` keeps them to a form. `naive` is the same result the plain way, for the tests.

The names below are imported at their first use, so that reading `SamplingParams` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "Delta": "openk3.engine.request",
    "Engine": "openk3.engine.engine",
    "EngineConfig": "openk3.engine.config",
    "EngineLoop": "openk3.engine.loop",
    "EngineStats": "openk3.engine.engine",
    "Handle": "openk3.engine.loop",
    "PinnedPrefix": "openk3.engine.pins",
    "SamplingParams": "openk3.engine.request",
    "Timings": "openk3.engine.request",
    "TokenLogprob": "openk3.engine.request",
}

__all__ = [
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineLoop",
    "EngineStats",
    "Handle",
    "PinnedPrefix",
    "SamplingParams",
    "Timings",
    "TokenLogprob",
]

if TYPE_CHECKING:
    from openk3.engine.config import EngineConfig
    from openk3.engine.engine import Engine, EngineStats
    from openk3.engine.loop import EngineLoop, Handle
    from openk3.engine.pins import PinnedPrefix
    from openk3.engine.request import Delta, SamplingParams, Timings, TokenLogprob


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'openk3.engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
