"""Entry point of ``streamrl-orchestrator`` and ``python -m orchestrator``: errors become one line and an exit code.

A bug is not an error of ours: it keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The working directory comes before us with ``python -m``: a transport.py of the user's is not ours
if sys.path[0] == os.getcwd() != str(Path(__file__).parents[1]):
    del sys.path[0]

try:
    from orchestrator.cli.commands import app
    from orchestrator.errors import exit_code, printable
    from transport.errors import StreamError
except KeyboardInterrupt:  # Ctrl-C while this imports
    print("streamrl-orchestrator: stopped by Ctrl-C before anything began", file=sys.stderr)
    raise SystemExit(130) from None


def main() -> None:
    """Run one command and exit with its code (see ``--help``); typer makes 130 of a KeyboardInterrupt."""
    is_child = sys.argv[1:2] == ["serve"]
    try:
        app()
    except StreamError as error:
        print(f"streamrl-orchestrator: {printable(str(error))}", file=sys.stderr)
        sys.exit(exit_code(error, is_child=is_child))


if __name__ == "__main__":
    main()
