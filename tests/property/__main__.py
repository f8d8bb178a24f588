"""``make explore MINUTES=10 SEED=1``: both machines in turn, a new seed each time, until the minutes are over.

The first failure ends it, with the shortest sequence that fails and the seed that draws it again. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.property.exploring import EXAMPLES, SEED, explore
from tests.property.test_pipeline_state import PipelineMachine
from tests.property.test_service_state import ServiceMachine

STEPS = 80
"""More than a test takes, so that what needs a long story is met too. The first seed is tried with a test's, too."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="to begin with; 0: a fresh one")
    arguments = parser.parse_args()
    seeded, began_s = arguments.seed or SEED, time.monotonic()
    examples, first = 0, seeded
    while time.monotonic() < began_s + 60.0 * arguments.minutes:
        for machine in (PipelineMachine, ServiceMachine):
            if seeded == first:
                explore(machine, seeded=seeded)
                examples += EXAMPLES
            explore(machine, seeded=seeded, steps=STEPS)
            examples += EXAMPLES
        seeded += 1
    seconds = time.monotonic() - began_s
    print(json.dumps({"first_seed": first, "last_seed": seeded - 1, "examples": examples, "seconds": round(seconds)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
