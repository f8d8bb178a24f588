"""New weights inside a vLLM server: the class for its --worker-extension-cls.

vLLM mixes it into its workers, the processes that hold the model; ``/collective_rpc`` calls its methods there, between
two steps.
"""

from __future__ import annotations

import base64
from typing import Any

from workers.generation.server.loader import carry_out
from workers.generation.server.order import order_decoder, outcome_numbers


class Loader:
    """Methods that a worker of vLLM has besides its own: none may have the name of one of those."""

    model_runner: Any
    vllm_config: Any

    def streamrl_about(self) -> dict[str, Any]:
        """What the worker serves, and what of it the engine depends on."""
        config = self.vllm_config
        cache = config.cache_config
        return {
            "model_type": config.model_config.hf_config.model_type,
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "max_context": config.model_config.max_model_len,
            "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
            "slots": config.scheduler_config.max_num_seqs,
            "processes": config.parallel_config.world_size,
        }

    def streamrl_load(self, order: str) -> list[int]:
        """Carry out the LoadOrder in ``order``. Returns the Outcome, as bytes."""

        model = self.model_runner.get_model()

        def take(tensors: Any) -> None:
            self.reload_weights(weights_iterator=iter(tensors.items()))  # type: ignore[attr-defined]  the worker's
            head: Any = getattr(model, "lm_head", None)
            if hasattr(head, "cpu_linear"):
                # On a CPU it computes with a packed copy, which a reload leaves as it was where the head is tied.
                head.quant_method.process_weights_after_loading(head)

        return outcome_numbers(carry_out(model, order_decoder.decode(base64.b64decode(order)), take, _processes))


def _processes() -> Any:
    from vllm.distributed import get_tp_group  # pyright: ignore[reportMissingImports]  only inside the server

    return get_tp_group().cpu_group
