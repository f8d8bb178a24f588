"""A jail for a child process: bubblewrap's namespaces with nothing in them but what Python needs, and limits.

    seen        the interpreter, its packages, ours, system libraries and what is named, read-only; a /tmp of its own
    not there   the network, other processes and their /proc, other files, capabilities, the way to them (no_new_privs)
    limits      memory, processes, size of a file, open files, no core dump

``why_not`` starts a process in the jail, so that whether it works is known and not supposed: default containers refuse
user namespaces. Without it ``confine`` still limits the child and takes its capabilities, which is no jail: it reads
and writes what its user may, reaches the network, and signals processes of its user.

Owns: what is around a child. Never: what runs in it, when it ends (reward_pool.py). Not held by the jail: bugs of the
kernel, time on the CPU (the pool ends a child that does not answer).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transport.programs import python_module

BUBBLEWRAP = "bwrap"
PROBE_S = 20.0
"""It takes 30 ms; on a machine with ten busy processes a second."""
TEMPORARY_BYTES = 256 * 1024**2
"""Of the jail's own /tmp, which is memory."""
MAX_FILE_BYTES = 1024**3
MAX_OPEN_FILES = 256
MAX_PROCESSES = 256
"""Threads count; counted in the jail only, because outside of it all processes of the user would."""
NOBODY = 65534

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/opt")
CONFIGURATION = tuple(f"/etc/{name}" for name in ("fonts", "ld.so.cache", "ld.so.conf.d", "alternatives", "localtime"))
PASSED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "TMPDIR", "HOME", "USER")
"""Of the environment; whatever else a child should know is named by the user (scoring.environment)."""


def clean_environment(environ: Mapping[str, str], allowed: Sequence[str] = ()) -> dict[str, str]:
    """What a child may know of ``environ``. No secret of ours is handed on, whoever allows it."""
    names = [name for name in (*PASSED, *allowed) if not name.startswith("STREAMRL_")]
    return {name: environ[name] for name in names if name in environ}


@dataclass(frozen=True, slots=True, kw_only=True)
class Jail:
    """readable: what is seen besides system and interpreter, where it lies.  hidden: directories in it that are not."""

    readable: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()

    def command(self, argv: Sequence[str]) -> list[str]:
        """``argv`` in the jail. Its environment is that of the command, which no other process can read there."""
        binds = [("--ro-bind-try", path, path) for path in (*SYSTEM, *CONFIGURATION)]
        for path in _outermost([*_interpreter(), *self.readable]):
            binds += [("--ro-bind", str(path.resolve()), str(path))]
        return [
            BUBBLEWRAP,
            *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
            *("--unshare-cgroup-try", "--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *("--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "jail"),
            *(word for bind in binds for word in bind),
            *(word for path in self.hidden if path.is_dir() for word in ("--tmpfs", str(path))),
            *("--proc", "/proc", "--dev", "/dev", "--size", str(TEMPORARY_BYTES), "--tmpfs", "/tmp"),
            *("--setenv", "HOME", "/tmp", "--setenv", "TMPDIR", "/tmp", "--chdir", "/tmp", "--"),
            *argv,
        ]

    async def why_not(self) -> str:
        """Why no process can be started in it on this machine, "" if one can: it is tried."""
        if shutil.which(BUBBLEWRAP) is None:
            return "bubblewrap is not installed (Debian: apt-get install bubblewrap)"
        command = self.command(python_module("keyword"))  # which does nothing
        process = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, env=clean_environment(os.environ)
        )
        try:
            async with asyncio.timeout(PROBE_S):
                _, said = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            return f"bubblewrap started nothing within {PROBE_S:.0f} s"
        if process.returncode == 0:
            return ""
        reason = said.decode(errors="replace").strip().splitlines()
        return (
            f"bubblewrap cannot make it: {reason[-1] if reason else f'exit code {process.returncode}'} (it needs "
            "unprivileged user namespaces: sysctl kernel.unprivileged_userns_clone, kernel.apparmor_restrict_"
            "unprivileged_userns; in a container a seccomp profile that allows them)"
        )


def _interpreter() -> list[Path]:
    """What this Python is made of, without the working directory: it may hold runs, and they hold secrets."""
    packages = [Path(entry) for entry in sys.path if entry and Path(entry).is_dir() and Path(entry) != Path.cwd()]
    ours = Path(__file__).resolve().parents[2]
    found = [Path(sys.prefix), Path(sys.base_prefix), Path(python_module("")[0]).resolve().parents[1]]
    found += [path for path in packages if path != ours and ours not in path.resolve().parents]
    return [*found, *(path.resolve() for path in found), ours / "workers", ours / "transport"]


def _outermost(paths: Sequence[Path]) -> list[Path]:
    """Without those that lie in another one; /usr is there already. Shortest first, as they are mounted."""
    kept: list[Path] = [Path(path) for path in SYSTEM]
    for path in sorted({path.absolute() for path in paths if path.exists()}, key=lambda path: len(path.parts)):
        if not any(path.is_relative_to(outer) for outer in kept):
            kept.append(path)
    return kept[len(SYSTEM) :]


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
