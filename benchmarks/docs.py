"""Figure ``docs``: what README, CONTRIBUTING, docs/*.md and the folders' READMEs print is run as it is printed.

    commands         commands of ``sh`` blocks, programs of ``python`` blocks, and ``toml`` blocks (read by
                     ``run --dry-run``) that were run
    commands_failed  those that ended with another exit code than 0, or not in time
    skipped          reason -> commands that were not run for it

All pages share one directory, a copy of its files with this checkout's environment, and are tried in
the order README, CONTRIBUTING, docs: runs that README makes are there for the others, also in later calls with the same
``--keep``. ``.venv/bin`` is not on the path.
A Valkey server with the password "..." listens on a free port, ``{redis}`` below.

Comments right before a block, invisible where Markdown is rendered, say how it is tried where it cannot be as it is:

    <!-- docs: skip: REASON -->      not run: it needs what a test machine lacks
    <!-- docs: needs: PROGRAM -->    skipped where that is not installed
    <!-- docs: swap: A => B -->      B takes the place of A, which must be there: fewer batches, a smaller model
    <!-- docs: first: COMMAND -->    run before it, in the same shell
    <!-- docs: beside: COMMAND -->   runs beside the block, and is ended after it
    <!-- docs: keep: CONDITION -->   the block itself goes on, and is ended after the page's last block
    <!-- docs: until: CONDITION -->  the block starts (``beside``) once this command succeeds
    <!-- docs: terminals -->         each command in a terminal of its own, all at once

    python -m benchmarks.docs [--pages docs/service.md,docs/client.md] [--list] [--keep DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.checkouts import copy_files

ROOT = Path(__file__).parents[1]
LANGUAGES = ("sh", "python", "toml", "json", "text")
"""Of blocks. The first three are run; ``json`` and ``text`` are what is shown, never what is typed."""
DIRECTIVES = ("skip", "needs", "swap", "first", "beside", "keep", "until", "terminals")
LIMIT_S = 600.0
"""For one block; a machine at load 8 keeps it."""
STOP_S = 60.0
POLL_S = 0.2
DRY_RUN = ".venv/bin/streamrl-orchestrator run --dry-run --config"
PASSWORD = "..."  # as the pages print it
STANDS_FOR = {
    "small": "--set model.path=random:qwen3-tiny --set run.batches=4 --set sampling.max_new_tokens=16 "
    "--set pipeline.groups_per_batch=4 --set pipeline.drop_no_signal=false",
    "endless": "--set run.batches=1000000 --set generation.engine=emulated --set trainer.engine=emulated",
}
"""What ``{small}`` and ``{endless}`` say in a comment: a run of seconds, and one that a block can look into."""

_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(r"<!-- docs: (\w+)(?:: (.*?))? -->\n", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """page: path from the root.  line: of its first line, from 1.  directives: (kind, value), in order."""

    page: str
    line: int
    language: str
    text: str
    directives: tuple[tuple[str, str], ...]

    def all(self, kind: str) -> list[str]:
        return [value for name, value in self.directives if name == kind]

    def one(self, kind: str) -> str | None:
        return next(iter(self.all(kind)), None)

    def tried(self, stands_for: Mapping[str, str]) -> str:
        """Its text with everything swapped. Raises ValueError when something to be swapped is not there."""
        text = self.text
        for swap in self.all("swap"):
            old, arrow, new = swap.partition(" => ")
            if not arrow or old not in text:
                raise ValueError(f"{self.page}:{self.line}: nothing to swap for {swap!r}")
            text = text.replace(old, new)
        return expand(text, stands_for)


def expand(text: str, stands_for: Mapping[str, str]) -> str:
    for name, value in stands_for.items():
        text = text.replace("{" + name + "}", value)
    return text


def pages() -> list[str]:
    """Every tracked Markdown file, in the order in which they are tried."""
    tracked = subprocess.check_output(["git", "ls-files", "-z", "*.md"], cwd=ROOT, text=True).split("\0")[:-1]
    first = ("README.md", "CONTRIBUTING.md")
    return [*first, *sorted(set(tracked) - set(first), key=lambda page: (not page.startswith("docs/"), page))]


def blocks_of(page: str, text: str) -> list[Block]:
    """The fenced blocks of a page, each with the comments right before it."""
    found: list[Block] = []
    for fence in _FENCE.finditer(text):
        before = text[: fence.start()]
        directives: list[tuple[str, str]] = []
        while (start := before.rfind("<!-- docs: ")) >= 0 and (comment := _DIRECTIVE.fullmatch(before[start:])):
            directives.insert(0, (comment[1], " ".join((comment[2] or "").split())))
            before = before[:start]
        line = text.count("\n", 0, fence.start(2)) + 1
        found.append(Block(page=page, line=line, language=fence[1], text=fence[2], directives=tuple(directives)))
    return found


def commands_of(script: str) -> list[tuple[int, str]]:
    """Its commands with the number of the line each begins at, from 0. One that goes on over lines is one."""
    commands: list[tuple[int, str]] = []
    begun: list[str] = []
    for number, line in enumerate(script.splitlines()):
        if not begun and (not line.strip() or line.lstrip().startswith("#")):
            continue
        begun.append(line)
        if is_whole("\n".join(begun)):
            commands.append((number + 1 - len(begun), "\n".join(begun)))
            begun = []
    return [*commands, (0, "\n".join(begun))] if begun else commands


def is_whole(command: str) -> bool:
    """Is nothing missing at its end? Simple lines are answered without asking a shell."""
    if command.endswith("\\"):
        return False
    if not re.search(r"[\n(<'\"]|\b(for|while|if|case)\b", command):
        return True
    checked = subprocess.run(["bash", "-n"], input=command + "\n", capture_output=True, text=True, check=False)
    return checked.returncode == 0 and not checked.stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one command. seconds: of its block, on the block's first command; else 0."""

    where: str
    command: str
    failure: str = ""  # empty: it ended with 0
    skipped: str = ""
    seconds: float = 0.0


