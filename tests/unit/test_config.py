"""Configuration: precedence, origins, and one clear error for each kind of mistake."""

from __future__ import annotations

import contextlib
import inspect
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest

from orchestrator.config import load, schema
from orchestrator.config.load import (
    RENAMED,
    Resolved,
    check_resume,
    is_chosen,
    key_lines,
    preset_names,
    read_document,
    read_preset,
    render,
    resolve,
)
from orchestrator.config.schema import FIELD_WORDS, FIELDS, SECTIONS, to_toml
from orchestrator.core.model.settings import core_settings
from orchestrator.errors import ConfigError
from transport.contracts.settings import Algorithm, ParallelSettings, Section, Settings, eval_sets
from transport.process.secret import BROKER_PASSWORD


def with_set(*overrides: str, preset: str | None = None) -> Resolved:
    return resolve(preset, [], list(overrides), {})


def error_of(*overrides: str, preset: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        with_set(*overrides, preset=preset)
    return str(caught.value)


def file_error(tmp_path: Path, document: str) -> ConfigError:
    file = tmp_path / "mine.toml"
    file.write_text(document, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        resolve(None, [file], [], {})
    return caught.value


# --- precedence and origins -------------------------------------------------------------------------------------------


def test_nothing_given_is_the_defaults():
    resolved = with_set()
    assert resolved.settings == Settings()
    assert set(resolved.origins) == set(FIELDS)
    assert set(resolved.origins.values()) == {"default"}


def test_later_layers_win_and_are_named(tmp_path: Path):
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("[trainer]\nlr = 2e-5\nthreads = 3\n[run]\nbatches = 7\n")
    second.write_text("# comment\n\n[trainer]\nthreads = 4\n")
    resolved = resolve("smollm2", [first, second], ["run.batches=9"], {BROKER_PASSWORD: "hush"})
    assert resolved.settings.run.batches == 9
    assert resolved.settings.trainer.lr == 2e-5
    assert resolved.settings.trainer.threads == 4
    assert resolved.settings.pipeline.group_size == 8
    assert resolved.settings.broker.password == "hush"
    assert resolved.origins["run.batches"] == "--set"
    assert resolved.origins["trainer.lr"] == f"{first}:2"
    assert resolved.origins["trainer.threads"] == f"{second}:4"
    assert resolved.origins["sampling.temperature"].startswith("preset smollm2:")
    assert resolved.origins["broker.password"] == f"environment {BROKER_PASSWORD}"
    assert resolved.origins["trainer.epochs"] == "default"


def test_what_dispatch_auto_stands_for_is_beside_it():
    text = render(resolve(None, [], ["pipeline.max_staleness=0"], {}))
    assert 'dispatch = "auto"  # default; scored here' in text
    assert 'dispatch = "even"  # --set\n' in render(resolve(None, [], ["pipeline.dispatch=even"], {}))


@pytest.mark.parametrize(
    ("argument", "section", "field", "expected"),
    [
        ("trainer.lr=1e-5", "trainer", "lr", 1e-5),
        ("trainer.lr=1", "trainer", "lr", 1.0),
        ("trainer.lr = 0.5", "trainer", "lr", 0.5),
        ("run.name=first-try", "run", "name", "first-try"),
        ('run.name="quoted"', "run", "name", "quoted"),
        ("run.name=7", "run", "name", "7"),
        ("run.name=2026-11-20", "run", "name", "2026-11-20"),
        ("data.suffix= Answer: x=1", "data", "suffix", " Answer: x=1"),
        ("data.suffix = Answer", "data", "suffix", "Answer"),
        ("data.shuffle=false", "data", "shuffle", False),
        ("trainer.betas=[0.9, 0.99]", "trainer", "betas", (0.9, 0.99)),
        ("pipeline.update=barrier", "pipeline", "update", "barrier"),
        ("broker.url=unix:///tmp/x.sock", "broker", "url", "unix:///tmp/x.sock"),
    ],
)
def test_override_values(argument: str, section: str, field: str, expected: object):
    assert getattr(getattr(with_set(argument).settings, section), field) == expected


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ("[trainer.parallel]\n\ntensor = 2\n[trainer]\nranks = 4\n", 3),
        ("[trainer]\nranks = 4\n\nparallel.tensor = 2", 4),
        ("[trainer]\nranks = 4\n\nparallel = {tensor = 2}\n[trainer.lora]\n", 4),
    ],
)
def test_a_section_within_a_section(tmp_path: Path, document: str, line: int):
    file = tmp_path / "mine.toml"
    file.write_text(document)
    resolved = resolve(None, [file], ["trainer.parallel.data=2", "trainer.lora.targets=['q_proj']"], {})
    trainer = resolved.settings.trainer
    assert trainer.parallel == ParallelSettings(data=2, tensor=2, pipeline="auto")
    assert (trainer.ranks, trainer.lora.targets, trainer.lora.rank) == (4, ["q_proj"], 0)
    assert resolved.origins["trainer.parallel.tensor"] == f"{file}:{line}"
    assert resolved.origins["trainer.parallel.data"] == "--set"
    assert resolved.origins["trainer.parallel.pipeline"] == "default"
    file.write_text(render(resolved))
    assert resolve(None, [file], [], {}).settings == resolved.settings


