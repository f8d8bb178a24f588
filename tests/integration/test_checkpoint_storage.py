"""Checkpoints on a disk and in object storage are saved, listed, read, found damaged and removed alike.

Ranks are threads.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from tests.fakes.rank_threads import ThreadRank, on_ranks
from tests.fakes.s3_server import S3Server, s3_server
from tests.fakes.saved_together import META, save_together
from tests.fakes.tiny_models import tiny_model
from tests.fakes.trainer_run import DigestPublisher, TrainerRun
from transport.contracts.ledger import Ledger, checkpoint_dirs, checkpoints_place
from transport.contracts.messages import CheckpointSaved, StepDone
from transport.contracts.settings import Settings
from transport.errors import DirectoryError
from transport.process import storage
from transport.process.storage import ObjectPath, Place, creating, place_of, prepare
from transport.tensors.manifest import checksum_of, file_checksum
from workers.errors import CheckpointError
from workers.models import MODEL_FILE, character_tokenizer
from workers.trainer.checkpoint import (
    OPTIMIZER_FILE,
    CheckpointStore,
    model_files,
    newest_model,
    shard_name,
)
from workers.trainer.placing import placing_in
from workers.trainer.policy.export import Exporter
from workers.trainer.policy.stored import StoredTensors, tensor_file
from workers.weights.parts import Shard, shard_of


def two_ranks_save(directory: Place, tensors: Mapping[str, Tensor], *, version: int = 3, problem: str = "") -> Place:
    """problem: what rank 1 says of its part."""

    def rank_saves(of: ThreadRank) -> Place | None:
        start = 6 * of.rank
        shards = {name: Shard(tensor[start : start + 6], (start, 0), (10, 4)) for name, tensor in tensors.items()}
        files = {
            shard_name(name, of.rank, 2): tensor_file(shards) for name in ("model.safetensors", "optimizer.safetensors")
        }
        said = problem if of.rank else ""
        return save_together(directory, lambda: files, rank=of.rank, gather=of.gather, version=version, problem=said)

    found = on_ranks(2, rank_saves)[0]
    if isinstance(found, Exception):
        raise found
    assert found is not None
    return found


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> Place:
    """Where checkpoints are kept; nothing is there."""
    return tmp_path / "checkpoints" if request.param == "disk" else s3.place(f"bucket/runs/{tmp_path.name}")


def put(file: Place, content: bytes) -> None:
    """Something else in its place."""
    remove(file)
    put_new(file, content)


def put_new(file: Place, content: bytes) -> None:
    with creating(file) as writer:
        writer.write(content)


def remove(file: Place) -> None:
    file.remove() if isinstance(file, ObjectPath) else file.unlink()


def names_in(place: Place) -> list[str]:
    return [path.name for path in checkpoint_dirs(place)]


def test_parts_are_one_set(place: Place) -> None:
    tensors = {name: torch.arange(40, dtype=torch.float32).view(10, 4) + n for n, name in enumerate("abc")}
    path = two_ranks_save(place, tensors)
    names = sorted(json.loads((path / "meta.json").read_bytes())["files"])
    stored = StoredTensors.open(path, [name for name in names if name.startswith("model")])
    assert all(torch.equal(stored.whole(name), tensor) for name, tensor in tensors.items())
    stored.close()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (remove, "model-00002-of-00002.safetensors is not there"),
        (
            lambda file: put(file, file.read_bytes()[:-4]),
            "model-00002-of-00002.safetensors is not what was written",
        ),
        (lambda file: put(file, file.read_bytes()[:-1] + b"\x7f"), "is not what was written"),
    ],
    ids=["missing", "truncated", "changed"],
)
def test_a_damaged_part_is_named_and_the_checkpoint_before_is_used(place: Place, damage, named: str) -> None:
    tensors = {"a": torch.ones(10, 4)}
    two_ranks_save(place, tensors, version=2)
    newest = two_ranks_save(place, tensors, version=3)
    damage(newest / "model-00002-of-00002.safetensors")
    store = CheckpointStore(place, keep=2)
    found = store.load_latest()
    assert found is not None
    assert found.meta.version == 2
    assert named in store.damaged[newest]


def test_a_part_that_was_not_written_is_no_checkpoint(place: Place) -> None:
    tensors = {"a": torch.ones(10, 4)}
    two_ranks_save(place, tensors, version=2)
    with pytest.raises(CheckpointError, match=r"step-3 \(\d+ bytes needed\): rank 1: No space left on device"):
        two_ranks_save(place, tensors, version=3, problem="No space left on device")
    assert names_in(place) == ["step-2"]


def test_ranks_see_one_directory_and_leave_nothing_there(place: Place) -> None:
    found = on_ranks(2, lambda of: CheckpointStore(place, keep=2, rank=of.rank).check_shared(of.gather))
    assert found == [None, None]
    assert list(place.iterdir() if isinstance(place, Path) else place.files()) == []


@pytest.mark.parametrize("shares_name", [True, False], ids=["another", "unwritable"])
def test_ranks_whose_directories_are_not_one_are_refused_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares_name: bool
) -> None:
    """As two hosts have them that share no file system; or as rank 0 cannot write to its own."""
    monkeypatch.setattr("workers.trainer.checkpoint.SEEN_S", 0.0)
    if not shares_name:
        (tmp_path / "0").write_text("no directory")
    found = on_ranks(
        3, lambda of: CheckpointStore(tmp_path / str(min(of.rank, 1)), keep=2, rank=of.rank).check_shared(of.gather)
    )
    wanted = r"rank 1: on .* it is not the directory of rank 0; rank 2: " if shares_name else "File exists"
    for error in found:
        assert isinstance(error, CheckpointError)
        assert re.search(wanted, str(error))
        assert "object storage" in str(error)
    assert not list(tmp_path.glob("*/*"))


def test_old_ones_go_and_what_a_killed_trainer_left_is_never_read(place: Place) -> None:
    tensors = {"a": torch.ones(10, 4)}
    if isinstance(place, Path):
        place.mkdir()
        (place / "writing-4").mkdir()
    put_new(placing_in(place).draft("step-4") / "model-00001-of-00002.safetensors", b"half")
    for version in (2, 3, 4):
        two_ranks_save(place, tensors, version=version)
    assert [name.partition(".")[0] for name in names_in(place)] == ["step-4", "step-3"]
    found = CheckpointStore(place, keep=2).load_latest()
    assert found is not None
    assert len(model_files(found.meta)) == 2


def test_the_last_checkpoint_is_saved_again_with_a_later_cursor(place: Place) -> None:
    """Its tensors are taken over, not sent again."""
    store = CheckpointStore(place, keep=2)
    files = {name: tensor_file({"a": shard_of(torch.ones(10, 4))}) for name in (MODEL_FILE, OPTIMIZER_FILE)}
    for cursor in ("7-1", "9-1"):
        meta = msgspec.structs.replace(META, cursor=cursor)
        saving = store.begin(lambda: files, Ledger(version=3, cursor=cursor), meta)
        store.commit(saving, {0: store.write(saving)})
    assert not saving.files
    assert names_in(place) == ["step-3.1"]
    found = CheckpointStore(place, keep=2).load_latest()
    assert found is not None
    assert found.ledger.cursor == "9-1"
    with closing(StoredTensors.open(found.path, model_files(found.meta))) as stored:
        assert torch.equal(stored.whole("a"), torch.ones(10, 4))


# --- a trainer ------------------------------------------------------------------------------------------------------


async def test_a_killed_trainer_goes_on_from_object_storage_and_its_weights_are_exported(
    s3: S3Server, tmp_path: Path
) -> None:
    model_dir, run_dir = tmp_path / "model", tmp_path / "run"
    tiny_model(tied=True).save_pretrained(model_dir)
    character_tokenizer().save_pretrained(model_dir)
    base = Settings()
    trainer = msgspec.structs.replace(base.trainer, checkpoint_dir=f"s3://bucket/{tmp_path.name}", device="cpu")
    settings = msgspec.structs.replace(base, trainer=trainer)
    run = TrainerRun(model_dir, run_dir, settings)
    await run.send_batch(0, checkpoint=True)
    await run.send_batch(1)
    killed, again = DigestPublisher(), DigestPublisher()
    task = asyncio.create_task(run.trainer(killed).run())
    await run.until_told(StepDone, 2)
    await run.until_told(CheckpointSaved)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await run.finish()
    await run.trainer(again).run()
    assert min(again.digests) == 1, "from the checkpoint of version 1"
    assert again.digests == {version: killed.digests[version] for version in (1, 2)}
    checkpoints = checkpoints_place(settings, run_dir)
    assert names_in(checkpoints) == ["step-2", "step-1"]
    assert not (run_dir / "checkpoints").exists()
    path, _, weights = newest_model(checkpoints, None, StoredTensors.open)
    with closing(weights):
        Exporter(model_dir=model_dir).write(weights, tmp_path / "out")
    assert path == checkpoints / "step-2"
    assert (tmp_path / "out" / MODEL_FILE).read_bytes() == (run_dir / "model" / MODEL_FILE).read_bytes()


# --- object storage alone ---------------------------------------------------------------------------------------------


def test_a_rank_asks_an_object_store_for_its_slices_alone(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    read_range = ObjectPath.read_range

    def counting(file: ObjectPath, start: int, end: int) -> bytes:
        asked.append(end - start)
        return read_range(file, start, end)

    place = s3.place("bucket/slices")
    tensor = torch.arange(2_000_000, dtype=torch.float32).view(2000, 1000)
    with creating(place / MODEL_FILE) as writer:
        for part in tensor_file({"a": shard_of(tensor)}).content():
            writer.write(part)
    monkeypatch.setattr(ObjectPath, "read_range", counting)
    monkeypatch.setattr("workers.trainer.tensor_files.BLOCK_BYTES", 1_000_000)
    local = torch.empty(500, 1000)
    with closing(StoredTensors.open(place, [MODEL_FILE])) as stored:
        stored.read({"a": Shard(local, (500, 0), (2000, 1000))})
    assert torch.equal(local, tensor[500:1000])
    assert sum(asked) < local.nbytes + 1000  # and the header
    assert max(asked) <= 1_000_000


def test_a_file_larger_than_a_part_is_sent_in_parts(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 MiB is the least that S3 takes as a part."""
    monkeypatch.setattr(storage, "BLOCK_BYTES", 5 * 1024 * 1024)
    file = s3.place("bucket/parts/file")
    content = torch.arange(3_000_000, dtype=torch.int32).numpy().tobytes()
    with creating(file) as writer:
        writer.write(content)
    assert file.stat().st_size == len(content)
    assert file_checksum(file) == checksum_of([content])


