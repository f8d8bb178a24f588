"""Mistakes as users make them: is each answered at once, in words that help, with the documented exit code?

Every case is a real command in a directory of its own. Its answer is clear when

- it ends with the documented exit code, without a traceback, in at most MAX_LINES lines;
- it holds the words of the case: what was given, what is wrong with it, what to do instead;
- it took at most LIMIT_S of CPU, children included, where nothing has to be loaded. CPU, because seconds on the wall
  are its neighbours' too on a machine that does other things;
- with exit code 2, no run was begun: its directory is not there, and its name is free.

A command that does not end within END_S is ended, and unclear. The last line is one JSON object; above it stands each
unclear case with what it answered, and with ``--show`` every case.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks import wrong_inputs, wrong_inputs_users
from benchmarks.wrong_inputs import EMULATED, ROWS, Case

LIMIT_S = 5.0
END_S = 240.0
MAX_LINES = 12
PROGRAMS = {"o": "streamrl-orchestrator", "w": "streamrl-worker", "py": "python"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    case: Case
    typed: str
    code: int | None
    text: str
    cpu_s: float
    left: str

    def faults(self) -> list[str]:
        case, flat = self.case, " ".join(self.text.split())
        found = [f"does not say {word!r}" for word in case.words if word not in flat]
        if self.code != case.code:
            found.insert(0, f"exit code {self.code}, not {case.code}" if self.code is not None else "does not end")
        if "Traceback" in self.text:
            found.append("is a traceback")
        if len(self.text.splitlines()) > MAX_LINES:
            found.append(f"has {len(self.text.splitlines())} lines")
        if self.cpu_s > LIMIT_S and not case.loads:
            found.append(f"took {self.cpu_s:.1f} s")
        if self.left:
            found.append(f"left {self.left}")
        return found


def answer(one: Case, here: Path, shared: Path, places: Mapping[str, str]) -> Answer:
    """Type it in ``here``, which is made for it."""
    here.mkdir()
    for name, content in one.files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(content.encode() if isinstance(content, str) else content)
    if one.prepare is not None:
        one.prepare(here, shared)
    before = runs_in(here)
    program, _, rest = _filled(one.typed, places).partition(" ")
    words = [str(Path(sys.executable).with_name(PROGRAMS[program])), *shlex.split(rest)]
    environ = {**os.environ, "COLUMNS": "200", **{name: _filled(text, places) for name, text in one.environ.items()}}
    said = here / ".said"
    with said.open("wb") as output:
        process = subprocess.Popen(
            words, cwd=here, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        status, usage = _ended(process, one.stop_s or END_S)
        in_time = status is not None
        for number in (signal.SIGTERM, signal.SIGKILL):
            if status is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                status, usage = _ended(process, END_S)
        process.returncode = -1 if status is None else os.waitstatus_to_exitcode(status)
    assert usage is not None
    return Answer(
        case=_with_places(one, places),
        typed=f"{PROGRAMS[program]} {rest}",
        code=process.returncode if in_time or one.stop_s else None,
        text=said.read_text(errors="replace"),
        cpu_s=usage.ru_utime + usage.ru_stime,
        left=", ".join(sorted(runs_in(here) - before)) if one.code == 2 else "",
    )


def _ended(process: subprocess.Popen[bytes], limit_s: float) -> tuple[int | None, resource.struct_rusage | None]:
    """Its status and what it and its children used, None after ``limit_s``."""
    ends_s = time.monotonic() + limit_s
    while time.monotonic() < ends_s:
        done, status, usage = os.wait4(process.pid, os.WNOHANG)
        if done:
            return status, usage
        time.sleep(0.02)
    return None, None


def runs_in(directory: Path) -> set[str]:
    """What only a run makes."""
    return {str(path.parent.relative_to(directory)) for path in directory.rglob("config.toml")} | {
        str(path.parent.relative_to(directory)) for path in directory.rglob("logs")
    }


def _filled(text: str, places: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: places.get(found[1], found[0]), text)


def _with_places(one: Case, places: Mapping[str, str]) -> Case:
    words = tuple(_filled(word, places) for word in one.words)
    return Case(about=one.about, typed=one.typed, words=words, code=one.code, loads=one.loads)


@contextmanager
def shared_runs(shared: Path) -> Iterator[dict[str, str]]:
    """A run that is over, one that goes on, a model, and a port that is taken: what mistakes are made with."""
    (shared / "rows.jsonl").write_text(ROWS)
    programs = {name: str(Path(sys.executable).with_name(program)) for name, program in PROGRAMS.items()}
    run = [programs["o"], "run", *shlex.split(EMULATED.format(s=shared)), "--dir", str(shared / "runs"), "--plain"]
    endless = [*run, "--name", "live", "--set", "run.batches=1000000", "--set", "emulated.step_s=0.2"]
    nowhere = subprocess.DEVNULL
    live, path = subprocess.Popen(endless, stdout=nowhere, stderr=nowhere), shared / "runs/live"
    try:
        done = ["--name", "done", "--set", "run.batches=2", "--set", "trainer.checkpoint_every=1"]
        subprocess.run([*run, *done], check=True, stdout=nowhere, stderr=nowhere)
        prepare = [programs["w"], "prepare", "--model", "random:qwen3-tiny"]
        model = subprocess.run(prepare, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1]
        shutil.copytree(model, shared / "model")
        while not (path / "api.address").exists():  # its orchestrator answers
            if live.poll() is not None:
                raise SystemExit("the run that should go on does not")
            time.sleep(0.2)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            yield {
                "s": str(shared),
                "live": str(path),
                "port": str(taken.getsockname()[1]),
                "broker": f"unix://{path}/broker/broker.sock",
                "password": (path / "broker/broker.password").read_text().strip(),
            }
    finally:
        live.terminate()
        live.wait()


def described(one: Answer) -> str:
    lines = [one.case.about, f"  $ {one.typed}", f"  exit code {one.code}, {one.cpu_s:.1f} s of CPU"]
    lines += [f"  | {line}" for line in one.text.splitlines()[: 2 * MAX_LINES]]
    return "\n".join([*lines, *(f"  UNCLEAR: {fault}" for fault in one.faults())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print every answer")
    parser.add_argument("--at-once", type=int, default=2, help="commands at once")
    parser.add_argument("-k", default="", help="only cases whose topic, name or command this expression finds")
    options = parser.parse_args()
    chosen = [
        one
        for topic in (*wrong_inputs.TOPICS, *wrong_inputs_users.TOPICS)
        for one in topic()
        if re.search(options.k, f"{topic.__name__}: {one.about} {one.typed}")
    ]
    answers: list[Answer] = []
    with tempfile.TemporaryDirectory(prefix="mistakes-") as made:
        root = Path(made)
        (root / "shared").mkdir()
        with shared_runs(root / "shared") as places, ThreadPoolExecutor(options.at_once) as pool:
            for one in pool.map(
                lambda one: answer(one[1], root / str(one[0]), root / "shared", places), enumerate(chosen)
            ):
                answers.append(one)
                if options.show or one.faults():
                    print(described(one), flush=True)
    unclear = [one for one in answers if one.faults()]
    figures = {"cases": len(answers), "unclear": len(unclear), "cpu_s": round(sum(one.cpu_s for one in answers))}
    print(json.dumps(figures | {"slowest_s": round(max((a.cpu_s for a in answers if not a.case.loads), default=0), 1)}))


if __name__ == "__main__":
    main()
