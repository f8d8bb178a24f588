"""Slurm's command lines and answers, Kubernetes' objects and API, and what all launchers have in common.

Slurm's commands are programs that write down how they were called and answer as the real ones did.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.load import Resolved, resolve
from orchestrator.errors import ChildFailedError, ConfigError, EngineLostError
from orchestrator.launch.checks import check_cluster
from orchestrator.launch.growth import STOP_GRACE_S, add_workers, report_loss
from orchestrator.launch.launchers import kubernetes_cluster, ray_cluster
from orchestrator.launch.launchers import slurm as slurm_launchers
from orchestrator.launch.launchers.base import NODE_LOST, ProcessSpec, Resources, Running, resources_of
from orchestrator.launch.launchers.kubernetes_cluster import KubernetesLauncher, KubernetesUnavailableError
from orchestrator.launch.launchers.kubernetes_manifests import OWNER, manifests, worker_manifest
from orchestrator.launch.launchers.ray_cluster import RayLauncher, RayUnavailableError, in_time
from orchestrator.launch.launchers.slurm import SlurmLauncher, batch_script
from orchestrator.launch.processes import NO_USE, Children, Fleet, last_words
from orchestrator.launch.submission import submission, write_base
from tests.fakes.kubernetes_api import KubernetesApi, kubernetes_api
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from tests.fakes.ray_api import ray_api
from tests.fakes.redis_servers import free_port
from transport.broker import keys
from transport.contracts.messages import SpawnWorkers, WorkerStatus, encode
from transport.contracts.types import RunName, WorkerId, WorkerKind

with contextlib.suppress(ImportError):  # here, as it takes seconds, which are not a test's
    importlib.import_module("kubernetes.client.api")

WORKER = ProcessSpec(
    name="generate-1",
    argv=["worker", "generate"],
    env={"K": "v"},
    kind=WorkerKind.GENERATE,
    resources=Resources(cpus=2, memory_mib=512),
)
RANKS = ProcessSpec(
    name="train-0", argv=["worker", "train"], kind=WorkerKind.TRAIN, ranks=2, resources=Resources(gpus=1)
)


def configured(*overrides: str) -> Resolved:
    return resolve("tiny", [], ["run.name=mine", *overrides], {})


LIMIT_S = 60.0
COMPOSE = Path(__file__).parents[2] / "compose"


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 what another process or thread does wakes no task
            await asyncio.sleep(0.02)


async def until_pending(launcher: KubernetesLauncher, expected: Mapping[str, str]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while await launcher.pending() != expected:  # noqa: ASYNC110 the same
            await asyncio.sleep(0.02)


# -- Slurm


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
    answers(slurm, "srun", "exec sleep 30")
    answers(slurm, "squeue", "echo '12|streamrl/mine/generate-1|Resources'; echo '13|other|Priority'")
    launcher = slurm_launcher(tmp_path)
    process = await launcher.start(WORKER, tmp_path / "log")
    try:
        assert await launcher.pending() == {"generate-1": "Slurm job 12: Resources"}
        answers(slurm, "squeue", "echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1")
        assert "Unable to contact" in (await launcher.pending())["generate-1"]
    finally:
        os.kill(process.pid, 9)
        await process.wait()
    assert await launcher.pending() == {}


async def test_a_controller_that_answers_late_is_named_and_its_worker_goes_on(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answers(slurm, "srun", "exec sleep 30")
    answers(slurm, "squeue", "exec sleep 30")
    launcher = slurm_launcher(tmp_path)
    process = await launcher.start(WORKER, tmp_path / "log")
    try:
        with monkeypatch.context() as impatient:
            impatient.setattr(slurm_launchers, "ANSWER_S", 0.2)
            said = await launcher.pending()
        assert said == {"generate-1": "Slurm does not answer: squeue said nothing for 0 s"}
        assert process.returncode is None
        answers(
            slurm, "squeue", "echo '12|streamrl/mine/generate-1|Priority'; echo '12|streamrl/mine/generate-1|Priority'"
        )
        assert await launcher.pending() == {"generate-1": "Slurm job 12: Priority"}, "said twice, it is one"
    finally:
        os.kill(process.pid, 9)
        await process.wait()


@pytest.mark.parametrize(
    "reason", ["AssocGrpCpuLimit", "QOSMaxJobsPerUserLimit", "ReqNodeNotAvail, UnavailableNodes:n3"], ids=str.lower
)
async def test_a_quota_or_a_node_that_is_away_is_said_as_slurm_says_it(slurm: Path, tmp_path: Path, reason: str):
    answers(slurm, "srun", "exec sleep 30")
    answers(slurm, "squeue", f"echo '12|streamrl/mine/generate-1|{reason}'")
    launcher = slurm_launcher(tmp_path)
    process = await launcher.start(WORKER, tmp_path / "log")
    try:
        assert await launcher.pending() == {"generate-1": f"Slurm job 12: {reason}"}
    finally:
        os.kill(process.pid, 9)
        await process.wait()


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
    with pytest.raises(ConfigError, match="needs srun on this machine"):
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


# -- Kubernetes

IMAGE = ("launcher.kind=kubernetes", "launcher.image=registry/streamrl:1", "tensors.host=0.0.0.0")

OPTIONS = "launcher.options=['kueue.x-k8s.io/queue-name=team', 'priorityClassName=high']"


def test_all_objects_are_what_the_api_takes():
    validate = pytest.importorskip("kubernetes_validate")
    resolved = configured(*IMAGE, OPTIONS, "launcher.place=rl")
    made = manifests(resolved)
    made += [worker_manifest(resolved.settings, spec, "a1") for spec in (WORKER, RANKS)]
    for one in made:
        validate.validate(one, "1.30", strict=True)
    kinds = [one["kind"] for one in made]
    assert kinds[-2:] == ["Pod", "Job"]
    assert {"StatefulSet", "Service", "NetworkPolicy", "Role", "ConfigMap", "PersistentVolumeClaim"} < set(kinds)


def made_of(kind: str, *overrides: str, name: str = "streamrl-mine") -> dict[str, Any]:
    """The one object of this kind and name."""
    (found,) = [
        one
        for one in manifests(configured(*IMAGE, *overrides))
        if (one["kind"], one["metadata"]["name"]) == (kind, name)
    ]
    return found


def pod_specs(*overrides: str) -> list[dict[str, Any]]:
    """Of all pods that there will ever be: the broker's, the run's, a worker's, and those of the trainer's ranks."""
    resolved = configured(*IMAGE, *overrides)
    made = [one for one in manifests(resolved) if one["kind"] in ("StatefulSet", "Job")]
    made += [worker_manifest(resolved.settings, spec, "a1") for spec in (WORKER, RANKS)]
    return [one["spec"] if one["kind"] == "Pod" else one["spec"]["template"]["spec"] for one in made]


def test_the_queue_of_kueue_and_the_priority_are_those_of_all_pods():
    resolved = configured(*IMAGE, OPTIONS)
    made = manifests(resolved) + [worker_manifest(resolved.settings, spec, "a1") for spec in (WORKER, RANKS)]
    assert all(one["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team" for one in made)
    assert [spec["priorityClassName"] for spec in pod_specs(OPTIONS)] == ["high"] * 4


def test_the_trainers_ranks_are_an_indexed_job_that_starts_and_ends_as_one():
    job = worker_manifest(configured(*IMAGE).settings, RANKS, "a1", "some-uid")
    spec, container = job["spec"], job["spec"]["template"]["spec"]["containers"][0]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["backoffLimit"] == 0
    (rank,) = [one for one in container["env"] if one["name"] == "RANK"]
    assert "job-completion-index" in rank["valueFrom"]["fieldRef"]["fieldPath"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert job["metadata"]["ownerReferences"][0]["uid"] == "some-uid"


def test_the_run_and_the_broker_have_probes_that_ask_them():
    (run,) = made_of("Job")["spec"]["template"]["spec"]["containers"]
    (broker,) = made_of("StatefulSet", name="streamrl-mine-broker")["spec"]["template"]["spec"]["containers"]
    for container, command in ((run, ["health.sh", "orchestrator"]), (broker, ["broker-health.sh"])):
        assert container["readinessProbe"]["exec"]["command"] == command
        assert container["livenessProbe"]["exec"]["command"] == command
        assert (COMPOSE / command[0]).exists(), "the images have it"
    (silent,) = made_of("Job", "api.enabled=false")["spec"]["template"]["spec"]["containers"]
    assert "livenessProbe" not in silent, "nothing would answer it"


def test_a_preempted_run_has_30_s_to_stop_and_goes_on_however_often_it_happens():
    job = made_of("Job")["spec"]
    assert {spec["terminationGracePeriodSeconds"] for spec in pod_specs()} == {30}
    assert STOP_GRACE_S < 30
    first, last = job["podFailurePolicy"]["rules"]
    assert (first["action"], first["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (last["action"], last["onExitCodes"]["values"]) == ("FailJob", [int(code) for code in NO_USE])
    (container,) = job["template"]["spec"]["containers"]
    assert "--resume" in container["command"][-1]


def test_only_pods_of_the_run_reach_its_pods():
    spec = made_of("NetworkPolicy")["spec"]
    own = {"podSelector": {"matchLabels": {"streamrl/run": "mine"}}}
    assert spec == {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]}
    resolved = configured(*IMAGE)
    workers = [worker_manifest(resolved.settings, spec, "a1") for spec in (WORKER, RANKS)]
    labelled = [one["metadata"]["labels"] for one in workers]
    labelled += [
        one["spec"]["template"]["metadata"]["labels"]
        for one in [*manifests(resolved), *workers]
        if "template" in one["spec" if "spec" in one else "metadata"]
    ]
    assert [one["streamrl/run"] for one in labelled] == ["mine"] * 5


def test_only_the_runs_own_pod_may_ask_the_api_and_none_is_root():
    """What its Role allows is all that the launcher asks for: see the test with an API."""
    role = made_of("Role")
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"create", "list", "delete", "get"}
    assert not {"secrets", "*"} & {kind for rule in role["rules"] for kind in rule["resources"]}
    bound = made_of("RoleBinding")
    assert (bound["roleRef"]["name"], bound["subjects"][0]["name"]) == ("streamrl-mine", "streamrl-mine")
    specs = pod_specs()
    assert [spec["automountServiceAccountToken"] for spec in specs] == [False, True, False, False]
    assert all(spec["securityContext"]["runAsNonRoot"] for spec in specs)


def test_secrets_are_files_of_the_secret_that_its_user_made():
    for spec in pod_specs():
        (volume,) = [one for one in spec["volumes"] if one["name"] == "secrets"]
        assert volume["secret"]["secretName"] == "streamrl-mine"
        (mount,) = [one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "secrets"]
        assert mount["readOnly"]
        files = [one for one in spec["containers"][0]["env"] if one["name"].endswith("_FILE")]
        assert files
        assert all(one["value"].startswith(mount["mountPath"]) for one in files)


@pytest.mark.parametrize("option", ["--account=x", "team", "Bad/Prefix=x", "a=b c"])
def test_an_option_that_is_no_label_is_refused(option: str):
    with pytest.raises(ConfigError, match="of Kubernetes these are labels"):
        manifests(configured(*IMAGE, f"launcher.options=['{option}']"))


def test_a_kustomize_base_is_the_same_objects(tmp_path: Path):
    """What kubectl makes of it, where there is one; an overlay of a user's in another namespace."""
    yaml = pytest.importorskip("yaml")
    resolved = configured(*IMAGE)
    write_base(resolved, [], tmp_path / "base")
    listed = yaml.safe_load((tmp_path / "base" / "kustomization.yaml").read_text())["resources"]
    assert [yaml.safe_load((tmp_path / "base" / name).read_text()) for name in listed] == manifests(resolved)
    with pytest.raises(ConfigError, match="has files already"):
        write_base(resolved, [], tmp_path / "base")
    with pytest.raises(ConfigError, match="goes with --dry-run --launcher kubernetes"):
        write_base(configured(), [], tmp_path / "other")
    if not shutil.which("kubectl"):
        pytest.skip("the base is whole; there is no kubectl to render an overlay of it with")
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text("namespace: rl\nresources: [../base]\n")
    made = subprocess.run(["kubectl", "kustomize", overlay], check=True, capture_output=True, timeout=60).stdout
    rendered = list(yaml.safe_load_all(made))
    assert sorted(one["kind"] for one in rendered) == sorted(one["kind"] for one in manifests(resolved))
    assert {one["metadata"]["namespace"] for one in rendered} == {"rl"}
    validate = pytest.importorskip("kubernetes_validate")
    for one in rendered:
        validate.validate(one, "1.30", strict=True)


