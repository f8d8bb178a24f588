"""What a response is worth: extraction, own verifiers, and what a user's function may return."""

import math
import subprocess
import sys

import numpy as np
import pytest

from transport.contracts.settings import DataSettings, ScoringSettings, Settings
from workers.errors import RewardError, RewardSetupError
from workers.scoring.rewards import (
    Reward,
    RewardSpec,
    Scorer,
    build_reward,
    read_entry,
    reward_spec,
)
from workers.scoring.user_reward import UserReward, read_reward

MARKER = "Answer:"


def spec(source: str = "jsonl", **changes: object) -> RewardSpec:
    fields = {"task": "chain_sum", "params": {}, "answer_marker": MARKER, "well_formed_reward": 0.1}
    return RewardSpec(source=source, **{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def gym() -> Scorer:
    return build_reward(spec("reasoning_gym", params={"min_terms": 2, "max_terms": 2}))


@pytest.mark.parametrize(
    ("response", "value", "well_formed", "right"),
    [
        ("Answer: -4", 1.0, 1.0, 1.0),
        ("Answer: -4.0", 1.0, 1.0, 1.0),
        ("Answer: 4", 0.1, 1.0, 0.0),
        ("Answer: <result>", 0.0, 0.0, 0.0),
        ("-4", 0.0, 0.0, 0.0),
    ],
)
def test_a_gym_task_is_scored_by_its_own_verifier(
    gym: Scorer, response: str, value: float, well_formed: float, right: float
) -> None:
    entry = {"question": "4 - 1 - 7 =", "answer": "-4", "metadata": {"num_terms": 3}}
    reward = gym("End with 'Answer: <result>'", response, entry)
    assert reward == Reward(value=value, components={"well_formed": well_formed, "right": right})


@pytest.mark.parametrize(
    ("answer", "response", "value"),
    [
        ("72", "Answer: 72.00", 1.0),
        ("6 * 12 = <<6*12=72>>72\n#### 72", "Answer: $72", 1.0),
        ("1,080", "Answer: 1080", 1.0),
        ("72", "Answer: 71", 0.1),
        ("72", "Answer: seventy-two", 1.0),
        ("72", "Answer: 72 apples", 1.0),
        ("72", "Answer: nan", 0.0),
        ("\\frac{1}{2}", "Answer: $\\frac{2}{4}$", 1.0),
        ("Paris", "Answer: paris", 1.0),
        ("Paris", "Answer: Rome", 0.1),
    ],
)
def test_an_answer_from_a_file_is_compared_as_text_number_or_mathematics(
    answer: str, response: str, value: float
) -> None:
    assert build_reward(spec())("", response, {"answer": answer}).value == value


def test_an_entry_without_an_answer_is_an_error_and_no_zero() -> None:
    with pytest.raises(RewardError, match="no answer"):
        build_reward(spec())("", "Answer: 1", {})


def test_a_task_that_the_gym_does_not_have_is_named() -> None:
    with pytest.raises(RewardSetupError, match="no_such_task"):
        build_reward(spec("reasoning_gym", task="no_such_task"))
    with pytest.raises(RewardSetupError, match="min_terms"):
        build_reward(spec("reasoning_gym", params={"min_terms": -1}))


# --- user's functions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (1, Reward(value=1.0)),
        (True, Reward(value=1.0)),
        (np.float32(0.5), Reward(value=0.5)),
        ({"reward": 0.5, "style": 1}, Reward(value=0.5, components={"style": 1.0})),
    ],
)
def test_a_function_returns_a_number_or_a_dict_with_a_reward(returned: object, reward: Reward) -> None:
    assert read_reward(returned) == reward


@pytest.mark.parametrize(
    "returned",
    [
        math.nan,
        math.inf,
        2e15,
        "1.0",
        None,
        [1.0],
        {"style": 1.0},
        {"reward": "high"},
        {"reward": 1.0, "style": math.nan},
    ],
)
def test_anything_else_is_an_error_and_no_zero(returned: object) -> None:
    with pytest.raises(RewardError):
        read_reward(returned)


ROW = {"question": "2 + 3 = ?", "answer": "5", "metadata": {"level": 2, "data_source": "sums", "solution": "2 + 3 = 5"}}


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return {
        "score": float((data_source, ground_truth, extra_info["level"]) == ("sums", "5", 2) and "5" in solution_str)
    }


def of_verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(str(truth) in text) for text, truth in zip(solution_strs, ground_truths, strict=True)]


