"""A model as the tables that the compiled step runs: where each matrix lies, and what each layer is.

Weights stay where they are (usually a memory-mapped file) when they are used as float32; INT8 weights are made once,
when the program is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openk3.config import SLIDING
from openk3.engine.config import WeightFormat
from openk3.kernels import step
from openk3.kernels.linear import BIAS, COLUMNS, F32, FORMAT, INT8, OP_SIZE, ROWS, SCALE, WEIGHT
from openk3.weights.quantize import quantize_int8

if TYPE_CHECKING:
    from openk3.config import K3Config
    from openk3.model import K3ForCausalLM

# The parameter behind each op, within a layer.
_MATRICES = {
    step.QUERY: "self_attn.q_proj",
    step.KEY: "self_attn.k_proj",
    step.VALUE: "self_attn.v_proj",
    step.OUTPUT: "self_attn.o_proj",
    step.GATE: "mlp.gate_proj",
    step.UP: "mlp.up_proj",
    step.DOWN: "mlp.down_proj",
    step.ROUTER: "mlp.gate",
    step.EXPERT_GATE_UP: "mlp.experts.gate_up_proj",
    step.EXPERT_DOWN: "mlp.experts.down_proj",
    step.SHARED_GATE: "mlp.shared_experts.gate_proj",
    step.SHARED_UP: "mlp.shared_experts.up_proj",
    step.SHARED_DOWN: "mlp.shared_experts.down_proj",
}


class Program:
    """The tables, and the arrays they point into.

    Attributes:
        ops, norms, kinds, biases, ints, floats: as `openk3.kernels.step.forward` takes them.
        head: `[1, OP_SIZE]`, the language-model head.
        embedding: `[V, D]` float32.
        final_norm: address of the last norm's weights.
        rotations: the distinct entries of `rope_parameters`, in the order that `kinds` refers to.
    """

    def __init__(self, model: K3ForCausalLM, weights: WeightFormat) -> None:
        config = model.config
        self._kept: list[NDArray[Any]] = []
        self._weights = weights
        parameters = dict(model.named_parameters())
        layers = range(config.num_hidden_layers)
        self.ops = np.zeros((len(layers), step.NUM_OPS, OP_SIZE), np.int64)
        self.norms = np.zeros((len(layers), step.NUM_NORMS), np.int64)
        self.kinds = np.zeros((len(layers), step.NUM_KINDS), np.int64)
        ropes = [kind for kind in sorted(set(config.layer_types)) if config.rope_parameters[kind] is not None]
        self.rotations = [config.rope_parameters[kind] for kind in ropes]
        for i in layers:
            prefix = f"model.layers.{i}."
            for op, name in _MATRICES.items():
                weight = parameters.get(f"{prefix}{name}.weight", parameters.get(f"{prefix}{name}"))
                if weight is not None:
                    bias = parameters.get(f"{prefix}{name}.bias")
                    self.ops[i, op] = self._op(weight, bias, "float32" if op == step.ROUTER else weights)
            for norm, name in self._norm_names(config):
                self.norms[i, norm] = self._address(parameters[f"{prefix}{name}.weight"])
            kind = config.layer_types[i]
            self.kinds[i, step.WINDOW] = config.layer_windows[i] if kind == SLIDING else 0
            self.kinds[i, step.ROTATION] = ropes.index(kind) if kind in ropes else -1
            self.kinds[i, step.SPARSE] = config.mlp_layer_types[i] == "sparse"
            self.kinds[i, step.SHARED] = f"{prefix}mlp.shared_experts.gate_proj.weight" in parameters
        self.biases = self._selection_biases(model)
        self.ints = np.array(
            [
                config.num_attention_heads,
                config.num_key_value_heads,
                config.use_sandwich_norm,
                config.hidden_act != "silu",
                config.num_experts_per_tok,
                config.scoring_func == "softmax",
                config.norm_topk_prob,
            ],
            np.int64,
        )
        self.floats = np.array([config.rms_norm_eps, config.attention_scaling, config.routed_scaling_factor])
        self.embedding = self._keep(parameters["model.embed_tokens.weight"])
        self.embedding_multiplier = np.float32(config.embedding_multiplier)
        head = parameters["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
        self.head = np.array([self._op(head, None, weights)], np.int64)
        self.final_norm = self._address(parameters["model.norm.weight"])

    @staticmethod
    def _norm_names(config: K3Config) -> Iterable[tuple[int, str]]:
        yield step.NORM_INPUT, "input_layernorm"
        yield step.NORM_POST_ATTENTION, "post_attention_layernorm"
        if config.use_sandwich_norm:
            yield step.NORM_PRE_FEEDFORWARD, "pre_feedforward_layernorm"
            yield step.NORM_POST_FEEDFORWARD, "post_feedforward_layernorm"
        if config.use_qk_norm:
            yield step.NORM_QUERY, "self_attn.q_norm"
            yield step.NORM_KEY, "self_attn.k_norm"

    @staticmethod
    def _selection_biases(model: K3ForCausalLM) -> NDArray[np.float32]:
        gates = [getattr(layer.mlp, "gate", None) for layer in model.model.layers]
        biases = [getattr(gate, "e_score_correction_bias", None) for gate in gates]
        width = 0 if all(bias is None for bias in biases) else model.config.num_experts
        zero = np.zeros(width, np.float32)
        return np.stack([zero if bias is None else bias.float().numpy() for bias in biases])

    def _keep(self, tensor: Tensor) -> NDArray[np.float32]:
        """The tensor's own memory where it is float32 and contiguous, a copy elsewhere; it lives as long as we do."""
        array: NDArray[np.float32] = tensor.detach().to(torch.float32).contiguous().numpy()
        self._kept.append(array)
        return array

    def _address(self, tensor: Tensor) -> int:
        return int(self._keep(tensor).ctypes.data)

    def _op(self, weight: Tensor, bias: Tensor | None, weights: WeightFormat) -> list[int]:
        op = [0] * OP_SIZE
        op[ROWS], op[COLUMNS] = weight.shape[-2:]
        op[BIAS] = 0 if bias is None else self._address(bias)
        if weights == "float32":
            op[FORMAT], op[WEIGHT] = F32, self._address(weight)
        else:
            packed, scales = quantize_int8(weight.detach().float().numpy())
            self._kept += [packed, scales]
            op[FORMAT], op[WEIGHT], op[SCALE] = INT8, packed.ctypes.data, scales.ctypes.data
        return op
