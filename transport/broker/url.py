"""A broker's URL as text: what may be shown of it, and where on this host a socket lies.

    redis://host:port   rediss://host:port   unix:///path/of/the/socket

Owns: how a password comes apart from a URL, and how a path goes into one. Never: connects.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit


def without_password(url: str) -> tuple[str, str]:
    """The URL as it may stand on a command line, which everybody on the host can read, and the password that it held.

    "" where it held none. The user's name stays. Raises ValueError for what is no URL.
    """
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    name, _, written = user.partition(":")
    query = parse_qsl(parts.query)
    password = dict(query).get("password") or unquote(written)
    if not password:
        return url, ""
    place = f"{name}@{host}" if name else host
    options = urlencode([(option, value) for option, value in query if option != "password"])
    # put together by hand: urlunsplit writes unix:/path for unix:///path
    return f"{parts.scheme}://{place}{parts.path}" + (f"?{options}" if options else ""), password


def socket_url(path: Path) -> str:
    """The URL of the socket at ``path``, which is absolute."""
    return "unix://" + quote(str(path))
