"""Objects of Kubernetes, made from a run's settings: those that are applied once, and those of its workers.

    kubectl apply ──► Secret's name only, ConfigMap, claim for the run's directory, broker (StatefulSet, Service),
                      ServiceAccount with a Role for pods and jobs, NetworkPolicy,
                      Job ``<run>``: ``run --launcher kubernetes`` (supervisor and orchestrator) ──► workers:
                      a Pod each; the trainer's ranks are an Indexed Job, which starts and ends as one

Pure: dictionaries in, dictionaries out. No object holds a secret: all name the one that its user made, whose keys are
``broker-password`` and ``secret``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.config.load import Resolved, render
from orchestrator.errors import ConfigError, ExitCode
from orchestrator.launch.launchers.base import ProcessSpec, Resources
from transport.contracts.settings import Settings
from transport.process.programs import quoted
from transport.process.secret import BROKER_PASSWORD, SHARED_SECRET

RUNS, CONFIG, SECRETS = "/runs", "/etc/streamrl", "/run/secrets/streamrl"
USER = 10001
"""Of the image (compose/Dockerfile)."""
BROKER_PORT, API_PORT = 6379, 8000
NO_USE = [int(code) for code in (ExitCode.BAD_CONFIG, ExitCode.STALLED, ExitCode.FATAL, ExitCode.UNWRITABLE)]
"""Exit codes of ``run`` after which its Job has failed."""
OWNER = "STREAMRL_OWNER_UID"
"""Variable of the run's pod: its Job, which owns the workers, so that they go when it is deleted."""
PRIORITY = "priorityClassName"
"""The one of launcher.options that is no label."""
SECRET_KEYS = {BROKER_PASSWORD: "broker-password", SHARED_SECRET: "secret"}
RUN_LABEL, ROLE_LABEL = "streamrl/run", "streamrl/role"

Manifest = dict[str, Any]


def object_name(run: str, part: str = "") -> str:
    """A DNS label. Raises ConfigError: the run's name makes none."""
    name = f"streamrl-{run}" + (f"-{part}" if part else "")
    if len(name) > 63 or not all(char.isdigit() or "a" <= char <= "z" or char == "-" for char in name):
        raise ConfigError(
            f"run.name: Kubernetes wants lower-case letters, digits and -, 63 characters with what is added: {name!r}",
            key="run.name",
        )
    return name


def manifests(resolved: Resolved) -> list[Manifest]:
    """What is applied once, in an order in which each finds what it names. Raises ConfigError."""
    settings = resolved.settings
    if not settings.launcher.image:
        raise ConfigError(
            "launcher.image: Kubernetes needs the image of all processes, by tag or digest (compose/Dockerfile)",
            key="launcher.image",
        )
    _check_options(settings)
    return [
        _object(settings, "v1", "ConfigMap", "", data={"run.toml": render(resolved)}),
        _object(
            settings,
            "v1",
            "PersistentVolumeClaim",
            "",
            spec={"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "50Gi"}}},
        ),
        *_broker(settings),
        *_rights(settings),
        _network(settings),
        _run_job(settings),
    ]


def manifests_text(resolved: Resolved, specs: Sequence[ProcessSpec]) -> str:
    """YAML for ``kubectl apply -f -``; what the run then starts itself stands in comments."""
    import yaml

    return _first_steps(resolved.settings, specs) + yaml.safe_dump_all(manifests(resolved), sort_keys=False)


def kustomize_base(resolved: Resolved, specs: Sequence[ProcessSpec]) -> dict[str, str]:
    """The same as files of a Kustomize base, by name."""
    import yaml

    made = {f"{one['kind'].lower()}-{one['metadata']['name']}.yaml": one for one in manifests(resolved)}
    base = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": list(made)}
    advice = "# The image and what workers ask for stand in the ConfigMap, too: render anew to change them.\n"
    files = {name: yaml.safe_dump(one, sort_keys=False) for name, one in made.items()}
    first = _first_steps(resolved.settings, specs)
    return {"kustomization.yaml": first + advice + yaml.safe_dump(base, sort_keys=False), **files}


def _first_steps(settings: Settings, specs: Sequence[ProcessSpec]) -> str:
    """Comments."""
    started = "".join(f"#   {spec.name}: {spec.ranks} x {_requests(spec.resources)}\n" for spec in specs)
    name = object_name(settings.run.name)
    first = f"# First: kubectl create secret generic {name} --from-file=broker-password --from-file=secret\n"
    return first + f"# The run starts by itself:\n{started}"


def worker_manifest(settings: Settings, spec: ProcessSpec, start: str, owner: str = "") -> Manifest:
    """Of one start of a worker: a Pod; an Indexed Job for several ranks.

    start: tells it from earlier ones.  owner: uid of the run's Job.
    """
    name = object_name(settings.run.name, f"{spec.name}-{start}")
    labels = _labels(settings, spec.name)
    template = _pod(settings, spec, {"STREAMRL_RANKS": start} if spec.ranks > 1 else {})
    metadata: Manifest = {"name": name, "labels": labels}
    if owner:
        job = {"apiVersion": "batch/v1", "kind": "Job", "name": object_name(settings.run.name), "uid": owner}
        metadata["ownerReferences"] = [job]
    if spec.ranks == 1:
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completions": spec.ranks,
            "parallelism": spec.ranks,
            "completionMode": "Indexed",
            "backoffLimit": 0,  # the first rank that fails ends all; who started them starts all again
            "template": {"metadata": {"labels": labels}, "spec": template},
        },
    }


