"""Fixtures the whole suite shares: a tiny random model, and the real default model, loaded once."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Both are read at import. No test may reach for a hub; and the suite runs one process per core, where more threads
# than one in each would wait for each other at every barrier.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nor may one see the keys and files of the user's own server.
os.environ["OPENK3_STATE"] = tempfile.mkdtemp(prefix="openk3-state-")

from openk3.config import ModelConfig, preset

if TYPE_CHECKING:
    from openk3.llm import LLM
    from openk3.model import K3ForCausalLM

atexit.register(shutil.rmtree, os.environ["OPENK3_STATE"], ignore_errors=True)


def random_model(config: ModelConfig, seed: int = 0) -> K3ForCausalLM:
    """A model whose random weights are large enough that its greedy tokens differ from position to position."""
    import torch

    from openk3.model import K3ForCausalLM

    torch.manual_seed(seed)
    model = K3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5 if "embed" in name else parameter.shape[-1] ** -0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model


@pytest.fixture(scope="session")
def debug_config() -> ModelConfig:
    return preset("debug")


@pytest.fixture(scope="session")
def debug_model(debug_config: ModelConfig) -> K3ForCausalLM:
    return random_model(debug_config)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model's local directory, pulled and converted at the first use."""
    from openk3.weights import resolve

    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: Path) -> Iterator[LLM]:
    from openk3.llm import load

    with load(str(smollm2_dir)) as llm:
        yield llm
