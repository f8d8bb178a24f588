"""Deaths in a row: one rule for a process that is started again, and for a prompt whose workers die under it.

Deaths that are far apart have nothing to do with one another; deaths in a row have a cause that the next start will
meet again. Source: ours; as systemd's StartLimitIntervalSec and Erlang's max restart intensity, per time.
"""

from __future__ import annotations

STABLE_S = 60.0
"""A process that lived, or a dispatch that ran, longer resets the count: a start that fails again is far shorter."""


def deaths_in_a_row(before: int, lived_s: float) -> int:
    """Deaths in a row, counting one now after ``lived_s``."""
    return 1 if lived_s > STABLE_S else before + 1
