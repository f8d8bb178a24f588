"""The client on a real broker, with consumers in processes of their own that are killed, stalled and shared with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes.command_line import environment
from tests.fakes.consumer_process import ConsumerProcess
from tests.fakes.redis_servers import ServerProcess, find_binary
from transport.contracts.types import RowId
from transport.errors import FencedError, PeerRejectedError, PeerUnavailableError
from transport.rows.units import StorageUnit
from transport.tensors.shm import SHARED_MEMORY
from workers.__main__ import EXIT_BAD_CONFIG, EXIT_SIGNALLED
from workers.client import Client
from workers.client.batch import Ragged
from workers.errors import ClientError, ClientTimeoutError
from workers.weights.pull import WeightPuller

ROOT = Path(__file__).parents[2]
WAIT_S = 100.0
LEASE_S = 2.0
"""A renewal every 0.7 s: late by this much on a busy machine, but not by a lease."""


Connect = Callable[..., Client]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    binary = find_binary("valkey")
    assert binary is not None
    server = ServerProcess(binary, tmp_path_factory.mktemp("broker"))
    try:
        server.wait_listening()
        yield server.url
    finally:
        server.kill()


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return request.node.name.partition("[")[0]


@pytest.fixture
def connect(url: str, run: str) -> Iterator[Connect]:
    """Clients of this test's own run, closed at its end."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Client.connect(url, run, **options))


def floats(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(length).astype(np.float32) for length in lengths]


# -- one process: what is put is got


@pytest.mark.parametrize("in_units", [False, True])
def test_values_of_any_length_come_back_exactly(connect: Connect, in_units: bool) -> None:
    unit = StorageUnit(max_bytes=1 << 24)
    try:
        client = connect(units=[unit.start()] if in_units else [])
        client.declare_task("x_train", ["x_ids", "x_note", "x_score", "x_hidden"])
        lengths = [3, 0, 700, 1]
        hidden = [np.arange(2.0 * n, dtype=np.float16).reshape(n, 2) for n in lengths]
        written = {"x_ids": floats(lengths), "x_note": ["a", "", "ü", "d"], "x_score": [1.5, 2, 3, 4.0]}
        index = client.put_experience_data({**written, "x_hidden": hidden})
        batch = client.get_experience_data("x_train", [*written, "x_hidden"], 4, timeout_s=WAIT_S)
        assert batch.index == index
        assert batch.columns["x_note"] == written["x_note"]
        assert [float(value) for value in batch.columns["x_score"]] == written["x_score"]
        for name in ("x_ids", "x_hidden"):
            for value, was in zip(batch.columns[name], {**written, "x_hidden": hidden}[name], strict=True):
                assert isinstance(value, np.ndarray)
                assert (value.dtype, value.shape) == (was.dtype, was.shape)
                assert np.array_equal(value, was)
        assert (unit.retained_bytes > 4 * sum(lengths)) == in_units
        assert client.clear(index) > 0
        assert unit.retained_bytes == 0
    finally:
        unit.close()


SECRET = "a secret of the test's own"


