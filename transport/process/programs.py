"""What our programs share: how one starts another and ends with it, commands that users are told, options, logs."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.metadata
import inspect
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar

from transport.process.words import control_character

if TYPE_CHECKING:
    import typer
    from typer.core import TyperGroup

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # here: little is safe to do after a fork


def process_age_s() -> float:
    """Seconds since this process was started: with the time that its imports took."""
    import psutil

    return max(0.0, time.time() - psutil.Process().create_time())


def python_module(module: str, *arguments: str) -> list[str]:
    """The command line of ``module`` in this interpreter.

    -P: nothing is imported from the working directory, where others may be able to write and a file that is called like
    a library would come before it.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def bare_python() -> list[str]:
    """This interpreter without packages, environment or working directory, for a text that follows: here in 10 ms."""
    return [getattr(sys, "_base_executable", sys.executable), "-I", "-S", "-B", "-c"]


def ending_signals() -> tuple[signal.Signals, ...]:
    """What asks this process to end: the end of its terminal does, too, unless nohup says otherwise."""
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return signal.SIGINT, signal.SIGTERM, *hang_up


def ignore_ending_signals() -> None:
    """For what is left of a program that has done its work: it takes moments, and ends with the exit code of that."""
    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


class Endable(Protocol):
    """What of a process ``end_children`` needs: an ``asyncio.subprocess.Process``, or one like it elsewhere."""

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


async def end_children(children: Iterable[Endable], *, grace_s: float) -> None:
    """SIGTERM to those that live, SIGKILL to those that still do after ``grace_s``; none of them is left."""
    living = [child for child in children if child.returncode is None]
    for child in living:
        with suppress(ProcessLookupError):
            child.terminate()
    with suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await asyncio.gather(*(child.wait() for child in living))
    for child in living:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()
    await asyncio.gather(*(child.wait() for child in living))


def leave_terminal() -> None:
    """Write nothing more to a terminal that is gone: a word to it raises, which would end this process otherwise."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):  # a file or a pipe goes on
            os.dup2(nowhere, stream)
    os.close(nowhere)


# --- what a user is told to type --------------------------------------------------------------------------------------

MAKE_FROM = "STREAMRL_MAKE_FROM"
"""Variable that ``make run`` sets: the directory in which its user typed it."""
MODULES = {"streamrl-orchestrator": "orchestrator", "streamrl-worker": "workers"}


def command(program: str, *arguments: str | Path) -> str:
    """A command that runs as it is printed, typed where this process was started: of this environment, quoted.

    program: a script of this environment; its path where PATH has none, or another one; by ``make`` where that started
    us and has a word for it.  arguments: a Path as its reader can name it.
    """
    if program == "streamrl-orchestrator" and arguments[:1] == ("run",) and MAKE_FROM in os.environ:
        words = quoted(*(str(argument) for argument in arguments[1:])).replace("$", "$$")
        here = [] if _typed_in() == Path.cwd() else ["-C", shown(Path.cwd())]
        return quoted("make", *here, "run") + (f" ARGS={quoted(words)}" if words else "")
    script = Path(sys.executable).with_name(program)
    on_path = shutil.which(program)
    if on_path and (_is_same(Path(on_path), script) or _runs_here(Path(on_path))):
        words = [program]
    elif script.exists():
        words = [shown(script)]
    else:  # not installed as a script, or a user's own installation
        words = python_module(MODULES.get(program, program))
    return quoted(*words, *(shown(each) if isinstance(each, Path) else each for each in arguments))


def quoted(*words: str) -> str:
    """Words for a shell, on one line: the one place where text of others becomes part of a script or a command.

    A word with control characters is quoted as bash reads them: $'a\\x0ab'.
    """
    return " ".join(_escaped(word) if control_character(word) else shlex.quote(word) for word in words)


def _escaped(word: str) -> str:
    def escape(char: str) -> str:
        if control_character(char):
            return f"\\u{ord(char):04x}" if ord(char) > 127 else f"\\x{ord(char):02x}"
        return f"\\{char}" if char in "\\'" else char

    return f"$'{''.join(map(escape, word))}'"


def _is_same(one: Path, other: Path) -> bool:
    return other.exists() and one.samefile(other)


def _runs_here(script: Path) -> bool:
    """Whether its first line names the interpreter of this environment: in our image, scripts lie elsewhere."""
    with script.open("rb") as file:
        mark, _, interpreter = os.fsdecode(file.readline(4096).rstrip()).partition("#!")
    return not mark and Path(interpreter).parent == Path(sys.executable).parent


def shown(path: Path) -> str:
    """``path`` as a user can name it where this process was started: relative where it lies below, else absolute."""
    whole = Path(os.path.abspath(path))  # not resolved: a link keeps the name that its user knows
    return str(whole.relative_to(_typed_in())) if whole.is_relative_to(_typed_in()) else str(whole)


def _typed_in() -> Path:
    return Path(os.environ.get(MAKE_FROM) or Path.cwd())


LAUNCHED = "STREAMRL_LAUNCHED"
"""Variable of a worker that an engine starts on a node: the version that it is to be, and a file of the run that a node
with the run's file system sees."""


