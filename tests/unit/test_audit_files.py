"""What a run left on its disk is compared with its journal, and a problem names file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.cli.audit_files import (
    Recomputed,
    check_checkpoints,
    check_events,
    check_final_model,
    check_lines,
    check_requests,
    check_samples,
    requests_line,
)
from orchestrator.config.run_directory import RunDir
from tests.fakes.saved_together import META
from transport.contracts.ledger import FILE_NAME, META_FILE, MODEL_FILES, CheckpointMeta, FileMark, Ledger
from transport.contracts.messages import (
    Event,
    GroupRows,
    GroupScored,
    JournalRecord,
    PromptRef,
    PromptsSubmitted,
    SamplesTaken,
    StepDone,
    TrainRound,
    encode,
)
from transport.contracts.settings import Settings
from transport.contracts.types import GroupId, PromptId, RowId, WeightIdentity
from transport.tensors.manifest import file_checksum


def train_round(batch: int) -> TrainRound:
    rows = GroupRows(group_id=GroupId(f"{batch}/0"), samples=(0, 1), num_tokens=9)
    return TrainRound(round_id=str(batch), batch=batch, ranks=((rows,),))


def history(*, reward: float = 1.0) -> Recomputed:
    """Three batches of a group each. reward: of the first sample of the second."""
    recomputed, seq = Recomputed(Settings()), 0
    for batch in range(3):
        rewards = (reward if batch == 1 else 1.0, 0.0)
        scored = GroupScored(group_id=GroupId(f"{batch}/0"), rewards=rewards, response_tokens=(4, 5), signal=True)
        weights = WeightIdentity(epoch=1, version=batch + 1, digest="d")
        step = StepDone(batch=batch, weights=weights, num_rows=2, num_tokens=9, metrics={"loss": 0.5})
        events: list[Event] = [scored, step]
        for event in events:
            seq += 1
            commands = [train_round(batch)] if event is scored else []
            recomputed.add(JournalRecord(seq=seq, now_s=float(seq), event=event, cursor=f"{seq}-0"), commands)
    return recomputed


def said(lines: list[dict[str, Any]], *, exact: bool = True) -> str:
    return "\n".join(check_lines(history(), lines, closed=3, exact=exact))


def test_lines_of_metrics_are_what_the_journal_says():
    lines = [json.loads(json.dumps(line)) for line in history().lines]
    assert said(lines) == ""
    lines[1] |= {"reward": 0.75}
    assert "batch 1 of the trainer's incarnation 1 says reward 0.75, by the journal it is 0.5" in said(lines)
    lines[1] = dict(history().lines[1]) | {"loss": 0.4}
    assert "says loss 0.4, by the journal it is 0.5" in said(lines)
    lines = [dict(line) for line in history().lines]
    assert "batch 1 of the trainer's incarnation 1 has a second line" in said([*lines, lines[1]])
    assert "batch 0 of the trainer's incarnation 1 stands after that of a later" in said([lines[1], lines[0], lines[2]])
    assert "batch 9 of the trainer's incarnation 1, which was never trained" in said([*lines, lines[0] | {"batch": 9}])


def test_a_line_that_an_orchestrator_wrote_from_less_after_a_restart_is_no_damage():
    short = [dict(line) | {"groups_trained": 0, "reward": 0.1} for line in history().lines]
    assert said(short, exact=False) == ""
    assert "says version 7" in said([short[0] | {"version": 7}, *short[1:]])
    assert "says groups_trained 0" in said(short)


def test_a_journal_that_was_rewritten_differs_from_the_events_of_the_broker():
    events = [(cursor, encode(event)) for cursor, event in history().events.items()]
    assert check_events(history(), [*events, ("99-0", b"\xff")]) == []
    (problem,) = check_events(history(reward=2.0), events)
    assert problem == "journal: the GroupScored of entry 3-0 is not what stream events holds"
    swapped = Recomputed(Settings())
    for record in (JournalRecord(seq=1, now_s=2.0, event=event) for event in history().events.values()):
        swapped.add(record, [])
    assert swapped.problems == []
    swapped.add(JournalRecord(seq=7, now_s=1.0, event=history().steps[0]), [])
    assert swapped.problems == ["journal: event 7 (StepDone) is older than the one before it"]


def test_a_sample_has_the_reward_that_it_got():
    kept = [{"row": "1/0/0", "reward": 1.0}, {"row": "1/0/1", "reward": 9.0}, {"row": "7/0/1", "reward": 9.0}]
    assert check_samples(history(), kept) == ["samples.jsonl: sample 1/0/1 has reward 9.0, by the journal it is 0.0"]


def test_a_service_is_checked_by_its_requests():
    recomputed = Recomputed(msgspec.convert({"trainer": {"engine": "none"}}, Settings))
    prompts = (PromptRef(prompt_id=PromptId("1/0"), prompt_tokens=1, predicted_tokens=1.0),)
    events: list[Event] = [
        PromptsSubmitted(request=1, prompts=prompts, group_size=2),
        SamplesTaken(request=1, upto=1),
    ]
    for seq, event in enumerate(events, start=1):
        recomputed.add(JournalRecord(seq=seq, now_s=float(seq), event=event), [])
    recomputed.generated |= {RowId("1/0/0"), RowId("1/0/1")}
    assert check_requests(recomputed) == []
    assert requests_line(recomputed) == "1 requests for 2 samples, 2 generated, 1 taken by their readers"
    recomputed.generated.add(RowId("2/0/0"))
    recomputed.taken[1] = 3
    assert check_requests(recomputed) == [
        "journal: sample 2/0/0 was generated, and no request asked for it",
        "journal: 3 samples of request 1 were taken, more than it asked for",
    ]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints" / "step-3"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    (path / FILE_NAME).write_bytes(Ledger(version=3, cursor="7-1").to_bytes())
    files = {name: mark(path / name) for name in ("model.safetensors", FILE_NAME)}
    (path / META_FILE).write_bytes(msgspec.structs.replace(META, files=files).to_bytes())
    return path


def mark(path: Path) -> FileMark:
    return FileMark(nbytes=path.stat().st_size, checksum=file_checksum(path))


def test_every_checkpoint_is_checked_as_a_trainer_does(checkpoint: Path):
    place = checkpoint.parent
    assert check_checkpoints(place) == []
    (checkpoint / "model-9-of-9.safetensors").touch()
    assert check_checkpoints(place) == ["step-3: model-9-of-9.safetensors is no file of it"]
    (checkpoint / "model-9-of-9.safetensors").unlink()
    (checkpoint / "model.safetensors").write_bytes(b"weighty")
    assert check_checkpoints(place) == ["step-3: model.safetensors is not what was written"]
    (checkpoint / "model.safetensors").unlink()
    assert check_checkpoints(place, "the critic's ") == ["the critic's step-3: model.safetensors is not there"]
    meta = (checkpoint / META_FILE).read_bytes()
    (checkpoint / META_FILE).write_bytes(meta.replace(b'"digest": "d"', b'"digest": "e"'))
    assert check_checkpoints(place) == ["step-3: meta.json cannot be used: meta.json is not what was written"]


def test_a_meta_json_of_an_earlier_version_has_no_checksum():
    assert CheckpointMeta.from_bytes(msgspec.json.encode(META)) == META


def test_the_final_model_is_what_was_written(tmp_path: Path):
    run = RunDir(tmp_path)
    assert check_final_model(run) == []
    run.model.mkdir()
    (run.model / "model.safetensors").write_bytes(b"weights")
    (tmp_path / MODEL_FILES).write_bytes(
        msgspec.json.encode({"model.safetensors": mark(run.model / "model.safetensors")})
    )
    assert check_final_model(run) == []
    (run.model / "model.safetensors").write_bytes(b"w")
    assert check_final_model(run) == ["model: model.safetensors is not what was written"]