def test_no_object_holds_a_secret():
    resolved = configured(*IMAGE)
    spec = ProcessSpec(name="score-0", argv=["w"], env={"STREAMRL_SECRET": "hidden-word"}, kind=WorkerKind.SCORE)
    assert "hidden-word" not in str(worker_manifest(resolved.settings, spec, "1"))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [(("launcher.kind=kubernetes",), "launcher.image"), ((*IMAGE, "run.name=My_Run"), "lower-case letters")],
)
def test_no_image_or_a_name_that_is_none_is_said(overrides: tuple[str, ...], problem: str):
    with pytest.raises(ConfigError, match=problem):
        manifests(configured(*overrides))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    pytest.importorskip("kubernetes")
    monkeypatch.setattr(kubernetes_cluster, "LOOK_S", 0.02)
    with kubernetes_api() as one:
        yield one


async def test_a_pod_is_a_process_with_an_exit_code_and_a_log(api: KubernetesApi, tmp_path: Path):
    launcher = KubernetesLauncher(configured(*IMAGE).settings, api.url)
    await launcher.open(resume=False)
    try:
        process = await launcher.start(WORKER, tmp_path / "generate-1.log")
        (name,) = api.objects
        message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
        why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        api.status(name, "Pending", conditions=[why])
        await until_pending(launcher, {"generate-1": f"Kubernetes: {message}"})
        api.status(name, "Running")
        await until_pending(launcher, {})
        api.ended(name, 4)
        assert await process.wait() == 4
        assert "a line of the pod" in (tmp_path / "generate-1.log").read_text()
    finally:
        await launcher.close()


