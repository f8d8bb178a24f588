"""A real headless Chromium, driven over a pipe with its DevTools protocol: no driver, no library, no port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-breakpad",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
ANSWER_S = 60.0
POLL_S = 0.05
NETWORK_CHANGED = "net::ERR_NETWORK_CHANGED"


def find_chromium() -> str | None:
    """Path of a Chromium or Chrome, None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page. Use as a context: it leaves no process behind.

    profile: an empty directory.  errors: what the page's console and the content-security policy complained of, but for
    requests that end because this machine got another network.
    """

    def __init__(self, chromium: str, profile: Path) -> None:
        self._chromium = chromium
        self._profile = profile
        self._number = 0
        self._unread = b""
        self._session = ""
        self._loads = 0
        self._network_changes = 0
        self.errors: list[str] = []

    def __enter__(self) -> Browser:
        read_ours, write_theirs = os.pipe()
        read_theirs, write_ours = os.pipe()
        log = os.open(self._profile.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        # Chromium reads commands from descriptor 3 and answers on 4. Lifted out of the way first: ours may be 3 or 4.
        commands, answers = (os.dup2(end, 100 + index) for index, end in enumerate((read_theirs, write_theirs)))
        self._pid = os.posix_spawn(
            self._chromium,
            [self._chromium, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
                (os.POSIX_SPAWN_DUP2, commands, 3),
                (os.POSIX_SPAWN_DUP2, answers, 4),
            ],
            setpgroup=0,
        )
        for descriptor in (log, read_theirs, write_theirs, commands, answers):
            os.close(descriptor)
        self._read, self._write = read_ours, write_ours
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._read)
        os.close(self._write)

    def open(self, url: str) -> None:
        """Go there, and wait until the page and its scripts are loaded."""
        self._load("Page.navigate", url=url)

    def reload(self) -> None:
        """The same page once more."""
        self._load("Page.reload")

    def _load(self, method: str, **params: Any) -> None:
        """Load a page, and again where Chromium threw some of it away because this machine got another network: each
        test with a second host gives it one."""
        deadline_s = time.monotonic() + ANSWER_S
        is_whole = False
        while not is_whole:
            loads, changes = self._loads, self._network_changes
            self._call(method, **params)
            while self._loads == loads:
                self._notice(self._next(deadline_s))
            self.evaluate("0")  # what is said of the last resource comes before this answer
            is_whole = self._network_changes == changes
            method, params = (
                "Page.reload",
                {},
            )  # to go where the page is already would load nothing: only a #key differs

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page. Raises AssertionError when it throws."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What a reader sees of the first match, "" where there is none."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")

    def wait_for(self, expression: str, *, timeout_s: float = 60.0) -> Any:
        """Poll until the expression is truthy. Returns it; fails with the page's text and errors."""
        deadline_s = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline_s, (
                f"never true: {expression}\nerrors: {self.errors}\n{self.evaluate('document.body.innerText')}"
            )
            time.sleep(POLL_S)
        return value

    def press(self, key: str) -> None:
        """One key, as from a keyboard."""
        code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """The user's colour scheme, "light" or "dark"."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path, *, size: tuple[int, int] | None = None, quality: int | None = None) -> None:
        """The page, or as much from its top left as ``size`` says (width, height), as PNG, or as WebP of ``quality``
        (0 to 100), by the path's suffix."""
        form: dict[str, Any] = {"format": path.suffix.removeprefix(".")} | (
            {} if quality is None else {"quality": quality}
        )
        if size is not None:
            form["clip"] = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True, **form)
        path.write_bytes(base64.b64decode(answer["data"]))

    # -- the protocol: JSON objects, each ended by a zero byte

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + ANSWER_S
        while (answer := self._next(deadline_s)).get("id") != self._number:
            self._notice(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _next(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, "Chromium does not answer"
            chunk = os.read(self._read, 1 << 16)
            assert chunk, f"Chromium ended: {self._profile.with_suffix('.log').read_text(errors='replace')[-2000:]}"
            self._unread += chunk
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _notice(self, event: dict[str, Any]) -> None:
        """Count loaded pages; keep what goes wrong in them."""
        params = event.get("params", {})
        self._loads += event.get("method") == "Page.loadEventFired"
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            text = params["entry"]["text"]
            if NETWORK_CHANGED in text:
                self._network_changes += 1
            else:
                self.errors.append(text)
