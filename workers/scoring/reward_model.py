"""A reward model: a sequence classifier of one number, which is the reward of a question and its response.

    question, response ─► its own chat template, its own tokens ─► what waits, in one padded pass ─► a number each

Texts are asked, because a reward model may have another vocabulary than the policy: nothing is trained on its tokens.
Of an episode it reads what the policy wrote.

Owns: the model, which samples share a pass. Never: delivery, retries (worker.py). Invariant: ``score`` ends with a
finite Reward or a RewardError.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import structlog
import torch
from transformers import AutoModelForSequenceClassification

from transport.contracts.chat_template import ChatTemplate, TemplateError
from transport.contracts.settings import Settings
from workers.errors import RewardError, RewardSetupError
from workers.models import changing_rope, choose_device, load_tokenizer, model_cache, prepare_reward_model
from workers.scoring.rewards import Reward, Sample, read_entry
from workers.scoring.tasks import Passes
from workers.trainer.policy.loading import NOT_BUILT
from workers.trainer.policy.model import choose_dtype

log = structlog.get_logger(__name__)

COMPONENT = "reward_model"
SETTING = "scoring.reward_model"


class RewardModel:
    """Its arithmetic; called on one thread at a time.

    max_tokens: of one pass, with its padding.  max_length: tokens that it reads of one sample, 0: no limit.
    """

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokenizer = load_tokenizer(directory)
        self._template = ChatTemplate(self._tokenizer)
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
                module, info = cast(
                    tuple[Any, dict[str, Any]],
                    AutoModelForSequenceClassification.from_pretrained(
                        directory,
                        dtype=dtype,
                        local_files_only=True,
                        trust_remote_code=False,
                        use_safetensors=True,
                        output_loading_info=True,
                    ),
                )
        except NOT_BUILT as error:
            raise RewardSetupError(f"{SETTING}: cannot load {directory}: {error}") from error
        if missing := sorted(info["missing_keys"]):
            raise RewardSetupError(
                f"{SETTING}: {directory} holds no tensor {missing[0]}: its rewards would be random; name a model that "
                "was trained as a reward model"
            )
        self._module = module.to(device).eval()
        if self._module.config.pad_token_id is None:
            self._module.config.pad_token_id = self._tokenizer.pad_token_id
        self.max_length = int(getattr(self._module.config, "max_position_embeddings", 0) or 0)
        rope = changing_rope(self._module.config.get_text_config().to_dict())
        self._rope_limit = rope.limit if rope is not None else 0

    def encode(self, conversation: Sequence[dict[str, str]]) -> list[int]:
        """The ids of a conversation that ends with the response. Raises RewardError."""
        if not self._tokenizer.chat_template:
            *said, response = (message["content"] for message in conversation)
            return self._tokenizer("\n\n".join(said), response)["input_ids"]
        try:
            text = self._template.plain(conversation, answered=True)
            if lost := self._template.lost(conversation, text):
                raise TemplateError(self._template.leaves_out(lost))
        except TemplateError as error:
            raise RewardError(str(error).replace("the model's", "the reward model's", 1)) from error
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.inference_mode()
    def scores(self, samples: Sequence[Sequence[int]]) -> list[float]:
        """One number of each, in passes of samples of similar lengths."""
        pad = self._module.config.pad_token_id
        found = [0.0] * len(samples)
        for indices in self._passes([len(ids) for ids in samples], alone=pad is None):
            ids = [torch.tensor(samples[index]) for index in indices]
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=float(pad or 0))
            mask = torch.arange(padded.shape[1]) < torch.tensor([[len(one)] for one in ids])
            device = self._module.device
            logits = self._module(input_ids=padded.to(device), attention_mask=mask.long().to(device)).logits
            for index, value in zip(indices, logits[:, 0].float().tolist(), strict=True):
                found[index] = value
        return found

    def _passes(self, lengths: Sequence[int], *, alone: bool) -> list[list[int]]:
        """Indices, so that no pass of several is over ``max_tokens``. alone: it cannot tell padding from words."""
        passes: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
            longest = lengths[passes[-1][0]] if passes else 0
            changes = lengths[index] <= self._rope_limit < longest  # the rope of a short one, beside that one
            if not alone and not changes and passes and (len(passes[-1]) + 1) * longest <= self._max_tokens:
                passes[-1].append(index)
            else:
                passes.append([index])
        return passes


class RewardModelPool:
    """As a RewardPool, of a model in this process: there is nothing of a stranger's to jail but its weights."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._model: RewardModel | None = None
        self._passes = Passes(self._scores)
        self.failures = 0
        self.jailed = None

    async def start(self, trial: Sequence[Sample] = ()) -> None:
        """Load it, and try it. Raises ModelError: there is none; RewardSetupError: it scores none of ``trial``."""
        self._model = await asyncio.to_thread(self._load)
        failures: list[str] = []
        for sample in trial:
            try:
                await self.score(sample.prompt, sample.response, sample.entry)
            except RewardError as error:
                failures.append(str(error))
            else:
                return
        if failures:
            raise RewardSetupError(f"{SETTING} was tried on {len(failures)} rows and scored none: {failures[0]}")

    def _load(self) -> RewardModel:
        settings = self._settings
        torch.set_num_threads(settings.trainer.threads)
        device = choose_device(settings.scoring_device, "scoring.device")
        directory = prepare_reward_model(settings.scoring.reward_model, cache_dir=model_cache(os.environ))
        dtype = choose_dtype(settings.trainer.dtype, device)
        model = RewardModel(directory, device, dtype, settings.trainer.micro_batch_tokens)
        log.info("reward model", path=settings.scoring.reward_model, device=str(device), dtype=str(dtype))
        return model

    async def score(self, prompt: str, response: str, entry: bytes) -> Reward:
        """Raises RewardError."""
        try:
            ids = self._loaded.encode([*self._asked(prompt, entry), {"role": "assistant", "content": response}])
            if 0 < self._loaded.max_length < len(ids):
                raise RewardError(
                    f"question and response are {len(ids)} tokens of the reward model, which reads at most "
                    f"{self._loaded.max_length}"
                )
            value = await self._passes.take(ids)
            if not math.isfinite(value):
                raise RewardError(f"the reward model gave {value}")
        except RewardError:
            self.failures += 1
            raise
        return Reward(value=value, components={COMPONENT: value})

    @property
    def _loaded(self) -> RewardModel:
        if self._model is None:
            raise ValueError("the reward model was not started")
        return self._model

    def _asked(self, prompt: str, entry: bytes) -> list[dict[str, str]]:
        """The conversation that the policy was to answer, as messages: of one that the row gave, its own."""
        row, data = read_entry(entry or b"{}"), self._settings.data
        system = [{"role": "system", "content": data.system}] if data.system else []
        if isinstance(messages := row.get("messages"), list):
            *before, last = messages
            return [*system, *before, {**last, "content": f"{last['content']}{data.suffix}"}]
        question = row.get("question")
        content = f"{question}{data.suffix}" if isinstance(question, str) else prompt
        return [*system, {"role": "user", "content": content}]

    async def _scores(self, samples: Sequence[list[int]]) -> list[float]:
        return await asyncio.to_thread(self._loaded.scores, samples)

    async def close(self) -> None:
        self._model = None
