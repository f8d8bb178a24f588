"""Record goldens anew: ``python -m tests.golden.record [--into DIR] [NAME ...]``, by default all of them.

Names are those of ``RUNS`` and ``digests``. Each run is a real one, as short as what it is to show allows, of the tiny
preset with the emulated engine and trainer (the service: of its real orchestrator, with workers in this process). Its
journal becomes ``tests/golden/journals/<name>.jsonl.gz``, once its replay from nothing is known to give the commands
that the run itself recovered by.

Record anew only when a decision changes on purpose, or for a new run; say in the commit which decision, and why. Where
only names change, add a line to ``renames.py`` instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from orchestrator.core.state import PipelineState
from orchestrator.journal import first_snapshot, read_whole_records
from orchestrator.sim.replay import recorded_commands
from orchestrator.sim.simulate import simulate
from tests.fakes.command_line import REPOSITORY
from tests.fakes.live_run import EMULATED, QUICK, LiveRun
from tests.fakes.service_run import service_run
from tests.golden.goldens import DIGESTS, digest, journal_path, plain, recorded, write
from tests.golden.scenarios import SCENARIOS
from workers.models import prepare_model

TWO_WORKERS = (*QUICK, *EMULATED, "generation.workers=2", "generation.slots=8", "emulated.time_scale=0.2")


def synchronous(directory: Path) -> Path:
    """Staleness 0, batches planned by scored dispatch, refills for groups without a signal, two steps a batch."""
    settings = (
        "run.batches=5",
        "pipeline.max_staleness=0",
        "pipeline.update=barrier",
        "pipeline.drop_no_signal=true",
        "pipeline.groups_per_batch=6",
        "trainer.mini_batches=2",
        "ranker.kind=history",
        "scoring.reward=tests.fakes.rewards:alike_for_some",
        f"scoring.reward_path={REPOSITORY}",
    )
    with LiveRun(directory, *TWO_WORKERS, *settings) as run:
        _ends_well(run)
    return run.run_dir


def staleness_2(directory: Path) -> Path:
    """Batches overlap; somebody pauses, changes a setting, asks for a checkpoint and drains."""
    settings = ("run.batches=5000", "pipeline.max_staleness=1", "trainer.checkpoint_every=3")
    with LiveRun(directory, *TWO_WORKERS, *settings) as run:
        run.wait_for_batch(1)
        for words in (("set", "pipeline.max_staleness=2"), ("pause",), ("set", "pipeline.update=staggered")):
            _ask(run, *words)
        run.pass_time(2.0)
        _ask(run, "resume")
        run.wait_for_batch(len(run.metrics()) + 4)
        _ask(run, "checkpoint")
        run.wait_for_batch(len(run.metrics()) + 2)
        _ask(run, "drain")
        _ends_well(run)
    return run.run_dir


def evaluation(directory: Path) -> Path:
    """Held-out problems beside every second batch, a reward that raises for some, logprobs recomputed, rolling."""
    settings = (
        "run.batches=6",
        "eval.every=2",
        "eval.problems=8",
        "pipeline.max_staleness=2",
        "pipeline.membership=rolling",
        "algorithm.old_logprobs=recomputed",
        "trainer.epochs=2",
        "scoring.reward=tests.fakes.rewards:raises_for_some",
        f"scoring.reward_path={REPOSITORY}",
    )
    with LiveRun(directory, *TWO_WORKERS, *settings) as run:
        _ends_well(run)
    return run.run_dir


def elastic(directory: Path) -> Path:
    """Workers come and go with the lengths, and are killed; so are trainer, scorer, orchestrator, supervisor and
    broker, whose tail is lost."""
    groups, samples, batches, phases = 6, 3, 24, (60, 320, 30)
    lengths = directory / "lengths.txt"
    each = batches // len(phases) * groups * samples
    lengths.write_text("\n".join(str(mean * (7 + n % 7) // 10) for mean in phases for n in range(each)))
    settings = (
        *(setting for setting in QUICK if "stall" not in setting),
        *EMULATED,
        f"run.batches={batches}",
        f"pipeline.groups_per_batch={groups}",
        f"pipeline.group_size={samples}",
        "sampling.max_new_tokens=420",
        f"generation.lengths={lengths}",
        "generation.slots=6",
        "generation.workers=1",
        "generation.max_workers=3",
        "emulated.time_scale=0.05",
        "emulated.optimizer_s=8.0",
        "ranker.kind=none",
    )
    faults = {"generate.row_ready": 40, "score.claimed": 9, "train.published": 6, "orchestrator.journaled": 90}
    with LiveRun(directory, *settings, faults=faults) as run:
        run.wait_until(lambda: "generation workers 1 -> " in run.output, "more workers")
        run.wait_for_batch(10)
        run.kill("workers", "generate")
        _lose_tail(run)
        run.wait_for_batch(len(run.metrics()) + 3)
        run.interrupt(signal.SIGKILL)
        run.wait_for_end()
        run.wait_until_gone()
        run.start("--resume")
        _ends_well(run)
        assert run.died_at() == set(faults), run.died_at()
    return run.run_dir


def service(directory: Path) -> Path:
    """Several requests, one of them cancelled, new weights and refused ones, a restart, and a worker that dies."""

    async def serve() -> None:
        model_dir = prepare_model("random:qwen3-tiny", cache_dir=directory / "models")
        quick = {"emulated": {"time_scale": 0.01}, "service": {"window": 12}, "sampling": {"max_new_tokens": 12}}
        async with service_run(directory / "run", model_dir, workers=2, weights_dir=model_dir.parent, **quick) as run:
            await run.until_serving(2)
            asked = [
                asyncio.create_task(run.ask("/generate", {"prompts": [[1, 2]] * 9, "samples": 2})),
                asyncio.create_task(run.ask("/generate", {"prompts": [[3]] * 5, "samples": 3, "temperature": 0.5})),
            ]
            async with run.asking("/generate", {"prompts": [[1]] * 30, "id": "r", "acknowledge": True}) as (_, lines):
                await anext(lines)
                await run.ask("/generate/r", method="DELETE")
            await run.ask("/update", {"path": model_dir.name})
            await run.ask("/update", {"path": "absent"})
            body = {"prompts": [[1]] * 40, "id": "s", "acknowledge": True, "max_new_tokens": 6}
            async with run.asking("/generate", body) as (_, lines):
                first = [await anext(lines) for _ in range(4)]
            await asyncio.gather(*asked)
            await run.stop()
            await run.start()
            await run.leave("generate-0.1")
            await run.ask("/generate/s/taken", {"upto": len(first)})
            async with run.asking("/generate/s?from=4") as (_, lines):
                async for line in lines:
                    if "n" in line:
                        await run.ask("/generate/s/taken", {"upto": line["n"] + 1})

    asyncio.run(serve())
    return directory / "run"


RUNS: Mapping[str, Callable[[Path], Path]] = {
    "synchronous": synchronous,
    "staleness_2": staleness_2,
    "evaluation": evaluation,
    "elastic": elastic,
    "service": service,
}
"""Name -> what makes the run in a new directory, and returns the run's directory."""


