"""What changed travels instead of whole weights, to who holds the version before; if that fails, whole weights do."""

import contextlib
import errno
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from transport.contracts.messages import WeightDelta, WeightManifest, WeightRoutes, encode, manifest_decoder
from transport.contracts.types import WorkerId
from transport.errors import MessageError, PeerUnavailableError
from transport.process.clock import MonotonicClock
from transport.tensors.base import Endpoint, TimeLimit
from transport.tensors.manifest import check_manifest
from transport.tensors.relay import Relay, relayed_address
from transport.tensors.shm import ShmStore, ShmWriter
from transport.tensors.tcp import HeldFile, RangeFollows
from transport.tensors.wire import Channel
from workers.generation.server.upkeep import hold
from workers.weights.publish import DELTA, WeightPublisher
from workers.weights.pull import WeightPuller
from workers.weights.updates import along

ELEMENTS = 1 << 18


class Policy:
    """A bf16 policy of which a few elements in a hundred change from step to step, in one tensor none."""

    def __init__(self, seed: int = 0) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self.tensors = {f"t{n}": torch.randn(ELEMENTS, generator=self._random) for n in range(4)}
        self.tensors["frozen"] = torch.ones(1024)

    def step(self) -> None:
        for name in ("t0", "t1", "t2", "t3"):
            changed = torch.rand(ELEMENTS, generator=self._random) < 0.02
            self.tensors[name] = torch.where(changed, self.tensors[name] * 1.01, self.tensors[name])

    def expected(self) -> dict[str, torch.Tensor]:
        return {name: tensor.bfloat16() for name, tensor in self.tensors.items()}


class Wire:
    """Counts the bytes of tensors that are sent in this process."""

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self) -> int:
        taken, self.nbytes = self.nbytes, 0
        return taken


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    counted, send = Wire(), HeldFile.send

    def counting(held: HeldFile, channel: Channel, header: RangeFollows, offset: int) -> None:
        counted.nbytes += header.nbytes
        send(held, channel, header, offset)

    monkeypatch.setattr(HeldFile, "send", counting)
    return counted


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher("delta", tmp_path, endpoint=Endpoint(limit=TimeLimit(5.0)), delta_share=0.5)
    yield publisher
    publisher.close()


def travelling(manifest: WeightManifest) -> WeightManifest:
    """As a worker of another host reads it."""
    delta = manifest.delta and replace(manifest.delta, sources=manifest.delta.sources[1:2])
    return manifest_decoder.decode(encode(replace(manifest, sources=manifest.sources[1:2], delta=delta)))


def delta_of(manifest: WeightManifest) -> WeightDelta:
    assert manifest.delta is not None
    return manifest.delta


class Run:
    """A publisher's policy and a puller, version after version."""

    def __init__(self, publisher: WeightPublisher) -> None:
        self.publisher, self.policy, self.puller = publisher, Policy(), WeightPuller(limit=TimeLimit(5.0))
        self.version = -1

    def publish(self) -> WeightManifest:
        self.version += 1
        if self.version:
            self.policy.step()
        return travelling(self.publisher.publish(1, self.version, self.policy.tensors, torch.bfloat16))

    def pull(self, manifest: WeightManifest, puller: WeightPuller | None = None) -> None:
        with (puller or self.puller).pull(manifest) as tensors:
            expected = self.policy.expected()
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.fixture
def run(publisher: WeightPublisher) -> Run:
    return Run(publisher)


def test_versions_after_the_first_come_as_what_changed(run: Run, wire: Wire) -> None:
    first = run.publish()
    assert first.delta is None
    run.pull(first)
    assert wire.take() == first.total_bytes
    for _ in range(4):
        manifest = run.publish()
        run.pull(manifest)
        assert wire.take() <= delta_of(manifest).total_bytes < 0.03 * manifest.total_bytes
        assert len(delta_of(manifest).patches) == 4  # what did not change is not spoken of


def test_who_holds_another_version_takes_whole_weights(run: Run, wire: Wire) -> None:
    run.pull(run.publish())
    run.publish()
    third = run.publish()
    wire.take()
    run.pull(third)  # the second was passed over
    assert wire.take() == third.total_bytes
    fourth = run.publish()
    run.pull(fourth, WeightPuller())
    assert wire.take() == fourth.total_bytes
    run.pull(fourth)  # which holds the third all the same
    assert wire.take() <= delta_of(fourth).total_bytes


