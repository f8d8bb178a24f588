"""How one program of ours starts another one.

Owns: the beginning of its command line. Never: starts it.
"""

from __future__ import annotations

import sys


def python_module(module: str, *arguments: str) -> list[str]:
    """The command line of ``module`` in this interpreter.

    -P: nothing is imported from the working directory, where others may be able to write and a file that is called like
    a library would come before it.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
