"""Workers as pods of Kubernetes, started by the run's own pod; one list of pods a look, whoever waits for one.

    start ──► create Pod, or Indexed Job ──► every LOOK_S: list pods of the run ──► exit code, or why it is pending
    terminate, kill ──► delete, with the grace of a signal or without

A pod that vanished, with its node or by an eviction, is a process that was killed. Each start is a pod of its own name.
Where a creation is not answered the next start asks for the same name, so that of two one is made; the second is told
that the name is taken. Workers are owned by the run's Job: who deletes it deletes them.
Logs: the log of a worker in the run's directory has what its pod wrote, once it has ended, and where to look before.

Source: ours; the official client, whose calls block and so run in threads.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from orchestrator.errors import ConfigError
from orchestrator.launch.launchers.base import NODE_LOST, ProcessSpec
from orchestrator.launch.launchers.kubernetes_manifests import OWNER, RUN_LABEL, object_name, worker_manifest
from transport.contracts.settings import Settings
from transport.errors import TransientError

log = structlog.get_logger(__name__)

LOOK_S = 2.0
ANSWER_S = 20.0
TERM_GRACE_S = 30
TAKEN, GONE = 409, 404
ROLE_OF_WORKER = "streamrl/role notin (broker,orchestrator,run)"

IN_A_POD = "KUBERNETES_SERVICE_HOST"
"""Set in every container of a cluster."""

T = TypeVar("T")


class KubernetesUnavailableError(TransientError):
    """The API server did not answer, or refused: a quota, an admission rule. status: of HTTP, 0 for no answer."""

    def __init__(self, problem: str, status: int = 0) -> None:
        super().__init__(problem)
        self.status = status


def check_image(settings: Settings) -> None:
    """Raises ConfigError: no image is named."""
    if not settings.launcher.image:
        raise ConfigError(
            "launcher.image: Kubernetes needs the image of all processes: name it with --set launcher.image=...",
            key="launcher.image",
        )


def check_in_a_pod(environ: Mapping[str, str]) -> None:
    """Raises ConfigError: ``environ`` is not that of a pod."""
    if IN_A_POD not in environ:
        raise _in_no_pod()


def _in_no_pod() -> ConfigError:
    return ConfigError(
        "launcher.kind: Kubernetes starts workers from a pod of its own, and this process is in none: print the "
        "manifests with --dry-run, and apply them with kubectl apply -f -",
        key="launcher.kind",
    )


class KubernetesLauncher:
    is_local = False

    def __init__(self, settings: Settings, host: str = "", environ: Mapping[str, str] = os.environ) -> None:
        """host: URL of an API server that asks for no token; "" is the cluster that this process runs in.

        environ: of this process, which names the Job that it runs in.
        """
        if importlib.util.find_spec("kubernetes") is None:
            hint = "install it with: pip install 'streamrl[kubernetes]'"
            raise ConfigError(f"launcher.kind: the client of Kubernetes is not installed; {hint}", key="launcher.kind")
        self._settings = settings
        self._host = host
        self._namespace = settings.launcher.place or "default"
        self._selector = f"{RUN_LABEL}={settings.run.name}"
        self._life = secrets.token_hex(2)
        self._starts = itertools.count(1)
        self._owner = environ.get(OWNER, "")
        self._unanswered: dict[str, int] = {}
        """Number of a start by its process's name, of which nobody knows whether it was made."""
        self._started: dict[str, PodProcess] = {}
        self._looking: asyncio.Task[None] | None = None
        self._deleting: set[asyncio.Task[None]] = set()
        self._core: Any = None
        self._batch: Any = None

    async def open(self, *, resume: bool) -> None:
        from kubernetes import client, config

        check_image(self._settings)
        object_name(self._settings.run.name)
        configuration = client.Configuration(host=self._host) if self._host else None
        if configuration is None:
            try:
                config.load_incluster_config()
            except config.ConfigException as error:
                raise _in_no_pod() from error
        api = client.ApiClient(configuration)
        self._core, self._batch = client.CoreV1Api(api), client.BatchV1Api(api)
        try:
            left = f"{self._selector},{ROLE_OF_WORKER}"  # by a supervisor before this one
            for job in await self._listed(self._batch.list_namespaced_job, left):
                await self._delete(job.metadata.name, is_job=True, grace_s=0)
            for pod in await self._listed(self._core.list_namespaced_pod, left):
                await self._delete(pod.metadata.name, is_job=False, grace_s=0)
        except KubernetesUnavailableError as error:
            raise ConfigError(f"launcher.place: namespace {self._namespace}: {error}", key="launcher.place") from error
        self._looking = asyncio.create_task(self._look_forever(), name="pods")

    async def start(self, spec: ProcessSpec, output: Path) -> PodProcess:
        number = self._unanswered.pop(spec.name, None) or next(self._starts)
        manifest = worker_manifest(self._settings, spec, f"{self._life}{number}", self._owner)
        name, is_job = manifest["metadata"]["name"], spec.ranks > 1
        create = self._batch.create_namespaced_job if is_job else self._core.create_namespaced_pod
        try:
            await self._call(lambda: create(self._namespace, manifest, _request_timeout=ANSWER_S))
        except KubernetesUnavailableError as error:
            if not error.status:
                self._unanswered[spec.name] = number
            if error.status != TAKEN:
                raise
        where = f"kubectl logs -n {self._namespace} {'job/' if is_job else ''}{name}"
        with output.open("a", encoding="utf-8") as file:
            file.write(f"what it writes: {where}\n")
        process = PodProcess(self, name, output, number, is_job=is_job, ranks=spec.ranks)
        self._started[spec.name] = process
        return process

    async def pending(self) -> Mapping[str, str]:
        return {name: one.waits for name, one in self._started.items() if one.returncode is None and one.waits}

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, *self._deleting, return_exceptions=True)

    async def _look_forever(self) -> None:
        while True:
            try:
                await self.look()
            except KubernetesUnavailableError as error:
                log.warning("no look at the pods", error=str(error))
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """One look at all pods of the run."""
        living = [process for process in self._started.values() if process.returncode is None]
        if not living:
            return
        pods = await self._listed(self._core.list_namespaced_pod, self._selector)
        for process in living:
            own = [
                pod
                for pod in pods
                if pod.metadata.name == process.name
                or (process.is_job and (pod.metadata.labels or {}).get("job-name") == process.name)
            ]
            code = process.see(own)
            if code is not None:
                await self._keep_log(process, own)
                process.end(code)
                await self._delete(process.name, is_job=process.is_job, grace_s=TERM_GRACE_S)

    async def _keep_log(self, process: PodProcess, pods: list[Any]) -> None:
        for pod in pods:
            ask = partial(
                self._core.read_namespaced_pod_log, pod.metadata.name, self._namespace, _request_timeout=ANSWER_S
            )
            try:
                said = await self._call(ask)
            except KubernetesUnavailableError as error:
                said = f"its log cannot be read: {error}"
            why = _why_ended(pod)
            with process.output.open("a", encoding="utf-8") as file:
                file.write(f"{said}\n" + (f"error: {why}\n" if why else ""))
        if not pods and not process.is_to_end:
            with process.output.open("a", encoding="utf-8") as file:
                file.write("error: its pod is gone: it was deleted, or lost with its node\n")

    async def _listed(self, listed: Callable[..., Any], selector: str) -> list[Any]:
        """listed: of the client, of one kind of object."""
        found = await self._call(lambda: listed(self._namespace, label_selector=selector, _request_timeout=ANSWER_S))
        return list(found.items)

    async def _delete(self, name: str, *, is_job: bool, grace_s: int) -> None:
        delete = self._batch.delete_namespaced_job if is_job else self._core.delete_namespaced_pod
        more = {"propagation_policy": "Background"} if is_job else {"grace_period_seconds": grace_s}
        try:
            await self._call(lambda: delete(name, self._namespace, _request_timeout=ANSWER_S, **more))
        except KubernetesUnavailableError as error:
            if error.status != GONE:
                log.warning("a pod was not deleted", name=name, error=str(error))

    def delete_soon(self, process: PodProcess, grace_s: int) -> None:
        process.is_to_end = True
        deleting = asyncio.create_task(self._delete(process.name, is_job=process.is_job, grace_s=grace_s))
        self._deleting.add(deleting)
        deleting.add_done_callback(self._deleting.discard)

    async def _call(self, ask: Callable[[], T]) -> T:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return await asyncio.to_thread(ask)
        except ApiException as error:
            body = str(error.body or error.reason)
            status = int(error.status or 0)
            raise KubernetesUnavailableError(f"the API server answers {status}: {body[:500]}", status) from error
        except HTTPError as error:
            raise KubernetesUnavailableError(f"the API server does not answer: {error}") from error


