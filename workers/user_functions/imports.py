"""Functions of the user's, ``module:function``: imported only where this process's own command line names them too."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any

from workers.errors import FatalError


def import_function(name: str, what: str, hint: str, error: type[FatalError]) -> Callable[..., Any]:
    """Import a function.

    Args:   name: ``module:function``.  what: it is for, "reward".  hint: where it was looked for, and what names it.
    Raises: ``error``: there is none, or its module cannot be imported.
    """
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as reason:
        raise error(f"{what} {name!r} cannot be imported: {reason} ({hint})") from reason
    except Exception as reason:  # the user's module may raise anything
        raise error(f"{what} {name!r} cannot be imported: {raised(reason)}; mend its module") from reason
    if not callable(function):
        raise error(f"{what} {name!r} is not a function")
    return function


def raised(error: BaseException) -> str:
    """What user's code raised, and where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if isinstance(error, AttributeError | SyntaxError) else f", {frame.filename}:{frame.lineno}"
    return f"{type(error).__name__}: {error}{where}"


def find_in(path: str) -> None:
    """Have modules looked for in ``path``, last: a file of the user's never takes the place of a library."""
    if path and path not in sys.path:
        sys.path.append(path)


def allowed_functions(
    what: str, wanted: Collection[str], allowed: str, options: Sequence[str], error: type[FatalError]
) -> list[str]:
    """The user's functions among ``wanted``, if this process's own command line names them all, and no others.

    Args:   wanted: of the run's settings; one of ours has no colon.  allowed: with commas between.
            options: that name them, and the directory that they lie in.
    Raises: ``error``: the run wants another, or one is allowed that it does not use.
    """
    option, path = options
    own, names = sorted({name for name in wanted if ":" in name}), [*filter(None, allowed.split(","))]
    for name in own:
        if name not in names:
            raise error(
                f"the run wants {what} {name!r}, this worker allows {allowed or '(ours)'!r}; start it with "
                f"{option} {','.join(own)}, and {path} where its module is not installed"
            )
    for name in names:
        if name not in own:
            uses = ", ".join(sorted(wanted))
            raise error(f"the run uses the {what} {uses!r}; drop {option} {name}")
    return own