def test_a_section_within_a_section_is_set_as_a_whole_too():
    parallel = with_set("trainer.ranks=2", "trainer.parallel={tensor = 2}", "trainer.parallel.data=1").settings.trainer
    assert parallel.parallel == ParallelSettings(data=1, tensor=2)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("[trainer.parallel]\ntensr = 2", "mine.toml:2: unknown key trainer.parallel.tensr (did you mean trainer.para"),
        ("[trainer]\nparallel = 2", "mine.toml:2: trainer.parallel is a section: write [trainer.parallel], then one"),
        ("[trainer.parallel]\ndata = 0", 'data must be a whole number >= 1, or "auto", not 0'),
        ("[trainer.lora]\nrank.x = 1", "trainer.lora.rank must be a whole number >= 0, not {x = 1}"),
        ("[trainer.lora]\nzzz = 1", "keys of trainer.lora: rank, alpha, targets, publish"),
        ("[run]\nseed = 1\n[replay]\nload_s = 1.0", "mine.toml:4: replay.load_s is emulated.load_s since"),
        ("[trainr]\nlr = 1", "mine.toml:2: unknown section trainr (did you mean trainer?)"),
        ("trainer = 1", "mine.toml:1: trainer is a section"),
        ("[trainer]\nlr = 1\nthreads = = 2", "mine.toml:3: not valid TOML"),
        ('[trainer]\nbetas = [\n  0.9,\n  0.95,\n]\nlr = "x"', "mine.toml:6: trainer.lr must be a number"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(tmp_path: Path, document: str, message: str):
    assert message in str(file_error(tmp_path, document))


def test_one_task_parameter_is_set_beside_the_others():
    params = with_set("data.params.max_digits=3", preset="smollm2-hard").settings.data.params
    assert params == {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 3}


def test_another_task_forgets_the_parameters_of_the_one_before():
    resolved = with_set("data.task=gcd", preset="smollm2-hard")
    assert resolved.settings.data.params == {}
    assert resolved.origins["data.params"] == "default"
    assert with_set("data.task=chain_sum", preset="smollm2-hard").settings.data.params["max_terms"] == 3


def test_another_schedule_forgets_what_the_one_before_left_at_its_end():
    constant = resolve("smollm2", [], ["trainer.lr_schedule=constant"], {}).settings.trainer
    assert (constant.lr_schedule, constant.lr_min_share) == ("constant", 0.0)
    both = ["trainer.lr_min_share=0.2", "trainer.lr_schedule=linear"]
    assert resolve("smollm2", [], both, {}).settings.trainer.lr_min_share == 0.2
    assert resolve("smollm2", [], ["trainer.lr_schedule=cosine"], {}).settings.trainer.lr_min_share == 0.1


def test_other_data_forgets_the_order_and_the_held_out_file_of_the_ones_before():
    mine = with_set("data.path=mine.jsonl", preset="smollm2").settings
    assert (mine.data.path, mine.data.shuffle, mine.eval.path) == ("mine.jsonl", True, "")
    made = with_set("data.source=reasoning_gym", "data.task=gcd", preset="smollm2").settings
    assert (made.data.path, made.data.shuffle, made.eval.path) == ("", True, "")
    assert 'data.task = "gcd" is read by' in str(error_of("data.task=gcd", preset="smollm2"))


MINE = """[data]
path = "mine.jsonl"
shuffle = false
[eval]
path = "mine/test.jsonl"
[eval.sets.sampled]
samples = 4
"""


def test_other_data_forgets_only_what_a_preset_set(tmp_path: Path):
    """A sweep over data files: each run has the held-out problems, sets and order that the user's file names."""
    file = tmp_path / "mine.toml"
    file.write_text(MINE)
    mine = resolve("smollm2", [file], ["data.path=other.jsonl"], {})
    data, held_out = mine.settings.data, mine.settings.eval
    assert (data.path, data.shuffle, held_out.path) == ("other.jsonl", False, "mine/test.jsonl")
    assert held_out.sets["sampled"].samples == 4
    assert mine.origins["data.shuffle"] == f"{file}:3"
    assert mine.forgotten == [], "what the user's file sets of its own is not missed"
    file.write_text("[eval.sets.sampled]\nsamples = 4\n")
    other = resolve("gsm8k", [file], ["data.path=docs/examples/gsm8k_sample.jsonl"], {})
    assert other.settings.eval.sets["sampled"].samples == 4
    left = with_set("data.path=other.jsonl", preset="smollm2")
    assert [re.sub(r"\d+", "N", sentence) for sentence in left.forgotten] == [
        "data.shuffle = false (preset smollmN:N) is not used: data.path is another (--set)",
        'eval.path = "preset:sums.jsonl" (preset smollmN:N) is not used: data.path is another (--set)',
    ]
    assert all(f"# {sentence}" in render(left, defaults=False).splitlines() for sentence in left.forgotten)


def test_a_mixture_of_other_data_takes_the_place_of_a_presets(tmp_path: Path):
    file = tmp_path / "mix.toml"
    file.write_text(
        '[data.mix.plus]\npath = "plus.jsonl"\n[data.mix.sums]\nsource = "reasoning_gym"\ntask = "chain_sum"\n'
    )
    mixed = resolve("smollm2", [file], [], {})
    data, held_out = mixed.settings.data, mixed.settings.eval
    assert (data.path, data.shuffle, held_out.path, held_out.problems) == ("", True, "", 256)
    assert len(mixed.forgotten) == 3
    assert all("each part of data.mix has data of its own" in sentence for sentence in mixed.forgotten)
    stored = tmp_path / "config.toml"
    stored.write_text(render(mixed))
    assert resolve(None, [stored], [], {}).settings == mixed.settings
    with pytest.raises(ConfigError, match=r"data.path names none: set one of them .in more."):
        resolve("smollm2", [file], ["data.mix.more.weight=2"], {})
    assert with_set("data.mix.more.weight=2", preset="smollm2").settings.data.path == "preset:sums.jsonl"


def test_a_params_table_in_a_file_is_one_value(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text("[data]\ntask = 'gcd'\n\n[data.params]\nmax_value = 9\n\n[trainer]\n")
    resolved = resolve("smollm2-hard", [file], [], {})
    assert resolved.settings.data.params == {"max_value": 9}
    assert resolved.origins["data.params"] == f"{file}:4"


def test_every_preset_resolves():
    known = "code distill endpoint gsm8k ppo service sft smollm2 smollm2-hard tiny two_turn_tool"
    assert preset_names() == known.split()
    for name in preset_names():
        data = ["data.path=rows.jsonl"] if name == "gsm8k" else []
        assert resolve(name, [], data, {}).settings.run.name == name


def test_presets_say_where_each_value_stands():
    lines = {setting.key: setting.where for setting in read_preset("tiny")}
    assert lines["run.name"] == "preset tiny:5"


def test_an_algorithm_sets_what_the_user_does_not(tmp_path: Path):
    chosen = with_set("algorithm.name=dapo", "algorithm.overlong_share=0.5", preset="smollm2")
    algorithm, pipeline = chosen.settings.algorithm, chosen.settings.pipeline
    assert (algorithm.clip_high, algorithm.overlong_share, pipeline.drop_no_signal) == (0.28, 0.5, True)
    assert chosen.origins["algorithm.clip_high"] == "algorithm dapo:4"
    assert not is_chosen(chosen, "algorithm.clip_high")
    stored = tmp_path / "config.toml"
    stored.write_text(render(chosen), encoding="utf-8")
    stored.chmod(0o600)
    for preset in ("smollm2", None):
        assert resolve(preset, [], [], {}, stored=stored).settings == chosen.settings
    other = resolve("smollm2", [], ["algorithm.name=cispo"], {}, stored=stored).settings.algorithm
    assert (other.loss, other.clip_high) == ("cispo", 4.0)


def test_a_critic_comes_with_its_advantages_and_nothing_of_it_without():
    chosen = with_set("algorithm.name=ppo", "critic.lr=3e-5", "pipeline.group_size=1", preset="tiny").settings
    assert chosen.has_critic
    assert not with_set(preset="tiny").settings.has_critic
    assert "need algorithm.advantage" in error_of("critic.value_clip=0.5")
    assert "pipeline.drop_no_signal = true must be false" in error_of(
        "algorithm.name=ppo", "pipeline.drop_no_signal=true"
    )
    assert "algorithm.gae_lambda must be a number in [0, 1]" in error_of("algorithm.gae_lambda=1.5")


def test_every_algorithm_resolves():
    for name in get_args(Algorithm):
        wanted = {
            "sft": ["data.source=jsonl", "data.path=x", "data.response_column=a"],
            "distill": ["algorithm.teacher=x"],
        }
        assert with_set(f"algorithm.name={name}", *wanted.get(name, [])).settings.algorithm.name == name
    assert "algorithm.name must be one of" in error_of("algorithm.name=grop")


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_unknown_key_in_a_file(tmp_path: Path):
    error = file_error(tmp_path, "[trainer]\nlr = 1e-5\nwarmup_batchs = 3\n")
    assert str(error).startswith(f"{tmp_path / 'mine.toml'}:3: unknown key trainer.warmup_batchs")
    assert "did you mean trainer.warmup_batches?" in str(error)
    assert error.key == "trainer.warmup_batchs"


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("trainer.learning_rate=1", "trainer.lr"),
        ("trainer.learnin_rate=1", "trainer.lr"),
        ("trainer.temperature=1", "sampling.temperature"),
        ("pipeline.groupsize=1", "pipeline.group_size"),
        ("trainer.batch_size=1", "pipeline.groups_per_batch"),
        ("trainer.lr.x=1", "trainer.lr"),
        ("trainr.lr=1", "trainer"),
        ("trainer.parallel.tensr=1", "trainer.parallel.tensor"),
        ("trainer.tensor=1", "trainer.parallel.tensor"),
        ("trainer.paralel.data=1", "trainer.parallel.data"),
        ("parallel.data=1", "trainer.parallel"),
        ("trainer.lora_rank=1", "trainer.lora.rank"),
    ],
)
def test_nearest_key(argument: str, meant: str):
    assert f"did you mean {meant}?" in error_of(argument)


