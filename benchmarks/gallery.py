"""``make gallery``: the pictures of docs/gallery.md, from two real runs of this checkout.

The first run is drawn while it goes on: its live page, on a wide screen and on a phone, and its terminal. Its report,
its timeline, and its comparison with the second run are those that the commands write. It needs Chromium, and the
minutes of two runs; without ARGS those of the preset smollm2, the second with another learning rate.

    python -m benchmarks.gallery [--preset tiny] [--set run.batches=20] [--second-set trainer.lr=1e-5] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import version
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from benchmarks.docs import ROOT, end_session
from orchestrator.config.load import resolve
from tests.fakes.browser import Browser, find_chromium
from tests.fakes.command_line import start_in_terminal

PAGE = ROOT / "docs" / "gallery.md"
COLUMNS, ROWS = 100, 42
"""Of the terminal that is drawn."""
DRAWN_AT = 0.6
"""Share of the batches at which the first run is drawn."""
LARGEST_BYTES = 150_000
RUN_LIMIT_S = 3600.0
SETTLE_S = 3.0
"""For what a page draws last."""
DRAWN = "document.body.dataset.link === 'live' && document.querySelectorAll('#curves canvas').length > 0"
"""When the live page shows the run."""
BIN = Path(sys.executable).parent


class Terminal:
    """What stands in a terminal after what was written to it: enough of one for rich's live tables."""

    def __init__(self) -> None:
        self._lines: list[list[tuple[str, str]]] = [[]]  # (character, the sequences of its style)
        self._row = self._column = 0
        self._style = ""

    def write(self, text: str) -> None:
        for control, parameter, final, character in re.findall(r"(\x1b\[([0-9;?]*)([A-Za-z]))|([^\x1b])", text):
            if final == "m":
                self._style = "" if parameter in ("", "0") else self._style + control
            elif final == "A":
                self._row = max(0, self._row - int(parameter or 1))
            elif final == "K":
                del self._lines[self._row][0 if parameter == "2" else self._column :]
            elif character == "\r":
                self._column = 0
            elif character == "\n":
                self._row += 1
                self._lines += [[] for _ in range(self._row + 1 - len(self._lines))]
            elif character and character.isprintable():
                line = self._lines[self._row]
                line += [(" ", "")] * (self._column + 1 - len(line))
                line[self._column] = (character, self._style)
                self._column += 1

    def shown(self) -> Text:
        """The last rows, in their colours."""
        while self._lines and not self._lines[-1]:
            self._lines.pop()
        rows = ["".join(f"{style}{character}\x1b[0m" for character, style in row) for row in self._lines[-ROWS:]]
        return Text.from_ansi("\n".join(rows))


class Run:
    """``streamrl-orchestrator run`` in a terminal of its own."""

    def __init__(self, directory: Path, preset: str, name: str, settings: Sequence[str]) -> None:
        self.directory = directory / "runs" / name
        self.batches = resolve(preset, [], settings, {}).settings.run.batches
        self.command = ["streamrl-orchestrator", "run", "--preset", preset, "--name", name]
        self.command += [word for setting in settings for word in ("--set", setting)]
        self.terminal = Terminal()
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            environment.pop(name, None)
        command = [BIN / self.command[0], *self.command[1:]]
        self._process, self._ours = start_in_terminal(
            command, cwd=directory, environ=environment, rows=ROWS, columns=COLUMNS
        )

    def until(self, done: Callable[[], bool]) -> None:
        """Let it go on, and read what it writes, until ``done`` or its end. Raises SystemExit after RUN_LIMIT_S."""
        deadline_s = time.monotonic() + RUN_LIMIT_S
        while not done() and self._read():
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{' '.join(self.command)}: not done after {RUN_LIMIT_S:.0f} s")

    def trained(self) -> int:
        path = self.directory / "metrics.jsonl"
        return path.read_text(encoding="utf-8").count('"batch"') if path.exists() else 0

    def _read(self) -> bool:
        if not select.select([self._ours], [], [], 0.5)[0]:
            return True
        with suppress(OSError):  # EIO: nobody holds the other end any more
            if written := os.read(self._ours, 1 << 16):
                self.terminal.write(written.decode(errors="replace"))
                return True
        return False

    def end(self) -> None:
        """See it through. Raises SystemExit with what it said when it fails."""
        self.until(lambda: False)
        if code := self._process.wait():
            raise SystemExit(f"{' '.join(self.command)}: exit code {code}\n{self.terminal.shown().plain}")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        end_session(self._process)
        os.close(self._ours)


