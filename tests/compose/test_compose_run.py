"""docker compose for real: our images, brought up without a GPU, train a tiny model, whatever is killed meanwhile.

`make compose-test` runs these: they need a container engine and some minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.compose_stack import CPU, KINDS, ROOT, Stack, free_port, inspected, provide_torch_wheel, why_not

ENABLED = "STREAMRL_COMPOSE_TEST"
"""``build``, or ``built`` to take the images that are there."""
IMAGE = "streamrl:0.2.0"
BROKER_IMAGE = "streamrl-broker:0.2.0"
FIRST = ("runs/first", "--broker", "redis://broker:6379")
MAX_OURS_BYTES = 1_500_000_000

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]


def config(batches: int) -> str:
    """As compose/run-cpu.toml, long enough for what happens to it, and quick to notice who is gone."""
    return f"""
[run]
batches = {batches}
[api]
host = "0.0.0.0"
port = 8000
[trainer]
checkpoint_every = 5
[liveness]
lease_s = 5.0
"""


@pytest.fixture(scope="module")
def images() -> None:
    """Our images, built from this checkout. Skips loudly where that cannot be."""
    if not os.environ.get(ENABLED):
        pytest.skip(f"{ENABLED} is not set: `make compose-test` runs this, it takes minutes")
    if reason := why_not():
        pytest.skip(f"no container engine: {reason}; set DOCKER_HOST, or install docker with compose")
    if os.environ[ENABLED] == "built":
        return
    provide_torch_wheel()
    done = subprocess.run(
        ["docker", "compose", *(part for file in CPU for part in ("-f", file)), "build"],
        env={**os.environ, "STREAMRL_BROKER_PASSWORD": "unused", "STREAMRL_SECRET": 24 * "unused"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture
def stack(images: None, tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, config(batches=100_000))
    try:
        yield stack
    finally:
        stack.down()


def test_a_run_outlives_every_container_and_each_row_is_trained_once(stack: Stack):
    stack.up()
    stack.wait_until(lambda: stack.trained() >= 1, "first batch")

    stack.up("--no-recreate", "--scale", "generation=3")
    stack.wait_until(lambda: len(stack.status().get("generation", [])) == 3, "three generation workers")
    stack.wait_for_batches(2)

    for kind in KINDS:
        stack.wait_until(stack.signal(kind, "KILL").is_started_again, f"restart of {kind}")
        stack.wait_for_batches(3)
    stack.compose("restart", "broker")  # under load, as an upgrade of the engine does
    stack.wait_for_batches(3)

    stack.up("--no-recreate", "--scale", "generation=1")
    stack.wait_until(lambda: len(stack.status().get("generation", [])) == 1, "the others to be gone")
    stack.wait_for_batches(2)
    assert not unhealthy(stack), unhealthy(stack)

    drained = stack.compose("exec", "-T", "orchestrator", "streamrl-orchestrator", "drain", *FIRST)
    assert "drain" in drained.stdout + drained.stderr
    stack.wait_until(lambda: set(exits(stack)) == {"0"} and len(exits(stack)) >= 4, "the end of all but the broker")
    audited = stack.orchestrate("inspect", *FIRST, "--audit")
    assert audited.returncode == 0, audited.stdout + audited.stderr
    assert "exactly once" in audited.stdout, audited.stdout

    before = len(stack.orchestrate("inspect", *FIRST).stdout)
    assert before
    stack.up()  # the same name goes on where it was
    stack.wait_until(lambda: stack.trained() >= 1, "the run that goes on")
    stack.wait_for_batches(2)


PROMETHEUS_OF_DEBIAN = """
FROM python:3.11-slim-bookworm
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends prometheus \\
 && install -d -o prometheus -g prometheus /prometheus
USER prometheus
ENTRYPOINT ["prometheus"]
"""


def prometheus_image() -> str:
    """The pinned image where it can be had, else Debian's Prometheus, for machines that reach no container registry."""
    pinned = "prom/prometheus:v3.5.0"
    if subprocess.run(["docker", "pull", "-q", pinned], capture_output=True, timeout=300).returncode == 0:
        return pinned
    network = os.environ.get("STREAMRL_BUILD_NETWORK", "default")
    build = ["docker", "build", "-q", "--network", network, "-t", "streamrl-test-prometheus", "-"]
    done = subprocess.run(build, input=PROMETHEUS_OF_DEBIAN, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return "streamrl-test-prometheus"


def test_prometheus_has_what_the_dashboard_asks_for(images: None, tmp_path: Path):
    port = free_port()
    stack = Stack(tmp_path, config(batches=100_000), PROMETHEUS_IMAGE=prometheus_image(), PROMETHEUS_PORT=str(port))

    def ask(expression: str) -> list[object]:
        query = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=5) as answer:
                return json.load(answer)["data"]["result"]
        except OSError:
            return []

    try:
        stack.up()
        stack.compose("--profile", "monitoring", "up", "-d", "--no-build", "--no-deps", "prometheus")
        stack.wait_until(lambda: bool(ask("streamrl_trained_batches_total > 0")), "a scrape with the secret")
        dashboard = json.loads((ROOT / "compose" / "grafana" / "dashboards" / "streamrl.json").read_text())
        asked = {target["expr"] for panel in dashboard["panels"] for target in panel["targets"]}
        asked -= {"streamrl_blocked_seconds"}  # nothing is blocked
        stack.wait_until(lambda: all(ask(expression) for expression in asked), "data for every panel")
    finally:
        stack.down()