def start_unit(*options: str, environ: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "workers", "storage-unit", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment(environ), text=True, **pipes)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_storage_unit_is_a_program_of_its_own(connect: Connect, tmp_path: Path, ending: signal.Signals) -> None:
    (tmp_path / "secret").write_text(SECRET)
    unit = start_unit("--max-bytes", str(1 << 20), environ={"STREAMRL_SECRET_FILE": str(tmp_path / "secret")})
    try:
        assert unit.stdout
        address = unit.stdout.readline().strip()
        client = connect(units=[address], secret=SECRET.encode(), name="first")
        values = np.arange(40_000, dtype=np.int32).reshape(4, 10_000)  # 160 kB: through shared memory
        index = client.put_experience_data({"x_ids": values, "x_note": ["a", "b", "c", "d"]})
        with pytest.raises(PeerUnavailableError, match="is full"):
            client.put_experience_data({"x_ids": [np.zeros(1 << 20, np.uint8)]})
        reader = connect(units=[address], secret=SECRET.encode(), name="second")
        found, columns = reader.read_experience_data(index, ["x_ids", "x_note"])
        assert found == index
        assert np.array_equal(np.asarray(columns["x_ids"]), values)
        assert list(columns["x_note"]) == ["a", "b", "c", "d"]
        with pytest.raises(PeerRejectedError):
            connect(units=[address], secret=SECRET[::-1].encode()).put_experience_data({"x_note": ["mine"]})
        assert segments_of(unit.pid)
        unit.send_signal(ending)
        _, stderr = unit.communicate(timeout=WAIT_S)
        assert (unit.returncode, stderr) == (EXIT_SIGNALLED, "")
        assert not segments_of(unit.pid)
        with pytest.raises(PeerUnavailableError):
            client.put_experience_data({"x_note": ["e"]})
    finally:
        unit.kill()
        unit.communicate()


def segments_of(pid: int) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"streamrl-rows@{pid}@*"))


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--max-bytes", "0"], 2, "greater than or equal to 1"),
        (["--max-bytes", "1", "--ports", "9-1"], 2, "no port and no range of ports"),
        (["--max-bytes", "1", "--listen", "0.0.0.0"], EXIT_BAD_CONFIG, "set STREAMRL_SECRET"),
        (["--max-bytes", "1", "--listen", "127.0.0.1", "--ports", "{taken}"], EXIT_BAD_CONFIG, "choose others"),
    ],
)
def test_a_storage_unit_that_cannot_be_says_why(url: str, options: list[str], code: int, message: str) -> None:
    taken = url.rpartition(":")[2]  # the broker's
    unit = start_unit(*(option.format(taken=taken) for option in options))
    stdout, stderr = unit.communicate(timeout=WAIT_S)
    assert (unit.returncode, stdout.count("tcp://")) == (code, 0)
    assert message in stderr


def test_a_loader_restores_rows_without_padding_and_ends(connect: Connect) -> None:
    client = connect()
    client.declare_task("x_train", ["x_ids", "x_note"])
    values = floats([5, 1, 8, 2, 3])
    index = client.put_experience_data({"x_ids": values, "x_note": list("abcde")})
    client.end_stream("x_train")
    batches = list(client.create_stream_data_loader("x_train", ["x_ids", "x_note"], 2, timeout_s=WAIT_S))
    assert [rows for _, rows in batches] == [index[:2], index[2:4], index[4:]]
    assert [note for data, _ in batches for note in data["x_note"]] == list("abcde")
    fields = [data["x_ids"] for data, _ in batches]
    assert all(isinstance(field, Ragged) for field in fields)
    assert [len(field.values) for field in fields] == [6, 10, 3]
    rows = [row for field in fields for row in field.split()]
    assert all(torch.equal(row, torch.from_numpy(was)) for row, was in zip(rows, values, strict=True))
    padded = fields[0].padded(-1.0, multiple_of=4)
    assert padded.shape == (2, 8)
    assert padded[1, 1:].tolist() == [-1.0] * 7
    again = list(client.create_stream_data_loader("x_train", ["x_ids"], 2, timeout_s=WAIT_S))
    assert again == []


def test_a_task_reads_what_another_wrote_back(connect: Connect) -> None:
    client = connect()
    client.declare_task("x_score", ["x_answer"])
    client.declare_task("x_train", ["x_answer", "x_reward"])
    index = client.put_experience_data({"x_answer": floats([4, 5, 6])}, group_size=3)
    assert client.get_experience_data("x_train", ["x_answer"], 3, timeout_s=0.0).waited_out
    batch = client.get_experience_data("x_score", ["x_answer"], 3, timeout_s=WAIT_S)
    client.put_experience_data({"x_reward": [0.0, 0.5, 1.0]}, index=batch.index, done=batch)
    scored = client.get_experience_data("x_train", ["x_reward"], 3, timeout_s=WAIT_S)
    assert scored.index == index
    assert [float(reward) for reward in scored.columns["x_reward"]] == [0.0, 0.5, 1.0]
    client.end_stream("x_score")
    assert client.get_experience_data("x_score", ["x_answer"], 1, timeout_s=WAIT_S).ended