async def test_a_pod_that_vanishes_was_killed_and_one_that_is_asked_to_end_is_deleted(
    api: KubernetesApi, tmp_path: Path
):
    launcher = KubernetesLauncher(configured(*IMAGE).settings, api.url)
    await launcher.open(resume=False)
    try:
        process = await launcher.start(WORKER, tmp_path / "log")
        (name,) = api.objects
        api.status(name, "Running")
        await until_pending(launcher, {})
        process.terminate()
        assert await process.wait() == NODE_LOST
        assert ("DELETE", f"/api/v1/namespaces/default/pods/{name}") in api.asked
    finally:
        await launcher.close()


MEMORY = "The node was low on resource: memory."
PREEMPTED = {"reason": "Preempting", "message": "a pod of a higher priority came"}


@pytest.mark.parametrize(
    ("status", "reason", "code"),
    [
        ({"code": 128, "reason": "StartError", "message": "exec: python: not found"}, "StartError: exec: python", 128),
        ({"code": 137, "reason": "OOMKilled"}, "OOMKilled", 137),
        ({"reason": "Evicted", "message": MEMORY}, f"Evicted: {MEMORY}", NODE_LOST),
        (
            {"conditions": [{"type": "DisruptionTarget", "status": "True", **PREEMPTED}]},
            "Preempting: a pod of a higher priority came",
            NODE_LOST,
        ),
        (None, "its pod is gone", NODE_LOST),
    ],
    ids=["no package in its image", "out of memory", "evicted", "preempted", "its node is gone"],
)
async def test_why_a_pod_ended_stands_last_in_its_log(
    api: KubernetesApi, tmp_path: Path, status: dict[str, Any] | None, reason: str, code: int
):
    launcher = KubernetesLauncher(configured(*IMAGE).settings, api.url)
    await launcher.open(resume=False)
    try:
        process = await launcher.start(WORKER, tmp_path / "log")
        (name,) = api.objects
        api.status(name, "Running")
        await until_pending(launcher, {})
        if status is None:
            del api.objects[name]
        elif "code" in status:
            api.ended(name, **status)
        else:
            api.status(name, "Failed", **status)
        assert await process.wait() == code
        said = last_words((tmp_path / "log").read_text())
        assert reason in said
    finally:
        await launcher.close()


