"""Functions of the user's, ``module:function``: imported only where this process's own command line names them too."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
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


def check_allowed(what: str, wanted: str, allowed: str, options: Sequence[str], error: type[FatalError]) -> None:
    """Raises ``error``: a run wants another function than this process's own command line allows.

    wanted: of the run's settings; one of ours has no colon.  options: that name it, and the directory that it lies in.
    """
    option, path = options
    if allowed not in (wanted, "" if ":" not in wanted else wanted):
        raise error(
            f"the run wants {what} {wanted!r}, this worker allows {allowed or '(ours)'!r}; start it with "
            f"{option} {wanted}, and {path} where its module is not installed"
            if ":" in wanted
            else f"the run uses the {what} {wanted!r}; drop {option} {allowed}"
        )
