"""The generation service in real processes: serve, a publisher, embedded engines, and nothing that trains or scores.

One worker lives a day ahead, one has another tokenizer, one is killed with samples in its hands.
"""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.fakes.command_line import REPOSITORY
from tests.fakes.machine import Machine, machine
from transport.tensors.shm import SHARED_MEMORY
from workers.models import prepare_model

TINY = (
    "model.path=random:qwen3-tiny",
    "generation.dtype=float32",
    "generation.slots=8",
    "sampling.max_new_tokens=16",
    "generation.max_context=256",
)
SHIFTED = """
import time
for name in ("time", "monotonic"):
    def shifted(told=getattr(time, name)):
        return told() + 86400.0
    setattr(time, name, shifted)
"""

pytestmark = pytest.mark.chaos


class Asked:
    """A client of the service, with nothing but the standard library."""

    def __init__(self, place: Machine) -> None:
        run = place.directory / "runs" / "service"
        self._url = f"http://{(run / 'api.address').read_text().strip()}"
        self._secret = (run / "api.secret").read_text().strip()

    def lines(self, path: str, body: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        request = urllib.request.Request(
            self._url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._secret}"},
        )
        with urllib.request.urlopen(request, timeout=120.0) as answer:
            for line in answer:
                yield json.loads(line)

    def samples(self, **body: Any) -> list[dict[str, Any]]:
        return [line for line in self.lines("/generate", body) if "n" in line]


def versions(samples: list[dict[str, Any]]) -> set[int]:
    return {span["version"] for sample in samples for span in sample["versions"]}


def join_shifted(place: Machine) -> None:
    """A generation worker whose clocks are a day ahead of everybody's."""
    (place.directory / "shifted").mkdir()
    (place.directory / "shifted" / "sitecustomize.py").write_text(SHIFTED)
    paths = f"{place.directory / 'shifted'}:{REPOSITORY}"
    place.join("service", "generate", index=7, environ={"PYTHONPATH": paths})


def another_tokenizer(model_dir: Path, directory: Path) -> Path:
    """The same model, two words of whose tokenizer changed places."""
    directory.mkdir()
    for path in model_dir.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    content = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


def test_generate_update_generate(tmp_path: Path):
    model_dir = prepare_model("random:qwen3-tiny", cache_dir=tmp_path / "models")
    weights = tmp_path / "weights"
    weights.mkdir()
    tensors = load_file(model_dir / "model.safetensors")
    save_file({name: tensor * 0.5 for name, tensor in tensors.items()}, weights / "half.safetensors")
    with machine(tmp_path) as place:
        place.serve("service", "--preset", "service", "--model-dir", str(model_dir), settings=TINY)
        publisher = place.join("service", "publish", "--model-dir", str(model_dir), "--weights-dir", str(weights))
        first = place.join("service", "generate", "--model-dir", str(model_dir))
        place.wait_until(lambda: len(place.status("service").get("generation", [])) == 1, "a worker")
        asked = Asked(place)

        before = asked.samples(prompts=["1+1=", [5, 6, 7]], samples=4)
        assert len(before) == 8
        assert versions(before) == {0}
        (updated,) = asked.lines("/update", {"path": "half.safetensors"})
        assert (updated["version"], updated["loaded"], updated["pending"]) == (1, ["generate-0.1"], [])
        after = asked.samples(prompts=["1+1=", [5, 6, 7]], samples=4)
        assert versions(after) == {1}
        assert [sample["logprobs"] for sample in after] != [sample["logprobs"] for sample in before]

        other = another_tokenizer(model_dir, tmp_path / "other")
        refused = place.join("service", "generate", "--model-dir", str(other), index=1)
        assert refused.wait(timeout=60) == 2
        del place.processes["service-generate-1"]
        words = (tmp_path / "service-generate-1.log").read_text()
        assert "generate-1.1 is refused: the tokenizer of" in words

        join_shifted(place)
        place.wait_until(lambda: len(place.status("service").get("generation", [])) == 2, "the worker of tomorrow")
        lines = asked.lines("/generate", {"prompts": ["1+1="] * 40, "samples": 4, "id": "long", "acknowledge": True})
        some = [next(lines) for _ in range(8)]
        first.send_signal(signal.SIGKILL)
        first.wait(timeout=10)
        del place.processes["service-generate-0"]
        rest = [line for line in lines if "n" in line]
        told = [(line["prompt"], line["sample"]) for line in [*some, *rest]]
        assert len(told) == len(set(told)) == 160
        assert any(line["worker"].startswith("generate-7") for line in rest)
        assert versions(rest) == {1}

        with pytest.raises(urllib.error.HTTPError, match="400"):
            next(asked.lines("/update", {"path": "../models"}))
        left_behind = SHARED_MEMORY / f"streamrl-service@{first.pid}@e9v9"
        left_behind.touch()  # as by one that was killed while it published
        place.drain("service")
        assert not left_behind.exists(), "serve sweeps when it ends"
        assert not list(SHARED_MEMORY.glob(f"streamrl-service@{publisher.pid}@*")), "and it ends after its workers"
        assert publisher.wait(timeout=30) == 0, place.words()
