"""Prompts: sources, order, exact resume, held-out problems, tokens, and one clear error for each bad input."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from orchestrator.config.load import resolve
from orchestrator.errors import ConfigError, DataError
from orchestrator.launch.checks import check_inputs, remarks
from orchestrator.prompts.dataset import Problem, Problems, load_problems
from orchestrator.prompts.source import (
    PromptEncoder,
    PromptSource,
    ShuffledSource,
    fitting,
    held_out,
    open_source,
    sampling_of_sets,
    write_held_out,
)
from transport.contracts.messages import MAX_MESSAGE_BYTES, HeldOutPromptsArrived, PromptRef, SlotOutcome, encode
from transport.contracts.settings import DataSettings, Settings
from transport.contracts.types import GroupId, PromptId, SamplingParams
from workers.models import character_tokenizer

SAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "gsm8k_sample.jsonl"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer()


@pytest.fixture(scope="module")
def model_dir(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a prompt source reads of a model directory."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 512}')
    return directory


def settings(*overrides: str, preset: str = "tiny") -> Settings:
    return resolve(preset, [], list(overrides), {}).settings


def of_rows(tmp_path: Path, rows: list[dict[str, object]], *overrides: str, name: str = "rows.jsonl") -> Settings:
    file = tmp_path / name
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return settings("data.source=jsonl", f"data.path={file}", "data.size=0", *overrides)


def questions(count: int) -> list[dict[str, object]]:
    return [{"prompt": f"question {index}", "answer": index} for index in range(count)]


def names(source: PromptSource, count: int) -> list[str]:
    return [prompt.prompt_id for prompt in source.next(count).prompts]


# --- order and position -----------------------------------------------------------------------------------------------


def test_every_position_resumes_exactly(model_dir: Path, tmp_path: Path):
    configured = of_rows(tmp_path, questions(7), "eval.problems=0")
    batch = open_source(configured, model_dir).next(20)
    ids = [prompt.prompt_id for prompt in batch.prompts]
    for done, position in enumerate(batch.positions, start=1):
        resumed = open_source(configured, model_dir)
        resumed.seek(position)
        assert resumed.position == position
        assert names(resumed, 20 - done) == ids[done:]


def test_batch_size_does_not_change_the_order(model_dir: Path):
    configured = settings("data.size=20")
    together = names(open_source(configured, model_dir), 12)
    source = open_source(configured, model_dir)
    assert [name for count in (1, 4, 7) for name in names(source, count)] == together


def test_each_pass_is_another_order_of_the_same_prompts(model_dir: Path, tmp_path: Path):
    source = open_source(of_rows(tmp_path, questions(9), "eval.problems=0"), model_dir)
    first, second = names(source, 9), names(source, 9)
    assert sorted(first) == sorted(second)
    assert first != second


def test_another_seed_is_another_order(model_dir: Path, tmp_path: Path):
    orders = [
        names(open_source(of_rows(tmp_path, questions(9), "eval.problems=0", f"run.seed={seed}"), model_dir), 9)
        for seed in (1, 2)
    ]
    assert orders[0] != orders[1]


def test_unshuffled_data_comes_as_it_lies(model_dir: Path, tmp_path: Path):
    source = open_source(of_rows(tmp_path, questions(3), "data.shuffle=false", "eval.problems=0"), model_dir)
    assert names(source, 4) == ["rows.jsonl/1", "rows.jsonl/2", "rows.jsonl/3", "rows.jsonl/1"]


def test_passes_end_the_data(model_dir: Path, tmp_path: Path):
    source = open_source(of_rows(tmp_path, questions(3), "data.passes=2", "eval.problems=0"), model_dir)
    first = source.next(5)
    assert (len(first.prompts), first.exhausted) == (5, False)
    last = source.next(5)
    assert (len(last.prompts), last.exhausted) == (1, True)
    assert source.next(5).prompts == []
    source.seek(last.positions[-1])
    assert source.next(1).exhausted
    source.seek("")
    assert len(source.next(9).prompts) == 6


@pytest.mark.parametrize("position", ["nonsense", "0/1@000000000000", "0/99@{fingerprint}", "-1/0@{fingerprint}"])
def test_a_foreign_position_is_refused(model_dir: Path, position: str):
    source = open_source(settings("data.size=20"), model_dir)
    fingerprint = source.position.partition("@")[2]
    with pytest.raises(DataError, match=r"the data, its settings or run\.seed have changed"):
        source.seek(position.format(fingerprint=fingerprint))


def test_changed_data_does_not_take_the_old_position(model_dir: Path, tmp_path: Path):
    position = open_source(of_rows(tmp_path, questions(5)), model_dir).next(2).positions[-1]
    changed = questions(5)
    changed[3]["answer"] = "another"
    with pytest.raises(DataError, match="is not one in these prompts"):
        open_source(of_rows(tmp_path, changed), model_dir).seek(position)


def test_lookup_finds_what_was_given_and_moves_nothing(model_dir: Path):
    source = open_source(settings("data.size=20"), model_dir)
    given = source.next(3).prompts[1]
    position = source.position
    found = source.lookup(given.prompt_id)
    assert (found.text, found.entry_json) == (given.text, given.entry_json)
    np.testing.assert_array_equal(found.prompt_ids, given.prompt_ids)
    assert source.position == position
    with pytest.raises(KeyError):
        source.lookup(PromptId("nowhere/1"))


def test_outcomes_do_not_change_the_order(model_dir: Path):
    configured = settings("data.size=20")
    source = open_source(configured, model_dir)
    source.observe(SlotOutcome(group_id=GroupId("0/0"), prompt_id=PromptId("chain_sum/0-1"), outcome="trained"))
    assert names(source, 5) == names(open_source(configured, model_dir), 5)


# --- held-out problems ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "held_out", "training"), [("smollm2", 256, 379), ("smollm2-hard", 128, 3900)])
def test_no_held_out_question_is_trained_on(preset: str, held_out: int, training: int):
    problems = load_problems(settings(preset=preset))
    held = {problem.question for problem in problems.held_out}
    assert len(held) == len(problems.held_out) == held_out
    assert held.isdisjoint(problem.question for problem in problems.training)
    assert len(problems.training) >= training


def test_the_sums_of_the_main_preset_are_right_differ_and_begin_with_the_easy_ones():
    problems = load_problems(settings("eval.path=", "eval.problems=0", preset="smollm2")).training
    numbers: list[tuple[int, int]] = []
    for problem in problems:
        found = re.search(r": (\d+) ([+-]) (\d+) =", problem.question)
        assert found
        one, other = int(found[1]), int(found[3])
        assert json.loads(problem.entry_json)["answer"] == str(one + other if found[2] == "+" else one - other)
        numbers.append((one, other))
    assert len({problem.question for problem in problems}) == len(problems) == 635
    easy = [max(pair) < 10 for pair in numbers]
    assert all(easy[:60])
    thirds = [sum(easy[start : start + 192]) for start in (60, 252, 444)]
    assert sum(thirds) == 95
    assert min(thirds) >= 20, f"the rest is mixed: {thirds} of 192"
    assert all(min(pair) < 10 and max(pair) <= 25 for pair in numbers)


def test_a_small_task_keeps_half_of_its_questions_for_training():
    digits = [f"data.params.{name}={value}" for name, value in (("max_terms", 2), ("max_digits", 1))]
    problems = load_problems(settings(*digits, preset="smollm2-hard"))  # 200 different sums of two digits
    assert 90 <= len({problem.question for problem in problems.held_out}) <= 100
    assert len({problem.question for problem in problems.training}) >= 100


def test_held_out_problems_are_the_same_for_every_training_seed(model_dir: Path):
    texts = [
        [prompt.text for prompt in held_out(settings(f"run.seed={seed}"), model_dir).next(99).prompts]
        for seed in (0, 1)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 16


def test_a_file_holds_out_a_tenth_at_most(tmp_path: Path):
    problems = load_problems(of_rows(tmp_path, questions(50)))
    assert (len(problems.held_out), len(problems.training)) == (5, 45)


def test_a_file_of_held_out_problems(model_dir: Path, tmp_path: Path):
    of_rows(tmp_path, [*questions(3), {"prompt": "only here", "answer": 1}], name="test.jsonl")
    configured = of_rows(tmp_path, questions(6), f"eval.path={tmp_path / 'test.jsonl'}", "data.size=5")
    problems = load_problems(configured)
    assert {problem.prompt_id for problem in problems.held_out} == {f"test.jsonl/{line}" for line in (1, 2, 3, 4)}
    assert [problem.prompt_id for problem in problems.training] == ["rows.jsonl/4", "rows.jsonl/5"]
    assert len(held_out(configured, model_dir).next(9).prompts) == 4


def two_sets(tmp_path: Path, *overrides: str) -> Settings:
    of_rows(tmp_path, questions(4), name="easy.jsonl")
    of_rows(tmp_path, [{"prompt": "only here", "answer": 1}, *questions(2)], name="hard.jsonl")
    sets = [f"eval.sets.{name}.path={tmp_path / name}.jsonl" for name in ("easy", "hard")]
    return of_rows(tmp_path, questions(9), *sets, "eval.sets.hard.samples=3", *overrides)


def test_several_sets_of_held_out_problems_each_with_its_samples(model_dir: Path, tmp_path: Path):
    configured = two_sets(tmp_path, "eval.sets.easy.problems=2", "eval.sets.hard.temperature=0.5")
    problems = load_problems(configured)
    by_set = Counter(problem.eval_set for problem in problems.held_out)
    assert by_set == {"easy": 2, "hard": 3}
    held = {problem.question for problem in problems.held_out}
    assert not held & {problem.question for problem in problems.training}, "what is asked is not trained on"
    asked = names(held_out(configured, model_dir), 99)
    assert asked[0].startswith("easy:easy.jsonl/")
    assert sorted(Counter(asked).values()) == [1, 1, 3, 3, 3]
    sampling = sampling_of_sets(configured)
    assert (sampling["easy"].temperature, sampling["hard"].temperature) == (0.0, 0.5)
    assert sampling_of_sets(settings()) == {}
    write_held_out(configured, model_dir, tmp_path / "eval.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert [line["eval_set"] for line in lines] == ["easy", "easy", "hard", "hard", "hard"], "each problem once"


def test_an_evaluation_of_more_answers_than_one_message_names_is_refused(model_dir: Path):
    """The journal took an event that its reader then refused: the run could neither be audited nor resumed."""
    sets = ["eval.sets.many.samples=4096", "eval.problems=4"]
    check_inputs(settings("eval.every=1", *sets))
    encoded = held_out(settings(*sets), model_dir).next(16_384).prompts
    assert len({id(prompt) for prompt in encoded}) == 4, "each problem is encoded once"
    event = HeldOutPromptsArrived(
        prompts=tuple(
            PromptRef(
                prompt_id=PromptId(f"{'s' * 64}:{'d' * 150}"),
                prompt_tokens=2**20,
                predicted_tokens=0.1,
                eval_set="s" * 64,
                sampling=SamplingParams(max_new_tokens=2**20, temperature=0.7),
            )
            for _ in encoded
        )
    )
    assert len(encode(event)) < MAX_MESSAGE_BYTES
    with pytest.raises(DataError, match=r"eval\.every: one evaluation asks for 20480 answers .* takes 16384 at most"):
        check_inputs(settings("eval.every=1", *sets, "eval.problems=5"))
    check_inputs(settings(*sets, "eval.problems=5"))


def test_sets_of_a_task_differ_by_its_parameters(model_dir: Path):
    hard = ["eval.sets.hard.params={min_digits=3, max_digits=3}", "eval.sets.hard.problems=4"]
    problems = load_problems(settings("eval.sets.same={}", *hard)).held_out
    assert Counter(problem.eval_set for problem in problems) == {"same": 16, "hard": 4}
    assert all(re.search(r"\d{3} [-+] \d{3}", one.question) for one in problems if one.eval_set == "hard")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eval.sets.hard.problems=4", r"eval\.sets\.hard\.problems is 4, but .*hard\.jsonl has 3: lower it"),
        ("eval.sets.more.problems=2", r"eval\.sets\.more\.problems is 2, but of the 9 of .* at most 0 are held out"),
        ("eval.sets.hard.path=nowhere.jsonl", r"nowhere\.jsonl"),
    ],
)
def test_a_set_that_its_data_cannot_fill(tmp_path: Path, override: str, message: str):
    with pytest.raises(DataError, match=message):
        load_problems(two_sets(tmp_path, override))


def test_no_held_out_problems(model_dir: Path):
    source = held_out(settings("eval.problems=0"), model_dir)
    assert source.next(4).exhausted
    assert len(source) == 0


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_named_columns(model_dir: Path, tmp_path: Path, name: str):
    rows: list[dict[str, object]] = [{"q": "one\u2028two", "a": "1", "level": 3, "tags": ["x"]}]
    columns = ["data.prompt_column=q", "data.answer_column=a", "data.suffix= !"]
    (prompt,) = open_source(of_rows(tmp_path, rows, *columns, name=name), model_dir).next(1).prompts
    assert "one\u2028two !" in prompt.text
    assert json.loads(prompt.entry_json) == {
        "question": "one\u2028two",
        "answer": "1",
        "metadata": {"level": 3, "tags": ["x"]},
    }
    assert prompt.prompt_id == f"{name}/1"


def test_the_gsm8k_example(model_dir: Path):
    configured = settings(f"data.path={SAMPLE}", "sampling.max_new_tokens=8", preset="gsm8k")
    batch = open_source(configured, model_dir).next(5)
    assert all(json.loads(prompt.entry_json)["answer"].count("####") == 1 for prompt in batch.prompts)


def test_given_responses_are_looked_for_before_the_run_and_not_among_held_out_problems(tmp_path: Path):
    given = ["data.response_column=response", "algorithm.name=sft"]
    rows = [{"prompt": f"{number}", "answer": "1", "response": "one"} for number in range(12)]
    assert len(load_problems(of_rows(tmp_path, rows, *given, "eval.problems=1")).training) == 11
    with pytest.raises(DataError, match=r"row 2: no column 'response'.*Set data\.response_column"):
        load_problems(of_rows(tmp_path, [rows[0], {"prompt": "x", "answer": "1"}], *given))
    with pytest.raises(DataError, match=r"row 1: column 'response' must be text that is not empty"):
        load_problems(of_rows(tmp_path, [{"prompt": "x", "answer": "1", "response": ""}], *given))
    (tmp_path / "asked.jsonl").write_text('{"prompt": "y", "answer": "2"}')
    asked = f"eval.path={tmp_path / 'asked.jsonl'}"
    assert len(load_problems(of_rows(tmp_path, rows, *given, asked, "eval.problems=1")).held_out) == 1


def test_no_answer_column_is_no_answer(tmp_path: Path):
    problems = load_problems(of_rows(tmp_path, [{"prompt": "x"}], "data.answer_column="))
    assert json.loads(problems.training[0].entry_json)["answer"] is None


def test_size_limits_a_file(tmp_path: Path):
    assert len(load_problems(of_rows(tmp_path, questions(9), "data.size=4")).training) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"rows\.jsonl is empty: it has no rows"),
        (b"\n\n", r"is empty"),
        (b'{"prompt": "x", "answer": 1}\n{"prompt": "y"}\n', r"row 2: no column 'answer'; it has 'prompt'"),
        (b'{"question": "x", "answer": 1}\n', r"row 1: no column 'prompt'; it has 'question', 'answer'"),
        (b'{"prompt": "x", "answer": 1}\n\n{"prompt": \n', r"rows\.jsonl:3: not the JSON that belongs here"),
        (b'["x"]\n', r"rows\.jsonl:1: not the JSON that belongs here"),
        (b'{"prompt": "  ", "answer": 1}\n', r"row 1: column 'prompt' must be text"),
        (b'{"prompt": 5, "answer": 1}\n', r"row 1: column 'prompt' must be text"),
        (b"\xff\xfe\x00", r"rows\.jsonl:1: it is UTF-16 text: save it as UTF-8"),
        (b"PAR1\x15\x04", r'rows\.jsonl:1: it is a Parquet file.*set data\.source to "hf"'),
        (b"prompt,answer\n", r'rows\.jsonl:1: not the JSON.*CSV.*set data\.source to "hf"'),
        (b'\xef\xbb\xbf{"question": "x"}\n', r"row 1: no column 'prompt'; it has 'question'"),
        (b'{"prompt": [{"role": "user"}], "answer": 1}\n', r"row 1: column 'prompt' is no list of messages.*content"),
        (b'{"prompt": [], "answer": 1}\n', r"row 1: column 'prompt' must be text that is not empty, or a list of"),
        (
            b'{"prompt": [{"role": "assistant", "content": "4"}], "answer": 1}\n',
            r"row 1: the messages in column 'prompt' end with the assistant's",
        ),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, message: str):
    configured = of_rows(tmp_path, [])
    Path(configured.data.path).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_problems(configured)


def test_a_prompt_may_be_a_conversation(tmp_path: Path, model_dir: Path):
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1 = ?"}]
    rows = [{"prompt": turns, "answer": 2}, {"prompt": "2 + 2 = ?", "answer": 4}]
    configured = of_rows(tmp_path, rows, 'data.suffix=" So?"', "data.shuffle=false", "eval.problems=0")
    texts = [prompt.text for prompt in open_source(configured, model_dir).next(2).prompts]
    assert texts[0] == (
        "<|im_start|>system\nbe brief<|im_end|><|im_start|>user\n1 + 1 = ? So?<|im_end|><|im_start|>assistant\n"
    )
    assert texts[1] == "<|im_start|>user\n2 + 2 = ? So?<|im_end|><|im_start|>assistant\n"
    entry = json.loads(load_problems(configured).training[0].entry_json)
    assert (entry["question"], entry["answer"]) == ("be brief\n\n1 + 1 = ?", 2)


def test_a_chat_history_may_stand_in_the_column_messages(tmp_path: Path, model_dir: Path):
    """As other trainers' data sets have it; a column that is named, or is called prompt, goes first."""
    turns = [{"role": "user", "content": "1 + 1 = ?"}, {"role": "assistant", "content": "3"}]
    turns.append({"role": "user", "content": "Sure?"})
    rows = [{"messages": turns, "answer": 2}]
    (problem,) = load_problems(of_rows(tmp_path, rows, "eval.problems=0")).training
    assert problem.question == "1 + 1 = ?\n\n3\n\nSure?"
    assert "messages" not in json.loads(problem.entry_json)["metadata"]
    (prompt,) = open_source(of_rows(tmp_path, rows, "eval.problems=0"), model_dir).next(1).prompts
    assert prompt.text.count("<|im_start|>") == 4
    assert prompt.text.endswith("<|im_start|>user\nSure?<|im_end|><|im_start|>assistant\n")
    both = [{"prompt": "2 + 2 = ?", "messages": turns, "answer": 4}]
    assert load_problems(of_rows(tmp_path, both, "eval.problems=0")).training[0].question == "2 + 2 = ?"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "content": 3}], r"rows\.jsonl, row 2: column 'messages' is no list of messages"),
        ([{"role": "user"}], r"rows\.jsonl, row 2: column 'messages' is no list of messages"),
        ([{"role": "user", "content": ""}], r"rows\.jsonl, row 2: column 'messages' must be text that is not empty"),
        ([], r"rows\.jsonl, row 2: column 'messages' must be text that is not empty"),
        ({"role": "user"}, r"rows\.jsonl, row 2: column 'messages' must be text"),
        ([{"role": "usr", "content": "4"}], r"row 2: .*role 'usr', which no chat template knows .did you mean user"),
        ([{"role": "assistant", "content": "4"}], r"rows\.jsonl, row 2: the messages .* end with the assistant's"),
    ],
)
def test_a_bad_chat_history_is_named_with_file_and_line(tmp_path: Path, messages: object, words: str):
    rows = [{"messages": [{"role": "user", "content": "x"}], "answer": 1}, {"messages": messages, "answer": 2}]
    with pytest.raises(DataError, match=words):
        load_problems(of_rows(tmp_path, rows))


