"""Which worker gets which groups: a rule for the next group, and plans for a whole batch.

placement.py    one group at a time: the least loaded of those with room
problem.py      what a plan is made of, and what it says
pricing.py      what a group costs an instance, as a sum: the closed form that planning is fast by
even.py         every instance the same share, whatever is predicted
two_class.py    StreamRL's Algorithm 2, corrected
slices.py       contiguous slices: what the next two have in common
slicing.py      deadline slicing
paced.py        the same for batches that overlap
scored.py       all of these, the best on sampled lengths
registry.py     the names that settings have for them
calibration.py  what predictions were worth so far
"""

from orchestrator.core.dispatch.placement import (
    BATCH_PRIORITY_TOKENS,
    Order,
    Placement,
    WorkerLoad,
    least_loaded,
    plan_priority,
    with_room,
)

__all__ = [
    "BATCH_PRIORITY_TOKENS",
    "Order",
    "Placement",
    "WorkerLoad",
    "least_loaded",
    "plan_priority",
    "with_room",
]
