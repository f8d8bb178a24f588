"""Secrets of the environment: the value of a variable, or of the file that ``<variable>_FILE`` names.

Container engines hand a secret over as a file, because a process's environment is shown by many tools.
Owns: the two names and where they are read. Never: keeps, logs or stores a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from transport.errors import SecretError

BROKER_PASSWORD = "STREAMRL_BROKER_PASSWORD"
SHARED_SECRET = "STREAMRL_SECRET"
"""Opens the HTTP service, and proves to each other the two ends of a tensor connection."""


def read_secret(environ: Mapping[str, str], variable: str) -> str:
    """The secret of ``variable``, "" where neither it nor ``<variable>_FILE`` is set; blanks around it are no part.

    Raises SecretError: the file cannot be read, or is empty, or the two differ.
    """
    value = environ.get(variable, "").strip()
    name = environ.get(f"{variable}_FILE", "")
    if not name:
        return value
    try:
        content = Path(name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SecretError(f"{variable}_FILE names {name}, which cannot be read: {reason}") from error
    if not content:
        raise SecretError(f"{variable}_FILE names {name}, which is empty: put the secret into it")
    if value not in ("", content):
        raise SecretError(f"{variable} and the file of {variable}_FILE differ: set one of them")
    return content