def test_a_server_that_reads_the_base_keeps_its_bytes(run: Run, wire: Wire) -> None:
    first = run.publish()
    with run.puller.pull(first) as tensors:
        held, expected = hold(first.weights, tensors), run.policy.expected()
    wire.take()
    second = run.publish()
    run.pull(second)
    assert wire.take() <= delta_of(second).total_bytes
    with contextlib.closing(held), WeightPuller().pull(held.offer(same_host=True)) as tensors:
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_what_was_made_of_changes_is_passed_on_whole(run: Run, wire: Wire) -> None:
    relay = Relay(secret=b"", limit=TimeLimit(5.0))
    run.puller = WeightPuller(limit=TimeLimit(5.0), relay=relay)
    with contextlib.closing(relay):
        run.pull(run.publish())
        second = run.publish()
        run.pull(second)
        wire.take()
        behind = replace(second, sources=(relayed_address(relay.address, second.weights), *second.sources))
        run.pull(behind, WeightPuller(limit=TimeLimit(5.0)))
        assert wire.take() == 0  # of the publisher's


def behind(manifest: WeightManifest, relay: Relay) -> WeightManifest:
    """As one reads it whose route begins at ``relay``."""
    me = WorkerId("generate-1")
    routes = {me: (relayed_address(relay.address, manifest.weights),)}
    found = along(manifest, WeightRoutes(weights=manifest.weights, routes=routes), me)
    assert found is not None
    return found


def test_changes_travel_along_relays_and_leave_the_trainer_once(run: Run, wire: Wire) -> None:
    relay = Relay(secret=b"", limit=TimeLimit(5.0))
    run.puller, last = WeightPuller(limit=TimeLimit(5.0), relay=relay), WeightPuller(limit=TimeLimit(5.0))
    with contextlib.closing(relay):
        first = run.publish()
        run.pull(first)
        run.pull(first, last)  # not of the relay, which is on this host: who maps its memory holds no base
        for _ in range(2):
            wire.take()
            manifest = run.publish()
            alone = delta_of(manifest)
            run.pull(manifest)
            assert wire.take() <= alone.total_bytes
            routed = behind(manifest, relay)
            only_there = replace(routed, sources=(), delta=replace(alone, sources=delta_of(routed).sources[:1]))
            run.pull(only_there, last)
            assert wire.take() == 0


def test_a_relay_that_got_whole_weights_has_no_changes_and_the_trainer_has_them(run: Run, wire: Wire) -> None:
    relay = Relay(secret=b"", limit=TimeLimit(5.0))
    with contextlib.closing(relay):
        run.pull(run.publish())
        second = run.publish()
        run.pull(second, WeightPuller(limit=TimeLimit(5.0), relay=relay))  # held nothing before
        wire.take()
        run.pull(behind(second, relay))
        assert 0 < wire.take() <= delta_of(second).total_bytes


def test_who_waits_for_changes_that_came_wrong_to_a_relay_goes_on_without_it(run: Run, wire: Wire) -> None:
    relay = Relay(secret=b"", limit=TimeLimit(5.0))
    run.puller = WeightPuller(limit=TimeLimit(5.0), relay=relay)
    with contextlib.closing(relay):
        first, last = run.publish(), WeightPuller(limit=TimeLimit(5.0))
        run.pull(first)
        run.pull(first, last)
        manifest = run.publish()
        run.pull(replace(manifest, delta=wrong_checksum(run, delta_of(manifest))))  # and passed on as a whole
        wire.take()
        run.pull(behind(manifest, relay), last)
        assert 0 < wire.take() <= delta_of(manifest).total_bytes


def test_a_worker_of_this_host_maps_the_whole(run: Run, wire: Wire) -> None:
    run.pull(run.publish())
    wire.take()
    run.version += 1
    run.policy.step()
    run.pull(run.publisher.publish(1, run.version, run.policy.tensors, torch.bfloat16))
    assert wire.take() == 0


def other_base(run: Run, delta: WeightDelta) -> WeightDelta:
    """Says that it is for the version that is held, and is for another."""
    return replace(delta_of(run.publish()), base=delta.base)


def wrong_checksum(run: Run, delta: WeightDelta) -> WeightDelta:
    return replace(delta, patches=(replace(delta.patches[0], checksum="crc32:00000000"), *delta.patches[1:]))


def swapped(run: Run, delta: WeightDelta) -> WeightDelta:
    """Each patch is as it was sent, and of another tensor."""
    tensors = [patch.tensor for patch in delta.patches]
    patches = zip(delta.patches, [*tensors[1:], tensors[0]], strict=True)
    return replace(delta, patches=tuple(replace(patch, tensor=tensor) for patch, tensor in patches))


def of_the_smallest(run: Run, delta: WeightDelta) -> WeightDelta:
    """It changes elements that the tensor does not have."""
    return replace(delta, patches=(replace(delta.patches[0], tensor=4), *delta.patches[1:]))


def one_missing(run: Run, delta: WeightDelta) -> WeightDelta:
    return replace(delta, patches=(*delta.patches[:2], replace(delta.patches[2], tensor=4), delta.patches[3]))


def no_address(run: Run, delta: WeightDelta) -> WeightDelta:
    return replace(delta, sources=("gopher://nowhere",))


