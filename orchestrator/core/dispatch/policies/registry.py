"""The dispatch policies by the names that settings have for them.

Owns: names, and the order of repair and planning. Never: a rule. Invariant: whatever the input, a plan names every
group once, or there is no instance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from orchestrator.core.dispatch.policies.even import even, even_longest_first, shuffled
from orchestrator.core.dispatch.policies.scored import scored
from orchestrator.core.dispatch.policies.slicing import slicing
from orchestrator.core.dispatch.policies.steady import steady_slicing
from orchestrator.core.dispatch.policies.two_class import two_class_max
from orchestrator.core.dispatch.problem import Plan, Problem, repaired

Planned: TypeAlias = Literal["even", "random", "two_class_max", "slicing", "paced", "scored"]
"""Policies that plan a batch. The other, "least_loaded", places one group after another."""

PLANNERS: Mapping[str, Callable[[Problem], Plan]] = MappingProxyType(
    {
        "even": even,
        "even_longest_first": even_longest_first,
        "random": shuffled,
        "two_class_max": two_class_max,
        "slicing": slicing,
        "paced": steady_slicing,
        "scored": scored,
    }
)


def plan_dispatch(policy: str, problem: Problem) -> Plan:
    """The plan of ``policy`` for ``problem``.

    Returns: shares for every instance; none where there is no instance, and then no worker gets anything.
    Raises:  KeyError: no such policy.
    """
    planner = PLANNERS[policy]
    if not problem.instances:
        return Plan(shares=(), policy=policy)
    return planner(repaired(problem))
