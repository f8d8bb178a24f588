"""Machines that explore: fresh sequences at every run, from a seed that is printed and can be given again.

``make test`` tries ``EXAMPLES`` sequences of each machine, ``make explore MINUTES=10`` goes on with seed after seed. A
failure names its seed: ``STREAMRL_SEED=<seed> make test TESTS=tests/property`` draws the same sequences, and
``make explore SEED=<seed>`` begins with them.
"""

from __future__ import annotations

import os
import random

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

SEED = int(os.environ.get("STREAMRL_SEED") or random.SystemRandom().getrandbits(32))
"""Of this process, where the caller names no other."""
EXAMPLES, STEPS = 200, 50


def explore(
    machine: type[RuleBasedStateMachine], *, seeded: int = SEED, examples: int = EXAMPLES, steps: int = STEPS
) -> None:
    """Try so many sequences of so many steps. Raises what the machine raised; a note names the seed."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        database=None,
        print_blob=False,
    )
    print(f"{machine.__name__}: seed {seeded}")
    drawn = seed(seeded)(type(machine.__name__, (machine,), {}))
    try:
        run_state_machine_as_test(drawn, settings=chosen)
    except BaseException as error:
        error.add_note(f"again: STREAMRL_SEED={seeded} make test TESTS=tests/property, or make explore SEED={seeded}")
        raise
