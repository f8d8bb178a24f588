"""Functions of the user's, ``module:function``: imported only where this process's own command line names them too."""

from __future__ import annotations

import errno
import importlib
import os
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
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
        if reason.name not in (module_name, module_name.partition(".")[0]):  # its module is there, and imports another
            advice = "install it in this Python, or mend the import"
            raise error(f"{what} {name!r} cannot be imported: {raised(reason)}; {advice}") from reason
        raise error(f"{what} {name!r} cannot be imported: {reason} ({hint})") from reason
    except Exception as reason:  # the user's module may raise anything
        advice = "mend its module"
        file = str(getattr(sys.modules.get(module_name), "__file__", None) or "")
        if isinstance(reason, AttributeError) and file.startswith(NOT_THE_USERS[:2]):
            advice = f"{module_name} is the library {file}: give {module_name}.py of yours another name"
        raise error(f"{what} {name!r} cannot be imported: {raised(reason)}; {advice}") from reason
    if not callable(function):
        raise error(f"{what} {name!r} is not a function")
    return function


def raised(error: BaseException) -> str:
    """What user's code raised, where, and what of a jail or a limit may be why."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [frame for frame in frames if not frame[0].startswith(("<", *NOT_THE_USERS))] or frames
    where = "" if isinstance(error, AttributeError | SyntaxError) or not own else f", {own[-1][0]}:{own[-1][1]}"
    return f"{type(error).__name__}: {error}{where}{_why(error)}"


NOT_THE_USERS = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parents[1]))
"""Directories whose files are libraries', or ours."""


@dataclass(slots=True)
class Limits:
    """What this process may not do.

    jail: setting that turns the jail off, "" where there is none.  variables: setting that names those of the
    environment that it gets, "" where it gets all.
    """

    jail: str = ""
    shown: str = ""
    variables: str = ""
    memory_bytes: int = 0


limits = Limits()
"""Of this process, for the words of errors; a child that is confined says them once."""


def _why(error: BaseException) -> str:
    """What a jail hides, or a limit forbids, where ``error`` may come of that; "" elsewhere."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    if limits.memory_bytes and any(isinstance(one, MemoryError) for one in causes):
        return f" (its process may take {limits.memory_bytes / 2**30:g} GiB of memory)"
    if limits.variables and isinstance(error, KeyError) and _asks_environment(error):
        return f' (it gets the variables that {limits.variables} names: {limits.variables} = ["{error.args[0]}"])'
    if not limits.jail:
        return ""
    off = f'{limits.jail} = "off" runs it without a jail (docs/security.md)'
    if any(isinstance(one, ConnectionError | socket.gaierror) or _errno(one) in NETWORK for one in causes):
        return f" (it runs in a jail, which has no network; {off})"
    if any(isinstance(one, FileNotFoundError | PermissionError) or _errno(one) == errno.EROFS for one in causes):
        return (
            f" (it runs in a jail, which hides all files but those of Python and of {limits.shown}, and lets it write "
            f"to /tmp alone; {off})"
        )
    return ""


NETWORK = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN)


def _asks_environment(error: KeyError) -> bool:
    """Whether ``os.environ`` raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames and error.args) and frames[-1].filename in ("<frozen os>", os.__file__)


def _errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


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
