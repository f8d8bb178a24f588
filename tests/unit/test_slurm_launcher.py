"""Slurm's command lines and answers.

Its commands are programs that write down how they were called, and answer as the real ones did.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from orchestrator.errors import ChildFailedError, ConfigError
from orchestrator.launch.launchers import slurm as slurm_launchers
from orchestrator.launch.launchers.base import ProcessSpec
from orchestrator.launch.launchers.slurm import SlurmLauncher, batch_script
from orchestrator.launch.processes import Children
from orchestrator.launch.submission import submission
from tests.fakes.launched import LIMIT_S, RANKS, WORKER, configured, until
from transport.contracts.types import WorkerKind


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of programs that are called like Slurm's; each writes its arguments to <program>.args."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": "", "squeue": "", "scancel": "", "sinfo": "echo main"}.items():
        answers(programs, name, text)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return programs


def answers(programs: Path, name: str, text: str) -> None:
    file = programs / name
    file.write_text(
        f'#!/bin/bash\nprintf "%s " "$@" >> {programs}/{name}.args\necho >> {programs}/{name}.args\n{text}\n'
    )
    file.chmod(0o755)


def calls(programs: Path, name: str) -> list[str]:
    file = programs / f"{name}.args"
    return file.read_text().splitlines() if file.exists() else []


def slurm_launcher(tmp_path: Path, *overrides: str, environ: Mapping[str, str] | None = None) -> SlurmLauncher:
    settings = configured("launcher.kind=slurm", *overrides).settings
    return SlurmLauncher(settings, tmp_path / "mine", {"generate-1", "train-0"}, environ or {})


@contextlib.asynccontextmanager
async def waiting(programs: Path, tmp_path: Path, squeue: str) -> AsyncIterator[tuple[SlurmLauncher, Process]]:
    """A worker whose job stands in the queue, which answers as ``squeue`` says."""
    answers(programs, "srun", "exec sleep 30")
    answers(programs, "squeue", squeue)
    launcher = slurm_launcher(tmp_path)
    process = await launcher.start(WORKER, tmp_path / "log")
    try:
        yield launcher, process
    finally:
        os.kill(process.pid, 9)
        await process.wait()


async def test_a_worker_is_a_job_of_slurm_and_its_secrets_stand_on_no_command_line(slurm: Path, tmp_path: Path):
    launcher = slurm_launcher(tmp_path, "launcher.place=main")
    process = await launcher.start(WORKER, tmp_path / "generate-1.log")
    assert await process.wait() == 0
    (line,) = calls(slurm, "srun")
    assert "--job-name=streamrl/mine/generate-1" in line
    assert "--cpus-per-task=2 --mem=512M" in line
    assert "--partition=main" in line
    assert "--exact" not in line
    assert "--het-group" not in line
    assert " v " not in line


async def test_in_an_allocation_it_is_a_step_and_one_that_is_added_a_job_of_its_own(slurm: Path, tmp_path: Path):
    launcher = slurm_launcher(tmp_path, environ={"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"})
    added = ProcessSpec(name="generate-9", argv=["worker", "generate"], kind=WorkerKind.GENERATE)
    for spec in (WORKER, RANKS, added):
        await (await launcher.start(spec, tmp_path / "log")).wait()
    step, ranks, job = calls(slurm, "srun")
    assert "--exact --het-group=0" in step
    assert "--ntasks=2" in ranks
    assert "--gpus-per-task=1" in ranks
    assert "--kill-on-bad-exit=1 --exact --het-group=1" in ranks
    assert "--exact" not in job
    assert "--comment=" in job


@pytest.mark.parametrize(("code", "fails"), [(4, True), (2, True), (143, False)])
async def test_its_exit_code_says_whether_it_is_started_again(slurm: Path, tmp_path: Path, code: int, fails: bool):
    """143: of a job that was cancelled, or lost its node."""
    answers(slurm, "srun", f"[[ $(wc -l <{slurm}/srun.args) == 1 ]] && exit {code}; exit 0")
    children = Children(tmp_path, max_restarts=1, launcher=slurm_launcher(tmp_path))
    if fails:
        with pytest.raises(ChildFailedError) as raised:
            await children.keep(WORKER)
        assert raised.value.code == code
    else:
        await children.keep(WORKER)
        assert children.restarts == {"generate-1": 1}


async def test_a_lost_node_is_no_clean_exit_though_srun_says_so(slurm: Path, tmp_path: Path):
    """As Slurm 22.05 does: exit code 0."""
    lost = "echo 'srun: error: Node failure on n1' >&2"
    answers(slurm, "srun", f"[[ $(wc -l <{slurm}/srun.args) == 1 ]] && {lost}; exit 0")
    children = Children(tmp_path, max_restarts=1, launcher=slurm_launcher(tmp_path))
    await children.keep(WORKER)
    assert children.restarts == {"generate-1": 1}


async def test_what_is_pending_has_the_schedulers_reason(slurm: Path, tmp_path: Path):
    squeue = "echo '12|streamrl/mine/generate-1|Resources'; echo '13|other|Priority'"
    async with waiting(slurm, tmp_path, squeue) as (launcher, _):
        assert await launcher.pending() == {"generate-1": "Slurm job 12: Resources"}
        answers(slurm, "squeue", "echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1")
        assert "Unable to contact" in (await launcher.pending())["generate-1"]
    assert await launcher.pending() == {}


async def test_a_controller_that_answers_late_is_named_and_its_worker_goes_on(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with waiting(slurm, tmp_path, "exec sleep 30") as (launcher, process):
        with monkeypatch.context() as impatient:
            impatient.setattr(slurm_launchers, "ANSWER_S", 0.2)
            said = await launcher.pending()
        assert said == {"generate-1": "Slurm does not answer: squeue said nothing for 0 s"}
        assert process.returncode is None
        answers(
            slurm, "squeue", "echo '12|streamrl/mine/generate-1|Priority'; echo '12|streamrl/mine/generate-1|Priority'"
        )
        assert await launcher.pending() == {"generate-1": "Slurm job 12: Priority"}, "said twice, it is one"


@pytest.mark.parametrize(
    "reason", ["AssocGrpCpuLimit", "QOSMaxJobsPerUserLimit", "ReqNodeNotAvail, UnavailableNodes:n3"], ids=str.lower
)
async def test_a_quota_or_a_node_that_is_away_is_said_as_slurm_says_it(slurm: Path, tmp_path: Path, reason: str):
    async with waiting(slurm, tmp_path, f"echo '12|streamrl/mine/generate-1|{reason}'") as (launcher, _):
        assert await launcher.pending() == {"generate-1": f"Slurm job 12: {reason}"}


@pytest.mark.parametrize(
    ("said", "code", "starts"),
    [
        ("slurmstepd-n1: error: execve(): /env/bin/python: No such file or directory", 2, 1),
        ("srun: error: Unable to allocate resources: Invalid account or account/partition combination", 1, 2),
    ],
    ids=["no package on the node", "no account"],
)
async def test_what_slurm_refuses_ends_the_run_in_its_own_words(
    slurm: Path, tmp_path: Path, said: str, code: int, starts: int
):
    """As srun of Slurm 22.05 does: what is not on the node is exit code 2, and not tried again."""
    answers(slurm, "srun", f"echo '{said}' >&2; exit {code}")
    with pytest.raises(ChildFailedError, match=re.escape(said)):
        await Children(tmp_path, max_restarts=1, launcher=slurm_launcher(tmp_path)).keep(WORKER)
    assert len(calls(slurm, "srun")) == starts


async def test_a_signal_goes_to_the_tasks_and_not_to_srun(slurm: Path, tmp_path: Path):
    answers(slurm, "srun", f"until [[ -s {slurm}/scancel.args ]]; do sleep .05; done; exit 143")
    process = await slurm_launcher(tmp_path).start(WORKER, tmp_path / "log")
    process.terminate()
    assert await process.wait() == 143
    await until(lambda: len(calls(slurm, "scancel")) == 2)
    pending, running = calls(slurm, "scancel")
    assert "--name=streamrl/mine/generate-1 --state=PENDING" in pending
    assert "--name=streamrl/mine/generate-1 --state=RUNNING --signal=TERM" in running


async def test_jobs_of_an_earlier_start_are_ended_and_those_of_another_run_are_not(slurm: Path, tmp_path: Path):
    own = tmp_path / "mine"
    answers(slurm, "squeue", f"echo '5|streamrl/mine/train-0|{own}'; echo '6|streamrl/mine2/train-0|/elsewhere'")
    await slurm_launcher(tmp_path).open(resume=True)
    assert calls(slurm, "scancel") == ["5 "]
    answers(slurm, "squeue", "echo '6|streamrl/mine/train-0|/elsewhere'")
    with pytest.raises(ConfigError, match="from /elsewhere: choose another --name"):
        await slurm_launcher(tmp_path).open(resume=False)


async def test_a_cluster_or_a_partition_that_is_not_there_is_said_before_anything_starts(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ConfigError, match="no partition 'gpu'; there are: main"):
        await slurm_launcher(tmp_path, "launcher.place=gpu").open(resume=False)
    answers(slurm, "sinfo", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(ConfigError, match="Slurm does not answer here: sinfo: Unable to contact"):
        await slurm_launcher(tmp_path).open(resume=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"needs srun\b.* on this machine"):
        await slurm_launcher(tmp_path).open(resume=False)


def test_the_batch_script_has_both_stages_and_goes_on_after_its_time_limit():
    typed = ["--preset", "tiny", "--name", "mine", "--launcher", "slurm", "--dry-run", "--set", "trainer.ranks=2"]
    more = ("trainer.device=cuda", "launcher.time_limit_s=3600", "launcher.options=['--account=x']")
    script = submission(configured("launcher.kind=slurm", "trainer.ranks=2", "tensors.host=0.0.0.0", *more), typed)
    first, second = script.split("#SBATCH hetjob\n")
    assert "--requeue" in first
    assert "--time=60" in first
    assert "--ntasks=3" in first
    assert "--ntasks=2" in second
    assert "--gpus=2" in second
    assert script.count("--account=x") == 2
    assert "run --preset tiny --launcher slurm --set trainer.ranks=2 --name mine" in script
    assert "run --resume --name mine" in script
    assert "--dry-run" not in script


@pytest.mark.parametrize(
    ("number", "saved", "code", "again"),
    [("USR1", True, 130, True), ("TERM", False, 130, True), ("", False, 0, False), ("", False, 4, False)],
    ids=["time limit", "preemption", "finished", "failed"],
)
async def test_a_batch_script_that_is_told_of_its_end_saves_and_is_queued_again(
    slurm: Path, tmp_path: Path, number: str, saved: bool, code: int, again: bool
):
    """run stays until it is signalled, or ends with ``code`` by itself; the seconds of grace pass at once."""
    stays = f"trap 'kill $!; exit 130' TERM; touch {slurm}/stays; /bin/sleep {LIMIT_S} & wait $!"
    answers(slurm, "program", f"[[ $1 == checkpoint ]] && exit; {stays if number else f'exit {code}'}")
    answers(slurm, "scontrol", "")
    answers(slurm, "sleep", "exit 0")
    settings = configured("launcher.kind=slurm", f"run.dir={tmp_path}", "launcher.time_limit_s=360").settings
    script = batch_script(settings, [WORKER, RANKS], ["--preset", "tiny"], str(slurm / "program"))
    environ = {**os.environ, "SLURM_JOB_ID": "7"}
    process = await asyncio.create_subprocess_exec("bash", "-c", script, env=environ)
    try:
        if number:
            await until((slurm / "stays").exists)
            process.send_signal(signal.Signals[f"SIG{number}"])
        async with asyncio.timeout(LIMIT_S):
            assert await process.wait() == code
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await until(lambda: len(calls(slurm, "program")) == 1 + saved)
    asked = calls(slurm, "program")
    assert asked[0].startswith("run --preset tiny --name mine --plain")
    assert [line.startswith("checkpoint ") for line in asked[1:]] == [True] * saved
    assert calls(slurm, "scontrol") == ["requeue 7 "] * again


def test_a_time_limit_that_leaves_no_time_is_refused():
    with pytest.raises(ConfigError, match=r"launcher.time_limit_s: 200 s leave no time to train"):
        submission(configured("launcher.kind=slurm", "launcher.address=127.0.0.1", "launcher.time_limit_s=200"), [])


def test_no_secret_is_printed():
    resolved = configured("launcher.kind=ray", "broker.url=redis://u:hidden-word@127.0.0.1:1")
    with pytest.raises(ConfigError, match="prints no secret"):
        submission(resolved, ["--set", "broker.url=redis://u:hidden-word@127.0.0.1:1"])
    assert "hidden-word" not in submission(resolved, ["--config", "mine.toml"])