@pytest.mark.parametrize("spec", [WORKER, RANKS], ids=["a pod", "a job without pods"])
async def test_one_that_never_began_ends_when_it_is_told_to(api: KubernetesApi, tmp_path: Path, spec: ProcessSpec):
    launcher = KubernetesLauncher(configured(*IMAGE).settings, api.url)
    await launcher.open(resume=False)
    try:
        process = await launcher.start(spec, tmp_path / "log")
        assert spec.name in await launcher.pending()
        process.kill()
        assert await process.wait() == NODE_LOST
    finally:
        await launcher.close()


async def test_an_api_that_does_not_answer_and_a_namespace_that_may_not_be_used_are_said_at_once(
    api: KubernetesApi,
):
    with pytest.raises(ConfigError, match=r"launcher\.place: namespace default: the API server does not answer"):
        await KubernetesLauncher(configured(*IMAGE).settings, f"http://127.0.0.1:{free_port()}").open(resume=False)
    api.refuse_lists = (403, 'pods is forbidden: User "me" cannot list resource "pods" in the namespace "rl"')
    launcher = KubernetesLauncher(configured(*IMAGE, "launcher.place=rl").settings, api.url)
    with pytest.raises(ConfigError, match=r"namespace rl: the API server answers 403: .*cannot list"):
        await launcher.open(resume=False)
    outside = KubernetesLauncher(configured(*IMAGE).settings)
    with pytest.raises(ConfigError, match="this process is in no pod; apply what this prints"):
        await outside.open(resume=False)