def _pod(settings: Settings, spec: ProcessSpec, more: Mapping[str, str]) -> Manifest:
    env = {key: value for key, value in spec.env.items() if key not in SECRET_KEYS} | {**more}
    variables: list[Manifest] = [{"name": key, "value": value} for key, value in env.items()]
    if spec.ranks > 1:
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        variables.append({"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}})
    return _pod_spec(settings, list(spec.argv), variables, spec.resources, restart="Never")


def _pod_spec(
    settings: Settings, argv: list[str], variables: list[Manifest], ask: Resources, *, restart: str
) -> Manifest:
    name = object_name(settings.run.name)
    files = [{"name": f"{variable}_FILE", "value": f"{SECRETS}/{key}"} for variable, key in SECRET_KEYS.items()]
    requests = _requests(ask)
    return {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": 30,  # as of a preemption's notice: a worker hands its work back at once
        "automountServiceAccountToken": False,
        **({PRIORITY: priority} if (priority := _options(settings).get(PRIORITY)) else {}),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "streamrl",
                "image": settings.launcher.image,
                "command": argv,
                "workingDir": "/tmp",
                "env": [*files, *variables],
                "resources": {"requests": requests, "limits": {k: v for k, v in requests.items() if k != "cpu"}},
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [
                    {"name": "runs", "mountPath": RUNS},
                    {"name": "secrets", "mountPath": SECRETS, "readOnly": True},
                    {"name": "shm", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": name}},
            {"name": "secrets", "secret": {"secretName": name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _requests(ask: Resources) -> dict[str, str]:
    asked = {"cpu": str(ask.cpus)}
    asked |= {"memory": f"{ask.memory_mib}Mi"} if ask.memory_mib else {}
    return asked | ({"nvidia.com/gpu": str(ask.gpus)} if ask.gpus else {})


def _run_job(settings: Settings) -> Manifest:
    """The supervisor with the orchestrator as its child: the one pod that may start others."""
    run = settings.run.name
    stored = quoted(f"{RUNS}/{run}/config.toml")
    again = f"[ -f {stored} ] && set -- --resume || set -- --config {CONFIG}/run.toml --trust"
    here = ["--name", run, "--dir", RUNS, "--launcher", "kubernetes", "--plain"]
    places = ["--set", f"broker.url={_broker_url(run)}", "--set", f"api.port={API_PORT}"]
    argv = ["bash", "-c", f'{again}; exec streamrl-orchestrator run "$@" {quoted(*here, *places)}']
    owner = {
        "name": OWNER,
        "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}},
    }
    pod = _pod_spec(settings, argv, [owner], Resources(cpus=1), restart="Never")
    pod |= {"serviceAccountName": object_name(run), "automountServiceAccountToken": True}
    pod["volumes"].append({"name": "config", "configMap": {"name": object_name(run)}})
    container = pod["containers"][0]
    container["volumeMounts"].append({"name": "config", "mountPath": CONFIG, "readOnly": True})
    if settings.api.enabled:
        probe = {"exec": {"command": ["health.sh", "orchestrator"]}, "periodSeconds": 10, "timeoutSeconds": 5}
        container["readinessProbe"] = probe
        container["startupProbe"] = probe | {"failureThreshold": 360}  # an hour, to load a model
        container["livenessProbe"] = probe | {"failureThreshold": 60}  # the supervisor starts an orchestrator again
    job = {
        "backoffLimit": 100,  # whatever it died of, it goes on with --resume
        "podFailurePolicy": {
            "rules": [
                {  # a preemption, a node that is drained: nothing of the run's, however often
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {  # bad configuration, a stall, a full disk: starting it again is no use
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "streamrl", "operator": "In", "values": NO_USE},
                },
            ]
        },
        "template": {"metadata": {"labels": _labels(settings, "orchestrator")}, "spec": pod},
    }
    return _object(settings, "batch/v1", "Job", "", spec=job)


def _broker_url(run: str) -> str:
    return f"redis://{object_name(run, 'broker')}:{BROKER_PORT}"


def _broker(settings: Settings) -> list[Manifest]:
    run = settings.run.name
    labels = _labels(settings, "broker")
    probe = {"exec": {"command": ["broker-health.sh"]}, "periodSeconds": 5, "timeoutSeconds": 5}
    pod = _pod_spec(settings, ["broker.sh"], [], Resources(cpus=1), restart="Always")
    container = pod["containers"][0]
    container |= {
        "name": "broker",
        "ports": [{"containerPort": BROKER_PORT}],
        "image": _broker_image(settings.launcher.image),
        "readinessProbe": probe,
        "livenessProbe": probe | {"initialDelaySeconds": 120, "failureThreshold": 12},
        "env": [{"name": "BROKER_PASSWORD_FILE", "value": f"{SECRETS}/{SECRET_KEYS[BROKER_PASSWORD]}"}],
    }
    container["volumeMounts"][0] = {"name": "data", "mountPath": "/data"}
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "runs"]
    claim = {
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}},
    }
    part = "broker"
    stateful = {
        "serviceName": object_name(run, part),
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
        "volumeClaimTemplates": [claim],
    }
    service = {"clusterIP": "None", "selector": labels, "ports": [{"port": BROKER_PORT}]}
    return [
        _object(settings, "v1", "Service", part, spec=service),
        _object(settings, "apps/v1", "StatefulSet", part, spec=stateful),
    ]


def _broker_image(image: str) -> str:
    """Beside that of the other processes, as docker-compose.yml names both."""
    repository, colon, tag = image.rpartition(":")
    if not colon or "/" in tag:  # no tag: what is after the colon is a port
        return f"{image}-broker"
    return f"{repository.partition('@')[0]}-broker:{tag}" if "@" not in image else f"{image.partition('@')[0]}-broker"


def _rights(settings: Settings) -> list[Manifest]:
    """What the supervisor may do, in its namespace alone: workers' pods and jobs, and their logs."""
    name = object_name(settings.run.name)
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "list", "delete"]},
        {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["create", "list", "delete"]},
    ]
    group = "rbac.authorization.k8s.io"
    return [
        _object(settings, "v1", "ServiceAccount", ""),
        _object(settings, f"{group}/v1", "Role", "", rules=rules),
        _object(
            settings,
            f"{group}/v1",
            "RoleBinding",
            "",
            subjects=[{"kind": "ServiceAccount", "name": name}],
            roleRef={"apiGroup": group, "kind": "Role", "name": name},
        ),
    ]


def _network(settings: Settings) -> Manifest:
    """Pods of the run are reached by pods of the run alone."""
    own = {"podSelector": {"matchLabels": {RUN_LABEL: settings.run.name}}}
    return _object(
        settings,
        "networking.k8s.io/v1",
        "NetworkPolicy",
        "",
        spec={**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]},
    )


