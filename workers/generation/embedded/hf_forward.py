"""The general way to run a step: any causal Hugging Face model with full attention, through its own module.

Owns: handing our slots to the module as its cache. Slower than ``forward.FusedForward`` (prompts run one by one, norms
and projections as the module wrote them), and the same numbers.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from workers.errors import ModelError
from workers.generation.embedded.forward import StepBatch
from workers.generation.embedded.kv import KVShape, SlotKV


class ModuleForward:
    """Runs ``model``'s own forward. Raises ModelError for a model whose cache is not plain keys and values."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = cast(Any, model.config).get_text_config()
        layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
        if layer_types != {"full_attention"}:
            raise ModelError(
                f"model type {config.model_type!r} has layers of type {', '.join(sorted(layer_types))}; "
                "the embedded engine runs full attention only"
            )
        heads = config.num_attention_heads
        self.kv_shape = KVShape(
            layers=config.num_hidden_layers,
            heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )
        self._model = cast(Any, model)

    @torch.inference_mode()
    def run(self, batch: StepBatch, kv: SlotKV) -> torch.Tensor:
        n = batch.num_decode
        logits: list[torch.Tensor] = []
        if n:
            logits.append(self._decode(batch.token_ids[:n], batch.positions[:n], batch.max_tokens, kv))
        for prompt in batch.prompts:
            cache = DynamicCache(config=self._model.config)
            ids = batch.token_ids[None, prompt.start : prompt.stop]
            out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits.append(out.logits[:, -1])
            for index, layer in enumerate(cast(Any, cache).layers):
                kv.fill(index, prompt.slots, layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1))
        return torch.cat(logits)

    def _decode(self, token_ids: torch.Tensor, positions: torch.Tensor, tokens: int, kv: SlotKV) -> torch.Tensor:
        inside = torch.arange(tokens, device=positions.device) <= positions[:, None]
        out = self._model(
            input_ids=token_ids[:, None],
            position_ids=positions[:, None],
            attention_mask=inside[:, None, None],  # 4-D: transformers passes it on as it is
            past_key_values=_SlotCache(kv, positions, tokens),
            use_cache=True,
        )
        return out.logits[:, -1]


class _SlotCache(Cache):
    """The running slots as the module sees its cache: each row has its own length."""

    def __init__(self, kv: SlotKV, positions: torch.Tensor, tokens: int) -> None:
        super().__init__(layers=[])
        self._kv, self._positions, self._tokens = kv, positions, tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new token, [n, H, 1, D] each; return all tokens of the running slots, [n, H, T, D] each."""
        self._kv.append(layer_idx, self._positions, key_states[:, :, 0], value_states[:, :, 0])
        keys, values = self._kv.live(layer_idx, self._positions.shape[0], self._tokens)
        return keys.transpose(2, 3), values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._tokens - 1
