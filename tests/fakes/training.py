"""Groups of random tokens for the trainer's tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transport.contracts.types import GroupId, RowId
from workers.trainer.policy.packing import PromptGroup, TrainingSample


def make_groups(
    *,
    seed: int = 0,
    batch: int = 0,
    prompt_tokens: Sequence[int] = (5, 3, 9),
    response_tokens: Sequence[Sequence[int]] = ((4, 1, 7), (2, 2), (6, 3, 1, 8)),
    vocabulary: int = 60,
    masked: bool = False,
    logprob: float = -4.1,
    all_columns: bool = False,
) -> list[PromptGroup]:
    """Ragged groups. logprob: about what the policy gives each token, so that ratios lie on both sides of the clips."""
    random = np.random.default_rng(seed)

    def logprobs(tokens: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return (logprob + 0.3 * random.normal(size=tokens)).astype(np.float32)

    def sample(slot: int, index: int, tokens: int) -> TrainingSample:
        mask = (random.random(tokens) < 0.7).astype(np.uint8)
        mask[0] = 1
        return TrainingSample(
            row_id=RowId(f"{batch}/{slot}/{index}"),
            response_ids=random.integers(4, vocabulary, tokens).astype(np.int32),
            rollout_logprobs=logprobs(tokens),
            advantage=float(random.normal()),
            loss_mask=mask if masked else None,
            reference_logprobs=logprobs(tokens) if all_columns else None,
            old_logprobs=logprobs(tokens) if all_columns else None,
            reward=float(index % 2),
        )

    return [
        PromptGroup(
            group_id=GroupId(f"{batch}/{slot}"),
            prompt_ids=random.integers(4, vocabulary, prompt).astype(np.int32),
            samples=[sample(slot, index, tokens) for index, tokens in enumerate(responses)],
        )
        for slot, (prompt, responses) in enumerate(zip(prompt_tokens, response_tokens, strict=True))
    ]
