"""A jail for a child process: bubblewrap's namespaces with nothing in them but what Python needs, and limits.

    seen        the interpreter, its packages, ours, the system's programs and libraries, and what is named, read-only;
                a bare jail has the interpreter's own files alone
    writable    a /tmp and a /dev/shm of its own, which are memory
    not there   the network, other processes and their /proc, other files, capabilities, the way to them (no_new_privs)
    refused     calls of the kernel that no namespace holds (system_calls.py)
    limits      memory, processes, size of a file, open files, no core dump

``why_not`` starts a process in the jail to find out whether it works: default containers refuse user namespaces. Where
it does not, ``confine`` still limits the child and drops its capabilities, which is no jail: the child reads and writes
what its user may, reaches the network, and signals processes of its user.

Owns: what is around a child. Never: what runs in it, when it ends (reward_pool.py). Not held by the jail: bugs of the
kernel, time on the CPU (the pool ends a child that does not answer).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import glob
import os
import platform
import resource
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transport.process.secret import own_directories
from workers.scoring.system_calls import child_filter

if TYPE_CHECKING:
    from transport.contracts.settings import Settings  # not for the child, which imports little

BUBBLEWRAP = "bwrap"
PROBE_S = 60.0
"""It takes .3 s, most of it imports; on a machine with ten busy processes several seconds."""
TEMPORARY_BYTES = 256 * 1024**2
"""Of the jail's own /tmp, and of its /dev/shm."""
MAX_FILE_BYTES = 1024**3
MAX_OPEN_FILES = 256
MAX_PROCESSES = 256
"""Threads count; counted in the jail only, because outside of it all processes of the user would."""
NOBODY = 65534
NOT_INSTALLED = "bubblewrap is not installed (Debian: apt-get install bubblewrap)"

SYSTEM = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64"),
    *("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec"),
    *("/usr/share/zoneinfo", "/usr/share/locale", "/usr/share/fonts"),
)
"""A distribution's own; not what an administrator adds: /opt, /usr/local, /usr/src, the rest of /usr/share."""
STORE = Path("/nix/store")
"""Each directory in it is a package; those are seen that this process has libraries of."""
CONFIGURATION = tuple(f"/etc/{name}" for name in ("fonts", "ld.so.cache", "ld.so.conf.d", "alternatives", "localtime"))
PASSED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "TMPDIR", "HOME", "USER")
"""Of the environment; whatever else a child should know is named by the user (scoring.environment)."""


def clean_environment(environ: Mapping[str, str], allowed: Sequence[str] = ()) -> dict[str, str]:
    """The part of ``environ`` that a child gets: PASSED and ``allowed``, and never a STREAMRL_ variable."""
    names = [name for name in (*PASSED, *allowed) if not name.startswith("STREAMRL_")]
    return {name: environ[name] for name in names if name in environ}


