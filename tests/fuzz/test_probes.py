"""Rebinding, forged requests, traversal: one probe a line against a real service, and the answer that each must get.

None of the answers tells the run's key or what is in a file of the machine.
"""

from __future__ import annotations

import re

from orchestrator.observability.http.routes import STATIC
from tests.fuzz.http_requests import KEY, served, status_of

HOST = "Host: 127.0.0.1:@PORT@"
SET = '{"key": "run.batches", "value": 1}'

PROBES: tuple[tuple[str, str, tuple[str, ...], str, set[int]], ...] = (
    # DNS rebinding: a name that an attacker's page was loaded from now means this machine
    ("a foreign host", "GET /status", ("Host: evil.example", KEY), "", {403}),
    ("a foreign host with our port", "GET /status", ("Host: evil.example:@PORT@", KEY), "", {403}),
    ("a host that begins like ours", "GET /status", ("Host: 127.0.0.1.evil.example", KEY), "", {403}),
    ("a host that ends like ours", "GET /status", ("Host: evil-localhost", KEY), "", {403}),
    ("a user in the host", "GET /status", ("Host: 127.0.0.1@evil.example", KEY), "", {403}),
    ("no host's name", "GET /status", ("Host: ", KEY), "", {403}),
    ("an address that is none", "GET /status", ("Host: [::1", KEY), "", {403}),
    ("every interface", "GET /status", ("Host: 0.0.0.0:@PORT@", KEY), "", {403}),
    ("two hosts", "GET /status", ("Host: evil.example", HOST, KEY), "", {400, 403}),
    ("no host", "GET /status", (KEY,), "", {400, 403}),
    ("another URL in the request", "GET http://evil.example/status", ("Host: evil.example", KEY), "", {400, 403, 404}),
    ("the open page by a foreign host", "GET /", ("Host: evil.example",), "", {403}),
    ("health by a foreign host", "GET /health", ("Host: evil.example",), "", {403}),
    # requests that a page of another origin makes its visitor's browser send
    ("another origin", "POST /control/drain", (HOST, KEY, "Origin: http://evil.example"), "", {403}),
    ("no origin's name", "POST /control/drain", (HOST, KEY, "Origin: null"), "", {403}),
    ("an origin of another port", "POST /control/drain", (HOST, KEY, "Origin: http://127.0.0.1:1"), "", {403}),
    ("an origin that is none", "POST /control/drain", (HOST, KEY, "Origin: http://[::1"), "", {403}),
    ("a form", "POST /control/drain", (HOST, "Content-Type: application/x-www-form-urlencoded"), "a=b", {401}),
    ("plain text", "POST /control/set", (HOST, "Content-Type: text/plain"), SET, {401}),
    ("a form with files", "POST /update", (HOST, "Content-Type: multipart/form-data; boundary=x"), "--x--", {401}),
    ("an image's request for samples", "GET /generate/mine", (HOST,), "", {401}),
    ("a cookie", "GET /status", (HOST, "Cookie: key=@KEY@; secret=@KEY@"), "", {401}),
    ("a password", "GET /status", (HOST, "Authorization: Basic QEtFWUA6QEtFWUA="), "", {401}),
    ("the key in the URL", "GET /status?key=@KEY@&secret=@KEY@", (HOST,), "", {401}),
    ("half of the key", "GET /status", (HOST, "Authorization: Bearer @KE"), "", {401}),
    ("an empty key", "GET /status", (HOST, "Authorization: Bearer "), "", {401}),
    ("a preflight", "OPTIONS /control/set", (HOST, "Access-Control-Request-Method: POST"), "", {401}),
    ("a script's read of the status", "GET /status", (HOST, "Origin: http://evil.example"), "", {403}),
    # files that are not of the page
    ("dots", "GET /../api.secret", (HOST, KEY), "", {400, 404}),
    ("many dots", "GET /../../../../../../etc/passwd", (HOST, KEY), "", {400, 404}),
    ("escaped dots", "GET /%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd", (HOST, KEY), "", {400, 404}),
    ("escaped slashes", "GET /..%2f..%2f..%2f..%2fetc%2fpasswd", (HOST, KEY), "", {400, 404}),
    ("backslashes", "GET /..\\..\\..\\..\\etc\\passwd", (HOST, KEY), "", {400, 404}),
    ("escaped twice", "GET /%252e%252e/%252e%252e/etc/passwd", (HOST, KEY), "", {400, 404}),
    ("an absolute path", "GET //etc/passwd", (HOST, KEY), "", {400, 404}),
    ("a NUL", "GET /app.js%00/../../api.secret", (HOST, KEY), "", {400, 404}),
    ("dots without a key", "GET /app.js/../../api.secret", (HOST,), "", {400, 401, 404}),
    ("dots in a request's name", "GET /generate/..%2f..%2fapi.secret", (HOST, KEY), "", {404}),
    ("dots in the name of a new one", "POST /generate", (HOST, KEY), '{"prompts": ["x"], "id": "../x"}', {400}),
    ("weights elsewhere", "POST /update", (HOST, KEY), '{"path": "../../../etc/passwd", "wait_s": 30}', {400}),
    ("weights at an absolute path", "POST /update", (HOST, KEY), '{"path": "/etc/passwd", "wait_s": 30}', {400}),
    ("weights behind a NUL", "POST /update", (HOST, KEY), '{"path": "a\\u0000b", "wait_s": 30}', {400}),
)


def test_probes_get_nothing_and_a_good_client_is_answered():
    """In one test: a service takes seconds to start. That good ones pass shows what the others are refused for."""
    own = "Origin: http://127.0.0.1:@PORT@"
    good = [(HOST, KEY), (HOST, KEY, own), (HOST.replace("127.0.0.1", "localhost"), KEY)]
    with served() as service:
        assert [status_of(service.ask(_said("GET /status", headers))) for headers in good] == [200] * len(good)
        assert status_of(service.ask(_said("GET /", (HOST,)))) == 200
        for name, line, headers, body, statuses in PROBES:
            answer = service.ask(_said(line, headers, body))
            assert status_of(answer) in statuses, (name, answer[:300])
            assert not re.search(rb"root:|access-control-allow|" + re.escape(service.key.encode()), answer), name
        assert status_of(service.ask(_said("GET /status", good[0]))) == 200, "it was not drained"


def _said(line: str, headers: tuple[str, ...], body: str = "") -> bytes:
    head = [f"{line} HTTP/1.1", *headers, *([f"Content-Length: {len(body)}"] if body else [])]
    return "\r\n".join([*head, "", body]).encode()


def test_the_live_page_makes_no_markup_of_what_it_is_told():
    scripts = {file.name: file.read_text(encoding="utf-8") for file in STATIC.iterdir() if file.name.endswith(".js")}
    assert scripts
    makes_markup = re.compile(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function|srcdoc)\b")
    assert not {name for name, text in scripts.items() if makes_markup.search(text)}