def test_prompts_reach_the_task_that_reads_them(connect: Connect) -> None:
    client = connect()
    client.declare_task("x_rollout", ["x_prompt"])
    index = client.put_prompts_data(["one", np.array([7, 8], np.int32)], samples=2)
    batch = client.get_experience_data("x_rollout", ["x_prompt"], 4, timeout_s=WAIT_S)
    assert batch.index == index
    assert batch.columns["x_prompt"][:2] == ["one", "one"]
    assert [np.asarray(ids).tolist() for ids in batch.columns["x_prompt"][2:]] == [[7, 8], [7, 8]]


def test_fewer_rows_come_when_time_is_over_and_the_rest_with_the_next_call(connect: Connect) -> None:
    client = connect()
    client.declare_task("x_train", ["x_ids"])
    first = client.put_experience_data({"x_ids": floats([1, 2])})
    batch = client.get_experience_data("x_train", ["x_ids"], 3, timeout_s=0.1)
    assert (batch.index, batch.ended, batch.waited_out) == (first, False, False)
    second = client.put_experience_data({"x_ids": floats([1, 2, 3, 4])})
    assert client.get_experience_data("x_train", ["x_ids"], 3, timeout_s=WAIT_S).index == second[:3]


def test_rows_that_were_cleared_are_told_as_missing(connect: Connect) -> None:
    client = connect()
    client.declare_task("x_train", ["x_ids"])
    index = client.put_experience_data({"x_ids": floats([1, 2, 3])})
    client.clear(index[:1])
    batch = client.get_experience_data("x_train", ["x_ids"], 3, timeout_s=WAIT_S)
    assert (batch.index, batch.num_missing) == (index[1:], 1)
    with pytest.raises(ClientError, match="1 of 2 rows are not written"):
        client.put_experience_data({"x_more": [1, 2]}, index=index[:2])


def test_what_cannot_be_is_refused_by_name(connect: Connect, run: str) -> None:
    client = connect()
    with pytest.raises(ClientError, match=f"run '{run}' has no user's task 'x_nothing'"):
        client.get_experience_data("x_nothing", ["x_ids"], 1, timeout_s=0.0)
    with pytest.raises(ClientError, match="'reward' is not a client's"):
        client.put_experience_data({"reward": [1.0]})
    with pytest.raises(ClientError, match="no column 'ids'"):
        client.declare_task("x_train", ["ids"])
    with pytest.raises(ValueError, match="'train' is not a user's"):
        client.declare_task("train", ["x_ids"])
    with pytest.raises(ValueError, match="one number of rows"):
        client.put_experience_data({"x_ids": [1], "x_note": ["a", "b"]})
    with pytest.raises(ClientError, match="are the run's"):
        client.clear([RowId("3/0/1")])
    client.declare_task("x_train", ["x_ids"])
    loader = client.create_stream_data_loader("x_train", ["x_ids"], 1, timeout_s=0.2)
    with pytest.raises(ClientTimeoutError, match="no more rows were put"):
        next(iter(loader))
    with pytest.raises(ClientTimeoutError, match="it has no orchestrator"):
        client.init_engines(timeout_s=0.1)


def test_the_runs_own_tasks_are_not_touched_by_a_client(connect: Connect) -> None:
    client = connect()
    with pytest.raises(ClientError, match="no user's task 'reward'"):
        client.create_stream_data_loader("reward", ["reward"], 1)


