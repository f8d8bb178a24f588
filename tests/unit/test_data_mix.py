"""Several data sets as one: the ratio, exact resume, difficulties, and one clear error for each bad part."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.load import FIXED_ON_RESUME, resolve
from orchestrator.errors import ConfigError, DataError
from orchestrator.launch.checks import check_inputs, remarks
from orchestrator.prompts.dataset import load_problems
from orchestrator.prompts.source import MixedSource, held_out, next_part, open_source, trial_rows
from transport.contracts.settings import Settings
from workers.errors import RewardError, RewardSetupError
from workers.models import character_tokenizer
from workers.scoring.rewards import build_reward, read_entry, reward_spec


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    character_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 512}')
    return directory


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mixed(tmp_path: Path, *overrides: str, sizes: tuple[int, ...] = (7, 3)) -> Settings:
    """Parts a (weight 3), b (weight 1), each a file of its own."""
    sets = ["data.source=jsonl", "eval.problems=0", "data.mix.a.weight=3"]
    for name, size in zip("ab", sizes, strict=True):
        rows = [{"prompt": f"{name} {index}", "answer": str(index)} for index in range(size)]
        sets.append(f"data.mix.{name}.path={written(tmp_path / f'{name}.jsonl', rows)}")
    return resolve("tiny", [], [*sets, *overrides], {}).settings


def parts_of(source: MixedSource, count: int) -> list[str]:
    return [prompt.prompt_id.partition("/")[0] for prompt in source.next(count).prompts]


def opened(settings: Settings, model_dir: Path) -> MixedSource:
    source = open_source(settings, model_dir)
    assert isinstance(source, MixedSource)
    return source


# --- the decision -----------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.05, 20), min_size=1, max_size=6), st.integers(1, 300))
def test_every_part_has_its_share_to_within_one_prompt_a_part(weights: list[float], count: int):
    given_out = [0] * len(weights)
    for _ in range(count):
        part = next_part(given_out, weights)
        assert part is not None
        given_out[part] += 1
    for had, weight in zip(given_out, weights, strict=True):
        assert abs(had - count * weight / sum(weights)) <= len(weights)


def test_a_part_that_ended_leaves_its_share_to_the_others():
    assert [next_part([9, 0], [1, 1], [False, True]), next_part([1, 1], [1, 1], [True, True])] == [0, None]
    assert next_part([0, 0], [1, 1]) == 0, "the first named of several"


@pytest.mark.parametrize(
    ("sizes", "overrides", "words"),
    [
        ((7, 1), ("pipeline.groups_per_batch=8",), ["data.mix.b has 1 prompt to train on, and a batch takes 2 of it"]),
        ((2, 2), ("pipeline.groups_per_batch=8",), ["data.mix.a has 2 prompts to train on, and a batch takes 6"]),
        ((7, 3), ("pipeline.groups_per_batch=8",), []),
        ((7, 3), ("trainer.warmup_batches=5", "run.batches=5", "pipeline.groups_per_batch=4"), ["never comes to"]),
    ],
)
def test_what_is_hardly_meant_is_remarked(
    tmp_path: Path, sizes: tuple[int, int], overrides: list[str], words: list[str]
):
    settings = mixed(tmp_path, *overrides, sizes=sizes)
    said = remarks(settings, check_inputs(settings))
    assert len(said) == len(words)
    assert all(word in sentence for word, sentence in zip(words, said, strict=True)), said


# --- the source -------------------------------------------------------------------------------------------------------


def test_prompts_come_in_the_ratio_of_the_weights_whatever_the_sizes(tmp_path: Path, model_dir: Path):
    source = opened(mixed(tmp_path, sizes=(2, 50)), model_dir)
    assert Counter(parts_of(source, 400)) == {"a": 300, "b": 100}
    assert parts_of(source, 4).count("a") == 3, "each batch has it"


def test_every_position_resumes_exactly(tmp_path: Path, model_dir: Path):
    settings = mixed(tmp_path)
    batch = opened(settings, model_dir).next(40)
    ids = [prompt.prompt_id for prompt in batch.prompts]
    for done, position in enumerate(batch.positions, start=1):
        resumed = opened(settings, model_dir)
        resumed.seek(position)
        assert resumed.position == position
        assert [prompt.prompt_id for prompt in resumed.next(40 - done).prompts] == ids[done:]


def test_the_size_of_a_request_does_not_change_the_order(tmp_path: Path, model_dir: Path):
    one, other = (opened(mixed(tmp_path), model_dir) for _ in range(2))
    whole = [prompt.prompt_id for prompt in one.next(24).prompts]
    assert [prompt.prompt_id for size in (1, 2, 5, 16) for prompt in other.next(size).prompts] == whole


def test_passes_end_each_part_and_then_the_mix(tmp_path: Path, model_dir: Path):
    source = opened(mixed(tmp_path, "data.passes=1", sizes=(3, 4)), model_dir)
    batch = source.next(100)
    assert batch.exhausted
    assert Counter(prompt.prompt_id.partition("/")[0] for prompt in batch.prompts) == {"a": 3, "b": 4}
    assert [prompt.prompt_id[0] for prompt in batch.prompts][-3:] == ["b"] * 3


def test_a_prompt_is_found_by_its_name_and_names_its_part(tmp_path: Path, model_dir: Path):
    source = opened(mixed(tmp_path), model_dir)
    prompt = source.lookup(next(iter(source.next(1).prompts)).prompt_id)
    assert prompt.prompt_id.startswith("a/a.jsonl/")
    assert json.loads(prompt.entry_json)["part"] == "a"


@pytest.mark.parametrize("position", ["0/0@x", "{}", '{"a": "0/0@x"}', "[]"])
def test_a_position_of_other_data_is_refused(tmp_path: Path, model_dir: Path, position: str):
    with pytest.raises(DataError, match=r"data.mix has changed"):
        opened(mixed(tmp_path), model_dir).seek(position)


def test_changed_data_of_one_part_does_not_take_the_old_position(tmp_path: Path, model_dir: Path):
    position = opened(mixed(tmp_path), model_dir).next(5).positions[-1]
    with pytest.raises(DataError, match="have changed since the run began"):
        opened(mixed(tmp_path, sizes=(7, 4)), model_dir).seek(position)
    assert "data.mix" in FIXED_ON_RESUME, "nor do other weights"


def test_what_is_held_out_is_of_all_parts_and_trained_in_none(tmp_path: Path, model_dir: Path):
    settings = mixed(tmp_path, "eval.problems=20", sizes=(100, 100))
    asked = {problem.question for problem in load_problems(settings).held_out}
    assert len(asked) == 20
    assert {question[0] for question in asked} == {"a", "b"}
    trained = {problem.question for problem in opened(settings, model_dir).problems}
    assert not asked & trained
    assert len(held_out(settings, model_dir)) == 20


def test_a_reward_is_tried_on_every_part(tmp_path: Path, model_dir: Path):
    source = opened(mixed(tmp_path), model_dir)
    assert [row.prompt[0] for row in trial_rows(source.problems, Settings().scoring).rows] == ["a", "b", "a", "b"]


def test_files_and_tasks_mix_and_each_is_graded_by_its_own_verifier(tmp_path: Path, model_dir: Path):
    rows = written(tmp_path / "half.jsonl", [{"prompt": "half?", "answer": "\\frac{1}{2}"}] * 2)
    settings = resolve(
        "tiny",
        [],
        [
            *("scoring.reward=", "eval.problems=0", "data.size=8", "data.mix.sums.task=chain_sum"),
            *("data.mix.half.source=jsonl", f"data.mix.half.path={rows}", "data.mix.sort.task=number_sorting"),
        ],
        {},
    ).settings
    assert {problem.part for problem in check_inputs(settings).training} == {"sums", "half", "sort"}
    score = build_reward(reward_spec(settings, ""))
    by_part = {problem.part: read_entry(problem.entry_json.encode()) for problem in load_problems(settings).training}
    assert score("", "Answer: \\frac{2}{4}", by_part["half"]).value == 1
    for part in ("sums", "sort"):
        assert score("", f"Answer: {by_part[part]['answer']}", by_part[part]).value == 1
        with pytest.raises(RewardError, match=r"none of this run's data\.mix"):
            score("", "Answer: 1", {**by_part[part], "part": "no"})
    with pytest.raises((RewardError, RewardSetupError)):
        build_reward(
            reward_spec(resolve("tiny", [], ["scoring.reward=", "data.mix.x.task=composite"], {}).settings, "")
        )


# --- difficulties -----------------------------------------------------------------------------------------------------


def pools(tmp_path: Path, *overrides: str) -> Settings:
    rows = written(tmp_path / "rows.jsonl", [{"prompt": f"q{index}", "answer": "1"} for index in range(10)])
    collected = [
        {
            "id": f"rows.jsonl/{index + 1}",
            "prompt": f"q{index}",
            "model": "m",
            "output_tokens": [3, 4],
            "rewards": [index / 10] * 2,
        }
        for index in range(9)
    ]
    sets = [
        *("data.source=jsonl", f"data.path={rows}", "eval.problems=0"),
        f"data.rewards={written(tmp_path / 'c.jsonl', collected)}",
        *("data.mix.hard.max_reward=0.3", "data.mix.easy.min_reward=0.3", "data.mix.easy.weight=2"),
    ]
    return resolve("tiny", [], [*sets, *overrides], {}).settings


def test_a_part_may_be_a_difficulty_measured_before(tmp_path: Path, model_dir: Path):
    settings = pools(tmp_path)
    problems = load_problems(settings).training
    found = {part: [one.question for one in problems if one.part == part] for part in ("hard", "easy")}
    assert found["hard"] == ["q0", "q1", "q2"]
    assert found["easy"] == [f"q{index}" for index in range(3, 9)], "what was not collected is in neither"
    other = written(
        tmp_path / "other" / "rows.jsonl", [{"prompt": "q0", "answer": "1"}, {"prompt": "new", "answer": "1"}]
    )
    both = pools(tmp_path, f"data.mix.hard.path={other}")
    asked = [one.question for one in load_problems(both).training if one.part == "hard"]
    assert asked == ["q0"], "row 2 of a file that has its name is another prompt"
    assert Counter(parts_of(opened(settings, model_dir), 30)) == {"easy": 20, "hard": 10}


# --- refused by name --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.mix.b.weight=0"], r"data\.mix\.b\.weight must be a number > 0"),
        (["data.mix.b.wieght=2"], r"unknown key data\.mix\.b\.wieght"),
        (["data.mix.c.weight=1"], r"has no path.*\(in c\)"),
        (["data.mix.b.task=chain_sum"], r"has a task or params.*\(in b\)"),
        (["data.mix.b.split=test"], r'need source "hf".*\(in b\)'),
        (["data.mix.b.source=reasoning_gym"], r'source "reasoning_gym" does not read.*\(in b\)'),
        (["data.mix.b.min_reward=0.5"], r"need data.rewards.*\(in b\)"),
        (["data.rewards=x.jsonl"], "is read for parts with min_reward or max_reward alone"),
        (["data.rewards=x", "data.mix.b.min_reward=0.5", "data.mix.b.max_reward=0.5"], r"not below its max.*\(in b\)"),
    ],
)
def test_parts_that_cannot_be(tmp_path: Path, overrides: list[str], words: str):
    with pytest.raises(ConfigError, match=words):
        mixed(tmp_path, *overrides)


def test_an_empty_part_is_named(tmp_path: Path, model_dir: Path):
    with pytest.raises(DataError, match=r"b\.jsonl is empty"):
        load_problems(mixed(tmp_path, sizes=(7, 0)))
    everything = written(tmp_path / "asked.jsonl", [{"prompt": f"b {index}", "answer": "1"} for index in range(3)])
    with pytest.raises(DataError, match=r"data\.mix\.b has no problems to train on: every problem is held out"):
        load_problems(mixed(tmp_path, f"eval.path={everything}", "eval.problems=3"))
    with pytest.raises(DataError, match=r"data\.mix\.hard has no problems .* mean reward from -inf to below -1 in"):
        load_problems(pools(tmp_path, "data.mix.hard.max_reward=-1"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no prompt with a reward"),
        ('{"id": "a", "prompt": "b", "model": "m", "output_tokens": [1]}\n', "has no prompt with a reward"),
        ('{"id": "a", "prompt": "b", "rewards": ["x"]}\n', r"c\.jsonl:1 is no line of `collect`"),
        ("[]\n", r"c\.jsonl:1"),
    ],
)
def test_a_file_of_rewards_that_is_none(tmp_path: Path, content: str, words: str):
    settings = pools(tmp_path)
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(DataError, match=words):
        load_problems(settings)
