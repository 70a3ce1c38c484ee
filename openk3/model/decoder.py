"""The decoder-only transformer, written as a Transformers model.

Being one, it works with `AutoModelForCausalLM`, `generate()`, PEFT, TRL and vLLM's Transformers backend as it is, and
the engine's runners take their weights from it. Tensor names are Hugging Face's.

Shapes: B batch, T new positions, D hidden_size, V vocab_size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, sliding_window_overlay
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from openk3.config import SLIDING, ModelConfig
from openk3.model.attention import Attention
from openk3.model.config import K3Config
from openk3.model.layers import MLP, RMSNorm
from openk3.model.moe import Experts, MoE, Router
from openk3.model.rotary import rotations


class DecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward, each on a normalised copy of the residual stream.

    With `use_sandwich_norm` (Gemma3) each branch's output is normalised too, under the names that family gave its
    norms.
    """

    def __init__(self, config: K3Config, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        sparse = config.mlp_layer_types[layer_idx] == "sparse"
        self.mlp: nn.Module = MoE(config) if sparse else MLP(config, config.intermediate_size)
        self.use_sandwich_norm = config.use_sandwich_norm
        names = ["input_layernorm", "post_attention_layernorm"]
        if config.use_sandwich_norm:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in names:
            self.add_module(name, RMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, x_BTD: Tensor, **kwargs: Any) -> Tensor:
        attended_BTD = self.self_attn(self.input_layernorm(x_BTD), **kwargs)
        if not self.use_sandwich_norm:
            x_BTD = x_BTD + attended_BTD
            return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        x_BTD = x_BTD + self.post_attention_layernorm(attended_BTD)
        return x_BTD + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_BTD)))


class K3PreTrainedModel(PreTrainedModel):
    """What Transformers needs to know about the family."""

    config_class = K3Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": DecoderLayer,
        "router_logits": OutputRecorder(Router, index=0),
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(K3Config.of(config))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, Router):
            init.normal_(module.weight, mean=0.0, std=std)
            if self.config.use_expert_bias:
                init.zeros_(module.e_score_correction_bias)


class K3Model(K3PreTrainedModel):
    """The decoder without its head: token ids to normalised hidden states."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(self.config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids: `[B, T]`, or `inputs_embeds` `[B, T, D]` in its place.
            attention_mask: `[B, S]`, 1 for tokens and 0 for padding; `None` for no padding.
            position_ids: `[B, T]`; by default those that follow the cache.
            kwargs: handed to the attention function of every layer.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        x_BTD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if inputs_embeds is None and self.config.embedding_multiplier != 1.0:
            x_BTD = x_BTD * self.config.embedding_multiplier
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(x_BTD.shape[1], device=x_BTD.device) + past)[None]
        masks = self._masks(x_BTD, attention_mask, cache, position_ids)
        turns = self._rotations(position_ids, x_BTD.dtype)
        for layer, kind, window in zip(self.layers, self.config.layer_types, self.config.layer_windows, strict=True):
            x_BTD = layer(
                x_BTD,
                rotations=turns[kind],
                attention_mask=masks[window],
                position_ids=position_ids,
                cache=cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x_BTD), cache=cache)

    def _masks(
        self, x_BTD: Tensor, attention_mask: Tensor | None, cache: Cache | None, position_ids: Tensor
    ) -> dict[int | None, Any]:
        """One mask per distinct window, in the form the chosen attention function takes."""
        config, masks = self.config, {}
        for i, (kind, window) in enumerate(zip(config.layer_types, config.layer_windows, strict=True)):
            if window not in masks:
                masks[window] = create_causal_mask(
                    config=config,
                    inputs_embeds=x_BTD,
                    attention_mask=attention_mask,
                    cache=cache,
                    position_ids=position_ids,
                    and_mask_function=sliding_window_overlay(window) if kind == SLIDING else None,
                    layer_idx=i,
                )
        return masks

    def _rotations(self, position_ids_BT: Tensor, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor] | None]:
        config, kinds = self.config, set(self.config.layer_types)
        return {
            kind: None
            if rope is None
            else rotations(rope, config.head_dim, config.max_position_embeddings, position_ids_BT, dtype)
            for kind, rope in config.rope_parameters.items()
            if kind in kinds
        }


class K3ForCausalLM(K3PreTrainedModel, GenerationMixin):
    """The language model: the decoder and its head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.model = K3Model(self.config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """
        Args:
            labels: `[B, T]`, the tokens themselves (the loss shifts them); -100 where no loss is wanted.
            logits_to_keep: how many last positions get logits (0: all), or their indices.

        Returns:
            `logits` `[B, T or logits_to_keep, V]`, `loss` when `labels` are given, and the cache.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
