"""Pods as processes: the official client, before an API that answers as its documentation says."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ChildFailedError, ConfigError
from orchestrator.launch.growth import add_workers
from orchestrator.launch.launchers import kubernetes_cluster
from orchestrator.launch.launchers.base import NODE_LOST, ProcessSpec
from orchestrator.launch.launchers.kubernetes_cluster import KubernetesLauncher, KubernetesUnavailableError
from orchestrator.launch.launchers.kubernetes_manifests import OWNER, manifests
from orchestrator.launch.processes import Children, Fleet, last_words
from tests.fakes.kubernetes_api import KubernetesApi, kubernetes_api
from tests.fakes.launched import IMAGE, LIMIT_S, RANKS, WORKER, configured, opened, until
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from tests.fakes.redis_servers import free_port
from transport.broker import keys
from transport.contracts.messages import SpawnWorkers, encode
from transport.contracts.types import RunName, WorkerKind

with contextlib.suppress(ImportError):  # here, as it takes seconds, which are not a test's
    importlib.import_module("kubernetes.client.api")


async def until_pending(launcher: KubernetesLauncher, expected: Mapping[str, str]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while await launcher.pending() != expected:  # noqa: ASYNC110 the same
            await asyncio.sleep(0.02)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    pytest.importorskip("kubernetes")
    monkeypatch.setattr(kubernetes_cluster, "LOOK_S", 0.02)
    with kubernetes_api() as one:
        yield one


async def test_a_pod_is_a_process_with_an_exit_code_and_a_log(api: KubernetesApi, tmp_path: Path):
    async with opened(KubernetesLauncher(configured(*IMAGE).settings, api.url)) as launcher:
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


async def test_a_pod_that_vanishes_was_killed_and_one_that_is_asked_to_end_is_deleted(
    api: KubernetesApi, tmp_path: Path
):
    async with opened(KubernetesLauncher(configured(*IMAGE).settings, api.url)) as launcher:
        process = await launcher.start(WORKER, tmp_path / "log")
        (name,) = api.objects
        api.status(name, "Running")
        await until_pending(launcher, {})
        process.terminate()
        assert await process.wait() == NODE_LOST
        assert ("DELETE", f"/api/v1/namespaces/default/pods/{name}") in api.asked


async def test_workers_that_the_run_asks_for_are_pods_and_one_that_was_drained_is_not_made_again(
    api: KubernetesApi, tmp_path: Path
):
    broker = MemoryBroker(MemoryServer(ManualClock()), RunName("r"))
    settings = configured(*IMAGE).settings
    launcher = KubernetesLauncher(settings, api.url)
    children = Children(tmp_path, max_restarts=1, launcher=launcher)
    fleet = Fleet(settings=settings, run_dir=tmp_path, model_dir=tmp_path, url="redis://h:1", env={}, is_local=False)
    async with opened(launcher):
        async with asyncio.TaskGroup() as group:

            def start(number: int) -> ProcessSpec:
                spec = fleet.worker(WorkerKind.GENERATE, number)
                group.create_task(children.keep(spec))
                return spec

            await broker.put_meta(keys.SPAWN, encode(SpawnWorkers(total=2, reason="generation is slower")))
            adding = group.create_task(add_workers(broker, start, first=1))
            await until(lambda: len(api.objects) == 2)
            assert {one["metadata"]["labels"]["streamrl/role"] for one in api.objects.values()} == {
                "generate-1",
                "generate-2",
            }
            for name in list(api.objects):
                api.ended(name, 0)  # as a worker that DrainWorker told to leave
            await until(lambda: not children.pids())
            adding.cancel()
        await until(lambda: not api.objects)
        assert children.restarts == {}


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
    async with opened(KubernetesLauncher(configured(*IMAGE).settings, api.url)) as launcher:
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


@pytest.mark.parametrize("spec", [WORKER, RANKS], ids=["a pod", "a job without pods"])
async def test_one_that_never_began_ends_when_it_is_told_to(api: KubernetesApi, tmp_path: Path, spec: ProcessSpec):
    async with opened(KubernetesLauncher(configured(*IMAGE).settings, api.url)) as launcher:
        process = await launcher.start(spec, tmp_path / "log")
        assert spec.name in await launcher.pending()
        process.kill()
        assert await process.wait() == NODE_LOST


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
    with pytest.raises(ConfigError, match="this process is in none: print the manifests with --dry-run"):
        await outside.open(resume=False)


async def test_a_quota_is_said_as_the_api_says_it_and_tried_again(api: KubernetesApi, tmp_path: Path):
    async with opened(KubernetesLauncher(configured(*IMAGE).settings, api.url)) as launcher:
        api.refuse = (403, "exceeded quota: gpus")
        with pytest.raises(KubernetesUnavailableError, match=r"answers 403.*exceeded quota"):
            await launcher.start(WORKER, tmp_path / "log")
        with pytest.raises(ChildFailedError, match="exceeded quota"):
            await Children(tmp_path, max_restarts=1, launcher=launcher).keep(WORKER)


async def test_an_image_that_is_not_there_is_said_as_the_node_says_it(api: KubernetesApi, tmp_path: Path):
    async with opened(KubernetesLauncher(configured(*IMAGE).settings, api.url)) as launcher:
        await launcher.start(WORKER, tmp_path / "log")
        waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such manifest"}}
        container = {"name": "streamrl", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
        api.status(next(iter(api.objects)), "Pending", containerStatuses=[{**container, "state": waiting}])
        await until_pending(launcher, {"generate-1": "Kubernetes: ImagePullBackOff: no such manifest"})


async def test_a_creation_that_is_answered_late_or_twice_starts_one_pod(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with opened(KubernetesLauncher(configured(*IMAGE).settings, api.url)) as launcher:
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
