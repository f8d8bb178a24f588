"""The part of Kubernetes' API that the launcher uses, with answers in the form that its documentation gives them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

LATE_S = 30.0


class KubernetesApi:
    """Pods by name, as they were created; a test sets their status. asked: (method, path) of every request."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str]] = []
        self.refuse: tuple[int, str] | None = None
        self.refuse_lists: tuple[int, str] | None = None
        self.answers = threading.Event()
        """While it is not set, what is created is created, and its answer does not come."""
        self.answers.set()
        self.url = ""

    def status(self, name: str, phase: str, **more: Any) -> None:
        self.objects[name]["status"] = {"phase": phase, **more}

    def ended(self, name: str, code: int, **more: str) -> None:
        """more: reason and message, as the node has them."""
        state = {"terminated": {"exitCode": code, **more}}
        container = {"name": "streamrl", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": state}
        self.status(name, "Failed" if code else "Succeeded", containerStatuses=[container])

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        place = urlsplit(path)
        self.asked.append((method, place.path))
        if self.refuse is not None and method == "POST":
            return self.refuse[0], {"kind": "Status", "status": "Failure", "message": self.refuse[1]}
        if self.refuse_lists is not None and method == "GET":
            return self.refuse_lists[0], {"kind": "Status", "status": "Failure", "message": self.refuse_lists[1]}
        name = place.path.rpartition("/")[2]
        if method == "POST":
            made = json.loads(body)
            if made["metadata"]["name"] in self.objects:
                return 409, {"kind": "Status", "reason": "AlreadyExists"}
            self.objects[made["metadata"]["name"]] = {**made, "status": {"phase": "Pending"}}
            self.answers.wait(LATE_S)
            return 201, made
        if method == "DELETE":
            return (200, {"kind": "Status"}) if self.objects.pop(name, None) else (404, {"kind": "Status"})
        if place.path.endswith("/log"):
            return 200, "a line of the pod\n"
        selector = parse_qs(place.query)["labelSelector"][0]
        kind, version = ("Job", "batch/v1") if name == "jobs" else ("Pod", "v1")
        found = [one for one in self.objects.values() if one["kind"] == kind]
        if "notin" not in selector:
            key, _, value = selector.partition("=")
            found = [one for one in found if one["metadata"]["labels"].get(key) == value]
        return 200, {"kind": f"{kind}List", "apiVersion": version, "metadata": {}, "items": found}


@contextmanager
def kubernetes_api() -> Iterator[KubernetesApi]:
    api = KubernetesApi()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            code, said = api.answer(self.command, self.path, body)
            content = said.encode() if isinstance(said, str) else json.dumps(said).encode()
            self.send_response(code)
            self.send_header("content-type", "text/plain" if isinstance(said, str) else "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, format: str, *args: Any) -> None:
            """A test's output is its own."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    api.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield api
    finally:
        api.answers.set()
        server.shutdown()
        thread.join()
        server.server_close()
