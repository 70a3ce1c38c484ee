"""The compiler behind the CPU kernels, ahead of the first request, which else waits for it.

Kernels are compiled once per machine and version, whatever the model; later processes load what was compiled.
"""

from __future__ import annotations

import numpy as np

from openk3.config import preset
from openk3.engine.groups import layer_groups
from openk3.kernels import MISSING
from openk3.parameters import parameter_shapes


def compile_kernels() -> None:
    """Compile the kernels, which takes up to a minute, or load them where that was done before.

    Nothing is done where this machine cannot run them, and PyTorch runs models in their place.
    """
    if MISSING:
        return
    from openk3.engine.runner_cpu import CpuRunner

    config = preset("debug")
    tensors = {name: np.zeros(shape, np.float32) for name, shape in parameter_shapes(config).items()}
    groups = layer_groups(config, config.max_position_embeddings)
    CpuRunner(config, tensors, groups, num_pages=1, page_size=16, kv_format="float32", num_threads=1)