def of_trl(prompts, completions, answer, **columns):
    assert (prompts, columns["level"], columns["solution"]) == (["2 + 3 = ?"], [2], ["2 + 3 = 5"])
    return [1.0 if right in text else 0.0 for text, right in zip(completions, answer, strict=True)]


def of_trl_with_a_column(completions, solution):
    return [float(text in column) for text, column in zip(completions, solution, strict=True)]


def of_openrlhf(queries, prompts, labels):
    said = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    return {"rewards": np.array([float(label in text) for label, text in zip(labels, said, strict=True)])}


def of_reasoning_gym(answer, entry):
    return float(answer == entry["answer"])


def by_column(response, level):
    return float(response == "5" and level == 2)


def in_another_order(entry, response, prompt):
    return float(entry["answer"] == response and prompt == "asked: 2 + 3 = ?")


def without_names(a, b, c, strict=True):
    return float(b == c["answer"] and strict)


@pytest.mark.parametrize(
    "function",
    [
        *[of_verl, of_verl_batch, of_trl, of_trl_with_a_column, of_openrlhf, of_reasoning_gym, by_column],
        *[in_another_order, without_names, lambda *args: float(args[1] == args[2]["answer"])],
    ],
)
def test_a_reward_of_another_trainer_gets_what_its_parameters_are_called(function) -> None:
    reward = UserReward("mine:reward", function)
    assert reward("asked: 2 + 3 = ?", "5", ROW).value == 1.0
    if function is not of_trl_with_a_column:
        assert reward("asked: 2 + 3 = ?", "6", ROW).value == 0.0


def test_completions_of_a_conversation_are_messages_as_in_trl() -> None:
    def reward(prompts, completions):
        return [float(said[0]["content"] == "5") + len(asked) for asked, said in zip(prompts, completions, strict=True)]

    entry = {**ROW, "messages": [{"role": "user", "content": "?"}]}
    assert UserReward("mine:reward", reward)("text", "5", entry).value == 2.0


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda args, sample: 1.0, "'args' is of another trainer"),
        (lambda prompt, entry: 1.0, "none of them is the response"),
        (lambda prompt, responses: 1.0, "'prompt' is of one response, and others are of several"),
        (lambda response, completion_ids: 1.0, "'completion_ids' is of another trainer"),
        (lambda **columns: 1.0, "none of them is the response"),
    ],
)
def test_a_reward_that_wants_something_else_is_refused_with_the_line_to_write(function, says: str) -> None:
    with pytest.raises(RewardSetupError, match=rf"{says}.*def reward\(prompt, response, entry\): return reward"):
        UserReward("mine:reward", function)


def test_a_parameter_that_is_no_column_is_named_with_the_columns() -> None:
    reward = UserReward("mine:reward", lambda response, difficulty: 1.0)
    with pytest.raises(
        RewardError, match=r"'difficulty' is neither a known name nor a column of the row \(answer, .*level"
    ):
        reward("", "5", ROW)


@pytest.mark.parametrize(
    "name", ["no_such_module:f", "math:no_such_function", "math:pi", "tests.fakes.no_such_module:f"]
)
def test_a_function_that_cannot_be_imported_is_named(name: str) -> None:
    with pytest.raises(RewardSetupError, match=name.replace(".", r"\.")):
        build_reward(spec(function=name))


@pytest.mark.parametrize(("setting", "allowed"), [("mine:reward", ""), ("", "mine:reward"), ("mine:a", "mine:b")])
def test_a_setting_alone_never_names_code(setting: str, allowed: str) -> None:
    with pytest.raises(RewardSetupError, match="reward"):
        reward_spec(Settings(scoring=ScoringSettings(reward=setting)), allowed)


def test_what_both_sides_name_is_built() -> None:
    settings = Settings(scoring=ScoringSettings(reward="mine:reward"), data=DataSettings(source="jsonl"))
    assert reward_spec(settings, "mine:reward").function == "mine:reward"


@pytest.mark.parametrize("raw", [b"", b"[1]", b"\xff", b"{"])
def test_a_corrupt_entry_is_an_error(raw: bytes) -> None:
    with pytest.raises(RewardError):
        read_entry(raw)


def test_the_child_that_computes_rewards_imports_little() -> None:
    heavy = {"httpx", "numpy", "redis", "rich", "structlog", "torch", "transformers", "typer"}
    code = "import sys, workers.scoring.rewards; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "msgspec" in loaded.stdout.split()
    assert heavy.isdisjoint(loaded.stdout.split())