def test_a_chat_history_that_the_template_refuses_is_named(tmp_path: Path, model_dir: Path):
    strict = character_tokenizer()
    refusing = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    strict.chat_template = "{% for m in messages %}" + refusing + "{{ m.content }}{% endfor %}"
    strict.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    rows = [{"messages": [{"role": role, "content": "x"}], "answer": 1} for role in ("user", "tool")]
    with pytest.raises(DataError, match=r"rows\.jsonl/2: the model's chat template refuses messages of tool: no tools"):
        open_source(of_rows(tmp_path, rows, "eval.problems=0"), tmp_path)


def test_a_missing_file():
    with pytest.raises(DataError, match=r"nowhere\.jsonl: cannot be read: No such file"):
        load_problems(settings("data.source=jsonl", "data.path=nowhere.jsonl"))


def test_a_cut_off_gz_file(tmp_path: Path):
    configured = of_rows(tmp_path, questions(500), name="rows.jsonl.gz")
    file = Path(configured.data.path)
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(DataError, match="is damaged"):
        load_problems(configured)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.task=chain_sun"], r"'chain_sun' is no reasoning_gym task \(did you mean chain_sum\?\)"),
        (["data.params.max_term=3"], r"data\.params\.max_term is no parameter of chain_sum \(did you mean max_terms"),
        (["data.params.min_terms=5"], r"data\.params do not suit chain_sum: max_terms must be >= min_terms"),
        (["data.params.seed=5"], r"data\.params\.seed is no parameter"),
    ],
)
def test_bad_tasks(overrides: list[str], message: str):
    with pytest.raises(DataError, match=message):
        load_problems(settings(*overrides))


