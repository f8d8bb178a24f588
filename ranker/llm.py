"""A small LLM with a regression head, the paper's kind of ranker, behind the same protocol as the text model.

The LLM is frozen: every prompt becomes one vector (the last layer's mean and last hidden state, and a middle layer's
mean), and a ridge regression on it predicts the log length. Fitting the head is a linear solve, so the cost is one
forward pass a prompt, about a thousand times the text model's (docs/ranker.md has both beside each other). Calibration
is the text model's.

Owns: the head. Never: the LLM's weights, which are read from a Hugging Face directory and not changed. torch and
transformers are imported when a ranker is made. Source: StreamRL sec. 5.2. Differs: the paper fine-tunes a Qwen2.5 of
1.5B to 7B to write the length as text; frozen features are what a CPU can pay for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ranker.calibration import Calibration, calibrate
from ranker.errors import RankerFileError
from ranker.lengths import PromptLengths, log_means
from ranker.protocol import LengthEstimate
from transport.process.files import replace

if TYPE_CHECKING:
    import torch

MAX_PROMPT_TOKENS = 256
"""Of a prompt that are read, half from its beginning and half from its end."""
BATCH_TOKENS = 2_048
PENALTIES = (1.0, 10.0, 100.0, 1_000.0, 10_000.0)
"""Ridge penalties on standardised features; validation prompts choose."""
FORMAT = "streamrl-llm-ranker-1"
MAX_BYTES = 16 * 1024 * 1024


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Log length = weights . (features - center) / scale + intercept. weights, center, scale: [D]."""

    format: str = FORMAT
    weights: list[float]
    center: list[float]
    scale: list[float]
    intercept: float
    calibration: Calibration


class PromptVectors:
    """A frozen LLM that turns prompts into vectors."""

    def __init__(self, model_dir: Path, dtype: str = "bfloat16") -> None:
        """model_dir: a Hugging Face directory with safetensors and tokenizer; nothing in it is executed."""
        import torch
        from transformers import AutoModel, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        model: Any = AutoModel.from_pretrained(
            model_dir, dtype=getattr(torch, dtype), local_files_only=True, use_safetensors=True
        )
        self._model = model.eval()

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[N, 3 * hidden size] float32; each row depends on its own text alone, up to rounding."""
        ids = [self._ids(text) for text in texts]
        rows: dict[int, NDArray[np.float32]] = {}
        for batch in batches([len(each) for each in ids]):
            rows |= zip(batch, self._forward([ids[index] for index in batch]), strict=True)
        return np.stack([rows[index] for index in range(len(texts))])

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        half = MAX_PROMPT_TOKENS // 2
        return (ids if len(ids) <= MAX_PROMPT_TOKENS else ids[:half] + ids[-half:]) or [0]

    def _forward(self, batch: list[list[int]]) -> list[NDArray[np.float32]]:
        """Prompts of one length need no padding, so there is none and no mask."""
        import torch

        with torch.inference_mode():
            out = self._model(input_ids=torch.tensor(batch), output_hidden_states=True, use_cache=False)
        last: torch.Tensor = out.last_hidden_state.float()
        middle: torch.Tensor = out.hidden_states[len(out.hidden_states) // 2].float()
        return list(torch.cat([last.mean(1), last[:, -1], middle.mean(1)], dim=1).numpy())


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of prompts of equal length, as many as BATCH_TOKENS hold; every index once."""
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    for length, indices in by_length.items():
        size = max(1, BATCH_TOKENS // length)
        yield from (indices[start : start + size] for start in range(0, len(indices), size))


class LlmRanker:
    """A LengthPredictor from text alone: an LLM's vectors and a head."""

    def __init__(self, vectors: PromptVectors, head: Head) -> None:
        self._vectors = vectors
        self.head = head

    @classmethod
    def fit(
        cls, vectors: PromptVectors, train: Sequence[PromptLengths], validation: Sequence[PromptLengths]
    ) -> LlmRanker:
        """Fit the head on ``train`` [N >= 2]; ``validation`` chooses the penalty and calibrates."""
        features = vectors.vectors([sample.text for sample in train]).astype(np.float64)
        held_out = vectors.vectors([sample.text for sample in validation]).astype(np.float64)
        return cls(vectors, fit_head(features, train, held_out, validation))

    def predict(self, prompt_ids: Sequence[str], texts: Sequence[str]) -> list[LengthEstimate]:
        if not texts:
            return []
        return self.head.calibration.estimates(scores(self.head, self._vectors.vectors(texts)))

    def observe(self, prompt_id: str, response_tokens: Sequence[int]) -> None:
        """Nothing: history is OnlineRanker's."""

    def save(self, path: Path) -> None:
        replace(path, msgspec.msgpack.encode(self.head))

    @classmethod
    def load(cls, path: Path, vectors: PromptVectors) -> LlmRanker:
        """Raises RankerFileError: not a head that ``save`` wrote."""
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        try:
            head = msgspec.msgpack.decode(content, type=Head)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RankerFileError(f"{path} is not the head of an LLM ranker: {error}") from error
        sizes = {len(head.weights), len(head.center), len(head.scale)}
        values = np.array([*head.weights, *head.center, *head.scale, head.intercept])
        if head.format != FORMAT or len(sizes) != 1 or not np.isfinite(values).all() or min(head.scale, default=0) <= 0:
            raise RankerFileError(f"{path} is a damaged head of an LLM ranker")
        head.calibration.check()
        return cls(vectors, head)


def fit_head(
    features: NDArray[np.float64],
    train: Sequence[PromptLengths],
    held_out: NDArray[np.float64],
    validation: Sequence[PromptLengths],
) -> Head:
    """Ridge regression of the mean log length, penalty by the smallest squared error on validation."""
    target, truth = log_means(train), log_means(validation)
    center, scale = features.mean(0), features.std(0) + 1e-6
    inputs, checks = (features - center) / scale, (held_out - center) / scale
    gram, moment, mean = inputs.T @ inputs, inputs.T @ (target - target.mean()), float(target.mean())
    solutions = [np.linalg.solve(gram + penalty * np.eye(len(gram)), moment) for penalty in PENALTIES]
    errors = [float(np.square(checks @ weights + mean - truth).mean()) for weights in solutions]
    best = solutions[int(np.argmin(errors))]
    return Head(
        weights=best.tolist(),
        center=center.tolist(),
        scale=scale.tolist(),
        intercept=mean,
        calibration=calibrate(checks @ best + mean, validation),
    )


def scores(head: Head, features: NDArray[np.float32]) -> NDArray[np.float64]:
    """[N] log lengths before calibration."""
    inputs = (features.astype(np.float64) - np.array(head.center)) / np.array(head.scale)
    return inputs @ np.array(head.weights) + head.intercept
