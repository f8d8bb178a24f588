"""The ranker of a run: what the text says, what prompts turned out to be, and how right that was.

    predict(ids, texts) --> text model --> history --> LengthEstimate
    observe(id, tokens) --> history, quality, what the next refit learns from
    refit(deadline_s)   --> another process trains; the new model takes over between two predictions

Owns: all that a run learns about lengths. Never: an event loop. ``observe`` and ``quality`` are cheap enough for one;
``predict``, ``refit``, ``save`` and ``load`` belong in a thread (``asyncio.to_thread``). Thread-safe: a lock is held
for dictionary work only, never while trees are evaluated or trained. Invariant: a prediction is judged by lengths that
came after it.

    python -m ranker.online PARENT < request > model    what trains; both MessagePack; it ends when process PARENT does

Source: StreamRL sec. 5.2 (offline scores, online fine-tuning); history, drift and fall-back are ours.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ranker.history import LengthHistory
from ranker.logs import PromptLengths, shuffled
from ranker.model import StoredModel, StoredRanker, TextModel, clipped, decode_ranker, read_ranker, write_ranker
from ranker.protocol import (
    UNKNOWN_LEVEL_SIGMA,
    UNKNOWN_SAMPLE_SIGMA,
    LengthEstimate,
    RankerError,
    RankerFileError,
    RefitError,
    checked,
)
from ranker.quality import TRUSTED_RECALL, RunningQuality
from transport.contracts.messages import RankerJudged
from transport.errors import DECODE_ERRORS
from transport.process.programs import python_module

MAX_KNOWN = 20_000  # prompts kept for refits, 8,000 characters each at most; the one not met for longest goes first
FIRST_REFIT_GROUPS = 512
REFIT_GROWTH = 1.5  # times the groups of the last refit, then the next is due: refits cost a constant share
MAX_REFIT_GROUPS = 8_192  # never wait longer than that, because the policy moves

MAX_MOVE = 3.0  # of a length, in log tokens, before it teaches a refit


@dataclass(slots=True)
class KnownPrompt:
    """A prompt that was predicted. prior: of the text model with this serial.  tokens: its last group, () before."""

    text: str
    prior: LengthEstimate
    model_serial: int
    predicted_tokens: float
    tokens: tuple[int, ...] = ()
    drift: float = 0.0


class OnlineRanker:
    """A LengthPredictor that learns while it is used."""

    def __init__(self, model: TextModel | None = None, *, first_guess_tokens: float = 512.0) -> None:
        """model: trained before the run, or None to begin with nothing but a first guess at the mean length."""
        self._model = model
        self._unknown = LengthEstimate(
            mean_tokens=first_guess_tokens, level_sigma=UNKNOWN_LEVEL_SIGMA, sample_sigma=UNKNOWN_SAMPLE_SIGMA
        )
        self._lock = threading.Lock()
        self._history = LengthHistory()
        self._quality = RunningQuality(trusted=model is not None and model.stored.recall_20 >= TRUSTED_RECALL)
        self._known: dict[str, KnownPrompt] = {}
        self._base: dict[str, tuple[int, ...]] = {}
        self._scores: dict[str, LengthEstimate] = {}
        self._serial = 0
        self._next_refit = FIRST_REFIT_GROUPS

    def cold_start(self, base_tokens: Mapping[str, Sequence[int]]) -> None:
        """Lengths that the base policy gave prompts before the run: {prompt id: lengths >= 1}.

        A model trained with such lengths gets them as features; otherwise they count as a first visit, of prompts that
        were not visited yet.
        """
        lengths = {prompt_id: checked(tokens) for prompt_id, tokens in base_tokens.items() if tokens}
        with self._lock:
            self._base.update(lengths)
            if self._model is None or not self._model.stored.uses_base:
                for prompt_id, tokens in lengths.items():
                    if prompt_id not in self._history.prompts:
                        self._history.seed(prompt_id, tokens)

    def expect(self, scores: Mapping[str, LengthEstimate]) -> None:
        """What another ranker says of prompts: {prompt id: estimate}. The paper's offline scores.

        They stand in for the text model until the run has trained one; that one gets them as features, as it gets the
        base policy's lengths, and so learns from the run what they are worth.
        """
        with self._lock:
            self._scores.update(scores)
            self._base.update({name: (max(1, round(said.mean_tokens)),) for name, said in scores.items()})

    def predict(self, prompt_ids: Sequence[str], texts: Sequence[str]) -> list[LengthEstimate]:
        with self._lock:
            model, serial = self._model, self._serial
            scored = self._scores if serial == 0 else {}
            new = [
                index
                for index, each in enumerate(prompt_ids)
                if each not in self._known or self._known[each].model_serial != serial
            ]
            base_tokens = [self._base.get(prompt_ids[index], ()) for index in new]
        if model is None:
            priors = [self._unknown] * len(new)
        else:
            priors = model.predict([texts[index] for index in new], base_tokens)
        fresh = {
            prompt_ids[index]: scored.get(prompt_ids[index], prior) for index, prior in zip(new, priors, strict=True)
        }
        with self._lock:
            return [
                self._estimate(prompt_id, text, fresh.get(prompt_id), serial)
                for prompt_id, text in zip(prompt_ids, texts, strict=True)
            ]

    def _estimate(self, prompt_id: str, text: str, fresh: LengthEstimate | None, serial: int) -> LengthEstimate:
        """Predict one prompt and remember what was said. fresh: the text model's answer if it was asked just now."""
        known = self._known.pop(prompt_id, None)
        if known is None:
            known = KnownPrompt(clipped(text), fresh or self._unknown, serial, 0.0)
        elif fresh is not None:
            known.prior, known.model_serial = fresh, serial
        self._known[prompt_id] = known
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        estimate = self._history.posterior(prompt_id, known.prior)
        known.predicted_tokens = estimate.mean_tokens
        return estimate

    def observe(self, prompt_id: str, response_tokens: Sequence[int]) -> None:
        """Raises ValueError: a length that is negative or not whole. No lengths at all are no news."""
        tokens = checked(response_tokens)
        if not tokens:
            return
        with self._lock:
            known = self._known.get(prompt_id)
            if known is not None:
                self._quality.record(known.predicted_tokens, math.fsum(tokens) / len(tokens))
                known.tokens, known.drift = tokens, self._history.drift
            self._history.observe(prompt_id, tokens, known.prior if known is not None else self._unknown)

    def quality(self) -> RankerJudged:
        """How right the newest predictions were; about 2 ms."""
        with self._lock:
            return msgspec.structs.replace(
                self._quality.judged(),
                drift=self._history.drift,
                known_prompts=len(self._history.prompts),
                refits=self._serial,
            )

    @property
    def trusted(self) -> bool:
        """Whether dispatch may rely on the order of predictions; free to ask."""
        return self._quality.trusted

    @property
    def refit_due(self) -> bool:
        """Whether enough was seen since the last try; ask after ``observe``."""
        return self._quality.num_groups >= self._next_refit

    def refit(self, deadline_s: float) -> None:
        """Train on what was observed, in another process, and use the result. Blocks up to ``deadline_s``.

        Raises: RefitError: too few prompts, training failed, or the deadline passed; the old model stays in use, and
        the next refit is due later, as after a success.
        """
        with self._lock:
            seen, old, drift = self._quality.num_groups, self._model, self._history.drift
            samples: list[PromptLengths] = []
            for prompt_id, known in self._known.items():
                if known.tokens:  # its last group, moved to where the policy is now
                    moved = math.exp(min(max(drift - known.drift, -MAX_MOVE), MAX_MOVE))
                    tokens = tuple(max(1, round(length * moved)) for length in known.tokens)
                    base = self._base.get(prompt_id, ())
                    samples.append(PromptLengths(prompt_id=prompt_id, text=known.text, tokens=tokens, base_tokens=base))
            self._next_refit = seen + min(MAX_REFIT_GROUPS, max(FIRST_REFIT_GROUPS, round(seen * (REFIT_GROWTH - 1))))
        model = refit_in_process(old.stored if old is not None else None, samples, self._serial, deadline_s)
        with self._lock:
            self._model = model
            self._serial += 1
            self._history.rebase()

    def save(self, path: Path) -> None:
        """Write model, history and flag; not the texts, so the next refit begins to collect anew."""
        with self._lock:
            history = msgspec.structs.replace(self._history, prompts=dict(self._history.prompts))
            model = self._model.stored if self._model is not None else None
            stored = StoredRanker(model=model, history=history, trusted=self._quality.trusted, refits=self._serial)
        write_ranker(path, stored)

    @classmethod
    def load(cls, path: Path, *, first_guess_tokens: float = 512.0) -> OnlineRanker:
        """A ranker from ``save`` or from ``rank train``. Raises RankerFileError."""
        stored = read_ranker(path)
        model = TextModel(stored.model) if stored.model is not None else None
        ranker = cls(model, first_guess_tokens=first_guess_tokens)
        if stored.history is not None:
            ranker._history = stored.history
        if stored.trusted is not None:
            ranker._quality.trusted = stored.trusted
        ranker._serial = stored.refits
        return ranker


