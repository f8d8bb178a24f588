"""A reward model: the numbers are its own, whatever shares a pass; what is none is refused, and nothing is zero."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3ForSequenceClassification

from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from tests.fakes.unscored_group import GROUP, admit, generate, next_event, settings_for
from transport.contracts.messages import GroupScored
from transport.contracts.settings import DataSettings, ScoringSettings, Settings
from transport.contracts.types import RunName, WorkerId
from workers.commands.check import check_workers
from workers.errors import ModelError, RewardError, RewardSetupError
from workers.models import prepare_model, prepare_reward_model
from workers.scoring.reward_model import COMPONENT, RewardModel, RewardModelPool
from workers.scoring.reward_pool import open_pool
from workers.scoring.rewards import Sample, reward_spec
from workers.scoring.worker import ScoringWorker

ANSWERS = ["4", "", "i think that it is four, and i am quite sure of it.", "5", "four"]
ENTRY = json.dumps({"question": "2 + 2 =", "answer": "4", "metadata": {}}).encode()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model("random:qwen3-tiny", cache_dir=tmp_path_factory.mktemp("models"), say=lambda line: None)


@pytest.fixture(scope="module")
def reward_model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy's trunk under a random head of one number, and its tokenizer."""
    return classifier(model_dir, tmp_path_factory.mktemp("reward") / "model", labels=1)


