"""A model as the tables that the compiled step runs: where each matrix lies, and what each layer is.

Weights stay where they are, usually in a memory-mapped file, in the form they have there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openk3.config import ModelConfig
from openk3.kernels import step
from openk3.kernels.integers import INT4_GROUPS, INT8, INT8_GROUPS, MOST_COLUMNS
from openk3.kernels.linear import BIAS, BLOCK, COLUMNS, F32, FORMAT, GROUP, MINIMUM, OP_SIZE, ROWS, SCALE, WEIGHT
from openk3.parameters import EMBEDDING, HEAD
from openk3.weights.formats import Int4Matrix, Int8Matrix, Matrix

# The parameter behind each op, within a layer.
_MATRICES = {
    step.QUERY: "self_attn.q_proj.weight",
    step.KEY: "self_attn.k_proj.weight",
    step.VALUE: "self_attn.v_proj.weight",
    step.OUTPUT: "self_attn.o_proj.weight",
    step.GATE: "mlp.gate_proj.weight",
    step.UP: "mlp.up_proj.weight",
    step.DOWN: "mlp.down_proj.weight",
    step.ROUTER: "mlp.gate.weight",
    step.EXPERT_GATE_UP: "mlp.experts.gate_up_proj",
    step.EXPERT_DOWN: "mlp.experts.down_proj",
    step.SHARED_GATE: "mlp.shared_experts.gate_proj.weight",
    step.SHARED_UP: "mlp.shared_experts.up_proj.weight",
    step.SHARED_DOWN: "mlp.shared_experts.down_proj.weight",
}


class Program:
    """The tables, and the arrays they point into.

    Attributes:
        ops, norms, kinds, biases, ints, floats, head: as `openk3.kernels.step.take_part` takes them.
        embedding, embedding_multiplier: as `openk3.kernels.plan.plan` takes them.
        rotations: the distinct entries of `rope_parameters`, in the order that `kinds` refers to.
        widest: columns of the widest matrix.

    Raises:
        ValueError: a matrix of integers with more columns than the kernels can add up.
    """

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Matrix]) -> None:
        self._kept: list[Any] = []
        layers = range(config.num_hidden_layers)
        self.ops = np.zeros((len(layers), step.NUM_OPS, OP_SIZE), np.int64)
        self.norms = np.zeros((len(layers), step.NUM_NORMS), np.int64)
        self.kinds = np.zeros((len(layers), step.NUM_KINDS), np.int64)
        ropes = [kind for kind in sorted(set(config.layer_types)) if config.rope_parameters[kind] is not None]
        self.rotations = [config.rope_parameters[kind] for kind in ropes]
        for i in layers:
            prefix = f"model.layers.{i}."
            for op, name in _MATRICES.items():
                weight = tensors.get(prefix + name)
                if weight is not None:
                    bias = tensors.get(prefix + name.removesuffix("weight") + "bias")
                    self.ops[i, op] = self._op(prefix + name, weight, bias)
            for norm, name in self._norm_names(config):
                self.norms[i, norm] = self._address(tensors[f"{prefix}{name}.weight"])
            kind = config.layer_types[i]
            self.kinds[i, step.WINDOW] = config.layer_windows[i] or 0
            self.kinds[i, step.ROTATION] = ropes.index(kind) if kind in ropes else -1
            self.kinds[i, step.SPARSE] = config.mlp_layer_types[i] == "sparse"
            self.kinds[i, step.SHARED] = prefix + _MATRICES[step.SHARED_GATE] in tensors
        self.biases = self._selection_biases(config, tensors)
        head = EMBEDDING if config.tie_word_embeddings else HEAD
        self.head = np.array([self._op(head, tensors[head], None)], np.int64)
        self.embedding = np.array([self._op(EMBEDDING, tensors[EMBEDDING], None)], np.int64)
        self.embedding_multiplier = np.float32(config.embedding_multiplier)
        self.widest = max(int(self.ops[..., COLUMNS].max()), config.hidden_size)
        self.ints = np.array(
            [
                config.num_attention_heads,
                config.use_sandwich_norm,
                config.hidden_act != "silu",
                config.num_experts_per_tok,
                config.scoring_func == "softmax",
                config.norm_topk_prob,
                bool((self.ops[..., FORMAT] != F32).any() or self.head[0, FORMAT] != F32),
                self._address(tensors["model.norm.weight"]),
                self.widest,
            ],
            np.int64,
        )
        self.floats = np.array([config.rms_norm_eps, config.attention_scaling, config.routed_scaling_factor])

    @staticmethod
    def _norm_names(config: ModelConfig) -> Iterable[tuple[int, str]]:
        yield step.NORM_INPUT, "input_layernorm"
        yield step.NORM_POST_ATTENTION, "post_attention_layernorm"
        if config.use_sandwich_norm:
            yield step.NORM_PRE_FEEDFORWARD, "pre_feedforward_layernorm"
            yield step.NORM_POST_FEEDFORWARD, "post_feedforward_layernorm"
        if config.use_qk_norm:
            yield step.NORM_QUERY, "self_attn.q_norm"
            yield step.NORM_KEY, "self_attn.k_norm"

    @staticmethod
    def _selection_biases(config: ModelConfig, tensors: Mapping[str, Matrix]) -> NDArray[np.float32]:
        names = [f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in range(config.num_hidden_layers)]
        width = config.num_experts if any(name in tensors for name in names) else 0
        zero = np.zeros(width, np.float32)
        return np.stack([np.asarray(tensors.get(name, zero), np.float32) for name in names])

    def _keep(self, array: Any) -> NDArray[np.float32]:
        """The array itself where it is float32 and contiguous, a copy elsewhere; it lives as long as we do."""
        kept = np.ascontiguousarray(array, np.float32)
        self._kept.append(kept)
        return kept

    def _address(self, array: Any) -> int:
        return int(self._keep(array).ctypes.data)

    def _op(self, name: str, weight: Matrix, bias: Any) -> list[int]:
        if isinstance(weight, Int8Matrix | Int4Matrix):
            if weight.columns > MOST_COLUMNS:
                raise ValueError(f"{name} has {weight.columns} columns: integer kernels take up to {MOST_COLUMNS}")
            self._kept.append(weight)
        else:
            weight = self._keep(weight)
        if bias is not None:  # kernels add whole blocks
            bias = self._keep(np.pad(np.asarray(bias, np.float32), (0, -weight.shape[-2] % BLOCK)))
        return matrix_op(weight, bias)


def matrix_op(weight: Matrix, bias: NDArray[np.float32] | None) -> list[int]:
    """What kernels know of a matrix. The arrays must be contiguous and outlive it; `bias` fills whole blocks."""
    op = [0] * OP_SIZE
    op[ROWS], op[COLUMNS] = weight.shape[-2:]
    op[BIAS] = 0 if bias is None else bias.ctypes.data
    if not isinstance(weight, Int8Matrix | Int4Matrix):
        op[FORMAT], op[WEIGHT] = F32, weight.ctypes.data
        return op
    op[WEIGHT], op[SCALE] = weight.values.ctypes.data, weight.scale.ctypes.data
    op[GROUP] = weight.group_size or weight.columns
    if isinstance(weight, Int4Matrix):
        op[FORMAT], op[MINIMUM] = INT4_GROUPS, weight.minimum.ctypes.data
    else:
        op[FORMAT] = INT8 if weight.group_size is None else INT8_GROUPS
    return op
