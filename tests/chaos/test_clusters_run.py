"""Real runs on a real Slurm and a real Ray of several nodes, of which some are lost.

Slurm: whichever ``sinfo`` reaches, with two nodes or more of this host. Ray: raylets that the test starts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from orchestrator.launch.launchers.ray_cluster import RECONNECT
from tests.chaos.test_elastic_run import BATCHES as BATCHES_OF_ELASTIC
from tests.chaos.test_elastic_run import ELASTIC, GROUPS, PHASES, SAMPLES, check_journal
from tests.fakes.command_line import orchestrator
from tests.fakes.live_run import EMULATED, PACED, QUICK, LiveRun, check_whole
from tests.fakes.ray_nodes import ray_nodes
from tests.fakes.slurm_nodes import ask_slurm, why_no_slurm

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

END_S = 600.0
BATCHES = 40
"""Enough that the run is not over when its script is told of the end."""


@pytest.fixture
def slurm() -> None:
    if why := why_no_slurm():
        pytest.skip(why)


SLURM = ("launcher.kind=slurm", "launcher.address=127.0.0.1")


def jobs() -> list[str]:
    """ "<id> <name>" of those of the run that have not ended."""
    lines = ask_slurm("squeue", "-h", "--me", "-t", "R,PD,CF", "-o", "%i %j").splitlines()
    return [line for line in lines if " streamrl/tiny/" in line]


def parts_of_jobs() -> list[str]:
    """Ids of all jobs that have not ended; components of a heterogeneous one have its id, "7+0"."""
    return [part.partition("+")[0] for part in ask_slurm("squeue", "-h", "-t", "R,PD,CG", "-o", "%i", "--me").split()]


def lengths_in(directory: Path, means: Sequence[int]) -> str:
    """A setting: answers of these mean lengths, equally many of each."""
    path, each = directory / "lengths.txt", BATCHES_OF_ELASTIC // len(means) * GROUPS * SAMPLES
    path.write_text("\n".join(str(mean * (7 + n % 7) // 10) for mean in means for n in range(each)))
    return f"generation.lengths={path}"


@pytest.mark.usefixtures("slurm")
def test_a_job_is_cancelled_and_a_node_taken_down_and_every_batch_is_trained_once(tmp_path: Path):
    with LiveRun(tmp_path, *EMULATED, *QUICK, *SLURM, "run.batches=30", "generation.workers=2") as run:
        run.wait_until(lambda: len(run.metrics()) >= 2, "batch 2", timeout_s=END_S)
        ask_slurm("scancel", "--me", "--name=streamrl/tiny/generate-0")
        run.wait_until(lambda: "generate-0 ended" in run.output, "the end of a cancelled worker")
        seen = len(run.metrics())
        run.wait_for_batch(seen + 2)
        node = ask_slurm(
            "squeue", "-h", "--me", "--name=streamrl/tiny/generate-1", "-t", "RUNNING", "-o", "%N"
        ).split()[0]
        ask_slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=a test")
        try:
            run.wait_until(lambda: "generate-1 ended" in run.output, "the loss of a node")
            assert run.wait_for_end(timeout_s=END_S) == 0, run.describe()
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):  # a node that comes back by itself
                ask_slurm("scontrol", "update", f"nodename={node}", "state=resume")
        assert run.audit().returncode == 0
        assert len(run.metrics()) == 30
        assert not jobs()


@pytest.mark.usefixtures("slurm")
def test_no_job_outlives_a_supervisor_that_was_killed_once_its_run_goes_on(tmp_path: Path):
    with LiveRun(tmp_path, *PACED, *QUICK, *SLURM, "run.batches=20", "generation.workers=2") as run:
        run.wait_until(lambda: len(run.metrics()) >= 2, "batch 2", timeout_s=END_S)
        before = set(jobs())
        assert len(before) == 4, "two workers that generate, one that scores, the trainer"
        run.interrupt(signal.SIGKILL)
        assert run.wait_for_end() == -signal.SIGKILL
        run.start("--resume")
        run.wait_until(lambda: not before & set(jobs()), "the end of all jobs of the dead supervisor")
        assert run.wait_for_end(timeout_s=END_S) == 0, run.describe()
        assert run.audit().returncode == 0
        assert len(run.metrics()) == 20
        assert not jobs()


@pytest.mark.usefixtures("slurm")
def test_a_run_grows_by_jobs_and_shrinks_again(tmp_path: Path):
    with LiveRun(tmp_path, *ELASTIC, *SLURM, lengths_in(tmp_path, PHASES)) as run:
        run.wait_until(lambda: "generate-1" in " ".join(jobs()), "a further job", timeout_s=END_S)
        assert run.wait_for_end(timeout_s=END_S) == 0, run.describe()
        assert run.audit().returncode == 0
        assert not jobs()
    check_journal(run)


@pytest.mark.usefixtures("slurm")
def test_ranks_that_srun_started_meet_at_the_broker(tmp_path: Path):
    ranks = ("trainer.ranks=2", "trainer.parallel.tensor=2", "run.batches=2")
    with LiveRun(tmp_path, *SLURM, *ranks) as run:
        assert run.wait_for_end(timeout_s=END_S) == 0, run.describe()
        assert run.audit().returncode == 0


@pytest.mark.usefixtures("slurm")
def test_a_batch_script_that_is_told_of_its_end_saves_is_queued_again_and_goes_on(tmp_path: Path):
    """Signals are sent by hand, of the time limit and then of a preemption, so that they need not be waited for;
    Slurm's pause of two minutes before a job is started again is cut.
    """
    settings = (*EMULATED, *QUICK, "launcher.address=127.0.0.1", f"run.batches={BATCHES}")
    command = ["run", "--preset", "tiny", "--name", "batch", "--launcher", "slurm", "--dry-run"]
    command += [part for setting in settings for part in ("--set", setting)]
    made = orchestrator(*command, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    script = tmp_path / "run.sh"
    script.write_text(made.stdout)
    run_dir, output = tmp_path / "runs" / "batch", tmp_path / "streamrl-batch.out"
    job = ask_slurm("sbatch", "--parsable", "--chdir", str(tmp_path), str(script)).strip()

    def state() -> str:
        return ask_slurm("squeue", "-h", "-j", job, "-o", "%T %r").splitlines()[0]

    def trained() -> int:
        path = run_dir / "metrics.jsonl"
        return sum('"batch"' in line for line in path.read_text().splitlines()) if path.exists() else 0

    def until(holds: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + END_S
        while not holds():
            said = output.read_text()[-3000:] if output.exists() else ""
            assert time.monotonic() < deadline_s, f"no {what}; job {state()}:\n{said}"
            time.sleep(0.5)

    try:
        until(lambda: trained() >= 3, "batch 3")
        ask_slurm("scancel", "--batch", "--signal=USR1", job)
        until(lambda: "a checkpoint follows the batch in training" in output.read_text(), "checkpoint asked for")
        ask_slurm("scancel", "--batch", "--signal=TERM", job)
        until(lambda: "BeginTime" in state(), "job that is queued again")
        assert "stopped by SIGTERM" in output.read_text()
        seen = trained()
        assert seen < BATCHES
        ask_slurm("scontrol", "update", f"jobid={job}", "starttime=now")
        until(lambda: trained() > seen, "batch after it")
        until(lambda: job not in parts_of_jobs(), "end")
        assert trained() == BATCHES
        audit = orchestrator("inspect", str(run_dir), "--audit", cwd=tmp_path)
        assert audit.returncode == 0, audit.stdout + audit.stderr
    finally:
        subprocess.run(["scancel", job], check=False, timeout=60)


def check_strangers_are_refused(directory: Path, run: LiveRun) -> None:
    """Ray's own processes listen on loopback, and take no program from one who has no token."""
    ports: list[int] = []
    for name in ("raylet", "gcs_server"):
        for connection in run.child(name).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                ports.append(connection.laddr.port)
                assert ipaddress.ip_address(connection.laddr.ip.removeprefix("::ffff:")).is_loopback, connection
    asks = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1]).internal_kv_keys(b'')"
    environ = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    for mode in ("disabled", "token"):
        stranger = subprocess.run(
            [sys.executable, "-c", asks, f"127.0.0.1:{ports[-1]}"],
            env={**environ, "HOME": str(directory), "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "f" * 64},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert stranger.returncode != 0
        assert "InvalidAuthToken" in stranger.stderr, stranger.stderr


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_run_with_a_ray_of_its_own_trains_all_and_leaves_none_of_it(tmp_path: Path):
    with LiveRun(tmp_path, *EMULATED, *QUICK, "launcher.kind=ray", "generation.workers=2") as run:
        run.wait_until(lambda: len(run.metrics()) >= 2, "batch 2", timeout_s=END_S)
        check_strangers_are_refused(tmp_path, run)
        run.kill("workers", "generate")
        run.wait_until(lambda: re.search(r"generate-\d ended", run.output) is not None, "the end of a killed worker")
        check_whole(run)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_run_grows_on_three_raylets_and_one_is_killed(tmp_path: Path):
    with ray_nodes(tmp_path) as cluster:
        settings = [*ELASTIC, lengths_in(tmp_path, (60, 320)), "generation.device=cuda"]
        settings += ["launcher.kind=ray", f"launcher.place={cluster.address}", "launcher.address=127.0.0.1"]
        with LiveRun(tmp_path, *settings, *QUICK) as run:
            run.wait_until(lambda: "generation workers 1 -> " in run.output, "more workers", timeout_s=END_S)
            cluster.kill(holding=["workers", "generate", "--index", "0"])
            run.wait_until(lambda: "generate-0 ended" in run.output, "the loss of a raylet")
            assert run.wait_for_end(timeout_s=END_S) == 0, run.describe()
            assert run.audit().returncode == 0
            assert len(run.metrics()) == BATCHES_OF_ELASTIC


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_run_whose_ray_has_no_head_says_so_and_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(RECONNECT, "80")  # Ray would end the program after these seconds, the run ends before
    with ray_nodes(tmp_path) as cluster:
        on_ray = ("launcher.kind=ray", f"launcher.place={cluster.address}", "launcher.address=127.0.0.1")
        with LiveRun(tmp_path, *EMULATED, *QUICK, *on_ray, "run.batches=400") as run:
            run.wait_until(lambda: len(run.metrics()) >= 2, "batch 2", timeout_s=END_S)
            cluster.kill_head()
            run.wait_until(lambda: "has taken no connection" in run.output, "the loss of the head")
            assert run.wait_for_end(timeout_s=END_S) == 1, run.describe()
            assert "nothing is heard of its workers. Everything is kept; go on with: " in run.output
