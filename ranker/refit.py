"""Training beside a run: in a process of its own, with a deadline, so that no event loop and no thread waits for it.

    python -m ranker.refit PARENT < request > model        (both MessagePack; it ends when process PARENT does)

A text model takes about a CPU-second per 1,000 prompts; in a thread the vocabulary would hold the interpreter's lock
for a fifth of that. Source: ours, for StreamRL sec. 5.2's online fine-tuning.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ranker import store
from ranker.errors import RankerError, RefitError
from ranker.logs import PromptLengths, shuffled
from ranker.model import StoredModel, TextModel
from transport.process.spawn import python_module

VALIDATION_SHARE = 0.2
PARENT_POLL_S = 0.5
NICE = 10
"""Decoding and training go first."""
ENOUGH_ANEW = 1.0
"""From scratch once there are as many prompts as the old model knew; before that, trees are added to it."""


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
    request = msgspec.msgpack.encode(RefitRequest(old=old, samples=list(samples), seed=seed))
    root = str(Path(__file__).parents[1])
    search = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    try:
        done = subprocess.run(
            python_module("ranker.refit", str(os.getpid())),
            input=request,
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
    stored = store.decode(done.stdout, "what training wrote").model
    if stored is None:
        raise RefitError("training wrote no model")
    return TextModel(stored)


def _end_with_parent(parent: int) -> None:
    """Nobody is left to want the model once the run's process is gone."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)


def main() -> None:
    """The child: one request in, one model out."""
    os.nice(NICE)
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[1]),), name="parent", daemon=True).start()
    try:
        request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=RefitRequest)
        model = refit(request)
    except (msgspec.DecodeError, RankerError) as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    sys.stdout.buffer.write(store.encode(store.StoredRanker(model=model.stored)))


if __name__ == "__main__":
    main()
