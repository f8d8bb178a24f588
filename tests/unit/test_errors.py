"""The error that a TaskGroup's end stands for."""

from __future__ import annotations

import asyncio

import pytest

from transport.errors import BrokerUnavailableError, FencedError, StreamError, first_error


async def _fail(error: Exception) -> None:
    raise error


async def _run_as_a_task(error: Exception) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_fail(error))
    except BaseExceptionGroup as failures:
        raise first_error(failures) from None


async def test_what_ended_a_group_of_tasks_comes_out_as_itself() -> None:
    fenced = FencedError("trainer", 1, 2)
    with pytest.raises(FencedError) as caught:
        await _run_as_a_task(fenced)
    assert caught.value is fenced


def test_the_first_of_several_counts_however_deep() -> None:
    first, second = BrokerUnavailableError("here", "gone"), FencedError("trainer", 1, 2)
    assert first_error(ExceptionGroup("outer", [ExceptionGroup("inner", [first]), second])) is first


@pytest.mark.parametrize("others", [[], [StreamError("ours")]])
def test_a_bug_is_not_hidden_behind_an_error_of_ours(others: list[Exception]) -> None:
    group = ExceptionGroup("tasks", [ValueError("a bug"), *others])
    assert first_error(group) is group
