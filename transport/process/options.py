"""Options that several commands of a command line share: declared once, as the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def with_options(shared: type[T]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command of typer the fields of ``shared`` as options before its own.

    The command gets them as an instance of ``shared``, its first argument.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        fields = inspect.signature(shared, eval_str=True).parameters
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        parameters = [*(field.replace(kind=inspect.Parameter.KEYWORD_ONLY) for field in fields.values())]
        parameters += [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]

        def with_shared(**given: Any) -> None:
            command(shared(**{name: given.pop(name) for name in fields}), **given)

        with_shared.__name__, with_shared.__doc__ = command.__name__, command.__doc__
        with_shared.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        with_shared.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_shared

    return decorate
