"""One harness for every fuzz target: inputs from a seed, failures by their place in the code, and the input kept.

A target makes an input out of a random source and says whether the product took it well. An input is bytes, so that it
can be kept and tried again: those that once failed lie in ``corpus/<target>/`` and come first.

Owns: seeds, bounds, counting. Invariant: input ``index`` of a seed is the same on every machine and in any order.
"""

from __future__ import annotations

import hashlib
import logging
import re
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeAlias

import structlog

from orchestrator.core.model.groups import BrokenInvariantError

Check: TypeAlias = Callable[[bytes], None]
"""Tries one input; raises whatever shows that the product did not take it well."""

CORPUS = Path(__file__).parent / "corpus"
MAX_CPU_S = 5.0
"""Of one input: a hundred times what any takes on a slow machine, and far below what a quadratic reader does."""


class CheckFailedError(AssertionError):
    """The product took an input badly without raising."""


SAYING = (CheckFailedError, BrokenInvariantError)
"""Errors whose place says less than their words."""


class HungError(BaseException):
    """An input took more than MAX_CPU_S; no guard of the product may catch it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One thing that reads what comes from outside.

    make: an input.  opened: what must run while inputs are tried (a server), and the check.
    num_inputs: of a short slice, a few seconds.
    """

    name: str
    make: Callable[[Random], bytes]
    opened: Callable[[], AbstractContextManager[Check]]
    num_inputs: int


def unopened(check: Check) -> Callable[[], AbstractContextManager[Check]]:
    """For a target that needs nothing to run."""
    return lambda: nullcontext(check)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An input that the product did not take. place: where in the code, one of which is kept for each."""

    content: bytes
    place: str
    report: str


@dataclass(slots=True, kw_only=True)
class Tried:
    """What became of a target. failures: by place."""

    target: str
    num_inputs: int = 0
    seconds: float = 0.0
    failures: dict[str, Failure] = field(default_factory=dict)


def fuzz(
    target: Target,
    seed: int,
    *,
    max_inputs: int | None = None,
    max_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tried:
    """Try what once failed, then inputs of ``seed``, until one of the bounds."""
    tried = Tried(target=target.name)
    with quiet(), target.opened() as check:
        start = clock()
        for content in _inputs(target, seed, max_inputs):
            if max_s is not None and clock() - start >= max_s:
                break
            tried.num_inputs += 1
            failure = failure_of(check, content)
            if failure is not None:
                tried.failures.setdefault(failure.place, failure)
        tried.seconds = clock() - start
    return tried


@contextmanager
def quiet() -> Generator[None]:
    """Warnings of the product about what it refuses would be most of the output."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        structlog.reset_defaults()


def _inputs(target: Target, seed: int, max_inputs: int | None) -> Iterator[bytes]:
    yield from (path.read_bytes() for path in kept(target.name))
    index = 0
    while max_inputs is None or index < max_inputs:
        yield target.make(Random(f"{seed}/{target.name}/{index}"))
        index += 1


def kept(target: str) -> list[Path]:
    """Inputs that once failed."""
    return sorted((CORPUS / target).glob("*"))


def failure_of(check: Check, content: bytes) -> Failure | None:
    """Try one input; None where it was taken well."""
    try:
        with _limited():
            check(content)
    except (Exception, HungError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, HungError):
            frames = frames[:-1]  # where it was stopped, not what stopped it
        at = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""
        detail = re.sub(r"\W*\w*\d[\w/.]*", "", f" {error}") if isinstance(error, SAYING) else ""
        report = "".join(traceback.format_exception(error, limit=-12))
        return Failure(content=content, place=f"{type(error).__name__} {at}{detail}"[:200], report=report)
    return None


@contextmanager
def _limited() -> Generator[None]:
    """HungError where the product is, once this process has computed for MAX_CPU_S."""

    def stop(number: int, frame: object) -> None:
        raise HungError(f"more than {MAX_CPU_S} s of CPU")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def save(failure: Failure, directory: Path) -> Path:
    """Keep an input that failed; named by its content, so that the same one is kept once."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / hashlib.blake2b(failure.content, digest_size=6).hexdigest()
    path.write_bytes(failure.content)
    path.with_suffix(".txt").write_text(failure.report, encoding="utf-8", errors="backslashreplace")
    return path