def test_everything_held_out(tmp_path: Path):
    of_rows(tmp_path, questions(3), name="test.jsonl")
    with pytest.raises(DataError, match="every problem is held out"):
        load_problems(of_rows(tmp_path, questions(3), f"eval.path={tmp_path / 'test.jsonl'}"))


# --- data sets of the datasets library --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["dict", "split", "parquet", "json"])
def test_data_set_on_disk(tmp_path: Path, form: str):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(questions(4))
    path = tmp_path / form
    match form:
        case "dict":
            datasets.DatasetDict({"train": rows}).save_to_disk(str(path))
        case "split":
            rows.save_to_disk(str(path))
        case "parquet":
            rows.to_parquet(str(path := tmp_path / "rows.parquet"))
        case _:
            rows.to_json(str(path := tmp_path / "rows.jsonl"))
    configured = settings("data.source=hf", f"data.path={path}", "eval.problems=0", "data.size=3")
    problems = load_problems(configured).training
    assert [problem.question for problem in problems] == ["question 0", "question 1", "question 2"]
    assert problems[2].prompt_id == f"{path.name}/train/2"


def test_data_set_errors(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(questions(2))}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="has no split 'dev'; it has train"):
        load_problems(settings("data.source=hf", f"data.path={tmp_path / 'saved'}", "data.split=dev"))
    with pytest.raises(DataError, match=r"data.config: .* was saved, and has no configurations"):
        load_problems(settings("data.source=hf", f"data.path={tmp_path / 'saved'}", "data.config=main"))
    with pytest.raises(DataError, match="cannot be loaded"):
        load_problems(settings("data.source=hf", f"data.path={tmp_path / 'absent'}"))