# --- as a child -------------------------------------------------------------------------------------------------------


def ending_with_this_process() -> Callable[[], None] | None:
    """``preexec_fn`` of a child that the kernel ends with this process, however it ends; None where it cannot.

    The signal is SIGKILL, because no other one ends a stopped child: one that was stopped while its supervisor died
    went on writing into the resumed run. No clean-up in the child is lost by that: leases run out, unlocked shared
    memory is swept by others, and files are whole at every moment. The kernel watches the thread that starts the child:
    it must be one that lives as long as the process. A parent that died before the request was made ends the child.
    """
    if sys.platform != "linux":
        return None
    parent = os.getpid()

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return in_child


T = TypeVar("T")


def with_options(*shared: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command of typer the fields of the classes ``shared`` as options before its own.

    The command gets them as an instance of each, its first arguments.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        fields = [inspect.signature(one, eval_str=True).parameters for one in shared]
        own = list(inspect.signature(command, eval_str=True).parameters.values())[len(shared) :]
        every = [*(field for one in fields for field in one.values()), *own]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in every]

        def with_shared(**given: Any) -> None:
            taken = [{name: given.pop(name) for name in names} for names in fields]
            command(*(one(**values) for one, values in zip(shared, taken, strict=True)), **given)

        with_shared.__name__, with_shared.__doc__ = command.__name__, command.__doc__
        with_shared.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        with_shared.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_shared

    return decorate


def versions(*packages: str) -> dict[str, str]:
    """Of Python and of those of the packages that are installed here; none is imported."""
    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def group_with_hints(hint: Callable[[str, list[str]], str]) -> type[TyperGroup]:
    """The class of a program whose usage errors end with advice.

    Args:  hint: from the error's message and the words behind the program's name to the advice, "" for none.
    """
    from typer.core import TyperGroup

    class Group(TyperGroup):
        def main(self, *args: Any, **kwargs: Any) -> Any:
            self.typed = sys.argv[1:]
            return super().main(*args, **kwargs)

        def invoke(self, ctx: Any) -> Any:
            try:
                return super().invoke(ctx)
            except Exception as error:
                message = getattr(error, "message", None)  # of click's UsageError, which typer has a copy of
                if isinstance(message, str) and hasattr(error, "ctx") and (advice := hint(message, self.typed)):
                    error.message = f"{message.rstrip('.')}; {advice}"  # type: ignore[attr-defined]
                raise

    return Group


def add_version(app: typer.Typer) -> None:
    """Give a program of typer ``--version``: ours, Python's and torch's."""
    import typer

    def show(asked: bool) -> None:
        if asked:
            found = versions("streamrl", "torch")
            torch = f"torch {found['torch']}" if "torch" in found else "no torch"
            typer.echo(f"streamrl {found['streamrl']} (Python {found['python']}, {torch})")
            raise typer.Exit

    option = typer.Option(False, "--version", callback=show, is_eager=True, help="Print the version and stop.")

    @app.callback()
    def options(version: bool = option) -> None:
        """Those of the program itself."""


def configure_logs(*, process: str, level: int = logging.INFO, file: TextIO | None = None) -> None:
    """Send structlog to ``file``, or stderr, as JSON lines. process: its name, in every line."""
    import structlog  # here: the child that computes rewards has no log, and starts without

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=file or sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)


def usable_cores() -> int:
    """CPUs that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