class Gallery:
    """Draws pages into ``out``."""

    def __init__(self, browser: Browser, out: Path) -> None:
        self._browser = browser
        self._out = out

    def draw(self, name: str, url: str, *, width: int = 1280, height: int | None = None, ready: str = "true") -> None:
        """The page, or its uppermost ``height`` pixels, once ``ready`` is true in it; in few bytes."""
        self._browser.resize(width, 900)
        self._browser.open(url)
        if self._browser.evaluate("location.protocol") == "chrome-error:":
            raise SystemExit(f"{name}: nobody answers at {url.partition('#')[0]}; is the run too short to be drawn?")
        self._browser.wait_for(ready)
        whole = self._browser.evaluate("Math.ceil(document.documentElement.getBoundingClientRect().height)")
        self._browser.resize(width, whole)  # so that nothing is scrolled
        time.sleep(SETTLE_S)
        path = self._out / f"{name}.webp"
        for quality in (90, 75, 60, 45, 30):
            self._browser.screenshot(path, size=(width, min(whole, height or whole)), quality=quality)
            if path.stat().st_size <= LARGEST_BYTES:
                break
        print(f"{path}  {path.stat().st_size:,} bytes", flush=True)

    def draw_terminal(self, run: Run, work: Path) -> None:
        console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
        console.print(run.terminal.shown())
        drawn = console.export_svg(title=" ".join(run.command[:4]))
        ((width, height),) = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)
        svg = work / "terminal.svg"  # without a size of its own it would be as high as the window
        svg.write_text(drawn.replace("<svg ", f'<svg width="{width}" height="{height}" ', 1), encoding="utf-8")
        self.draw("terminal", svg.as_uri(), width=round(float(width)))


def call(*arguments: str, cwd: Path) -> None:
    subprocess.run([BIN / arguments[0], *arguments[1:]], cwd=cwd, check=True)


def draw_all(gallery: Gallery, work: Path, preset: str, first: Sequence[str], second: Sequence[str]) -> Run:
    with Run(work, preset, "first", first) as run:
        run.until(lambda: run.trained() >= run.batches * DRAWN_AT)
        address, key = ((run.directory / name).read_text().strip() for name in ("api.address", "api.secret"))
        gallery.draw_terminal(run, work)
        gallery.draw("live-page", f"http://{address}/#key={key}", ready=DRAWN)
        gallery.draw("live-page-phone", f"http://{address}/?phone#key={key}", width=400, height=1600, ready=DRAWN)
        run.end()
    with Run(work, preset, "second", [*first, *second]) as other:
        other.end()
    call("streamrl-orchestrator", "timeline", "runs/first", "--svg", cwd=work)
    call("streamrl-orchestrator", "compare", "runs/first", "runs/second", cwd=work)
    gallery.draw("report", (run.directory / "report.html").as_uri(), height=1800)
    gallery.draw("report-phone", (run.directory / "report.html").as_uri(), width=400, height=1600)
    gallery.draw("timeline", (run.directory / "timeline.svg").as_uri())
    gallery.draw("comparison", (work / "comparison.html").as_uri(), height=1600)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="smollm2")
    parser.add_argument("--set", dest="first", action="append", default=[], help="a setting of both runs")
    parser.add_argument("--second-set", dest="second", action="append", help="a setting of the second run alone")
    parser.add_argument("--out", type=Path, help="where the pictures go; without: docs/gallery, and its page says so")
    options = parser.parse_args()
    chromium = find_chromium()
    if chromium is None:
        sys.exit("make gallery needs Chromium to draw with: sudo apt-get install chromium fonts-dejavu-core")
    out = options.out or PAGE.with_suffix("")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="streamrl-gallery-") as directory:
        work = Path(directory)
        with Browser(chromium, work / "profile") as browser:
            run = draw_all(
                Gallery(browser, out), work, options.preset, options.first, options.second or ["trainer.lr=1e-5"]
            )
        last = json.loads((run.directory / "metrics.jsonl").read_text().splitlines()[-1])
    if options.out is None:
        made = (
            f"Made {date.today()} with StreamRL {version('streamrl')} by `make gallery` from `{' '.join(run.command)}`"
        )
        made += f", which took {last['time_s']:.0f} s."
        PAGE.write_text(re.sub(r"^Made \d.*$", made, PAGE.read_text(), flags=re.MULTILINE))


if __name__ == "__main__":
    main()
