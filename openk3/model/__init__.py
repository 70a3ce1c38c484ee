"""The network, in pure PyTorch, registered with Transformers under the model type `openk3`."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from openk3.model.config import K3Config
from openk3.model.decoder import K3ForCausalLM, K3Model

AutoConfig.register(K3Config.model_type, K3Config, exist_ok=True)
AutoModel.register(K3Config, K3Model, exist_ok=True)
AutoModelForCausalLM.register(K3Config, K3ForCausalLM, exist_ok=True)

__all__ = ["K3Config", "K3ForCausalLM", "K3Model"]