def test_a_task_declared_again_goes_on_and_one_removed_begins_anew(connect: Connect) -> None:
    client = connect()
    client.declare_task("x_train", ["x_ids"])
    client.put_experience_data({"x_ids": floats([1, 2])})
    client.end_stream("x_train")
    client.declare_task("x_train", ["x_ids"])
    client.done(client.get_experience_data("x_train", ["x_ids"], 2, timeout_s=WAIT_S))
    assert client.get_experience_data("x_train", ["x_ids"], 2, timeout_s=WAIT_S).ended
    client.remove_task("x_train")
    client.declare_task("x_train", ["x_ids"])
    index = client.put_experience_data({"x_ids": floats([3])})
    assert client.get_experience_data("x_train", ["x_ids"], 1, timeout_s=WAIT_S).index == index


# -- leases


def test_a_slow_consumer_keeps_its_rows(connect: Connect) -> None:
    slow, other = connect(name="slow"), connect(name="other")
    slow.declare_task("x_train", ["x_ids"], lease_s=LEASE_S)
    index = slow.put_experience_data({"x_ids": floats([1, 2])})
    batch = slow.get_experience_data("x_train", ["x_ids"], 2, timeout_s=WAIT_S)
    slow.end_stream("x_train")
    taken = other.get_experience_data("x_train", ["x_ids"], 2, timeout_s=2 * LEASE_S)
    assert taken.waited_out
    slow.done(batch)
    assert batch.index == index
    assert other.get_experience_data("x_train", ["x_ids"], 2, timeout_s=WAIT_S).ended


@pytest.fixture
def start_consumer(url: str, run: str) -> Iterator[Callable[..., ConsumerProcess]]:
    """Consumers of "x_train" in processes of their own, killed at the end of the test."""
    started: list[ConsumerProcess] = []

    def start(name: str, *options: str) -> ConsumerProcess:
        started.append(ConsumerProcess(url, run, name, *options))
        return started[-1]

    yield start
    for consumer in started:
        consumer.kill()


def test_two_processes_share_a_task_and_each_row_goes_to_one(
    connect: Connect, start_consumer: Callable[..., ConsumerProcess]
) -> None:
    client = connect()
    client.declare_task("x_train", ["x_ids"])
    consumers = [start_consumer(name) for name in ("first", "second")]
    index = client.put_experience_data({"x_ids": floats([1 + n % 7 for n in range(200)])})
    client.end_stream("x_train")
    taken = [consumer.read_to_end() for consumer in consumers]
    assert sorted(row for rows in taken for row in rows) == sorted(index)


def test_what_a_killed_consumer_held_goes_to_the_other(
    connect: Connect, start_consumer: Callable[..., ConsumerProcess]
) -> None:
    client = connect()
    client.declare_task("x_train", ["x_ids"], lease_s=LEASE_S)
    index = client.put_experience_data({"x_ids": floats([1] * 10)})
    client.end_stream("x_train")
    killed = start_consumer("killed", "--hold-after", "1")
    done, held = killed.read_batch(), killed.read_batch()
    killed.kill()
    rest = start_consumer("other").read_to_end()
    assert sorted([*done, *rest]) == sorted(index)
    assert set(held) <= set(rest)


def test_a_stalled_consumer_hears_that_its_rows_are_gone(
    connect: Connect, start_consumer: Callable[..., ConsumerProcess]
) -> None:
    client = connect()
    client.declare_task("x_train", ["x_ids"], lease_s=LEASE_S)
    index = client.put_experience_data({"x_ids": floats([1, 1, 1])})
    client.end_stream("x_train")
    stalled = start_consumer("stalled", "--hold-after", "0")
    assert stalled.read_batch() == index
    stalled.process.send_signal(signal.SIGSTOP)
    assert client.get_experience_data("x_train", ["x_ids"], 3, timeout_s=WAIT_S).index == index
    stalled.process.send_signal(signal.SIGCONT)
    stalled.go_on()
    assert stalled.read_line() == {"lost": index}
    assert client.get_experience_data("x_train", ["x_ids"], 3, timeout_s=WAIT_S).ended
    assert stalled.read_to_end() == []


