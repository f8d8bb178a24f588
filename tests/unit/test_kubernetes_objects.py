"""Kubernetes' objects as pure functions of the settings: each is what the API takes, and has what it is there for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from orchestrator.launch.growth import STOP_GRACE_S
from orchestrator.launch.launchers.base import ProcessSpec
from orchestrator.launch.launchers.kubernetes_manifests import manifests, worker_manifest
from orchestrator.launch.processes import NO_USE
from orchestrator.launch.submission import write_base
from tests.fakes.launched import IMAGE, RANKS, WORKER, configured
from transport.contracts.types import WorkerKind

COMPOSE = Path(__file__).parents[2] / "compose"
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
