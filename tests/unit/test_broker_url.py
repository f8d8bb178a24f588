"""A broker's password never stands where everybody on the host can read it."""

from __future__ import annotations

import pytest
from redis.asyncio.connection import parse_url

from transport.broker.base import without_password


@pytest.mark.parametrize(
    ("url", "shown", "password"),
    [
        ("redis://host:1/2", "redis://host:1/2", ""),
        ("redis://:p%40w@host:1/2", "redis://host:1/2", "p@w"),
        ("rediss://user:pw@host?db=2", "rediss://user@host?db=2", "pw"),
        ("redis://user:pw@[::1]:77", "redis://user@[::1]:77", "pw"),
        ("redis://host?password=pw&db=2", "redis://host?db=2", "pw"),
        ("unix://user@/a/b.sock?db=1&password=pw", "unix://user@/a/b.sock?db=1", "pw"),
        ("unix:///a/b.sock", "unix:///a/b.sock", ""),
    ],
)
def test_the_password_comes_apart_from_the_url(url: str, shown: str, password: str):
    assert without_password(url) == (shown, password)
    before, after = dict(parse_url(url)), dict(parse_url(shown))
    assert (before.pop("password", ""), before) == (password, after)