# --- training, in a process of its own --------------------------------------------------------------------------------
# With a deadline, so that no event loop and no thread waits for it. A text model takes about a CPU-second per 1,000
# prompts; in a thread the vocabulary would hold the interpreter's lock for a fifth of that.

VALIDATION_SHARE = 0.2
PARENT_POLL_S = 0.5
NICE = 10  # decoding and training go first
ENOUGH_ANEW = 1.0  # of the prompts that the old model knew: from then on from scratch, before that trees are added


class RefitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """old: what is in use.  samples: what was observed since, one entry a prompt."""

    old: StoredModel | None
    samples: list[PromptLengths]
    seed: int


def refit(request: RefitRequest) -> TextModel:
    """Train here and now. Raises RankerError: too few prompts, or the old model is damaged."""
    samples = shuffled(request.samples, request.seed)
    num_validation = max(1, round(VALIDATION_SHARE * len(samples)))
    validation, train = samples[:num_validation], samples[num_validation:]
    if len(train) < 2:
        raise RefitError(f"{len(samples)} prompts are too few to learn from")
    if request.old is None or len(train) >= ENOUGH_ANEW * request.old.num_prompts:
        return TextModel.fit(train, validation, request.seed)
    return TextModel(request.old).continued(train, validation, request.seed)