@dataclass(frozen=True, slots=True, kw_only=True)
class Jail:
    """readable: what is seen besides system and interpreter, where it lies.

    hidden: files and directories that are not seen, wherever they lie, besides the secrets of this user; but what is to
    be seen inside of one is.
    temporary_bytes: of its /tmp, and of its /dev/shm.  bare: the interpreter's own files alone (interpreter.py), and
    the command is the first process: others in the jail cannot signal it, and end with it.
    """

    readable: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()
    temporary_bytes: int | None = None
    bare: bool = False

    def command(self, argv: Sequence[str]) -> list[str]:
        """``argv`` in the jail. Its environment is that of the command, which no other process can read there."""
        size = str(TEMPORARY_BYTES if self.temporary_bytes is None else self.temporary_bytes)
        mounts, hidden = self._mounts(size)
        return [
            BUBBLEWRAP,
            *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
            *("--unshare-cgroup-try", "--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *("--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "jail", *(["--as-pid-1"] if self.bare else [])),
            *(word for path in CONFIGURATION for word in ("--ro-bind-try", path, path)),
            *(word for mount in mounts for word in mount),
            *("--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm"),
            # else half the memory; /proc: its settings of the kernel obey root by its id, whatever the namespace
            *(word for path in (*hidden, "/dev", "/proc", "/") for word in ("--remount-ro", str(path))),
            *("--setenv", "HOME", "/tmp", "--setenv", "TMPDIR", "/tmp", "--chdir", "/tmp", "--"),
            *argv,
        ]

    def _mounts(self, size: str) -> tuple[list[tuple[str, ...]], list[Path]]:
        """Arguments for what is seen and /tmp, shallowest first, as each covers what lies below it; what is hidden."""
        system, interpreter, foreign = _seen(bare=self.bare)
        named = interpreter | {path.absolute(): path.resolve() for path in self.readable if path.exists()}
        places = system | named
        private = [one.resolve() for one in (*self.hidden, *own_directories(), *foreign) if one.exists()]
        covered = [
            bind / one.relative_to(place)
            for one in private
            for bind, place in places.items()
            if one.is_relative_to(place)
        ]
        wanted = [
            *(("see", path) for path in system),
            ("temporary", Path("/tmp")),
            *(("hide", path) for path in covered),
            *(("see", path) for path in named),
        ]
        mounts: list[tuple[str, ...]] = []
        hidden: list[Path] = []
        shows: dict[Path, bool] = {}
        for what, path in sorted(wanted, key=lambda one: len(one[1].parts)):
            outer = next((one for one in (path, *path.parents) if one in shows), path)
            seen = shows.get(outer, False)
            if what == "temporary":
                mounts.append(("--size", size, "--tmpfs", str(path)))
            elif what == "see" and not seen:
                mounts.append(("--ro-bind", str(places[path]), str(path)))
            elif what == "hide" and seen and path.resolve() == outer.resolve() / path.relative_to(outer):
                if path.is_dir():
                    mounts.append(("--tmpfs", str(path)))
                    hidden.append(path)
                else:
                    mounts.append(("--ro-bind", os.devnull, str(path)))
            else:  # seen or hidden already, or a link out of what is seen
                continue
            shows[path] = what == "see"
        return mounts, [path for path in hidden if not shows[path]]

    async def start(self, argv: Sequence[str], **options: Any) -> Process:
        """``argv`` in the jail. options: as of ``asyncio.create_subprocess_exec``. Raises OSError."""
        calls = child_filter()
        if not calls:
            return await asyncio.create_subprocess_exec(*self.command(argv), **options)
        with tempfile.TemporaryFile() as file:
            file.write(calls)
            file.seek(0)
            words = [BUBBLEWRAP, "--seccomp", str(file.fileno()), *self.command(argv)[1:]]
            return await asyncio.create_subprocess_exec(*words, pass_fds=(file.fileno(),), **options)

    async def why_not(self, argv: Sequence[str], environment: Mapping[str, str]) -> str:
        """Why ``argv`` does not run in it on this machine, "" if it does: it is tried, with nothing to read."""
        if shutil.which(BUBBLEWRAP) is None:
            return NOT_INSTALLED
        process = await self.start(
            argv, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, env=environment, start_new_session=True
        )
        try:
            async with asyncio.timeout(PROBE_S):
                _, said = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            return f"nothing started in it within {PROBE_S:.0f} s"
        if process.returncode == 0:
            if not child_filter():
                import structlog  # not for the child, which imports little

                structlog.get_logger(__name__).warning(
                    "no filter of system calls for this processor", processor=platform.machine()
                )
            return ""
        lines = said.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {process.returncode}"
        if not reason.startswith("bwrap: ") or "execvp" in reason:
            return f"the reward's process does not start in it: {reason}"
        return (
            f"bubblewrap cannot make a jail: {reason} (it needs unprivileged user namespaces: "
            "sysctl kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; in a container a "
            "seccomp profile that allows them)"
        )