@pytest.mark.parametrize(
    ("argument", "answer"),
    [
        ("replay.step_s=1", "replay.step_s is emulated.step_s since version 0.2"),
        ("pipeline.move_running=true", "pipeline.move_running is pipeline.migrate_running since"),
        ("generation.engine=replay", 'generation.engine = "replay" is generation.engine = "emulated" since'),
    ],
)
def test_a_name_of_the_version_before_is_answered_with_the_new_one(argument: str, answer: str):
    assert error_of(argument).startswith(f"--set: {answer}")


def test_old_names_are_free_and_new_ones_are_real():
    known = {*FIELDS, *SECTIONS}
    assert not known & set(RENAMED)
    assert {new.partition(" = ")[0] for new in RENAMED.values()} <= known


def test_a_key_like_no_other_lists_those_there_are():
    assert "keys of eval: every, ends, temperature" in error_of("eval.zzz=1")


def test_words_of_other_trainers_name_real_settings():
    assert set(FIELD_WORDS.values()) <= set(FIELDS)


def test_missing_file_and_preset(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        resolve(None, [tmp_path / "absent.toml"], [], {})
    with pytest.raises(ConfigError, match=r"no preset 'smolm2' \(did you mean smollm2\?\)"):
        resolve("smolm2", [], [], {})


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("trainer.lr=fast", 'trainer.lr must be a number in (0, 1], not "fast"'),
        ("pipeline.group_size=true", "pipeline.group_size must be a whole number >= 1, not true"),
        ("run.batches=1.5", "run.batches must be a whole number >= 1, not 1.5"),
        ("liveness.lease_s=soon", 'liveness.lease_s must be a number >= 1 (seconds), not "soon"'),
        ("broker.max_retained_bytes=2GB", 'must be a whole number >= 1000000 (bytes), not "2GB"'),
        ("data.shuffle=maybe", 'data.shuffle must be true or false, not "maybe"'),
        ("pipeline.update=now", 'must be one of "barrier", "together", "staggered", "in_flight", not "now"'),
        ("generation.dtype=fp16", 'must be one of "bfloat16", "float32", not "fp16"'),
        ("trainer.betas=[1]", "trainer.betas must be a list of 2, each a number in [0, 1), not [1]"),
        ("data.params=3", "data.params must be a table"),
        ("lr=1", "'lr' is not of the form section.key=value"),
        ("trainer.lr", "'trainer.lr' is not of the form section.key=value"),
    ],
)
def test_wrong_types_and_forms(argument: str, message: str):
    error = error_of(argument)
    assert error.startswith("--set: ")
    assert message in error


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("sampling.top_p=0", "sampling.top_p must be a number in (0, 1], not 0"),
        ("sampling.top_p=nan", "must be a number in (0, 1], not "),
        ("sampling.temperature=0", "must be a number >= 0.001, not 0"),
        ("sampling.temperature=inf", "must be a number >= 0.001, not inf"),
        ("trainer.betas=[0.9, nan]", "each a number in [0, 1), not [0.9, nan]"),
        ("pipeline.max_staleness=-1", "must be a whole number in [0, 16], not -1"),
        ("pipeline.group_size=0", "must be a whole number >= 1, not 0"),
        ("pipeline.group_size=1", "must be 2 or more"),
        ("trainer.ranks=0", 'must be a whole number >= 1, or "auto", not 0'),
        ("trainer.betas=[0.9, 1.0]", "must be a list of 2, each a number in [0, 1), not [0.9, 1.0]"),
        ("scoring.timeout_s=0", "must be a number >= 1 (seconds), not 0"),
        ("run.name=../x", "must be 1 to 64 letters (a-z, A-Z), digits"),
        ("run.name=", "must be 1 to 64 letters (a-z, A-Z), digits"),
        ("scoring.reward=my_reward", "must be module:function"),
        ("scoring.reward=os; import x:y", "must be module:function"),
        ("generation.device=gpu", "must be auto, cpu, cuda or cuda:<n>"),
        ("generation.engine_url=h:1", "must be http://host:port"),
        ("model.path=", "must be a directory, a hub name"),
    ],
)
def test_out_of_range(argument: str, message: str):
    assert message in error_of(argument)


