"""Log lines of code that also runs inside an inference server, whose Python need not have structlog."""

from __future__ import annotations

import logging
from typing import Any

try:
    import structlog
except ImportError:
    structlog = None


class _PlainLogger:
    """The server's own log, in the words of ours."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(name)

    def info(self, event: str, **fields: object) -> None:
        self._log.info("%s %s", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._log.warning("%s %s", event, fields)


def get_logger(name: str) -> Any:
    """As structlog's."""
    return structlog.get_logger(name) if structlog is not None else _PlainLogger(name)