def refit_in_process(
    old: StoredModel | None, samples: Sequence[PromptLengths], seed: int, deadline_s: float
) -> TextModel:
    """Train in another process; it is killed at the deadline. Blocks. Raises RefitError."""
    root = str(Path(__file__).parents[1])
    search = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    try:
        done = subprocess.run(
            python_module("ranker.online", str(os.getpid())),
            input=msgspec.msgpack.encode(RefitRequest(old=old, samples=list(samples), seed=seed)),
            capture_output=True,
            timeout=deadline_s,
            check=False,
            env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise RefitError(f"training on {len(samples)} prompts took longer than {deadline_s:.0f} s") from error
    if done.returncode != 0:
        last_words = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise RefitError(f"training on {len(samples)} prompts failed: {' '.join(last_words) or done.returncode}")
    try:
        stored = decode_ranker(done.stdout, "what training wrote").model
    except RankerFileError as error:
        raise RefitError(f"training on {len(samples)} prompts made no usable model: {error}") from error
    if stored is None:
        raise RefitError("training wrote no model")
    return TextModel(stored)


def main() -> None:
    """The child: one request in, one model out."""

    def end_with_parent() -> None:
        """Nobody is left to want the model once the run's process is gone."""
        while os.getppid() == int(sys.argv[1]):
            time.sleep(PARENT_POLL_S)
        os._exit(1)

    os.nice(NICE)
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    try:
        request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=RefitRequest)
        model = refit(request)
    except (*DECODE_ERRORS, RankerError) as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    sys.stdout.buffer.write(msgspec.msgpack.encode(StoredRanker(model=model.stored)))


if __name__ == "__main__":
    main()
