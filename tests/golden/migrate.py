"""Rewrite the recorded goldens in today's names: ``python -m tests.golden.migrate``.

The journals by the table of ``renames.py``; the digests by simulating again, which is refused unless all of them hold
under the table. Empty ``RENAMES`` afterwards, in the same commit.
"""

from __future__ import annotations

import json
import sys

from orchestrator.sim.simulate import simulate
from tests.golden import goldens
from tests.golden.renames import RENAMES, Renaming
from tests.golden.scenarios import SCENARIOS


def main() -> int:
    histories = {name: simulate(one).history for name, one in SCENARIOS.items()}
    before = json.loads(goldens.DIGESTS.read_text())
    differing = [name for name, history in histories.items() if goldens.digest(history) != before.get(name)]
    for path in sorted(goldens.JOURNALS.glob("*.jsonl.gz")):
        golden = goldens.read(path).renamed(Renaming(RENAMES))
        if any(commands != moment.commands for moment, commands in goldens.replayed(golden)):
            differing.append(path.name)
    if differing:
        print(f"nothing is written: these do not hold under the table of renames: {', '.join(differing)}")
        return 1
    for path in sorted(goldens.JOURNALS.glob("*.jsonl.gz")):
        goldens.write(path, goldens.read(path).renamed(Renaming(RENAMES)))
    digests = {name: goldens.digest(history, Renaming({})) for name, history in histories.items()}
    goldens.DIGESTS.write_text(json.dumps(digests, indent=1) + "\n")
    print("the goldens are rewritten: now empty RENAMES in tests/golden/renames.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
