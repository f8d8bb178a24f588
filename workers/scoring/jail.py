"""A jail for a child process: bubblewrap's namespaces with nothing in them but what Python needs, and limits.

    seen        the interpreter, its packages, ours, system libraries and what is named, read-only
    writable    a /tmp and a /dev/shm of its own, which are memory
    not there   the network, other processes and their /proc, other files, capabilities, the way to them (no_new_privs)
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
import os
import resource
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/opt")
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

    hidden: directories that are not seen, wherever they lie; but what is to be seen inside of one is.
    temporary_bytes: of its /tmp, and of its /dev/shm.  bare: the interpreter without packages, ours included, and the
    command is the first process: others in the jail cannot signal it, and end with it.
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
        system = [path for path in map(Path, SYSTEM) if path.exists()]
        interpreter = [Path(sys.base_prefix)] if self.bare else _interpreter()
        named = [path.absolute() for path in (*interpreter, *self.readable) if path.exists()]
        covered = [
            bind / one.resolve().relative_to(bind.resolve())
            for one in self.hidden
            for bind in (*system, *named)
            if os.path.isdir(one) and one.resolve().is_relative_to(bind.resolve())
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
                mounts.append(("--ro-bind", str(path.resolve()), str(path)))
            elif what == "hide" and seen and path.resolve() == outer.resolve() / path.relative_to(outer):
                mounts.append(("--tmpfs", str(path)))
                hidden.append(path)
            else:  # seen or hidden already, or a link out of what is seen
                continue
            shows[path] = what == "see"
        return mounts, [path for path in hidden if not shows[path]]

    async def why_not(self, argv: Sequence[str], environment: Mapping[str, str]) -> str:
        """Why ``argv`` does not run in it on this machine, "" if it does: it is tried, with nothing to read."""
        if shutil.which(BUBBLEWRAP) is None:
            return NOT_INSTALLED
        process = await asyncio.create_subprocess_exec(
            *self.command(argv), stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, env=environment, start_new_session=True
        )
        try:
            async with asyncio.timeout(PROBE_S):
                _, said = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            return f"nothing started in it within {PROBE_S:.0f} s"
        if process.returncode == 0:
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


def _interpreter() -> list[Path]:
    """What this Python is made of, without the working directory: it may hold runs, and they hold secrets."""
    from transport.process.programs import python_module  # not for the child, which imports little

    packages = [Path(entry) for entry in sys.path if entry and Path(entry).is_dir() and Path(entry) != Path.cwd()]
    ours = Path(__file__).resolve().parents[2]
    found = [Path(sys.prefix), Path(sys.base_prefix), Path(python_module("")[0]).resolve().parents[1]]
    if not any(ours.glob("*.dist-info")):  # not installed (also by --user, --target), but a checkout, which holds runs
        packages = [path for path in packages if path != ours and ours not in path.resolve().parents]
    found += packages
    return [*found, *(path.resolve() for path in found), ours / "workers", ours / "transport"]


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
