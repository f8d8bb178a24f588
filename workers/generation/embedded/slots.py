"""Continuous batching over KV slots: the synchronous core of the embedded engine.

Owns: the slots, and the order of a step. Never: threads, asyncio, the broker.
Invariant: every submitted sample comes out exactly once, as a Completion or in an EngineFailure; running samples occupy
slots [0, n); a prompt's KV is used under the weights that made it, and under no others.

    submit ─► waiting ─► step: admit, one forward pass, draw, hand out what ended, close the gaps
                           │ the prompt of a new group is computed once and written to all its slots
                           └ if they were too few, it is kept for the group's other samples

Source: ours; continuous batching as in Orca (OSDI 2022), prompts and decode tokens in one pass as in Sarathi-Serve
(OSDI 2024). Re-computing the prompts of partly admitted groups took 23% of the time on long-tailed lengths.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from transport.contracts.types import FinishReason, GroupId, WeightIdentity
from transport.process.clock import Clock
from workers.generation.embedded.forward import Forward, PromptSegment, StepBatch
from workers.generation.embedded.kv import SlotKV
from workers.generation.embedded.samples import (
    KeptPrompt,
    RunningSample,
    SlotTable,
    WaitingGroup,
    WaitingGroups,
    token_array,
)
from workers.generation.embedded.sampling import sample_tokens
from workers.generation.engine import ABORTED_UNSTARTED, GenerationRequest, Result

MAX_PREFILL_TOKENS = 2048
"""Prompt tokens of one step (at least one prompt): bounds the activations and the pause of the running samples."""


@dataclass(slots=True, kw_only=True)
class DecoderCounters:
    """Cumulative. tokens: drawn, of all samples.  prefill_tokens: prompt tokens computed; a kept prompt costs none."""

    steps: int = 0
    tokens: int = 0
    prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Admission:
    """Samples of ``group`` that enter ``slots`` in this step."""

    group: WaitingGroup
    slots: slice

    @property
    def count(self) -> int:
        return self.slots.stop - self.slots.start


class SlotDecoder:
    """``slots`` samples at once over one model. Not thread-safe: one thread calls everything.

    parameters: the model's tensors by each of their Hugging Face names; ``load_weights`` writes into them.
    weights: the identity of what they hold now.
    """

    def __init__(
        self,
        forward: Forward,
        parameters: Mapping[str, torch.Tensor],
        *,
        slots: int,
        max_context: int,
        vocab_size: int,
        weights: WeightIdentity,
        clock: Clock,
    ) -> None:
        like = next(iter(parameters.values()))
        self.slots, self.max_context, self.vocab_size = slots, max_context, vocab_size
        self.weights = weights
        self.counters = DecoderCounters()
        self._forward, self.parameters, self._clock = forward, parameters, clock
        self._device = like.device
        self._kv = SlotKV(forward.kv_shape, slots=slots, max_tokens=max_context, dtype=like.dtype, device=like.device)
        self._waiting = WaitingGroups()
        self._running: list[RunningSample] = []
        self._table = SlotTable(slots)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def submit(self, request: GenerationRequest) -> list[Result]:
        """Queue a group. A request that can never run comes back at once, as a failure that is not retryable."""
        group = WaitingGroup(request=request, samples=list(request.samples), queued_at_s=self._clock.now_s())
        reason = request.why_impossible(max_context=self.max_context, vocab_size=self.vocab_size)
        if reason:
            return [group.failure(reason, retryable=False)]
        self._waiting.push(group)
        return []

    def abort(self, keys: Collection[tuple[GroupId, int]]) -> list[Result]:
        """Stop these (group, attempt)s: running samples come out with what they have, waiting ones as a failure."""
        waiting = self._waiting.remove(keys)
        results: list[Result] = [group.failure(ABORTED_UNSTARTED, retryable=True) for group in waiting]
        now_s = self._clock.now_s()
        stopped = [slot for slot, sample in enumerate(self._running) if sample.request.key in keys]
        results += [self._leave(slot).completion(FinishReason.ABORT, now_s) for slot in reversed(stopped)]
        return results

    @torch.inference_mode()
    def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy ``tensors`` into the model, which then is ``weights``. Running samples go on from the KV they have.

        Their names and shapes have been checked (``weights.check_tensors``): here nothing may fail half-way.
        """
        for name, tensor in tensors.items():
            self.parameters[name].copy_(tensor)
        self.weights = weights
        self._waiting.forget_kept_prompt()

    @torch.inference_mode()
    def step(self) -> list[Result]:
        """Admit what fits, draw one token for every running sample, and return those that ended."""
        num_decode = len(self._running)
        admitted = self._admit()
        if not self._running:
            return []
        logits = self._compute(num_decode, admitted)
        token_ids, logprobs = sample_tokens(logits, self._table.draw(len(self._running)))
        self._table.record(token_ids)
        self.counters.steps += 1
        self.counters.tokens += len(token_ids)
        for sample, token_id, logprob in zip(self._running, token_ids.tolist(), logprobs.tolist(), strict=True):
            sample.add(token_id, logprob, self.weights)
        return self._hand_out(np.isfinite(logprobs).tolist())

    # --- the parts of a step ------------------------------------------------------------------------------------------

    def _admit(self) -> list[_Admission]:
        """Give the free slots to waiting samples, a group at a time; they are running from now on."""
        admitted: list[_Admission] = []
        prefill_tokens = 0
        while len(self._running) < self.slots and (group := self._waiting.first()) is not None:
            prefill_tokens += len(group.request.prompt_ids) if group.kept is None else 0
            if prefill_tokens > MAX_PREFILL_TOKENS and admitted:
                break
            first = len(self._running)
            for sample in self._waiting.take(self.slots - first):
                self._enter(group, sample)
            admitted.append(_Admission(group, slice(first, len(self._running))))
        return admitted

    def _enter(self, group: WaitingGroup, sample: int) -> None:
        now_s = self._clock.now_s()
        self._table.enter(len(self._running), group.request, sample)
        self._running.append(
            RunningSample(
                request=group.request,
                sample=sample,
                limit=group.request.limit(sample),
                queued_s=now_s - group.queued_at_s,
                admitted_at_s=now_s,
            )
        )

    def _compute(self, num_decode: int, admitted: Sequence[_Admission]) -> torch.Tensor:
        """One forward pass. Returns the logits of every running sample, [n, V], in the order of the slots."""
        kept = [admission for admission in admitted if admission.group.kept is not None]
        fresh = [admission for admission in admitted if admission.group.kept is None]
        batch = self._batch(num_decode, fresh)
        prompts = [len(admission.group.request.prompt_ids) for admission in admitted]
        self._kv.reserve(max(batch.max_tokens, *prompts, 0), num_decode)
        # Only the started group can have a kept prompt, and it is admitted first: its slots precede the fresh ones.
        parts: list[torch.Tensor] = []
        for admission in kept:
            prompt = admission.group.kept
            assert prompt is not None
            self._kv.paste_prompt(admission.slots, prompt.kv)
            parts.append(prompt.logits.expand(admission.count, -1))
        if not num_decode and not fresh:
            return torch.cat(parts)
        logits = self._forward.run(batch, self._kv)
        if not admitted:
            return logits
        for row, admission in enumerate(fresh, start=num_decode):
            parts.append(logits[row : row + 1].expand(admission.count, -1))
            self._keep_prompt(admission, logits[row : row + 1])
        return torch.cat([logits[:num_decode], *parts])

    def _batch(self, num_decode: int, fresh: Sequence[_Admission]) -> StepBatch:
        token_ids, positions = self._table.decode_inputs(num_decode)
        tokens, places, segments, start = [token_ids], [positions], list[PromptSegment](), num_decode
        for admission in fresh:
            prompt = admission.group.request.prompt_ids.astype(np.int64)
            tokens.append(prompt)
            places.append(np.arange(len(prompt)))
            segments.append(PromptSegment(start=start, stop=start + len(prompt), slots=admission.slots))
            start += len(prompt)
        self.counters.prefill_tokens += start - num_decode
        return StepBatch(
            token_ids=token_array(tokens, self._device),
            positions=token_array(places, self._device),
            num_decode=num_decode,
            max_tokens=int(positions.max()) + 1 if num_decode else 0,
            prompts=segments,
        )

    def _keep_prompt(self, admission: _Admission, logits: torch.Tensor) -> None:
        """Keep a prompt just computed, if samples of its group are still without a slot."""
        group = admission.group
        if group.samples:
            prompt = self._kv.copy_prompt(admission.slots.start, len(group.request.prompt_ids))
            group.kept = KeptPrompt(prompt, logits.clone())

    def _hand_out(self, finite: Sequence[bool]) -> list[Result]:
        """Free the slots of the samples whose last token ended them. finite: per slot, whether its logprob was."""
        results: list[Result] = []
        now_s = self._clock.now_s()
        for slot in reversed(range(len(self._running))):
            reason = self._running[slot].finish_reason()
            if not finite[slot]:
                self._kv.clear(slot)  # a masked position still meets its value as 0 * value, and 0 * NaN is NaN
                results.append(self._leave(slot).failure(f"logits are not finite under weights {self.weights}"))
            elif reason is not None:
                results.append(self._leave(slot).completion(reason, now_s))
        return results

    def _leave(self, slot: int) -> RunningSample:
        """Free ``slot``. The last running sample moves into it, so that slots [0, n) stay the running ones."""
        leaving, last = self._running[slot], self._running.pop()
        if leaving is not last:
            self._running[slot] = last
            self._kv.move(len(self._running), slot, last.kv_tokens)
            self._table.move(len(self._running), slot)
        return leaving