class Shell:
    """Runs blocks in ``work``."""

    def __init__(self, work: Path, environment: Mapping[str, str], stands_for: Mapping[str, str]) -> None:
        self._work = work
        self._environment = environment
        self._stands_for = stands_for

    def try_page(self, page: str, text: str) -> Iterator[Outcome]:
        with ExitStack() as kept:
            for block in blocks_of(page, text):
                if block.language in ("sh", "python", "toml"):
                    yield from self._try(block, kept)

    def _try(self, block: Block, kept: ExitStack) -> list[Outcome]:
        where = f"{block.page}:{block.line}"
        commands = commands_of(block.text) if block.language == "sh" else [(0, block.text)]
        path = self._environment["PATH"]
        absent = [program for program in block.all("needs") if not shutil.which(program, path=path)]
        if why := block.one("skip") or (f"{absent[0]} is not installed" if absent else ""):
            return [Outcome(where=where, command=command, skipped=why) for _, command in commands]
        started_s = time.monotonic()
        try:
            failures = self._failures(block, kept)
        except (ValueError, TimeoutError) as error:
            failures = {number: str(error) for number in range(len(commands))}
        seconds = time.monotonic() - started_s
        return [
            Outcome(
                where=f"{block.page}:{block.line + line}",
                command=command,
                failure=failures.get(number, ""),
                seconds=0.0 if number else seconds,
            )
            for number, (line, command) in enumerate(commands)
        ]

    def _failures(self, block: Block, kept: ExitStack) -> dict[int, str]:
        """Number of each command of the block that failed, and how."""
        script = self._script(block, block.tried(self._stands_for))
        until = block.one("until")
        with ExitStack() as beside:
            for command in block.all("beside"):
                running = beside.enter_context(self._running(expand(command, self._stands_for)))
                self._wait_for(until or "true", running)
            if (condition := block.one("keep")) is None:
                with tempfile.TemporaryFile("w+") as reports, self._running(script, reports.fileno()) as running:
                    return self._see_through(running, reports)
            reports = kept.enter_context(tempfile.TemporaryFile("w+"))
            running = kept.enter_context(self._running(script, reports.fileno()))
            self._wait_for(condition, running)
            return failures(running, reports)

    def _script(self, block: Block, text: str) -> str:
        """Each command reports its exit code as ``<number> <code>`` on descriptor 9."""
        first = [expand(command, self._stands_for) for command in block.all("first")]
        if block.language != "sh":
            file = f"example-{block.page.replace('/', '-')}-{block.line}.{block.language}"
            (self._work / file).write_text(text, encoding="utf-8")
            program = ".venv/bin/python" if block.language == "python" else DRY_RUN
            text = f"{program} {file}"
        lines = ["shopt -s expand_aliases", *first]
        in_terminals = block.one("terminals") is not None
        for number, (_, command) in enumerate(commands_of(text)):
            report = f'printf "{number} %s\\n" $? >&9'
            lines += [f"( {command}\n{report} ) &"] if in_terminals else [command, report]
        return "\n".join([*lines, "wait"])

    def _see_through(self, running: Running, reports: IO[str]) -> dict[int, str]:
        try:
            running.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not done after {LIMIT_S:.0f} s:\n{running.output()}") from None
        return failures(running, reports)

    @contextmanager
    def _running(self, script: str, reports: int = 2) -> Iterator[Running]:
        """A shell in a session of its own, all of which is ended with it."""
        log = tempfile.NamedTemporaryFile("w+", dir=self._work, prefix=".docs-", suffix=".log")  # noqa: SIM115
        with log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec 9>&{reports}\n{script}"],
                cwd=self._work,
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(reports,) if reports > 2 else (),
                start_new_session=True,
            )
            try:
                yield Running(process, Path(log.name))
            finally:
                end_session(process)

    def _wait_for(self, condition: str, running: Running) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        ask = ["bash", "-c", condition]
        while subprocess.run(ask, cwd=self._work, env=dict(self._environment), capture_output=True).returncode:
            if running.process.poll() is not None or time.monotonic() > deadline_s:
                raise TimeoutError(f"never true: {condition}\n{running.output()}")
            time.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class Running:
    process: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-3000:]


