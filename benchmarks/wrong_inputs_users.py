"""Mistakes of two users who wrote none of the checks: a demanding new one, and one who comes from other trainers.

As in benchmarks/wrong_inputs.py, one function a topic.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping

from benchmarks.wrong_inputs import (
    EMULATED,
    ROWS,
    Case,
    Files,
    case,
    copied,
    damaged,
    edit_config,
    reward,
    rows,
    setting,
)

_BERT: Mapping[str, object] = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 768}
_ENVIRONMENT = """
class Pair:
    def reset(self, prompt, entry):
        return None

    def step(self, text, tokens):
        return "said", True
"""
_WRONG = """
class Mute:
    def reset(self, prompt, entry):
        return None


class Gym:
    def reset(self, prompt, entry):
        return "begin", {}

    def step(self, text, tokens):
        return "said", True, 1.0
"""


def second_user() -> Iterator[Case]:
    """What a demanding new user tried and found unclear, silent or late."""
    small = "--model Qwen2.5-7B --lengths l.txt"
    files: Files = {"l.txt": "100\n200\n", "bert.json": json.dumps(_BERT)}
    yield case(
        "Slurm where there is none",
        "o run --preset tiny --launcher slurm --set launcher.address=127.0.0.1",
        "launcher.kind",
        "srun",
        "login node",
    )
    yield case(
        "Kubernetes outside of it",
        "o run --preset tiny --launcher kubernetes --set launcher.image=i --set tensors.host=0.0.0.0",
        "launcher.kind",
        "pod",
        "--dry-run",
        environ={"STREAMRL_SECRET": "a-secret-of-this-test-that-is-long"},
    )
    yield case(
        "a logger without a login",
        "o run --preset tiny --set 'run.loggers=[\"wandb\"]'",
        "wandb",
        environ={"WANDB_MODE": "online", "HOME": "/nowhere", "WANDB_API_KEY": ""},
        loads=True,
    )
    yield case(
        "an environment of two values",
        f"o run {EMULATED} --set environment.name=env:Pair --set environment.path=.",
        "env:Pair",
        "turn",
        "(observation, done, reward)",
        files={"env.py": _ENVIRONMENT},
        loads=True,
    )
    yield case("GPUs that generate, and none that train", "o simulate --generate 4xH100", "--train", "colocated")
    yield case("GPUs that train, and none that generate", "o simulate --train 4xH100", "--generate")
    yield case(
        "an adapter wider than its layer",
        "o run --preset tiny --set trainer.lora.rank=100000",
        "trainer.lora.rank",
        loads=True,
    )
    yield case(
        "adapters of no layer",
        "o run --preset tiny --set trainer.lora.rank=4 --set 'trainer.lora.targets=[\"qproj\"]'",
        "trainer.lora.targets",
        "qproj",
        "q_proj",
        loads=True,
    )
    yield rows(
        "a role that no template knows",
        json.dumps({"prompt": [{"role": "usr", "content": "2+2"}], "answer": "4"}) + "\n",
        "usr",
        "role",
        loads=True,
    )
    yield case("a resume with another preset", "o run --resume --name done --dir {s}/runs --preset ppo", "--preset")
    yield case(
        "a model's config.json",
        "o run --preset tiny --set model.path={s}/model/config.json",
        "model.path",
        "a file",
        "directory",
        loads=True,
    )
    yield reward(
        "a file that the jail hides",
        "def reward(prompt, response, entry):\n    return len(open('/etc/hostname').read())\n",
        "/etc/hostname",
        "jail",
        "scoring.jail",
    )
    yield reward(
        "a network that the jail has not",
        "import socket\ndef reward(prompt, response, entry):\n    socket.create_connection(('127.0.0.1', 9), 1)\n",
        "network",
        "scoring.jail",
    )
    yield reward("more memory than a reward may take", "held = bytearray(40 * 2**30)\n", "MemoryError", "4 GiB")
    yield reward("an import of its own", "import numpyy\n", "numpyy", "mine.py:1", "install it")
    yield reward(
        "a column that is not there",
        "def reward(prompt, response, entry):\n    return entry['target']\n",
        "KeyError",
        "mine.py:2",
        "answer",
    )
    yield case(
        "rows by a pattern of nothing",
        "o run --preset tiny --set scoring.reward= --set data.source=jsonl --set 'data.path=mine/*.jsonl'",
        "mine/*.jsonl",
        "no file",
    )
    yield case(
        "rows at home",
        "o run --preset tiny --set scoring.reward= --set data.source=jsonl --set 'data.path=~/absent.jsonl'",
        "absent.jsonl",
        "No such file",
    )
    yield case("a set with a slash", "o run --preset tiny --set eval.sets.bad/name.samples=2", "bad/name", "64 letters")
    yield case(
        "a model by its name on the hub",
        "o plan --model Qwen/Qwen2.5-7B-Instruct --gpus 8xH100 --lengths l.txt",
        "--model",
        "did you mean Qwen2.5-7B?",
        files=files,
    )
    yield case("a GPU of nobody's list", f"o plan --gpus 8xRTX4090 {small}", "RTX4090", "--profile", files=files)
    yield case("a GPU with its memory", f"o plan --gpus 8xH100-80GB {small}", "did you mean H100?", files=files)
    yield case(
        "an encoder", "o plan --model bert.json --gpus 8xH100 --lengths l.txt", "bert", "writes no text", files=files
    )
    yield case("too few GPUs to train", "o simulate --model Qwen2.5-72B --generate 8xH100 --train 4xH100", "32 H100")
    yield case(
        "evaluate no such model",
        "w evaluate --run-dir {s}/runs/done --model last --reward workers.scoring.rewards:digit_share",
        "last",
        "final",
        "checkpoint",
        loads=True,
    )
    for command in ("checkpoint", "drain"):
        yield case(f"{command} of a finished run", f"o {command} {{s}}/runs/done", "finished", "run.batches", code=1)
    yield case("set in a finished run", "o set {s}/runs/done run.batches=9", "finished", "--resume", code=1)
    yield case(
        "a broker that is not there",
        "o run --preset tiny --set broker.url=redis://127.0.0.1:1",
        "broker.url",
        "leave it out",
        code=1,
    )
    yield case(
        "several wrong keys",
        "o run --preset tiny --config mine.toml",
        "learning_rate",
        "batch_size",
        "grpo",
        files={"mine.toml": "[trainer]\nlearning_rate = 1\nbatch_size = 2\n[grpo]\nbeta = 1\n"},
    )
    yield case(
        "rolling workers without staleness",
        "o run --preset tiny --set pipeline.max_staleness=0 "
        "--set pipeline.update=together --set pipeline.membership=rolling",
        "pipeline.membership",
    )
    yield setting("algorithm.loss=gspoo", "gspo")
    yield setting("environment.name=calculater", "did you mean calculator?")


def third_user_commands() -> Iterator[Case]:
    """Command lines of other trainers, and slips of the hand."""
    yield setting("trainer.per_device_train_batch_size=4", "unknown key", "trainer.micro_batch_tokens")
    yield case("Hydra's assignments", "o run --preset tiny actor_rollout_ref.rollout.n=8", "rollout.n=8", "--set")
    yield case("OpenRLHF's option", "o run --pretrain Qwen/Qwen2.5-0.5B", "--pretrain", "--set", "model.path")
    yield setting("trainer.kl_coef=0.001", "algorithm.kl_coef")
    yield setting("sampling.n=8", "pipeline.group_size")
    yield setting("trainer.lr=1e-5x", "1e-5x", "a number")
    yield setting("sampling.temperature=0,7", "0,7", "0.7")
    yield setting("trainer.lr=1e\u22125", "1e-5")
    yield setting("trainer.warmup_batches=0.1", "whole number", "0.1")
    yield setting("scoring.timeout_s=30s", "30s", "seconds")
    yield setting("rows.unit_bytes=4", "1000000", "bytes")
    yield setting("generation.gpus=[0,1]", "0,2-3")
    yield setting("data.shuffle=False", "False", "false")
    yield setting("data.system=None", "None", "leave it out")
    yield setting("eval.sets.hard.path=None", "None", "leave it out")
    yield case(
        "fewest workers above the most",
        "o run --preset tiny --set generation.min_workers=4 --set generation.max_workers=2",
        "generation.min_workers = 4",
        "at most generation.max_workers",
    )
    yield setting("run.batches=1e3", "whole number", "did you mean 1000?")
    yield case(
        "blanks around =",
        "o run --preset tiny --set pipeline.group_size = 8",
        "= 8",
        "--set SECTION.KEY=VALUE, without blanks",
    )
    yield case("a file for a preset", "o run --preset mine.toml", "mine.toml", "--config", files={"mine.toml": ""})
    yield case("a preset for a file", "o run --config tiny", "tiny", "--preset tiny")
    yield case(
        "two files behind one --config",
        "o run --config a.toml b.toml",
        *("b.toml", "--config"),
        files={"a.toml": "", "b.toml": ""},
    )
    yield case("the other program's command", "w run --preset tiny", "run", "streamrl-orchestrator run")
    yield case("a command of the workers' program", "o evaluate {s}/runs/done", "streamrl-worker evaluate")
    yield case("evaluate a run without its option", "w evaluate {s}/runs/done", "--run-dir")
    yield case("manifests without --dry-run", "o run --preset tiny --out manifests", "--out", "--dry-run")
    yield case("a launcher in capitals", "o run --preset tiny --launcher Slurm", "Slurm", "slurm")
    yield case("settings of a name from elsewhere", "o settings trainer.learning_rate", "learning_rate", "trainer.lr")
    yield case("set in two words", "o set {live} run.batches 80", "run.batches", "run.batches=80")
    yield case("a preset for a simulation", "o simulate --preset tiny", "--preset", "takes no settings", "--help")
    yield case(
        "GPUs without a type",
        "o plan --gpus 8 --model Qwen2.5-7B --lengths l.txt",
        "COUNTxTYPE",
        files={"l.txt": "9\n"},
    )
    yield case("a log without lengths", "o rank train {s}/rows.jsonl --out r.bin", "rows.jsonl", "output_tokens")


def third_user_runs() -> Iterator[Case]:
    """Runs that are named, compared and shown otherwise than they are."""
    yield case("resume by a path", "o run --resume {s}/runs/done", "--name done", "--dir")
    yield case("resume, and no name", "o run --resume", "--name")
    yield case("resume by the command for pauses", "o resume {s}/runs/done", "finished", "run --resume", code=1)
    yield case(
        "resume to fewer batches than there are",
        "o run --resume --name r --dir . --set run.batches=1 --plain",
        *("finished", "nothing was changed"),
        code=0,
        prepare=copied(lambda run: None),
    )
    yield case("compare a run with itself", "o compare {s}/runs/done {s}/runs/done/", "runs/done", "twice")
    yield case("batches that were not trained", "o timeline {s}/runs/done --batches 9-16", "9 to 16", "batches 1 to 2")
    yield case("a part of a run", "o inspect {s}/runs/done/journal", "holds no run", "give {s}/runs/done")
    yield case("logs of no process", "o logs {s}/runs/done trainer", "trainer", "train-0")
    yield case("a report as PDF", "o report {s}/runs/done --out report.pdf", "report.pdf", ".html")
    yield case(
        "the live page for a run", "o inspect http://127.0.0.1:{port}/#key=abc", "the address of its page", "directory"
    )
    yield case("runs of no directory", "o list --dir absent", "absent")
    yield case(
        "a checkpoint of an emulated run", "w export --run-dir {s}/runs/done --out o", "trained no model", "emulated"
    )
    yield case(
        "an alphabet that lacks our signs",
        "o inspect {s}/runs/done",
        "finished",
        code=0,
        environ={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
    )


def third_user_rows() -> Iterator[Case]:
    """Files and rows in forms of other trainers and systems."""
    jsonl = "o run --preset tiny --set scoring.reward= --set data.source=jsonl --set"
    yield case(
        "Windows' files",
        f"o run {EMULATED} --config mine.toml --set data.path=rows.jsonl --plain",
        "batch 1/1",
        code=0,
        files={
            "mine.toml": b"\xef\xbb\xbf[run]\r\nbatches = 1\r\n",
            "rows.jsonl": ("\ufeff" + ROWS).replace("\n", "\r\n"),
        },
        loads=True,
    )
    yield rows(
        "conversations of ShareGPT",
        '{"conversations": [{"from": "human", "value": "2+2"}, {"from": "gpt", "value": "4"}], "answer": "4"}\n',
        *("conversations", "data.prompt_column"),
    )
    yield rows("rows as Python prints them", "{'prompt': '2+2', 'answer': '4'}\n", "double quotes")
    yield case("rows in a bucket", f"{jsonl} data.path=s3://mine/rows.jsonl", "s3://mine/rows.jsonl", "copy it here")
    yield case(
        "a page of the hub",
        "o run --preset tiny --set scoring.reward= --set data.source=hf "
        "--set data.path=https://huggingface.co/datasets/openai/gsm8k",
        *("data.path", "openai/gsm8k", "hub name"),
    )
    yield case("a variable of the shell in quotes", f"{jsonl} 'data.path=$HOME/rows.jsonl'", "$HOME", "shell")
    yield rows("a zip file", b"PK\x03\x04" + b"\x00" * 60, "zip", name="rows.zip")
    yield rows(
        "a last message of the assistant",
        '{"prompt": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}], "answer": "4"}\n',
        *("assistant", "row 1"),
    )
    yield rows(
        "an image in a message",
        '{"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "answer": "4"}\n',
        *("row 1", "text"),
    )
    yield rows(
        "a column within a text",
        '{"prompt": "2+2", "reward_model": "rule"}\n',
        *("reward_model.ground_truth", "row 1"),
        more="--set data.answer_column=reward_model.ground_truth",
    )
    yield case(
        "rows from a pipe",
        f"{jsonl} data.path=rows.jsonl",
        *("rows.jsonl", "pipe", "file"),
        prepare=lambda here, shared: os.mkfifo(here / "rows.jsonl"),
    )
    yield case(
        "a chat template's argument of another model",
        "o run --preset tiny --set data.chat_template_kwargs={enable_thinking=false}",
        *("data.chat_template_kwargs", "enable_thinking"),
        loads=True,
    )


def third_user_rewards() -> Iterator[Case]:
    """Rewards and environments as other libraries call them."""
    yield reward(
        "a class",
        "class Reward:\n    def __call__(self, prompt, response, entry):\n        return 1.0\n",
        "mine:Reward",
        "class",
        "function",
        function="mine:Reward",
    )
    yield reward(
        "an array", "import numpy\ndef reward(prompt, response, entry):\n    return numpy.ones(2)\n", "array", "number"
    )
    yield reward("a generator", "def reward(prompt, response, entry):\n    yield 1.0\n", "generator", "return")
    yield reward(
        "a component of words",
        "def reward(prompt, response, entry):\n    return {'reward': 1.0, 'why': 'right'}\n",
        *("why", "number"),
    )
    yield reward(
        "a key in the environment",
        "import os\ndef reward(prompt, response, entry):\n    return float(len(os.environ['JUDGE_KEY']))\n",
        *("JUDGE_KEY", "scoring.environment"),
    )
    yield case(
        "a reward's file for its directory",
        f"o run {EMULATED} --set scoring.reward=mine:reward --set scoring.reward_path=mine.py",
        *("scoring.reward_path", "mine.py", "directory"),
        files={"mine.py": "def reward(prompt, response, entry):\n    return 1.0\n"},
        loads=True,
    )
    yield case(
        "a reward in the working directory alone",
        f"o run {EMULATED} --set scoring.reward=mine:reward",
        *("scoring.reward_path", "mine"),
        files={"mine.py": "def reward(prompt, response, entry):\n    return 1.0\n"},
        loads=True,
    )
    yield case(
        "a reward in a file of a library's name",
        f"o run {EMULATED} --set scoring.reward=json:reward --set scoring.reward_path=.",
        *("json.py", "another name"),
        files={"json.py": "def reward(prompt, response, entry):\n    return 1.0\n"},
        loads=True,
    )
    talks = f"o run {EMULATED} --set environment.path=. --set environment.name=env:"
    yield case("an environment without a step", f"{talks}Mute", "step", files={"env.py": _WRONG}, loads=True)
    yield case("Gym's reset", f"{talks}Gym", "reset", "tuple", files={"env.py": _WRONG}, loads=True)
    yield case(
        "an argument that its environment lacks",
        f"{talks}Gym --set environment.params={{tries=3}}",
        *("tries", "environment.params"),
        files={"env.py": _WRONG},
        loads=True,
    )


def third_user_models() -> Iterator[Case]:
    """Models in forms that nothing here trains."""
    model = "o run --preset tiny --set model.path="
    yield case("llama.cpp's file", f"{model}m", "m.gguf", "safetensors", files={"m/m.gguf": b"GGUF"}, loads=True)
    yield case(
        "an adapter for a model",
        f"{model}m",
        *("adapter_config.json", "merge"),
        files={"m/adapter_config.json": '{"peft_type": "LORA"}', "m/adapter_model.safetensors": b""},
        loads=True,
    )
    yield case("a run for a model", f"{model}{{s}}/runs/done", "runs/done", "a run", "runs/done/model", loads=True)
    yield case(
        "a model's page on the hub",
        f"{model}https://huggingface.co/Qwen/Qwen2.5-0.5B",
        *("model.path", "Qwen/Qwen2.5-0.5B", "hub name"),
        loads=True,
    )
    yield case(
        "a quantised model",
        f"{model}model",
        "quantization_config",
        prepare=damaged(lambda model: edit_config(model, quantization_config={"quant_method": "awq", "bits": 4})),
        loads=True,
    )
    yield case(
        "the hub, offline",
        f"{model}Qwen/Qwen2.5-0.5B",
        "HF_HUB_OFFLINE",
        environ={"HF_HUB_OFFLINE": "1"},
        loads=True,
    )


def third_user_machines() -> Iterator[Case]:
    """Settings that contradict each other, ports and secrets."""
    contradiction = f"o run {EMULATED} --set"
    yield case(
        "a response longer than the context",
        f"{contradiction} generation.max_context=64 --set sampling.max_new_tokens=128",
        *("generation.max_context", "sampling.max_new_tokens"),
    )
    yield case(
        "fewer workers at most than at the start",
        f"{contradiction} generation.workers=4 --set generation.max_workers=2",
        *("generation.workers", "generation.max_workers"),
    )
    yield setting("trainer.checkpoint_dir=checkpoints", "absolute")
    yield setting("api.host=0.0.0.0:8080", "without a port")
    yield setting("tensors.ports=7409-7400", "7400-7409")
    yield case(
        "an endpoint on a taken port",
        "o run --preset endpoint --set endpoint.port={port}",
        "endpoint.port",
        "{port}",
        loads=True,
    )
    yield case(
        "a slash in a password", f"{contradiction} broker.url=redis://:pa/ss@127.0.0.1:6379", "broker.url", "%2F"
    )
    yield case(
        "a secret, and its file",
        f"{contradiction} run.batches=1",
        *("STREAMRL_SECRET", "STREAMRL_SECRET_FILE"),
        environ={"STREAMRL_SECRET": "one-secret-of-sixteen", "STREAMRL_SECRET_FILE": "{s}/rows.jsonl"},
    )


def third_user_workers() -> Iterator[Case]:
    """Workers that do not fit the run that they join."""
    password = {"STREAMRL_BROKER_PASSWORD": "{password}"}
    yield case(
        "a reward that is not the run's",
        "w score --broker {broker} --run live --reward mine:reward --index 7",
        *("--reward", "mine:reward"),
        environ=password,
        loads=True,
    )
    yield case(
        "an id of another run",
        "w generate --broker {broker} --run live --run-id abc --index 7",
        "another run named 'live'",
        "--run-id",
        environ=password,
        loads=True,
    )
    yield case(
        "weights for a run with a trainer",
        "w publish --broker {broker} --run live --weights-dir absent",
        *("'live'", "publishes its weights itself", "service"),
        environ=password,
        loads=True,
    )


TOPICS: tuple[Callable[[], Iterator[Case]], ...] = (
    second_user,
    third_user_commands,
    third_user_runs,
    third_user_rows,
    third_user_rewards,
    third_user_models,
    third_user_machines,
    third_user_workers,
)