def classifier(model_dir: Path, target: Path, *, labels: int) -> Path:
    shutil.copytree(model_dir, target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = Qwen3ForSequenceClassification.from_pretrained(model_dir, num_labels=labels, dtype=torch.float32)
        torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(target)
    return target


def settings_of(reward_model: Path, **data: str) -> Settings:
    settings = settings_for()
    return msgspec.structs.replace(
        settings,
        scoring=ScoringSettings(reward_model=str(reward_model), lease_s=60.0),
        data=DataSettings(source="jsonl", **data),  # type: ignore[arg-type]
    )


def alone(reward_model: Path, messages: list[dict[str, str]]) -> float:
    """What transformers says of one conversation, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    model = Qwen3ForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32).eval()
    ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits.item()


async def test_samples_that_share_a_pass_get_the_numbers_that_they_have_alone(
    reward_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    scores = RewardModel.scores

    def counted(self: RewardModel, samples: list[list[int]]) -> list[float]:
        passes.append(len(samples))
        return scores(self, samples)

    threads: list[int] = []
    monkeypatch.setattr(RewardModel, "scores", counted)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    settings = settings_of(reward_model, suffix=" say it.", system="be brief.")
    pool = open_pool(settings, reward_spec(settings, ""), processes=1)
    await pool.start()
    found = await asyncio.gather(*(pool.score("unused", answer, ENTRY) for answer in ANSWERS))
    await pool.close()
    assert passes == [1, 4], "what came during the first pass is the second"
    assert threads == [settings.trainer.threads]
    asked = [{"role": "system", "content": "be brief."}, {"role": "user", "content": "2 + 2 = say it."}]
    expected = [alone(reward_model, [*asked, {"role": "assistant", "content": answer}]) for answer in ANSWERS]
    assert [reward.value for reward in found] == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == len(ANSWERS)
    assert found[0].components == {COMPONENT: found[0].value}


async def test_a_conversation_is_scored_as_the_row_had_it(reward_model: Path) -> None:
    history = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "3"}]
    history.append({"role": "user", "content": "sure?"})
    pool = RewardModelPool(settings_of(reward_model, suffix=" think."))
    await pool.start()
    entry = json.dumps({"question": "all of it", "answer": None, "messages": history}).encode()
    found = await pool.score("unused", "no, 2", entry)
    history[-1] = {"role": "user", "content": "sure? think."}
    assert found.value == pytest.approx(alone(reward_model, [*history, {"role": "assistant", "content": "no, 2"}]))


def test_no_pass_is_larger_than_the_setting_and_all_are_in_one(reward_model: Path) -> None:
    model = RewardModel(reward_model, torch.device("cpu"), torch.float32, max_tokens=40)
    samples = [[5] * length for length in (3, 50, 10, 12, 9, 1)]
    passes = model._passes([len(ids) for ids in samples], alone=False)
    assert passes == [[1], [3, 2, 4], [0, 5]]
    assert model._passes([3, 4], alone=True) == [[1], [0]]
    assert model.scores(samples) == pytest.approx([model.scores([ids])[0] for ids in samples], abs=1e-5)


def write_template(model: RewardModel, text: str) -> None:
    model._tokenizer.chat_template = text


@pytest.mark.parametrize(
    ("response", "change", "reason"),
    [
        ("x" * 600, lambda model: None, r"tokens of the reward model, which reads at most 512"),
        ("x", lambda model: model._module.score.weight.data.fill_(torch.nan), "the reward model gave nan"),
        ("x", lambda model: write_template(model, "{{ messages[0].content }}"), "leaves out .* of the role assistant"),
    ],
)
async def test_what_it_cannot_score_is_an_error_and_no_zero(
    reward_model: Path, response: str, change: object, reason: str
) -> None:
    pool = RewardModelPool(settings_of(reward_model))
    await pool.start()
    change(pool._loaded)  # type: ignore[operator]
    with pytest.raises(RewardError, match=reason):
        await pool.score("2 + 2 =", response, ENTRY)
    assert pool.failures == 1
    with pytest.raises(RewardSetupError, match=rf"tried on 1 rows and scored none: .*{reason}"):
        await _start_with(pool, change, Sample(prompt="?", response=response, entry=ENTRY))


async def _start_with(pool: RewardModelPool, change: object, sample: Sample) -> None:
    load = pool._load

    def changed() -> RewardModel:
        model = load()
        change(model)  # type: ignore[operator]
        return model

    pool._load = changed
    await pool.start([sample])


async def test_what_is_no_reward_model_is_refused_by_name(model_dir: Path, reward_model: Path, tmp_path: Path) -> None:
    cases = {
        str(model_dir): r"scoring.reward_model = .* gives 2 numbers, where a reward model gives one",
        str(classifier(model_dir, tmp_path / "three", labels=3)): "gives 3 numbers",
        str(tmp_path / "nowhere"): r"scoring.reward_model.*nowhere",
        "what is this": r"scoring.reward_model 'what is this' is neither",
    }
    headless = tmp_path / "headless"
    shutil.copytree(reward_model, headless)
    shutil.copy(model_dir / "model.safetensors", headless)
    for path, reason in cases.items():
        with pytest.raises(ModelError, match=reason):
            check_workers(settings_of(Path(path)) if path != "what is this" else _named(path), _no_rows())
    with pytest.raises(RewardSetupError, match=r"holds no tensor score.weight: its rewards would be random"):
        await RewardModelPool(settings_of(headless)).start()


def test_a_language_model_is_refused_before_torch_is_imported(model_dir: Path) -> None:
    code = (
        "import sys\n"
        "from workers.errors import ModelError\n"
        "from workers.models import prepare_reward_model\n"
        "import workers.commands.check\n"
        "from pathlib import Path\n"
        "try:\n"
        "    prepare_reward_model(sys.argv[1], cache_dir=Path())\n"
        "except ModelError:\n"
        "    print(sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(model_dir)], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize(
    ("labels", "numbers"), [({"id2label": {"0": "score"}}, 1), ({"num_labels": 1}, 1), ({"num_labels": 4}, 4), ({}, 2)]
)
def test_numbers_are_counted_as_transformers_counts_them(
    model_dir: Path, tmp_path: Path, labels: dict[str, object], numbers: int
) -> None:
    directory = shutil.copytree(model_dir, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | labels))
    assert AutoConfig.from_pretrained(directory).num_labels == numbers
    if numbers == 1:
        assert prepare_reward_model(str(directory), cache_dir=tmp_path) == directory
    else:
        with pytest.raises(ModelError, match=f"gives {numbers} numbers"):
            prepare_reward_model(str(directory), cache_dir=tmp_path)


def _named(path: str) -> Settings:
    return msgspec.structs.replace(settings_of(Path("x")), scoring=ScoringSettings(reward_model=path))


def _no_rows() -> object:
    from transport.contracts.messages import TrialRows

    return TrialRows(rows=[])


async def test_each_task_may_have_workers_of_its_own(model_dir: Path, reward_model: Path) -> None:
    clock = ManualClock(1000.0)
    broker = MemoryBroker(MemoryServer(clock), RunName("scoring"))
    settings = msgspec.structs.replace(
        settings_of(reward_model), algorithm=msgspec.structs.replace(settings_for(kl_coef=0.1).algorithm)
    )

    def worker(index: int, *tasks: str) -> ScoringWorker:
        name = WorkerId(f"score-{index}.1")
        return ScoringWorker(broker, settings, name, model_dir=model_dir, clock=clock, tasks=tasks)

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    responses = [tokenizer.encode(text, add_special_tokens=False) for text in ("4", "5", "four")]
    await admit(broker, json.loads(ENTRY), reference=True)
    await generate(broker, *responses)
    workers = [worker(0, "reward"), worker(1, "reference"), worker(2, "advantages")]
    tasks = [asyncio.create_task(one.run()) for one in workers]
    _, event = await next_event(broker)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(event, GroupScored)
    assert event.group_id == GROUP
    asked = {"role": "user", "content": "2 + 2 ="}
    expected = [alone(reward_model, [asked, {"role": "assistant", "content": text}]) for text in ("4", "5", "four")]
    assert event.rewards == pytest.approx(expected, abs=1e-5)
    done = [one.activity().counters for one in workers]
    assert [counters.get("reward_done") for counters in done] == [3.0, None, None]
    assert [counters.get("reference_done") for counters in done] == [None, 3.0, None]
    with pytest.raises(ModelError, match="has no task 'values'; it has reward, reference, advantages"):
        worker(3, "reward", "values")