@functools.cache
def _seen(*, bare: bool) -> tuple[dict[Path, Path], dict[Path, Path], tuple[Path, ...]]:
    """Paths of the system, paths of the interpreter, each with the place that it leads to; directories to hide in them.

    Found once: it takes 20 ms, and a jail is made for each answer.
    """
    from workers.scoring import interpreter  # not for the child, which imports little

    if bare:
        found = interpreter.bare_interpreter()
        return {}, {path: path.resolve() for path in (*found.files, *found.trees)}, found.foreign
    system = {path: path.resolve() for path in map(Path, SYSTEM) if path.exists()}
    packages = {path.absolute(): path.resolve() for path in _packages() if path.exists()}
    shown = (*system, *packages)
    libraries = {_place(one) for one in interpreter.loaded_libraries() if not any(map(one.is_relative_to, shown))}
    return system, packages | {path: path.resolve() for path in libraries}, ()


def _packages() -> list[Path]:
    """Parts of this Python, without the working directory: it may hold runs, and they hold secrets."""
    from transport.process.programs import python_module  # not for the child, which imports little

    packages = [Path(entry) for entry in sys.path if entry and Path(entry).is_dir() and Path(entry) != Path.cwd()]
    ours = Path(__file__).resolve().parents[2]
    prefixes = [Path(sys.prefix), Path(sys.base_prefix), Path(python_module("")[0]).resolve().parents[1]]
    if not any(ours.glob("*.dist-info")):  # not installed (also by --user, --target), but a checkout, which holds runs
        packages = [path for path in packages if path != ours and ours not in path.resolve().parents]
    found = [*(part for prefix in prefixes for part in _parts(prefix)), *packages]
    return [*found, *(path.resolve() for path in found), ours / "workers", ours / "transport"]


def _parts(prefix: Path) -> list[Path]:
    """Directories of an interpreter's prefix that are Python's: a user may have anything beside them."""
    if prefix in (Path("/usr"), Path("/usr/local")):
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        parts = [prefix / "lib" / version, *(prefix / "bin").glob("python3*")]
    else:
        parts = [prefix / name for name in ("bin", "lib", "lib64", "pyvenv.cfg")]
    return [part for part in parts if part.exists()]


def _place(library: Path) -> Path:
    """The path by which a library is shown: its own, or that of its package in the store of Nix."""
    return STORE / library.relative_to(STORE).parts[0] if library.is_relative_to(STORE) else library


def jail_of(
    path: str, readable: Sequence[str], setting: str, *, hidden: Sequence[Path], error: type[Exception]
) -> Jail:
    """The jail of a user's function. path: directory of its module, "" for none.  readable: as ``setting`` names it.

    Raises ``error``, by the name of the setting, for what is not there.
    """
    named = [Path(one).expanduser() for one in readable]
    for one in named:
        if not one.exists():
            raise error(f"{setting}: there is no file or directory {one} on {socket.gethostname()}")
    return Jail(readable=(*([Path(path)] if path else []), *named), hidden=tuple(hidden))


def private_paths(settings: Settings) -> tuple[Path, ...]:
    """Paths that no jail of a run shows unless they are named: all runs beside it; its data, which has the answers."""
    data, held_out = settings.data, settings.eval
    named = [data.path, data.rewards, held_out.path, *(part.path for part in data.mix.values())]
    named += [one.path for one in held_out.sets.values()]
    files = [Path(file) for name in named if name for file in glob.glob(os.path.expanduser(name))]
    return tuple(path.resolve() for path in (Path(settings.run.dir), *files))


# --- in the child -----------------------------------------------------------------------------------------------------

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
CAPABILITIES_V3 = 0x20080522


def confine(*, memory_bytes: int, jailed: bool) -> None:
    """Limit this process, before anything foreign is imported: none of it can be taken back, also not by root."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
    }
    if jailed:
        limits[resource.RLIMIT_NPROC] = MAX_PROCESSES
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if not jailed:  # bubblewrap does these
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for capability in range(64):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        with contextlib.suppress(AttributeError):  # musl has no capset
            libc.capset((ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)())


def hide_from_children() -> None:
    """Let no process of the same user read this one's memory or environment, which holds the broker's password.

    Price: no core dump, no debugger of the same user. A child of root's must have lost its capabilities (``confine``).
    """
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