def withdrawn(run: Run, delta: WeightDelta) -> WeightDelta:
    run.publisher._store.drop(f"e1v{run.version}{DELTA}")
    return delta


@pytest.mark.parametrize("harm", [wrong_checksum, swapped, of_the_smallest, one_missing, no_address, withdrawn])
def test_after_wrong_changes_whole_weights_come_and_then_changes_again(
    run: Run, wire: Wire, harm: Callable[[Run, WeightDelta], WeightDelta]
) -> None:
    run.pull(run.publish())
    manifest = run.publish()
    whole = replace(manifest, delta=harm(run, delta_of(manifest)))
    wire.take()
    run.pull(whole)
    assert wire.take() >= manifest.total_bytes
    following = run.publish()
    run.pull(following)
    assert wire.take() <= delta_of(following).total_bytes


def test_changes_of_another_base_are_found_out(run: Run, wire: Wire) -> None:
    run.pull(run.publish())
    second = run.publish()
    expected = run.policy.expected()
    lied = replace(second, delta=other_base(run, delta_of(second)))
    with run.puller.pull(lied) as tensors:
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert wire.take() >= second.total_bytes


def test_a_publisher_that_ends_in_between_is_an_error_and_its_successor_gives_whole_weights(
    run: Run, wire: Wire, tmp_path: Path
) -> None:
    run.pull(run.publish())
    lost = run.publish()
    run.publisher.close()
    started_s = MonotonicClock().now_s()
    with pytest.raises(PeerUnavailableError), run.puller.pull(lost):
        pass
    assert MonotonicClock().now_s() - started_s < 60  # it does not wait for who cannot come back
    successor = WeightPublisher("delta", tmp_path, delta_share=0.5)
    with contextlib.closing(successor):
        wire.take()
        manifest = travelling(successor.publish(2, 2, run.policy.tensors, torch.bfloat16))
        assert manifest.delta is None
        run.pull(manifest)
        assert wire.take() == manifest.total_bytes


def test_changes_that_are_too_long_or_of_another_layout_are_not_offered(run: Run) -> None:
    run.publish()
    run.policy = Policy(seed=1)
    assert run.publish().delta is None
    assert run.publish().delta is not None
    run.policy.tensors["more"] = torch.ones(3)
    assert run.publish().delta is None


@pytest.mark.parametrize("options", [{"delta_share": 0.0}, {"delta_share": 0.5, "keep": 1}])
def test_nothing_is_compared_unless_asked_for_and_kept(tmp_path: Path, options: dict[str, float]) -> None:
    with contextlib.closing(WeightPublisher("delta-not", tmp_path, **options)) as publisher:  # pyright: ignore
        run = Run(publisher)
        assert [run.publish().delta for _ in range(3)] == [None, None, None]


def test_what_changed_is_dropped_with_its_version(run: Run) -> None:
    for _ in range(5):
        run.publish()
    kept = sorted(run.publisher._store._open)
    assert kept == [f"e1v{version}{end}" for version in (2, 3, 4) for end in ("", DELTA)]


def test_contradicting_changes_are_refused(run: Run) -> None:
    run.publish()
    manifest = run.publish()
    delta = delta_of(manifest)
    first, second, *rest = delta.patches
    for patches in (
        (replace(first, tensor=99), second, *rest),
        (first, replace(second, offset=0), *rest),
        (first, replace(second, tensor=first.tensor), *rest),
        (first, second, replace(rest[0], offset=1 << 40)),
    ):
        with pytest.raises(MessageError, match="changes since"):
            check_manifest(replace(manifest, delta=replace(delta, patches=tuple(patches))))
    with pytest.raises(MessageError, match="changes since"):
        check_manifest(replace(manifest, delta=replace(delta, total_bytes=1 << 40)))


@pytest.mark.parametrize("fails", ["create", "write"])
def test_changes_that_cannot_be_written_fail_no_version_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    publisher, policy = WeightPublisher("delta", tmp_path, endpoint=Endpoint(), delta_share=0.5), Policy()
    called = getattr(ShmStore, fails)

    def broken(store: ShmStore, to: ShmWriter | str, *more: object) -> object:
        name = to if isinstance(to, str) else to.name
        if name.endswith(DELTA):
            raise OSError(errno.EIO, "Input/output error")
        return called(store, to, *more)

    try:
        assert publisher.publish(1, 1, policy.tensors, torch.bfloat16).delta is None
        policy.step()
        gc.collect()  # what tests before this one still hold
        before = sorted(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(ShmStore, fails, broken)
        manifest = publisher.publish(1, 2, policy.tensors, torch.bfloat16)
        assert manifest.delta is None
        assert len(os.listdir("/proc/self/fd")) == len(before) + 1
        with WeightPuller().pull(manifest) as tensors:
            assert all(torch.equal(tensors[name], tensor) for name, tensor in policy.expected().items())
    finally:
        publisher.close()