# -- ranks


def test_ranks_get_balanced_tokens_and_equally_many_batches(connect: Connect) -> None:
    client = connect()
    client.declare_task("x_train", ["x_ids", "x_row"])
    lengths = [int(length) for length in np.random.default_rng(5).lognormal(4, 1, size=70)]
    index = client.put_experience_data({"x_ids": floats(lengths), "x_row": list(range(70))})
    client.end_stream("x_train")
    loaders = [
        connect(name=f"rank{rank}").create_stream_data_loader(
            "x_train", ["x_ids"], 8, policy="token_balanced", rank=rank, world=2, timeout_s=WAIT_S
        )
        for rank in range(2)
    ]
    steps = list(zip(*loaders, strict=True))  # as many batches for both, 8 rows each on average
    assert sum(len(rows) for step in steps for _, rows in step) == 70
    assert sorted(row for step in steps for _, rows in step for row in rows) == sorted(index)
    assert len(steps) == 5
    for step in steps:
        tokens = [len(data["x_ids"].values) for data, _ in step]
        longest = max(int(length) for data, _ in step for length in data["x_ids"].lengths)
        assert max(tokens) - min(tokens) <= longest


# -- weights


def test_weights_are_published_and_awaited(connect: Connect) -> None:
    trainer, sampler = connect(name="trainer"), connect(name="sampler")
    assert sampler.wait_weights(timeout_s=0.0) is None
    tensors = {"layer": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor([3])}
    trainer.weight_sync_notify(tensors, version=4)
    assert sampler.wait_weights(newer_than=4, timeout_s=0.0) is None
    manifest = sampler.wait_weights(newer_than=3, timeout_s=WAIT_S)
    assert manifest is not None
    puller = WeightPuller()
    with puller.pull(manifest) as pulled:
        assert puller.way == "inproc", "both are clients of one program"
        assert all(torch.equal(pulled[name], tensor) for name, tensor in tensors.items())
    sampler.weight_sync_notify(tensors, version=5)
    with pytest.raises(FencedError):
        trainer.weight_sync_notify(tensors, version=6)


def test_weights_are_announced_again_to_a_broker_that_lost_them(tmp_path: Path, run: str) -> None:
    binary = find_binary("valkey")
    assert binary is not None
    server = ServerProcess(binary, tmp_path / "before")
    server.wait_listening()
    tensors = {"layer": torch.arange(6.0)}
    with Client.connect(server.url, run, name="trainer") as trainer:
        published = trainer.weight_sync_notify(tensors, version=4)
        server.kill()
        server = ServerProcess(binary, tmp_path / "after", port=server.port)
        try:
            server.wait_listening()
            with Client.connect(server.url, run, name="sampler") as sampler:
                assert sampler.wait_weights(timeout_s=WAIT_S) == published
                assert sampler.wait_weights(newer_than=4, timeout_s=0.0) is None
                with WeightPuller().pull(published) as pulled:
                    assert torch.equal(pulled["layer"], tensors["layer"])
            trainer.weight_sync_notify(tensors, version=5)
        finally:
            trainer.close()
            server.kill()


# -- the example


def test_the_documented_example_learns(url: str) -> None:
    script = [sys.executable, str(ROOT / "docs/examples/client_training.py"), url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    sampler = subprocess.Popen([*script, "sample"], env=environment)
    try:
        trained = subprocess.run([*script, "train"], env=environment, capture_output=True, text=True, timeout=100)
        assert (trained.returncode, sampler.wait(WAIT_S)) == (0, 0), trained.stderr
    finally:
        sampler.kill()
        sampler.wait()
    rewards = [float(line.split()[-1]) for line in trained.stdout.splitlines()]
    assert len(rewards) == 30
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.9
