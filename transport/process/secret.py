"""Secrets: those of the environment, the user's own on this host, and the key that each purpose makes of one.

Container engines hand a secret over as a file, because a process's environment is shown by many tools: ``read_secret``
takes the value of a variable, or of the file that ``<variable>_FILE`` names.

Invariant: a shared secret is logged and sent nowhere, and used for nothing but keys: the key of one purpose (HTTP
clients send theirs in clear) gives away neither that of another nor the secret.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from transport.errors import ForeignError, SecretError
from transport.process.files import private_directory, read_own

BROKER_PASSWORD = "STREAMRL_BROKER_PASSWORD"
SHARED_SECRET = "STREAMRL_SECRET"  # opens the HTTP service, and proves the ends of a tensor connection to each other
ENGINE_KEY = "STREAMRL_ENGINE_KEY"  # what an inference server that runs elsewhere asks for
MIN_CHARACTERS = 16
"""Of a shared secret. One recorded handshake is enough to try secrets offline, some 10^10 a second: all of 16 random
hexadecimal digits take 60 years, all of 8 letters 20 seconds."""
HOW_TO_MAKE = 'python3 -c "import secrets; print(secrets.token_urlsafe(32))"'


class Purpose(StrEnum):
    TENSORS = "tensors"  # proof between the two ends of a connection for weights or columns (tensors/wire.py)
    HTTP = "http"  # bearer token and password of the HTTP service
    ENDPOINT = "endpoint"  # bearer token of agents (docs/endpoint.md)


def is_made(key: str) -> bool:
    """Whether ``key`` has the form of those that we make: 32 to 64 characters of URL-safe base64."""
    return re.fullmatch(r"[A-Za-z0-9_-]{32,64}", key) is not None


def derive(secret: str | bytes, purpose: Purpose) -> str:
    """The key of ``purpose``: 43 characters of URL-safe base64, from which neither ``secret`` nor another key follows.

    HMAC-SHA-256 of ``streamrl <purpose>`` under the secret; in a shell:
    ``printf 'streamrl http' | openssl dgst -sha256 -hmac "$STREAMRL_SECRET" -binary | basenc --base64url | tr -d =``
    """
    key = secret.encode() if isinstance(secret, str) else secret
    digest = hmac.digest(key, f"streamrl {purpose}".encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def check_strength(secret: str | bytes, name: str) -> None:
    """Raises SecretError for a shared secret that is too short. name: where it was set."""
    if len(secret) < MIN_CHARACTERS:
        raise SecretError(
            f"{name} has {len(secret)} characters and needs {MIN_CHARACTERS} or more: make one with {HOW_TO_MAKE}"
        )


def read_secret(environ: Mapping[str, str], variable: str) -> str:
    """The secret of ``variable``, "" where neither it nor ``<variable>_FILE`` is set; blanks around it are no part.

    Raises SecretError: the file cannot be read, or is empty, or the two differ, or a shared secret is too short.
    """
    value = environ.get(variable, "").strip()
    if name := environ.get(f"{variable}_FILE", ""):
        try:
            content = Path(name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise SecretError(f"{variable}_FILE names {name}, which cannot be read: {reason}") from error
        if not content:
            raise SecretError(f"{variable}_FILE names {name}, which is empty: put the secret into it")
        if value not in ("", content):
            raise SecretError(f"{variable} and the file of {variable}_FILE differ: set one of them")
        value = content
    if value and variable == SHARED_SECRET:  # a broker's password is whatever the broker's owner chose
        check_strength(value, variable)
    return value


def secrets_env(broker_password: str, shared_secret: str) -> dict[str, str]:
    """The environment by which a process that is started learns them; "" is none."""
    given = {BROKER_PASSWORD: broker_password, SHARED_SECRET: shared_secret}
    return {variable: value for variable, value in given.items() if value}


# --- the user's own ---------------------------------------------------------------------------------------------------


def own_secret(directories: Sequence[Path] = ()) -> bytes:
    """The secret of this user on this host, made when it is first asked for, where none was set.

    On loopback there are no other machines, only other users; a file that one user alone can read tells them apart, and
    reaches every program of that user, also those that know no run (storage units, the loader inside a server).

    directories: where it may be, the first that can be written to; none: below the home directory, else /dev/shm.
    Raises SecretError: nowhere, or others can read or have written what is there.
    """
    problems: list[str] = []
    for directory in directories or list(own_directories()):
        path = directory / "secret"
        try:
            with contextlib.suppress(FileNotFoundError):
                return _read_own(path)
            _make_own(path)
            return _read_own(path)
        except ForeignError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
    raise SecretError(f"no file for the secret of this user: {'; '.join(problems)}; set {SHARED_SECRET} instead")


def own_directories() -> Iterator[Path]:
    """Where the secret of this user may lie; nothing else does."""
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield Path.home() / ".local" / "state" / "streamrl"
    yield Path("/dev/shm") / f"streamrl-user-{os.geteuid()}"


def _read_own(path: Path) -> bytes:
    try:
        content = read_own(path, max_bytes=4096, secret=True).strip()
    except ForeignError as error:
        raise SecretError(f"{error}, or set {SHARED_SECRET} instead") from error
    check_strength(content, str(path))
    return content


def _make_own(path: Path) -> None:
    """Whole when it gets its name; where another process was faster, its file stays.

    Raises: ForeignError: the directory is another user's, or a link.  OSError.
    """
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    private_directory(path.parent)
    draft = path.with_name(f".secret-{secrets.token_hex(6)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(secrets.token_urlsafe(32).encode())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
