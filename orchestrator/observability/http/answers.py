"""What all routes share: numbers in a query, and the form of every answer that is JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

NUMBER = re.compile(r"[0-9]{1,18}")
"""No number here needs more digits, and int() refuses to read very many."""


def number_of(text: str) -> int | None:
    """A whole number from 0 on that a client sent, None for anything else."""
    return int(text) if NUMBER.fullmatch(text) else None


def answer(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON that a browser can read: a loss that is not a number becomes null."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


async def name_error(request: Request, error: Exception) -> Response:
    """``{"error": why}`` for what a route refused."""
    assert isinstance(error, HTTPException)  # the only kind it is registered for
    return answer({"error": error.detail}, error.status_code, error.headers)
