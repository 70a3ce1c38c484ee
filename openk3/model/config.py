"""The configuration as a Transformers config: what `AutoConfig`, `save_pretrained` and PyTorch models work with."""

# Not `from __future__ import annotations`: `strict` checks values against types, not against their names.
from dataclasses import asdict
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from openk3.config import ModelConfig


@strict
class K3Config(ModelConfig, PreTrainedConfig):
    """Configuration of `K3ForCausalLM`: the fields of `ModelConfig` and those that every Transformers config has.

    Raises:
        ValueError: as `ModelConfig`.
    """

    model_type = "openk3"
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    @classmethod
    def of(cls, config: ModelConfig) -> "K3Config":
        """`config` itself where it is one already, else a new one of the same model."""
        return config if isinstance(config, cls) else cls(**asdict(config))

    def __post_init__(self, **kwargs: Any) -> None:
        ModelConfig.__post_init__(self)
        PreTrainedConfig.__post_init__(self, **kwargs)

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Transformers' hook for old rotary fields: `ModelConfig` has made ours canonical already."""
        return kwargs