CONFIGURATIONS = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train.jsonl}, {split: test, path: main/test.jsonl}]
- config_name: socratic
  data_files: [{split: train, path: socratic/train.jsonl}]
---
"""


@pytest.fixture
def two_configurations(tmp_path: Path) -> Path:
    """A data set as on the hub: openai/gsm8k has these two."""
    pytest.importorskip("datasets")
    directory = tmp_path / "gsm8k"
    for part in ("main/train", "main/test", "socratic/train"):
        path = directory / f"{part}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"prompt": f"{part} {number}", "answer": str(number)} for number in range(4)]
        path.write_text("\n".join(map(json.dumps, rows)))
    (directory / "README.md").write_text(CONFIGURATIONS)
    return directory


def test_a_data_set_is_read_by_configuration_and_split(two_configurations: Path):
    def loaded(*overrides: str) -> Problems:
        return load_problems(settings("data.source=hf", f"data.path={two_configurations}", *overrides))

    one = loaded("data.config=main", f"eval.path={two_configurations}", "eval.problems=2")
    assert [problem.question for problem in one.training] == [f"main/train {number}" for number in range(4)]
    assert all(problem.question.startswith("main/test ") for problem in one.held_out)
    assert {problem.prompt_id for problem in one.held_out} < {f"gsm8k/main/test/{number}" for number in range(4)}
    part = loaded("data.config=socratic", "data.split=train[:2]", "eval.problems=0")
    assert [problem.question for problem in part.training] == ["socratic/train 0", "socratic/train 1"]
    other = loaded("data.config=main", f"eval.path={two_configurations}", "eval.config=socratic", "eval.split=train")
    assert all(problem.question.startswith("socratic/train ") for problem in other.held_out)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), r"configs: \['main', 'socratic'\].*; set data.config"),
        (("data.config=mian",), r"'mian' not found. Available: \['main', 'socratic'\]; set data.config"),
        (("data.config=main", "data.split=dev"), r"Should be one of \['train', 'test'\].; set data.split"),
        (
            ("data.config=main", "eval.path=HERE", "eval.split=dev"),
            r"^eval.path: .* \['train', 'test'\].; set eval.split",
        ),
        (("data.config=main", "data.revision=v1"), r"data.revision is of a data set on the hub"),
    ],
)
def test_what_a_data_set_has_is_named(two_configurations: Path, overrides: tuple[str, ...], words: str):
    given = [override.replace("HERE", str(two_configurations)) for override in overrides]
    with pytest.raises(DataError, match=words):
        load_problems(settings("data.source=hf", f"data.path={two_configurations}", *given))


def test_a_configuration_needs_a_data_set_that_may_have_some():
    for override in ("data.config=main", "data.revision=v1", "eval.config=main"):
        with pytest.raises(ConfigError, match=r'needs? data.source "hf"'):
            settings(override)


# --- text and tokens --------------------------------------------------------------------------------------------------


def test_the_chat_template_wraps_question_and_system(tokenizer: PreTrainedTokenizerFast):
    encoder = PromptEncoder(tokenizer, DataSettings(system="be brief"))
    text = encoder.render("1 + 1 = ?")
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|><|im_start|>user\n1 + 1 = ?<|im_end|><|im_start|>assistant\n"
    )
    ids = encoder.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_without_chat_template(tokenizer: PreTrainedTokenizerFast):
    encoder = PromptEncoder(tokenizer, DataSettings(system="be brief", chat_template=False))
    assert encoder.render("1 + 1 = ?") == "be brief\n\n1 + 1 = ?"
    assert tokenizer.decode(encoder.encode("1 + 1 = ?")) == "1 + 1 = ?"


def test_a_template_that_refuses(tokenizer: PreTrainedTokenizerFast):
    strict = character_tokenizer()
    strict.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match="chat template refuses messages of user: no system role"):
        PromptEncoder(strict, DataSettings()).render("x")


def test_the_decoded_text_is_what_the_model_reads(model_dir: Path, tokenizer: PreTrainedTokenizerFast):
    (prompt,) = open_source(settings(), model_dir).next(1).prompts
    assert tokenizer.decode(prompt.prompt_ids) == prompt.text.lower()


def problem(number: int, characters: int) -> Problem:
    return Problem(prompt_id=PromptId(f"p/{number}"), question="x" * characters, entry_json="{}")


@pytest.mark.parametrize("room", [100, 40])
def test_prompts_exactly_at_the_limit(tokenizer: PreTrainedTokenizerFast, room: int):
    encoder = PromptEncoder(tokenizer, DataSettings(chat_template=False))
    configured = settings("sampling.max_new_tokens=16")
    problems = [problem(0, 5), problem(1, room), problem(2, room + 1), problem(3, room + 2)]
    assert fitting(problems[:2], encoder, room + 16, configured) == problems[:2]
    with pytest.raises(DataError, match=rf"2 of 4 prompts do not fit: p/3 has {room + 2} tokens.* leaves {room} "):
        fitting(problems, encoder, room + 16, configured)
    skipping = msgspec.structs.replace(configured, data=msgspec.structs.replace(configured.data, overlong="skip"))
    assert fitting(problems, encoder, room + 16, skipping) == problems[:2]
    with pytest.raises(DataError, match="2 of 2 prompts do not fit"):
        fitting(problems[2:], encoder, room + 16, skipping)


def test_a_context_without_room(model_dir: Path):
    with pytest.raises(DataError, match="a context of 512 tokens has no room"):
        open_source(settings("sampling.max_new_tokens=512"), model_dir)


def test_a_context_the_model_was_not_made_for(model_dir: Path):
    with pytest.raises(DataError, match=r"generation\.max_context is 600, but random:qwen3-tiny was made for 512"):
        open_source(settings("generation.max_context=600"), model_dir)


def test_overlong_prompts_are_found_at_the_start(model_dir: Path, tmp_path: Path):
    rows = [*questions(3), {"prompt": "y" * 600, "answer": 0}]
    with pytest.raises(DataError, match=r'1 of 4 prompts do not fit: rows\.jsonl/4 .*set data\.overlong to "skip"'):
        open_source(of_rows(tmp_path, rows), model_dir)
    assert len(open_source(of_rows(tmp_path, rows, "data.overlong=skip"), model_dir)) == 3


def test_a_broken_tokenizer(model_dir: Path, tmp_path: Path):
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "none"}}')
    with pytest.raises(DataError, match=r"the tokenizer in .* cannot be read"):
        open_source(settings(), tmp_path)


def test_a_source_of_one_problem_never_ends(tokenizer: PreTrainedTokenizerFast):
    source = ShuffledSource([problem(0, 3)], PromptEncoder(tokenizer, DataSettings()), seed=0, shuffle=True, passes=0)
    assert names(source, 3) == ["p/0"] * 3


# --- answers and files from elsewhere ---------------------------------------------------------------------------------


OWN = "scoring.reward="
"""Our own verifier compares."""
NESTED = [{"prompt": f"{n} + 1?", "reward_model": {"style": "rule", "truth": [str(n + 1), "?"]}} for n in range(30)]


@pytest.mark.parametrize(
    ("column", "answer"),
    [
        ("reward_model.truth", ["1", "?"]),  # spellings that are all right
        ("reward_model.truth.0", "1"),
    ],
)
def test_a_column_may_be_within_another(tmp_path: Path, column: str, answer: object) -> None:
    first = load_problems(of_rows(tmp_path, NESTED, f"data.answer_column={column}", OWN, "eval.problems=0")).training[0]
    assert json.loads(first.entry_json)["answer"] == answer


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            {"style": "rule", "ground_truth": "4"},
            r'an object with the keys .*set data.answer_column = "answer.ground_truth"',
        ),
        ([{"text": "4"}], "is a list, and not one of texts or numbers"),
        ([], "is a list, and not one of texts or numbers"),
        (None, r"has no answer \(null\)"),
        ("  ", "is empty"),
        ("reasoning, and nothing behind it ####", "is empty"),
        ("4" * 1_100_000, "has 1100000 characters"),
    ],
)
def test_an_answer_that_cannot_be_compared_is_named_with_its_row(tmp_path: Path, answer: object, says: str) -> None:
    rows = [{"prompt": "2 + 2?", "answer": "4"}, {"prompt": "3 + 1?", "answer": answer}]
    with pytest.raises(DataError, match=rf"rows.jsonl, row 2: .*{says}"):
        load_problems(of_rows(tmp_path, rows, OWN))
    every = "eval.problems=0"
    assert load_problems(of_rows(tmp_path, rows, "scoring.reward=mine:reward", every)).training, "it reads any answer"
    assert load_problems(of_rows(tmp_path, rows, OWN, every), scored=False).training


def test_a_column_that_is_not_in_its_row_is_named(tmp_path: Path) -> None:
    says = r"row 1: no column 'reward_model.gold'; 'gold' is not in it; it has 'prompt', 'reward_model'"
    with pytest.raises(DataError, match=says):
        load_problems(of_rows(tmp_path, NESTED, "data.answer_column=reward_model.gold"))


def test_files_may_be_named_by_a_glob_a_directory_or_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/rows.jsonl", "b/rows.jsonl", "b/others.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"prompt": name, "answer": "1"}) + "\n")
    monkeypatch.setenv("HOME", str(tmp_path))

    def ids(path: str) -> list[str]:
        asked = settings("data.source=jsonl", f"data.path={path}", "eval.problems=0")
        return [one.prompt_id for one in load_problems(asked).training]

    assert ids(f"{tmp_path}/*/rows.jsonl") == ids("~/*/rows.jsonl") == ["a/rows.jsonl/1", "b/rows.jsonl/1"]
    assert ids("~/a/rows.jsonl") == ids("~/a") == ["rows.jsonl/1"]
    for nothing, why in (("~/c*/rows.jsonl", "matches no file"), (f"{tmp_path}", "is a directory without a .jsonl")):
        with pytest.raises(DataError, match=rf"data.path: .* {why}"):
            ids(nothing)


def test_what_is_held_out_is_not_trained_on_with_other_white_space_and_is_counted(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"prompt": "question 1", "answer": "1"}) + "\n")
    rows = [*questions(3), {"prompt": " question  1\n", "answer": "1"}, {"prompt": "question 2 ", "answer": "2"}]
    loaded = load_problems(of_rows(tmp_path, rows, f"eval.path={held}", "eval.problems=1"))
    assert [one.question for one in loaded.training] == ["question 0", "question 2", "question 2 "]
    assert (loaded.also_held_out, loaded.repeated) == (2, 1)
    assert remarks(settings(), loaded)[:2] == [
        "2 rows ask what a held-out row asks, and stay out of training",
        "1 row repeats the prompt of another row of the training data",
    ]
