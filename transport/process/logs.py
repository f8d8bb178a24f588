"""Structured logs: one JSON object a line on stderr, the same in every process."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logs(*, process: str, level: int = logging.INFO) -> None:
    """Send structlog to stderr as JSON lines. process: its name, in every line."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