DEFERS = ["pipeline.oversampled_tail=defer", "pipeline.oversampled_groups=2"]
GIVEN = ["data.source=jsonl", "data.path=x", "data.response_column=answer"]
EMULATED = ["trainer.engine=emulated", "generation.engine=emulated"]
SGLANG = "generation.engine=sglang"
THEIR_SGLANG = [SGLANG, "generation.engine_url=http://h:1"]
THEIR_VLLM = ["generation.engine=vllm", "generation.engine_url=http://h:1"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pipeline.probes=true", "pipeline.dispatch=scored"], 'must be "auto", "pulled" or "least_loaded" with'),
        (
            ["pipeline.probes=true", "ranker.kind=oracle", "generation.lengths=some.txt", "generation.engine=emulated"],
            "which knows what a probe shows",
        ),
        (["trainer.mini_batches=3"], "pipeline.groups_per_batch = 8 must be divisible by trainer.mini_batches"),
        (["pipeline.oversampled_tail=defer"], "oversampled_groups = 0 must be above 0 with pipeline"),
        ([*DEFERS, "pipeline.oversampled_groups=8"], "and below pipeline.groups_per_batch: so many groups are left to"),
        ([*DEFERS, "pipeline.membership=rolling"], 'pipeline.membership = "rolling" must be "fixed"'),
        ([*DEFERS, "generation.partial_s=0"], "generation.partial_s = 0.0 must be above 0"),
        ([*DEFERS, "environment.name=calculator", "pipeline.update=barrier"], 'update = "barrier" must be "in_flight"'),
        ([*DEFERS, "generation.lengths=x", "ranker.kind=oracle"], 'ranker.kind = "oracle" must not be "oracle" where'),
        (["trainer.ranks=16"], "trainer.ranks = 16 divides a round into 16 parts, and there may be at most groups_per"),
        (["trainer.ranks=2", "trainer.device=cuda:1"], 'trainer.device = "cuda:1" must be "cuda" or "auto" with 2'),
        (["trainer.ranks=6", "trainer.parallel.tensor=4"], "trainer.ranks = 6 must be a multiple of 4, which is data"),
        (["trainer.ranks=8", "trainer.parallel={data = 2, tensor = 2, pipeline = 1}"], "trainer.ranks = 8 must be 4,"),
        (
            ["trainer.ranks=4", "trainer.parallel.pipeline=2", "algorithm.old_logprobs=recomputed"],
            'algorithm.old_logprobs = "recomputed" must be "rollout": "recomputed" is not supported with pip',
        ),
        (
            ["trainer.parallel.buckets=[512]", "trainer.parallel.pipeline=1"],
            "buckets = [512] needs trainer.parallel.pi",
        ),
        (["trainer.lora.publish=adapters"], 'trainer.lora.publish = "adapters" needs trainer.lora.rank above 0'),
        (["scoring.reward_model=judge", "scoring.reward=mine:reward"], 'scoring.reward_model = "judge" is the'),
        (["scoring.pools.reference.workers=2"], "has reference, and without algorithm.kl_coef this run has no such"),
        (["scoring.pools.values.workers=2"], '"reward", "reference" or "advantages"'),
        (["environment.executes_answers=true"], "is about an environment of yours: name it"),
        (
            ["environment.name=mine:Tool", "environment.executes_answers=true", "environment.jail=off"],
            'environment.jail = "off" must be "auto" with environment.executes_answers',
        ),
        (["data.mix.a.environment_params={tries=3}"], "names no environment of its own that takes them (in a)"),
        (["data.mix.a.environment=calculater"], 'must be "calculator", module:function, or "none"'),
        (["data.mix.a.advantage=rloo", "algorithm.name=reinforce_pp"], "has an advantage of its own, which"),
        (["trainer.parallel.buckets=[8, 16]"], "buckets = [8, 16] must reach beyond sampling.max_new_tokens"),
        (["trainer.lora.rank=8", "trainer.engine=none"], 'trainer.lora.rank = 8 needs trainer.engine "torch"'),
        (["trainer.lora.rank=8", "trainer.lora.targets=[]"], "trainer.lora.targets = [] must name layers"),
        (["environment.name=calculator", "algorithm.name=sft", *GIVEN], '"calculator" must be empty with data.res'),
        (["endpoint.enabled=true"], "endpoint.max_session_s = 1800.0 must be below pipeline.rollout_timeout_s"),
        (["endpoint.enabled=true", "environment.name=calculator"], "endpoint.enabled = true must be false with"),
        (["endpoint.enabled=true", "trainer.engine=none"], "endpoint.enabled = true needs a trainer"),
        (["pipeline.group_size=1"], 'pipeline.group_size = 1 must be 2 or more with algorithm.advantage "group_std"'),
        (["algorithm.rl_coef=0"], "algorithm.rl_coef = 0.0 must be above 0 where algorithm.ce_coef and"),
        (["algorithm.teacher=random:qwen3-tiny"], 'algorithm.teacher = "random:qwen3-tiny" needs algorithm.kl_coef'),
        (["algorithm.kl_estimator=reverse"], 'algorithm.kl_estimator = "reverse" needs algorithm.kl_coef above 0'),
        (["algorithm.name=reinforce_pp", "algorithm.ce_coef=1"], "algorithm.ce_coef = 1.0 must be 0 with"),
        (["algorithm.name=distill"], 'algorithm.teacher = "" must name a model, or algorithm.teacher_url a server of'),
        (
            ["algorithm.name=distill", "algorithm.teacher=x", "pipeline.drop_no_signal=true"],
            "pipeline.drop_no_signal = true must be false with algorithm.rl_coef 0",
        ),
        (["algorithm.functions_path=mine"], 'algorithm.functions_path = "mine" needs a module:function as'),
        (
            ["algorithm.loss=mine:loss", *EMULATED],
            'algorithm.loss = "mine:loss" needs trainer.engine "torch", which alone computes with it',
        ),
        (["data.mix.a.loss=cispo", "data.mix.a.clip_high=4.0"], "has a, where algorithm.importance_cap = 2.0 must be"),
        (["data.mix.a.rl_coef=0"], "has a, where algorithm.rl_coef = 0.0 must be above 0 where algorithm.ce_coef and"),
        (["data.mix.a.ce_above=0.5"], "has a, where algorithm.ce_above = 0.5 needs algorithm.ce_coef above 0:"),
        (
            ["data.mix.a.rl_coef=0", "data.mix.a.ce_coef=1", "pipeline.drop_no_signal=true"],
            "has a, where pipeline.drop_no_signal = true must be false with algorithm.rl_coef 0",
        ),
        (["data.mix.a.kl_coef=0.1", "algorithm.name=reinforce_pp"], "has a, where algorithm.kl_coef = 0.1 must be 0"),
        (["data.mix.a.loss=mine:loss", *EMULATED], 'needs trainer.engine "torch", which alone computes with it'),
        (["data.mix.a.advantage=batch_std"], "data.mix.a.advantage must be"),
        (["algorithm.name=sft"], 'algorithm.name = "sft" needs data.response_column'),
        (["data.response_column=answer"], 'data.response_column = "answer" needs data.source "jsonl" or "hf"'),
        (GIVEN, 'data.response_column = "answer" needs algorithm.rl_coef 0: what is given was not sampled'),
        ([*GIVEN, "algorithm.name=rft"], 'data.response_column = "answer" needs pipeline.group_size 1'),
        ([*GIVEN, "algorithm.name=distill", "algorithm.teacher=x"], '"answer" needs algorithm.kl_estimator "k3"'),
        (["algorithm.importance_cap=1.2"], "algorithm.importance_cap = 1.2 must be 0 (off) or above 1 + algorithm"),
        (["trainer.micro_batch_tokens=16"], "must be at least sampling.max_new_tokens"),
        (["generation.max_context=32"], "must be 0 or above sampling.max_new_tokens"),
        (["generation.kv_tokens=32"], "generation.kv_tokens = 32 must be 0 or above sampling.max_new_tokens"),
        (["generation.kv_tokens=1000", "generation.max_context=1001"], "generation.kv_tokens = 1000 must be 0 or at"),
        (["generation.kv_tokens=9000", "generation.engine=vllm"], "generation.kv_tokens = 9000 must be 0 with"),
        (["generation.engine_url=http://h:1"], 'needs generation.engine "sglang" or "vllm"'),
        (["generation.engine=vllm", "sampling.top_p=0.9"], 'must be 1 and 0 with generation.engine "vllm"'),
        ([*THEIR_VLLM, "generation.drafts=4"], "must be 0 with generation.engine_url: whether that server drafts"),
        (
            [SGLANG, "generation.drafts=4", 'generation.server_args=["--speculative-algorithm=x"]'],
            "must be 0 with --spec",
        ),
        (["generation.kv_dtype=fp8"], 'generation.kv_dtype = "fp8" must be "auto": fp8 needs generation.engine'),
        (["generation.weights_dtype=fp8"], 'must be "auto": fp8 needs generation.engine "sglang"'),
        ([*THEIR_VLLM, "generation.kv_dtype=fp8"], "what that server holds in fp8 is said where it is started"),
        (
            [SGLANG, "generation.kv_dtype=fp8", 'generation.server_args=["--kv-cache-dtype=x"]'],
            "with --kv-cache-dtype in",
        ),
        ([SGLANG, "generation.weights_dtype=fp8", "generation.dtype=float32"], 'needs generation.dtype "bfloat16"'),
        (["emulated.fp8_mismatch=0.1"], "is read with an emulated engine and fp8 in it alone"),
        (['generation.server_command=["x"]'], 'generation.server_args need generation.engine "sglang"'),
        ([*THEIR_SGLANG, 'generation.server_command=["x"]'], "leave them out, or generation.engine_url"),
        ([*THEIR_SGLANG, "generation.workers=2"], "a server takes new weights from one worker"),
        (["data.source=jsonl"], 'data.path = "" must name the data'),
        (["data.path=x.jsonl"], 'is not read by data.source "reasoning_gym"'),
        (["eval.path=x.jsonl"], 'is not read by data.source "reasoning_gym"'),
        (["eval.every=2", "eval.problems=0"], "eval.every = 2 needs eval.problems above 0"),
        (["eval.every=2", "trainer.engine=none"], "eval.every = 2 must be 0 with trainer.engine"),
        (["eval.seed=0"], "eval.seed = 0 must differ from run.seed"),
        (["broker.tls_ca=ca.pem", "broker.url=redis://h"], "needs a broker.url that starts with rediss://"),
        (["broker.tls_cert=me.pem", "broker.url=rediss://h"], "go together"),
        (["liveness.lease_s=1"], "must be at least twice liveness.heartbeat_s"),
        (["liveness.stall_s=100"], "must be above liveness.lease_s and pipeline.rollout_timeout_s"),
    ],
)
def test_impossible_combinations(overrides: list[str], message: str):
    assert message in error_of(*overrides)