async def test_a_quota_is_said_as_the_api_says_it_and_tried_again(api: KubernetesApi, tmp_path: Path):
    launcher = KubernetesLauncher(configured(*IMAGE).settings, api.url)
    await launcher.open(resume=False)
    try:
        api.refuse = (403, "exceeded quota: gpus")
        with pytest.raises(KubernetesUnavailableError, match=r"answers 403.*exceeded quota"):
            await launcher.start(WORKER, tmp_path / "log")
        with pytest.raises(ChildFailedError, match="exceeded quota"):
            await Children(tmp_path, max_restarts=1, launcher=launcher).keep(WORKER)
    finally:
        await launcher.close()


async def test_an_image_that_is_not_there_is_said_as_the_node_says_it(api: KubernetesApi, tmp_path: Path):
    launcher = KubernetesLauncher(configured(*IMAGE).settings, api.url)
    await launcher.open(resume=False)
    try:
        await launcher.start(WORKER, tmp_path / "log")
        waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such manifest"}}
        container = {"name": "streamrl", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
        api.status(next(iter(api.objects)), "Pending", containerStatuses=[{**container, "state": waiting}])
        await until_pending(launcher, {"generate-1": "Kubernetes: ImagePullBackOff: no such manifest"})
    finally:
        await launcher.close()


async def test_a_creation_that_is_answered_late_or_twice_starts_one_pod(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    launcher = KubernetesLauncher(configured(*IMAGE).settings, api.url)
    await launcher.open(resume=False)
    try:
        with monkeypatch.context() as impatient:
            impatient.setattr(kubernetes_cluster, "ANSWER_S", 0.3)
            api.answers.clear()
            with pytest.raises(KubernetesUnavailableError, match="does not answer"):
                await launcher.start(WORKER, tmp_path / "log")
        api.answers.set()
        await until(lambda: len(api.objects) == 1)
        process = await launcher.start(WORKER, tmp_path / "log")  # which the server says is there already
        (name,) = api.objects
        api.ended(name, 0)
        assert await process.wait() == 0
        await launcher.start(WORKER, tmp_path / "log")
        assert list(api.objects) != [name], "the next start is another pod"
    finally:
        await launcher.close()


async def test_what_an_earlier_supervisor_left_is_ended_and_no_more_is_asked_than_the_role_allows(
    api: KubernetesApi, tmp_path: Path
):
    resolved = configured(*IMAGE)
    dead = KubernetesLauncher(resolved.settings, api.url, {OWNER: "some-uid"})
    await dead.open(resume=False)
    for spec in (WORKER, RANKS):
        await dead.start(spec, tmp_path / "log")
    await dead.close()
    assert {one["kind"] for one in api.objects.values()} == {"Pod", "Job"}
    assert all(one["metadata"]["ownerReferences"][0]["uid"] == "some-uid" for one in api.objects.values())
    launcher = KubernetesLauncher(resolved.settings, api.url)
    await launcher.open(resume=True)
    assert api.objects == {}
    process = await launcher.start(WORKER, tmp_path / "log")
    api.ended(next(iter(api.objects)), 0)
    await process.wait()
    await launcher.close()
    (role,) = [one for one in manifests(resolved) if one["kind"] == "Role"]
    allowed = {(kind, verb) for rule in role["rules"] for kind in rule["resources"] for verb in rule["verbs"]}
    assert {used(method, path) for method, path in api.asked} == allowed


def used(method: str, path: str) -> tuple[str, str]:
    """(resource, verb) of a request, as RBAC has them."""
    parts = path.partition("/namespaces/default/")[2].split("/")
    verb = {"POST": "create", "DELETE": "delete", "GET": "get" if len(parts) > 1 else "list"}[method]
    return "/".join([parts[0], *parts[2:]]), verb


# -- Ray


async def test_a_head_of_ray_that_is_gone_is_a_reason_then_the_end_and_one_that_comes_back_is_neither(tmp_path: Path):
    address = ("127.0.0.1", free_port())

    async def answer() -> asyncio.Server:
        return await asyncio.start_server(lambda _, writer: writer.close(), *address)

    clock, head = ManualClock(), await answer()
    launcher = RayLauncher(configured("launcher.kind=ray", "launcher.place=auto").settings, 1)
    launcher.watch_head(f"{address[0]}:{address[1]}", clock)
    assert await launcher.pending() == {}
    for silent_s in (0.0, 134.0):  # 135 s are three quarters of 180
        head.close()
        await head.wait_closed()
        await launcher.pending()
        clock.advance(silent_s)
        with pytest.raises(RayUnavailableError, match="ends after 135 s"):
            await launcher.start(WORKER, tmp_path / "log")
        await launcher.pending()
        head = await answer()
        assert await launcher.pending() == {}
    head.close()
    await head.wait_closed()
    await launcher.pending()
    clock.advance(136.0)
    with pytest.raises(EngineLostError, match=f"its head at {address[0]}:{address[1]} took no connection for 136 s"):
        await launcher.pending()


async def test_an_actor_is_a_process_with_what_it_writes_and_its_exit_code(tmp_path: Path):
    with ray_api() as api:
        launcher = RayLauncher(configured("launcher.kind=ray").settings, 2)
        await launcher.open(resume=False)
        output = tmp_path / "generate-1.log"
        process = await launcher.start(WORKER, output)
        assert await launcher.pending() == {
            "generate-1": "Ray: asks for 2 CPU, of which the cluster has 1000 free of 1000"
        }
        (actor,) = api.actors
        assert actor.options["memory"] == 512 * 2**20
        assert actor.given[:2] == (["worker", "generate"], {"K": "v"})
        actor.says(b"a line of the worker\n")
        await until(lambda: process.has_begun)
        assert await launcher.pending() == {}
        process.terminate()
        assert actor.sent == [15]
        await asyncio.sleep(0)
        actor.says(b"", 3)
        assert await process.wait() == 3
        assert output.read_text() == "a line of the worker\n"
        await launcher.close()


async def test_ranks_of_ray_end_with_the_first_that_is_lost_and_all_are_lost_with_the_head(tmp_path: Path):
    with ray_api() as api:
        launcher = RayLauncher(configured("launcher.kind=ray").settings, 2)
        await launcher.open(resume=False)
        ranks = await launcher.start(RANKS, tmp_path / "train-0.log")
        assert api.groups == [[{"CPU": 1.0, "GPU": 1.0}] * 2]
        assert [actor.given[1]["RANK"] for actor in api.actors] == ["0", "1"]
        api.actors[1].lost()
        assert await ranks.wait() == NODE_LOST
        assert "its node has died" in (tmp_path / "train-0.log").read_text()
        worker = await launcher.start(WORKER, tmp_path / "log")
        clock = ManualClock()
        launcher.watch_head(f"127.0.0.1:{free_port()}", clock)
        assert "has taken no connection" in (await launcher.pending())["generate-1"]
        clock.advance(200.0)
        with pytest.raises(EngineLostError):
            await launcher.pending()
        assert await worker.wait() == NODE_LOST
        api.actors[-1].lost()
        await launcher.close()


async def test_an_actor_that_is_created_after_nobody_waits_for_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with ray_api() as api:
        launcher = RayLauncher(configured("launcher.kind=ray").settings, 2)
        await launcher.open(resume=False)
        with monkeypatch.context() as impatient:
            impatient.setattr(ray_cluster, "ANSWER_S", 0.05)
            api.answers.clear()
            with pytest.raises(RayUnavailableError, match="Ray did not answer"):
                await launcher.start(WORKER, tmp_path / "log")
        api.answers.set()
        await until(lambda: [actor.was_killed for actor in api.actors] == [True])
        second = await launcher.start(WORKER, tmp_path / "log")
        assert [actor.was_killed for actor in api.actors] == [True, False]
        second.kill()
        assert await second.wait() == NODE_LOST
        await launcher.close()


async def test_a_cluster_of_ray_that_is_not_there_is_said_before_anything_starts():
    """As ray.init does."""
    with ray_api() as api:
        api.refuses = ConnectionError("Failed to connect to 10.0.0.1:6379")
        launcher = RayLauncher(configured("launcher.kind=ray", "launcher.place=10.0.0.1:6379").settings, 1)
        with pytest.raises(
            ConfigError, match=r"launcher\.place: no cluster of Ray answers at 10\.0\.0\.1:6379: Failed"
        ):
            await launcher.open(resume=False)


async def test_a_ray_without_a_gpu_is_refused_by_a_run_that_asks_for_one():
    with ray_api() as api:
        api.resources = {"CPU": 4.0}
        launcher = RayLauncher(configured("launcher.kind=ray", "generation.device=cuda").settings, 1)
        with pytest.raises(ConfigError, match="has no GPU, and the run asks for 1"):
            await launcher.open(resume=False)
        await launcher.close()


async def test_a_call_that_waits_for_ray_ends_in_time():
    hangs = threading.Event()
    with pytest.raises(RayUnavailableError, match="Ray did not answer for 0 s"):
        await in_time(hangs.wait, 0.01)
    hangs.set()
    assert await in_time(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_time(lambda: 1 // 0)


# -- what all have in common


def test_gpus_are_asked_for_where_a_device_says_so():
    asked = configured("generation.device=cuda", "trainer.device=auto", "launcher.cpus=3").settings
    assert resources_of(asked, WorkerKind.GENERATE) == Resources(gpus=1, cpus=3)
    assert resources_of(asked, WorkerKind.TRAIN) == Resources(gpus=0, cpus=3)
    served = configured("generation.engine=sglang", "generation.gpus_per_worker=4").settings
    assert resources_of(served, WorkerKind.GENERATE).gpus == 4


def test_ranks_that_an_engine_starts_are_one_process_that_numbers_itself(tmp_path: Path):
    settings = configured("trainer.ranks=2", "trainer.parallel.tensor=2").settings
    fleet = Fleet(
        settings=settings,
        run_dir=tmp_path,
        model_dir=tmp_path,
        url="unix:///s",
        worker_url="redis://h:1",
        env={},
        is_local=False,
    )
    (train,) = [spec for spec in fleet.workers() if spec.kind is WorkerKind.TRAIN]
    assert train.ranks == 2
    assert "--index" not in train.argv
    assert "redis://h:1" in train.argv
    assert "unix:///s" in fleet.orchestrator().argv


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("launcher.kind=slurm",), "launcher.address"),
        (("launcher.kind=ray", "launcher.place=auto"), "launcher.address"),
        (("launcher.kind=slurm", "launcher.address=10.0.0.1"), "tensors.host"),
        (("launcher.kind=ray", "broker.url=redis://far:1"), "tensors.host"),
        (("launcher.kind=slurm", "launcher.address=h", "tensors.host=0.0.0.0", "rows.store=units"), "rows.host"),
    ],
)
def test_what_nodes_could_not_reach_is_refused(overrides: tuple[str, ...], problem: str):
    with pytest.raises(ConfigError, match=problem):
        check_cluster(configured(*overrides).settings)


class Slow:
    """A launcher whose processes begin when a test says so."""

    is_local = False

    def __init__(self) -> None:
        self.waits: dict[str, str] = {"generate-1": "Resources"}

    async def open(self, *, resume: bool) -> None: ...

    async def start(self, spec: ProcessSpec, output: Path) -> Running:
        raise AssertionError("nothing is started")

    async def pending(self) -> Mapping[str, str]:
        return self.waits

    async def close(self) -> None: ...


async def test_who_is_pending_is_reported_again_and_again(tmp_path: Path):
    heard: asyncio.Queue[Mapping[str, str]] = asyncio.Queue()
    children = Children(tmp_path, max_restarts=0, launcher=Slow())
    watching = asyncio.create_task(children.watch_pending(heard.put))
    assert await heard.get() == {"generate-1": "Resources"}
    assert children.pending() == {"generate-1": "Resources"}
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_workers_that_are_added_take_numbers_that_nobody_has():
    broker = MemoryBroker(MemoryServer(ManualClock()), RunName("r"))
    for number in (1, 2):
        await broker.beat(WorkerId(f"generate-{number}.1"), b"", ttl_s=1000.0)
    await broker.put_meta(keys.SPAWN, encode(SpawnWorkers(total=2, reason="slower")))
    added: list[int] = []
    done = asyncio.Event()

    def start(number: int) -> ProcessSpec:
        added.append(number)
        if len(added) == 2:
            done.set()
        return ProcessSpec(name=f"generate-{number}", argv=[], kind=WorkerKind.GENERATE)

    adding = asyncio.create_task(add_workers(broker, start, first=1))
    await done.wait()
    adding.cancel()
    await asyncio.gather(adding, return_exceptions=True)
    assert added == [3, 4]


async def test_a_process_elsewhere_that_ended_is_reported_by_its_name_with_all_its_ranks():
    broker = MemoryBroker(MemoryServer(ManualClock()), RunName("r"))
    for name in ("train-0", "train-1", "train-2", "generate-1"):
        status = WorkerStatus(
            worker_id=WorkerId(f"{name}.1"), kind=WorkerKind.TRAIN, host="n1", pid=7, protocol=1, doing="waiting"
        )
        await broker.beat(status.worker_id, encode(status), ttl_s=1000.0)
    await report_loss(broker, RANKS, None)
    assert sorted(await broker.leases()) == ["generate-1.1", "train-2.1"]