def exits(stack: Stack) -> list[str]:
    """Exit codes of what ended, of all kinds but the broker."""
    containers = [one for kind in KINDS[1:] for one in stack.containers(kind, all_states=True)]
    return [str(one["ExitCode"]) for one in containers if one["State"] == "exited"]


def unhealthy(stack: Stack) -> list[str]:
    containers = [one for kind in KINDS for one in stack.containers(kind)]
    return [one["Name"] for one in containers if one["Health"] != "healthy"]


def test_a_rank_that_hangs_beside_another_is_killed_by_their_health_check(images: None, tmp_path: Path):
    stack = Stack(tmp_path, config(batches=100_000), STREAMRL_SILENT_S="40", TRAINER_RANKS="2")
    try:
        stack.up()
        stack.wait_until(lambda: stack.trained() >= 1, "first batch")
        stack.wait_until(stack.signal("trainer", "STOP", rank=1).is_started_again, "restart", timeout_s=120)
        stack.wait_for_batches(2)
        stack.signal("trainer", "KILL")
        stack.wait_for_batches(2)
    finally:
        stack.down()


def test_our_images_are_small_and_nothing_in_them_runs_as_root(images: None):
    sizes = {image: int(inspected(image, "{{.Size}}")) for image in (IMAGE, BROKER_IMAGE)}
    assert max(sizes.values()) <= MAX_OURS_BYTES, sizes
    for image in sizes:
        assert inspected(image, "{{.Config.User}}") not in ("", "root", "0")


@pytest.mark.parametrize("missing", ["STREAMRL_BROKER_PASSWORD", "STREAMRL_SECRET"])
def test_without_a_secret_no_run_starts_and_its_name_is_said(images: None, tmp_path: Path, missing: str):
    stack = Stack(tmp_path, config(batches=1))
    try:
        done = stack.compose("up", "-d", "--no-build", check=False, without=[missing])
        assert done.returncode != 0
        assert missing in done.stderr
        assert not [one for kind in KINDS[1:] for one in stack.containers(kind)]
    finally:
        stack.down()


def run_image(image: str, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """One container, alone."""
    command = ["docker", "run", "--rm", "--network", "none", *options, image, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_broker_that_was_given_no_secret_says_so(images: None):
    done = run_image(BROKER_IMAGE)
    assert done.returncode == 2
    assert "there is no password: /run/secrets/broker_password cannot be read" in done.stderr


def test_a_gpu_that_is_not_there_is_named(images: None):
    done = run_image(
        *(IMAGE, "streamrl-worker", "generate", "--gpus", "0"), *("--broker", "redis://127.0.0.1:1", "--run", "first")
    )
    assert done.returncode == 2
    assert "--gpus 0: there is no GPU 0 here" in done.stderr
    assert "NVIDIA Container Toolkit" in done.stderr


@pytest.mark.parametrize(
    ("volume", "says"),
    [
        (("--tmpfs", "/data:size=1m,uid=10001"), "/data has 1 MiB free, 256 are needed"),
        (("--tmpfs", "/data:size=1g,uid=0,mode=755"), "/data cannot be written by user 10001"),
    ],
    ids=["full", "not ours"],
)
def test_a_broker_on_a_bad_volume_says_what_to_do(images: None, tmp_path: Path, volume: tuple[str, ...], says: str):
    (tmp_path / "password").write_text("long-enough-to-pass")
    (tmp_path / "password").chmod(0o644)
    secret = ("-v", f"{tmp_path / 'password'}:/run/secrets/broker_password:ro")
    done = run_image(BROKER_IMAGE, options=(*volume, *secret))
    assert done.returncode == 2
    assert says in done.stderr


WRITE_A_RUN = """
from pathlib import Path
import sys
from orchestrator.journal import Journal
from orchestrator.config.run_directory import RunDir
from orchestrator.errors import StreamError
try:
    rundir = RunDir(Path("runs/first"))
    rundir.claim("# settings", resume=False)
    journal, _ = Journal.open(rundir.journal)
    journal.snapshot(bytes(10_000_000), 0)
except StreamError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("size=1m,uid=10001", "No space left on device; free some space there, or enlarge the volume"),
        ("size=100m,uid=0,mode=755", "Permission denied; let user 10001 write there (a volume: chown -R 10001)"),
    ],
    ids=["full", "not ours"],
)
def test_a_run_on_a_bad_volume_says_what_to_do(images: None, options: str, says: str):
    volume = ("--tmpfs", f"/srv/streamrl/runs:{options}")
    done = run_image(IMAGE, "python", "-c", WRITE_A_RUN, options=volume)
    assert done.returncode == 1
    assert says in done.stderr


def test_a_real_sglang_generates_and_takes_new_weights_over_the_network(images: None, tmp_path: Path):
    venv = os.environ.get("SGLANG_VENV")
    if not venv:
        pytest.skip("SGLANG_VENV does not name an environment in which SGLang runs on a CPU")
    (site,) = Path(venv).glob("lib/python3.*/site-packages")
    stack = Stack(
        tmp_path,
        config(batches=4) + '[generation]\nengine = "sglang"\ndtype = "float32"\n',
        files=(*CPU, "compose/sglang-cpu.yml"),
        SGLANG_SITE_PACKAGES=str(site),
    )
    try:
        stack.up()
        stack.wait_until(lambda: set(exits(stack)) == {"0"} and len(exits(stack)) == 4, "four batches", timeout_s=420)
        audited = stack.orchestrate("inspect", *FIRST, "--audit")
        assert audited.returncode == 0, audited.stdout + audited.stderr
    finally:
        stack.down()
