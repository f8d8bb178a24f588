"""``make fuzz MINUTES=5 SEED=1``: each target for its share of the time. The last line is JSON; exit code 1: failures.

What failed is kept in a directory outside of the sources, and tried again with ``--input FILE --target NAME``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.harness import Target, Tried, failure_of, fuzz, save
from tests.fuzz.targets import TARGETS


def main() -> int:
    arguments = _arguments()
    chosen = [target for target in TARGETS if arguments.target in ("", target.name)]
    if arguments.input is not None:
        return _again(chosen[0], arguments.input.read_bytes())
    seed = arguments.seed or random.randrange(2**31)
    print(f"seed {seed}, {arguments.minutes:g} minutes")
    found = Path(arguments.found or tempfile.mkdtemp(prefix="streamrl-fuzz-"))
    end_s = time.monotonic() + 60 * arguments.minutes
    done: list[Tried] = []
    for place, target in enumerate(chosen):
        share_s = (end_s - time.monotonic()) / (len(chosen) - place)
        done.append(fuzz(target, seed, max_s=max(1.0, share_s)))
        _say(done[-1], found)
    failures = {tried.target: len(tried.failures) for tried in done}
    summary = {"seed": seed, "inputs": {tried.target: tried.num_inputs for tried in done}, "failures": failures}
    print(json.dumps(summary | {"seconds": round(sum(tried.seconds for tried in done), 1)}))
    return 1 if any(failures.values()) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0, help="[0: a fresh one, which is printed]")
    parser.add_argument("--target", choices=["", *(target.name for target in TARGETS)], default="")
    parser.add_argument("--found", help="directory for what falls  [a new one]")
    parser.add_argument("--input", type=Path, help="try this file again, with --target")
    arguments = parser.parse_args()
    if arguments.input is not None and not arguments.target:
        parser.error("--input needs --target")
    return arguments


def _say(tried: Tried, directory: Path) -> None:
    print(
        f"{tried.target:<12} {tried.num_inputs:>9,} inputs in {tried.seconds:.0f} s, {len(tried.failures)} failed",
        flush=True,
    )
    for failure in tried.failures.values():
        path = save(failure, directory / tried.target)
        print(f"  {failure.place}\n    python -m tests.fuzz --target {tried.target} --input {path}", flush=True)


def _again(target: Target, content: bytes) -> int:
    with target.opened() as check:
        failure = failure_of(check, content)
    print(failure.report if failure else "it holds")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