def test_a_combination_blames_what_was_set_last_and_shows_the_rest():
    error = error_of("trainer.mini_batches=3", preset="smollm2")
    assert error.startswith("--set: pipeline.groups_per_batch = 8 must be divisible")
    assert error.endswith("trainer.mini_batches = 3 (--set)")


def test_every_rule_is_about_real_settings_and_every_number_has_a_range():
    rules = [rule for name, rule in vars(schema).items() if name.startswith("_broken_")]
    source = "".join(map(inspect.getsource, rules))
    named = re.findall(r'^ +(?:yield )?"((?:[a-z_]+\.[a-z_]+ ?)+)",', source, re.MULTILINE)
    assert len(named) == source.count("yield ") - source.count("yield from ")
    assert {key for keys in named for key in keys.split()} <= set(FIELDS)
    unlimited = [key for key, field in FIELDS.items() if field.type in (int, float)]
    assert unlimited == []


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_a_password_is_never_shown():
    url = "broker.url=redis://me:s%3Afish@host:6379/1"
    resolved = with_set(url)
    assert resolved.settings.broker.url == "redis://me@host:6379/1"
    assert resolved.settings.broker.password == "s:fish"
    assert "fish" not in render(resolved)
    assert 'password = ""  # --set; set, not shown' in render(resolved)