def failures(running: Running, reports: IO[str]) -> dict[int, str]:
    """What the commands that have ended reported, of those that failed."""
    reports.seek(0)
    codes = [tuple(map(int, line.split())) for line in reports]
    return {number: f"exit code {code}:\n{running.output()}" for number, code in codes if code}


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Ask all of it to end, and kill what is left after STOP_S. (SIGINT is ignored by what a script began with &.)"""
    for number, patience_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s and session_lives(process):
            time.sleep(POLL_S)
    process.wait()


def session_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def copy_checkout(target: Path) -> None:
    """Copy this checkout's files, its environment, and nothing that would make ``make`` set it up again."""
    copy_files(ROOT, target)
    if not (target / ".venv").exists():
        (target / ".venv").symlink_to(ROOT / ".venv")
    for name in ("pyproject.toml", ".ci/setup"):
        os.utime(target / name, (0, 0))


OF_MAKE = ("ARGS", "JOBS", "MINUTES", "NAME", "PRESET", "SEED", "TESTS")
"""Variables of the Makefile, which ``make bench ARGS=...`` passes on to every ``make`` of a page."""


def environment() -> dict[str, str]:
    """As a user's after the set-up, who has activated nothing."""
    ours = str(ROOT / ".venv" / "bin")
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != ours)
    dropped = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", *OF_MAKE, "VIRTUAL_ENV", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}


def try_pages(names: Sequence[str], work: Path) -> list[Outcome]:
    from tests.fakes.redis_servers import ServerProcess  # a benchmark without servers needs no pytest
    from transport.broker.embedded import packaged_binary

    copy_checkout(work)
    server = ServerProcess(packaged_binary(), work / ".redis", "--requirepass", PASSWORD)
    server.wait_listening()
    outcomes: list[Outcome] = []
    try:
        shell = Shell(work, environment(), {**STANDS_FOR, "redis": server.url})
        for page in names:
            for outcome in shell.try_page(page, (ROOT / page).read_text(encoding="utf-8")):
                outcomes.append(outcome)
                said = f"skipped: {outcome.skipped}" if outcome.skipped else "FAILED" if outcome.failure else "ok"
                seconds = f"  {outcome.seconds:.0f} s" if outcome.seconds else ""
                first = outcome.command.splitlines()[0]
                print(f"{outcome.where}  {first[:80]}  {said}{seconds}", flush=True)
                if outcome.failure:
                    print("    " + outcome.failure.replace("\n", "\n    "), flush=True)
    finally:
        server.kill()
    return outcomes


def summary(outcomes: Sequence[Outcome], seconds: float) -> dict[str, object]:
    tried = [outcome for outcome in outcomes if not outcome.skipped]
    failed = [outcome.where for outcome in tried if outcome.failure]
    return {
        "commands": len(tried),
        "commands_failed": len(failed),
        "failed": failed,
        "skipped": dict(Counter(outcome.skipped for outcome in outcomes if outcome.skipped)),
        "seconds": round(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", default="", help="comma-separated; without: all of them")
    parser.add_argument("--list", action="store_true", help="only print what would be run")
    parser.add_argument(
        "--keep", type=Path, help="try them in this directory, which an earlier call may have left, and keep it"
    )
    options = parser.parse_args()
    names = options.pages.split(",") if options.pages else pages()
    if options.list:
        for block in (block for page in names for block in blocks_of(page, (ROOT / page).read_text())):
            print(f"{block.page}:{block.line}  {block.language}  {dict(block.directives)}\n{block.text}")
        return
    started_s = time.monotonic()
    with ExitStack() as stack:
        work = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamrl-docs-")))
        work.mkdir(parents=True, exist_ok=True)
        outcomes = try_pages(names, work)
    result = summary(outcomes, time.monotonic() - started_s)
    print(json.dumps(result))
    sys.exit(1 if result["commands_failed"] else 0)


if __name__ == "__main__":
    main()