def _ask(run: LiveRun, command: str, *arguments: str) -> None:
    done = run.command(command, str(run.run_dir), *arguments)
    assert done.returncode == 0, done.stderr


def _ends_well(run: LiveRun) -> None:
    assert run.wait_for_end() == 0, run.describe()
    audit = run.audit()
    assert audit.returncode == 0, audit.stdout


def _lose_tail(run: LiveRun) -> None:
    run.interrupt(signal.SIGSTOP)
    run.kill("valkey-server")
    (path,) = (run.run_dir / "broker" / "aof").glob("*.incr.aof")
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * 0.95))
    run.interrupt(signal.SIGCONT)


def record_journal(name: str, into: Path | None) -> None:
    directory = Path(tempfile.mkdtemp(prefix=f"golden-{name}-"))
    journal = RUNS[name](directory) / "journal"
    _, snapshot = first_snapshot(journal)
    assert snapshot is not None
    state = PipelineState.restore(snapshot)
    assert state.snapshot() == PipelineState(state.settings).snapshot(), "the journal does not begin with nothing"
    golden = recorded(state.settings, read_whole_records(journal))
    issued = [[plain(command) for command in commands] for _, commands in recorded_commands(journal)]
    assert [moment.commands for moment in golden.moments] == issued
    path = into / f"{name}.jsonl.gz" if into else journal_path(name)
    write(path, golden)
    events = Counter(moment.event["type"] for moment in golden.moments)
    commands = Counter(command["type"] for moment in golden.moments for command in moment.commands)
    print(f"{path}: {path.stat().st_size} bytes\n  events {dict(events)}\n  commands {dict(commands)}")
    shutil.rmtree(directory)


def record_digests() -> None:
    digests = {name: digest(simulate(one).history) for name, one in SCENARIOS.items()}
    DIGESTS.write_text(json.dumps(digests, indent=1) + "\n")
    print(f"{DIGESTS}: {len(digests)} scenarios")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*RUNS, "digests"], metavar="NAME")
    parser.add_argument(
        "--into", type=Path, help="directory of the journals' goldens, instead of tests/golden/journals"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {*RUNS, "digests"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join([*RUNS, 'digests'])}")
    for name in arguments.names:
        if name == "digests":
            record_digests()
        else:
            record_journal(name, arguments.into)


if __name__ == "__main__":
    main()