@pytest.mark.parametrize("overrides", [["broker.url=hush://me:secret@host"], ["broker.url=me:secret@host"]])
def test_an_error_does_not_show_a_password(overrides: list[str]):
    error = error_of(*overrides)
    assert "broker.url must be" in error
    assert "secret" not in error


def test_a_password_of_another_type_is_not_shown(tmp_path: Path):
    assert "424242" not in str(file_error(tmp_path, "[broker]\npassword = 424242\n"))


def test_the_environment_wins_over_a_url():
    resolved = resolve(None, [], ["broker.url=redis://:old@host"], {BROKER_PASSWORD: "new"})
    assert resolved.settings.broker.password == "new"


# --- several sets of held-out problems --------------------------------------------------------------------------------

SETS = """
[eval]
every = 2
problems = 8
split = "validation"

[eval.sets.plain]

[eval.sets.hard]
params = { max_digits = 3 }
problems = 4
samples = 4
"""


def of_sets(tmp_path: Path, *overrides: str) -> Resolved:
    file = tmp_path / "sets.toml"
    file.write_text(SETS)
    return resolve("tiny", [file], list(overrides), {})


def test_a_set_is_as_the_section_where_it_says_nothing_else(tmp_path: Path):
    resolved = of_sets(
        tmp_path, "eval.sets.hard.problems=6", "eval.sets.drawn.samples=2", "eval.sets.drawn.temperature=0.5"
    )
    plain, hard, drawn = eval_sets(resolved.settings).values()
    assert list(eval_sets(resolved.settings)) == ["plain", "hard", "drawn"]
    assert (plain.problems, plain.samples, plain.temperature, plain.split) == (8, 1, 0.0, "validation")
    assert (hard.problems, hard.samples, hard.temperature, hard.params) == (6, 4, 1.0, {"max_digits": 3})
    assert (drawn.problems, drawn.samples, drawn.temperature) == (8, 2, 0.5)
    assert core_settings(resolved.settings).eval_problems == 8 + 6 * 4 + 8 * 2
    file = tmp_path / "config.toml"
    file.write_text(render(resolved))
    assert resolve(None, [file], [], {}).settings == resolved.settings
    with pytest.raises(ConfigError, match=r"eval\.sets was .* cannot become"):
        check_resume(resolved.settings, of_sets(tmp_path))