class PodProcess:
    """One start of a worker: a pod, or the job of all ranks."""

    def __init__(
        self, launcher: KubernetesLauncher, name: str, output: Path, number: int, *, is_job: bool, ranks: int
    ) -> None:
        self._launcher = launcher
        self.name = name
        self.output = output
        self.pid = number
        self.is_job = is_job
        self.returncode: int | None = None
        self.waits = "Kubernetes: no pod yet"
        self.is_to_end = False
        self._ranks = ranks
        self._seen = False
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def see(self, pods: list[Any]) -> int | None:
        """What a look shows. Returns its exit code once it has ended: of several ranks the first that failed."""
        if not pods:  # a job makes its pods later
            return NODE_LOST if self._seen or not self.is_job or self.is_to_end else None
        self._seen = True
        self.waits = next((reason for reason in map(_why_pending, pods) if reason), "")
        codes = [code for code in map(_exit_code, pods) if code is not None]
        failed = next((code for code in codes if code), None)
        return failed if failed is not None else 0 if len(codes) == self._ranks else None

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def terminate(self) -> None:
        self._launcher.delete_soon(self, TERM_GRACE_S)

    def kill(self) -> None:
        self._launcher.delete_soon(self, 0)


def _exit_code(pod: Any) -> int | None:
    if pod.status.phase not in ("Succeeded", "Failed"):
        return None
    for status in pod.status.container_statuses or []:
        if status.state.terminated is not None:
            return status.state.terminated.exit_code
    return 0 if pod.status.phase == "Succeeded" else NODE_LOST  # evicted, or its node is gone


def _why_ended(pod: Any) -> str:
    """In the words of the node or the scheduler; "" where the exit code is all there is to say."""
    ends = [status.state.terminated for status in pod.status.container_statuses or [] if status.state.terminated]
    said = [(end.reason, end.message) for end in ends if end.reason not in (None, "Completed", "Error")]
    said += [(pod.status.reason, pod.status.message)] if pod.status.reason else []
    said += [(one.reason, one.message) for one in pod.status.conditions or [] if one.type == "DisruptionTarget"]
    return "; ".join(f"Kubernetes: {reason}: {message or ''}".rstrip(": ") for reason, message in said)


def _why_pending(pod: Any) -> str:
    """In the words of the scheduler or the node; "" for one that has begun."""
    if pod.status.phase != "Pending":
        return ""
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"Kubernetes: {condition.message or condition.reason}"
    for status in pod.status.container_statuses or []:
        if status.state.waiting is not None:
            return f"Kubernetes: {status.state.waiting.reason}: {status.state.waiting.message or ''}".rstrip(": ")
    return "Kubernetes: no node yet"
