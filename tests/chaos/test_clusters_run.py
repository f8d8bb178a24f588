"""Real runs on a real Slurm and a real Ray of several nodes, of which some are lost.

Slurm: whichever ``sinfo`` reaches, with two nodes or more of this host. Ray: raylets that the test starts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
from pathlib import Path

import pytest

from orchestrator.launch.launchers.ray_cluster import RECONNECT
from tests.chaos.test_elastic_run import ELASTIC
from tests.fakes.live_run import EMULATED, QUICK, LiveRun
from tests.fakes.ray_nodes import ray_nodes
from tests.fakes.slurm_nodes import ask_slurm, why_no_slurm

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

END_S = 600.0


@pytest.fixture
def slurm() -> None:
    if why := why_no_slurm():
        pytest.skip(why)


SLURM = ("launcher.kind=slurm", "launcher.address=127.0.0.1")


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
        assert not ask_slurm("squeue", "-h", "--me", "-o", "%j").count("streamrl/tiny/")


@pytest.mark.usefixtures("slurm")
def test_ranks_that_srun_started_meet_at_the_broker(tmp_path: Path):
    ranks = ("trainer.ranks=2", "trainer.parallel.tensor=2", "run.batches=2")
    with LiveRun(tmp_path, *SLURM, *ranks) as run:
        assert run.wait_for_end(timeout_s=END_S) == 0, run.describe()
        assert run.audit().returncode == 0


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_run_grows_on_three_raylets_and_one_is_killed(tmp_path: Path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(str(mean * (7 + n % 7) // 10) for mean in (60, 320) for n in range(8 * 32)))
    with ray_nodes(tmp_path) as cluster:
        settings = [setting for setting in ELASTIC if not setting.startswith("run.batches")]
        settings += ["run.batches=24", f"generation.lengths={lengths}", "generation.device=cuda"]
        settings += ["launcher.kind=ray", f"launcher.place={cluster.address}", "launcher.address=127.0.0.1"]
        with LiveRun(tmp_path, *settings, *QUICK) as run:
            run.wait_until(lambda: "generation workers 1 -> " in run.output, "more workers", timeout_s=END_S)
            cluster.kill(holding=["workers", "generate", "--index", "0"])
            run.wait_until(lambda: "generate-0 ended" in run.output, "the loss of a raylet")
            assert run.wait_for_end(timeout_s=END_S) == 0, run.describe()
            assert run.audit().returncode == 0
            assert len(run.metrics()) == 24


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