def test_a_run_without_sets_has_one_without_a_name():
    settings = with_set("eval.problems=5", "eval.temperature=0.5", preset="tiny").settings
    ((name, only),) = eval_sets(settings).items()
    assert (name, only.problems, only.samples, only.temperature) == ("", 5, 1, 0.5)
    assert core_settings(settings).eval_problems == 5


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("eval.sets.hard.samples=0", "eval.sets.hard.samples must be a whole number in [1, 4096], not 0"),
        ("eval.sets.hard.sample=2", "unknown key eval.sets.hard.sample (did you mean samples?); keys of"),
        ("eval.sets.hard={samples=0}", "eval.sets.hard.samples must be a whole number in [1, 4096], not 0"),
        ("eval.sets.hard.temperature=hot", 'eval.sets.hard.temperature must be a number >= 0, not "hot"'),
        ("eval.sets.hard.temperature=inf", "eval.sets.hard.temperature must be a number >= 0"),
        ("eval.sets.hard.params.x=1", "unknown key eval.sets.hard.params.x"),
        ("eval.sets.no/name.samples=2", "each with a name: 1 to 64 letters (a-z, A-Z), digits"),
        ("eval.sets.hard=3", "must be a table of tables"),
        ("eval.sets.hard.temperature=0", "needs a temperature above 0 with several samples"),
        ("eval.sets.hard.path=x.jsonl", 'has a path, which data.source "reasoning_gym" does not read'),
        ("eval.sets.hard.config=main", 'has a config or split, which need data.source "hf"'),
    ],
)
def test_a_set_that_cannot_be(tmp_path: Path, argument: str, message: str):
    with pytest.raises(ConfigError) as caught:
        of_sets(tmp_path, argument)
    assert message in str(caught.value)


def test_two_sets_of_one_name_are_refused_with_their_line(tmp_path: Path):
    file = tmp_path / "twice.toml"
    file.write_text("[eval.sets.hard]\nsamples = 2\n[eval.sets.hard]\nsamples = 4\n")
    with pytest.raises(ConfigError, match=r"twice.toml:3: not valid TOML: .*hard"):
        resolve("tiny", [file], [], {})


# --- back to TOML, resuming -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["smollm2", "tiny"])
def test_what_is_printed_reads_back_the_same(tmp_path: Path, preset: str):
    resolved = with_set('data.suffix="a \\"b\\"\\n\\u007f # c"', "data.params.odd key=[1, 2]", preset=preset)
    file = tmp_path / "config.toml"
    file.write_text(render(resolved), encoding="utf-8")
    again = resolve(None, [file], [], {})
    assert again.settings == resolved.settings
    assert again.origins["run.name"] == f"{file}:2"


def test_a_stored_run_still_says_where_its_values_came_from(tmp_path: Path):
    """However often it is resumed: what it was started with, what was set later, and a line changed by hand."""
    file, stored = tmp_path / "mine.toml", tmp_path / "config.toml"
    file.write_text('[data]\nsuffix = "a # b"\n')
    resolved = resolve("tiny", [file], ["trainer.lr=0.5", "broker.password=fish"], {})
    stored.write_text(render(resolved))
    changed = {"run.batches", "broker.password", "api.secret"}
    for _ in range(2):
        again = resolve(None, [], ["run.batches=9"], {}, stored=stored)
        assert again.settings.trainer == resolved.settings.trainer
        for key in FIELDS.keys() - changed:
            assert again.origins[key] == resolved.origins[key], key
        assert again.origins["run.batches"] == "--set"
        assert load.presets_of(again) == ["tiny"]
        stored.write_text(render(again))
    text = stored.read_text().replace("epochs = 1  # default", "epochs = 2  # default")
    stored.write_text(text)
    line = text.splitlines().index("epochs = 2  # default") + 1
    assert resolve(None, [], [], {}, stored=stored).origins["trainer.epochs"] == f"{stored}:{line}"
    stored.write_text(text.replace("epochs = 2  # default", "epochs = 0  # default"))
    with pytest.raises(ConfigError, match=rf"{stored}:{line}: trainer.epochs must be"):
        resolve(None, [], [], {}, stored=stored)


def test_all_wrong_keys_and_values_are_named_at_once(tmp_path: Path):
    first, second, third = (tmp_path / f"{name}.toml" for name in "abc")
    first.write_text("[trainer]\nlearning_rate = 1\nlr = 7\n\n[grpo]\nbeta = 0.1\n")
    second.write_text("[pipeline]\nbatch_size = 8\ndispatch = 'scord'\n")
    third.write_text("[pipeline\n")
    with pytest.raises(ConfigError) as caught:
        resolve("tiny", [first, second, third], ["run.batch=3", "algorithm.loss=gspoo"], {})
    lines = str(caught.value).splitlines()
    for start, words in (
        (f"{third}:1: not valid TOML", ""),
        (f"{first}:2: unknown key trainer.learning_rate", "(did you mean trainer.lr?)"),
        (f"{first}:3: trainer.lr must be a number in (0, 1], not 7", ""),
        (f"{first}:6: unknown section grpo", "sections: "),
        (f"{second}:2: unknown key pipeline.batch_size", "(did you mean pipeline.groups_per_batch?)"),
        (f"{second}:3: pipeline.dispatch must be", "(did you mean scored?)"),
        ("--set: unknown key run.batch", "(did you mean run.batches?)"),
        ("--set: algorithm.loss must be", "(did you mean gspo?)"),
    ):
        assert any(line.startswith(start) and words in line for line in lines), start
    assert len(lines) == 8


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("algorithm.loss=gspoo", "gspo"),
        ("environment.name=calculater", "calculator"),
        ("launcher.kind=slrum", "slurm"),
        ('run.loggers=["tensorbord"]', "tensorboard"),
        ("pipeline.update=inflight", "in_flight"),
        ("trainer.ranks=autom", "auto"),
        ("scoring.pools={reference = {workers = 2}, advantage = {workers = 1}}", "advantages"),
        ("data.mix.a.loss=cispoo", "cispo"),
    ],
)
def test_a_misspelt_choice_is_answered_with_the_near_one(argument: str, meant: str):
    assert f"(did you mean {meant}?)" in error_of(argument)


