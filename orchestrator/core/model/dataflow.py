"""Which tasks stand between a generated sample and a trainable one, and what each reads and writes.

A task is started by its columns, never by another task: add one by declaring it here. Source: AsyncFlow sec. 3.1, 3.3.
"""

from __future__ import annotations

from transport.contracts.types import Column, TaskSpec

REWARD = "reward"
REFERENCE = "reference"
ADVANTAGES = "advantages"


def grpo_tasks(*, with_reference: bool) -> tuple[TaskSpec, ...]:
    """The tasks of GRPO, in the order in which a sample usually meets them.

    with_reference: logprobs of a frozen reference model are needed (kl_coef > 0); advantages then wait for them too, so
    that a scored group is always trainable.
    """
    reference = TaskSpec(
        name=REFERENCE,
        unit="sample",
        reads=frozenset({Column.RESPONSE_IDS}),
        writes=frozenset({Column.REFERENCE_LOGPROBS}),
    )
    before_advantages = [Column.REWARD, Column.REFERENCE_LOGPROBS] if with_reference else [Column.REWARD]
    return (
        TaskSpec(
            name=REWARD,
            unit="sample",
            reads=frozenset({Column.RESPONSE_IDS}),
            writes=frozenset({Column.REWARD, Column.REWARD_COMPONENTS}),
        ),
        *((reference,) if with_reference else ()),
        TaskSpec(
            name=ADVANTAGES,
            unit="group",
            reads=frozenset(before_advantages),
            writes=frozenset({Column.ADVANTAGE}),
        ),
    )