def test_an_upload_that_fails_becomes_no_object(s3: S3Server) -> None:
    file = s3.place("bucket/failed/file")

    def half() -> None:
        with creating(file) as writer:
            writer.write(b"half")
            raise OSError("the rank cannot go on")

    with pytest.raises(OSError, match="cannot go on"):
        half()
    assert not file.is_file()


def test_a_bucket_that_is_not_there(s3: S3Server) -> None:
    place = s3.place("nobucket/runs")
    for use in (prepare, checkpoint_dirs, lambda place: CheckpointStore(place, keep=1).load_latest()):
        with pytest.raises(DirectoryError, match=r"cannot use s3://nobucket/runs: .*bucket does not exist; make the"):
            use(place)


def test_a_store_that_denies_access(s3: S3Server) -> None:
    place = s3.place("bucket/denied")
    s3.admit(0)
    try:
        for use in (prepare, checkpoint_dirs):
            with pytest.raises(DirectoryError, match=r"cannot use s3://bucket/denied: .*credentials come from the env"):
                use(place)
    finally:
        s3.admit(float("inf"))


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes the connection and says nothing; in a child, whose request hangs as long as it lives."""
    script = (
        "from transport.process import storage\n"
        "storage.ANSWER_S = 0.5\n"
        "try: storage.prepare(storage.place_of('s3://bucket/x'))\n"
        "except storage.DirectoryError as error: print(error)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert "no answer within 0 s" in child.stdout
    assert "AWS_ENDPOINT_URL" in child.stdout


def test_the_extra_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3")  # it was imported by then
    with pytest.raises(DirectoryError, match=r"s3://bucket/x: pip install 'streamrl\[s3\]'"):
        place_of("s3://bucket/x")
    with pytest.raises(DirectoryError, match="Protocol not known: s5"):
        place_of("s5://bucket/x")