def test_printing_names_every_key_with_its_origin():
    lines = render(with_set("trainer.lr=0.5", preset="tiny")).splitlines()
    assert "lr = 0.5  # --set" in lines
    assert "batches = 24  # preset tiny:6" in lines
    assert "epochs = 1  # default" in lines
    assert sum(" = " in line for line in lines) == len(FIELDS)


def test_a_value_that_is_no_setting_is_a_bug():
    with pytest.raises(TypeError):
        to_toml(None)


@pytest.mark.parametrize(
    "change",
    [
        "model.path=other",
        "data.task=gcd",
        "pipeline.group_size=4",
        "data.suffix=x",
        "run.seed=5",
        "trainer.lora.rank=8",
        "ranker.model=other.bin",
        "eval.seed=7",
    ],
)
def test_a_resumed_run_stays_the_same_run(change: str):
    stored = with_set(preset="smollm2-hard").settings
    with pytest.raises(ConfigError, match=rf"--set: {change.partition('=')[0]} was .* cannot become"):
        check_resume(stored, with_set(change, preset="smollm2-hard"))


def test_a_resumed_run_may_go_on_longer_and_on_other_hardware():
    stored = with_set(preset="smollm2-hard").settings
    layout = ["trainer.ranks=4", "trainer.parallel.tensor=2", "trainer.recompute=whole", "trainer.offload=optimizer"]
    check_resume(stored, with_set(*layout, preset="smollm2-hard"))
    check_resume(stored, with_set("run.batches=100", "trainer.lr=1e-6", "generation.workers=2", preset="smollm2-hard"))


# --- lines ------------------------------------------------------------------------------------------------------------

AWKWARD = '''# a comment with lr = 1
run.seed = 1
[trainer]   # [not.this]
lr = 1e-5
betas = [
    0.9,  # ] = "x"
    0.95,
]
[data]
suffix = """
[eval]
seed = 3
"""
params.x = 1
'params'.y = [2]
system = "line\u2028break"
[eval]
'''


def test_lines_of_awkward_toml():
    assert key_lines(AWKWARD) == {
        ("run",): 2,
        ("run", "seed"): 2,
        ("trainer",): 3,
        ("trainer", "lr"): 4,
        ("trainer", "betas"): 5,
        ("data",): 9,
        ("data", "suffix"): 10,
        ("data", "params"): 14,
        ("data", "params", "x"): 14,
        ("data", "params", "y"): 15,
        ("data", "system"): 16,
        ("eval",): 17,
    }
    assert set(tomllib.loads(AWKWARD)) == {path[0] for path in key_lines(AWKWARD)}


@pytest.mark.parametrize("line", ["[", "seed = [", 'name = """', "seed = {a = 1,"])
def test_reading_takes_time_in_proportion_to_the_document(line: str, monkeypatch: pytest.MonkeyPatch):
    """Each line was parsed again with all before it, until they were a statement: 41 s for 5,000 lines of a list."""
    parsed = 0

    def counted(text: str) -> dict[str, Any]:
        nonlocal parsed
        parsed += len(text)
        return tomllib.loads(text)

    monkeypatch.setattr(load, "tomllib", SimpleNamespace(loads=counted, TOMLDecodeError=tomllib.TOMLDecodeError))
    document = f"[run]\n{line}\n" + "1,\n" * 2000 + "]\n"
    with contextlib.suppress(ConfigError):
        read_document(document, "big.toml")
    assert 0 < parsed <= 2 * len(document)


@pytest.mark.parametrize(
    ("document", "where", "problem"),
    [
        ("[run]\nseed = " + "[" * 40 + "]" * 40, "x.toml:2", "lists and tables of more than 32 levels"),
        ("[run]\n\n" + "a." * 20_000 + "a = 1", "x.toml:3", "a key of more than 16 parts"),
        ("[" + "a." * 20_000 + "a]", "x.toml:1", "a key of more than 16 parts"),
        ("seed = " + "{a = " * 400, "x.toml:1", "lists and tables of more than 32 levels"),
        ("[run]\nseed = " + "9" * 5000, "x.toml", "a whole number of more than 64 bits"),
        ("[run]\nseed = 0x" + "f" * 20, "x.toml:2", "a whole number of more than 64 bits"),
        ("[run]\nname = [[9999999999999999999]]", "x.toml:2", "a whole number of more than 64 bits"),
        ("#" * 2_000_000, "x.toml", "it is larger than 1 MiB"),
    ],
)
def test_a_document_that_is_no_configuration_is_refused(tmp_path: Path, document: str, where: str, problem: str):
    (tmp_path / "x.toml").write_text(document)
    with pytest.raises(ConfigError, match=rf"{where}: .*{problem}"):
        resolve(None, [tmp_path / "x.toml"], [], {})


def test_a_number_of_many_digits_is_no_number_for_set_either():
    with pytest.raises(ConfigError, match=r"run\.seed must be a whole number in "):
        with_set("run.seed=" + "9" * 5000)


def test_the_schema_is_what_the_fields_say():
    def count(value: object) -> int:
        inside = [getattr(value, field.name) for field in msgspec.structs.fields(value)]
        return sum(count(one) if isinstance(one, Section) else 1 for one in inside)

    assert len(FIELDS) == count(Settings())


def test_what_an_environment_cannot_be_is_refused():
    assert 'must be "calculator" or module:function, not "solver"' in error_of("environment.name=solver")
    assert "is where a module:function lies" in error_of("environment.path=mine", preset="tiny")
    too_long = error_of("environment.name=calculator", "environment.max_turn_tokens=99", preset="tiny")
    assert "must be at most sampling.max_new_tokens, which bounds the whole episode" in too_long