def _labels(settings: Settings, role: str) -> dict[str, str]:
    more = {key: value for key, value in _options(settings).items() if key != PRIORITY}
    return {**more, RUN_LABEL: settings.run.name, ROLE_LABEL: role}


def _options(settings: Settings) -> dict[str, str]:
    """launcher.options: labels, as "kueue.x-k8s.io/queue-name=team", and PRIORITY."""
    return dict(option.split("=", 1) for option in settings.launcher.options if "=" in option)


_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL = re.compile(rf"([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_NAME}=({_NAME})?")
"""As the API has labels: an optional DNS name, a name, a value."""


def _check_options(settings: Settings) -> None:
    for option in settings.launcher.options:
        if not LABEL.fullmatch(option):
            raise ConfigError(
                f'launcher.options: of Kubernetes these are labels, "key=value", and {PRIORITY}=NAME, not {option!r}',
                key="launcher.options",
            )


def _object(settings: Settings, version: str, kind: str, part: str, **content: Any) -> Manifest:
    name, namespace = object_name(settings.run.name, part), settings.launcher.place
    metadata: Manifest = {"name": name, "labels": _labels(settings, part or "run")}
    metadata |= {"namespace": namespace} if namespace else {}
    return json.loads(json.dumps({"apiVersion": version, "kind": kind, "metadata": metadata, **content}))
