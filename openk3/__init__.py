"""OpenK3: an open sparse-MoE language-model system that runs, trains and reads on an ordinary CPU.

`import openk3` is light; the model stack is imported at the first use of a name from the SDK.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# MKL picks its GEMM kernel by the number of rows unless told not to, and different kernels round differently. With
# this setting a row of a product has the same bits whatever stands beside it, which is what lets the engine promise
# that a result never depends on who else is in the batch. It must be set before MKL's first call.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

_LAZY = {
    "load": "openk3.llm",
    "LLM": "openk3.llm",
    "load_embedder": "openk3.embedder",
    "SamplingParams": "openk3.engine.request",
    "Grammar": "openk3.engine.grammar.spec",
    "ToolCalls": "openk3.engine.grammar.tools",
    "EngineConfig": "openk3.engine.engine",
    "ModelConfig": "openk3.config",
    "preset": "openk3.config",
    "dial": "openk3.config",
    "K3Config": "openk3.model",
    "K3ForCausalLM": "openk3.model",
}

__all__ = ["__version__", *_LAZY]

if TYPE_CHECKING:
    from openk3.config import ModelConfig, dial, preset
    from openk3.embedder import load_embedder
    from openk3.engine.engine import EngineConfig
    from openk3.engine.grammar.spec import Grammar
    from openk3.engine.grammar.tools import ToolCalls
    from openk3.engine.request import SamplingParams
    from openk3.llm import LLM, load
    from openk3.model import K3Config, K3ForCausalLM


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'openk3' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
