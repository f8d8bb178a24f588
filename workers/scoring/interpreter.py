"""Files of an interpreter on this machine, one by one: a jail shows these, and no tree of the administrator's.

program          the executable
library          Python's standard library, without what others installed into it
shared           libraries that its extension modules load, the loader among them, by each name they have
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from transport.process.programs import bare_python

PROBE_S = 60.0
LOADERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
"""Where programs name their loader, whatever those are linked to."""
DATA = ("/usr/share/zoneinfo", "/usr/lib/locale/C.utf8")
FOREIGN = ("site-packages", "dist-packages")
"""Directories in the standard library that are none of it."""
PROBE = """
import json, os, sys, sysconfig
library = sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
for directory in sys.path:
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else []:
        module, _, kind = name.partition(".")
        if kind.endswith("so") and not module.startswith(("_test", "xx", "_xx", "_ctypes_test", "_tkinter")):
            try:
                __import__(module)
            except ImportError:
                pass
with open("/proc/self/maps") as file:
    mapped = sorted({line.split(maxsplit=5)[5].strip() for line in file if "/" in line})
print(json.dumps({"program": sys.executable, "library": library, "mapped": mapped}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """files, trees: to be seen.  foreign: directories in the trees that are not."""

    files: tuple[Path, ...]
    trees: tuple[Path, ...]
    foreign: tuple[Path, ...]


@functools.cache
def bare_interpreter() -> Interpreter:
    """``bare_python``: asked once, in .3 s. Raises OSError, subprocess.SubprocessError."""
    run = subprocess.run([*bare_python(), PROBE], env={}, capture_output=True, timeout=PROBE_S, check=True)
    found = json.loads(run.stdout)
    program, trees = Path(found["program"]), [Path(one) for one in found["library"] if os.path.isdir(one)]
    files = {program, program.resolve(), *shared_libraries(found["mapped"])}
    return Interpreter(
        files=tuple(sorted(one for one in files if not any(one.is_relative_to(tree) for tree in trees))),
        trees=(*trees, *(Path(one) for one in DATA if os.path.exists(one))),
        foreign=tuple(tree / name for tree in trees for name in FOREIGN if (tree / name).is_dir()),
    )


def loaded_libraries() -> set[Path]:
    """Shared libraries of this process, by each of their names."""
    mapped = Path("/proc/self/maps").read_text("utf-8", errors="surrogateescape").splitlines()
    return shared_libraries(line.split(maxsplit=5)[5].strip() for line in mapped if "/" in line)


def shared_libraries(mapped: Iterable[str]) -> set[Path]:
    """mapped: paths as in /proc/PID/maps. Returns those of libraries, and the links to them that lie beside them."""
    files = {os.path.realpath(one) for one in mapped if ".so" in os.path.basename(one) and os.path.isfile(one)}
    directories = {os.path.dirname(one) for one in files} | {*LOADERS}
    return {Path(one) for one in files} | {
        Path(path) for directory in directories for path in _entries(directory) if os.path.realpath(path) in files
    }


def _entries(directory: str) -> Iterator[str]:
    if os.path.isdir(directory):
        yield from (entry.path for entry in os.scandir(directory) if ".so" in entry.name)
