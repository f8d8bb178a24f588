"""``streamrl-orchestrator collect``: lengths and rewards that the policy alone gets on a prompt set, to a file.

    prompts of [data], as a run renders them ──► worker process: engine and reward ──► one JSON line a prompt
                                                                                  └──► a row an answer that is kept

The file is a log of lengths (``rank train``, ``ranker.base_lengths``) and a file of rewards (``data.rewards``) in one;
that of answers is data for ``algorithm.name = "sft"``, whoever wrote them: rejection-sampled distillation.
Lines are written as prompts end; called again with the same files, it goes on with the prompts that are missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from orchestrator.config.schema import keys_of, to_toml, value_of
from orchestrator.errors import ChildFailedError, ConfigError, DataError, ExitCode, writing_out
from orchestrator.launch.checks import check_inputs, check_workers, prepare_model
from orchestrator.launch.processes import last_words
from orchestrator.prompts.source import Prompt, open_source
from transport.contracts.collection import Collected, CollectedAnswer, CollectedPrompt, CollectJob, CollectPrompt
from transport.contracts.settings import Settings, public
from transport.contracts.types import PromptId
from transport.process import files
from transport.process.files import read_rows
from transport.process.programs import ending_with_this_process, python_module

SAID_EVERY_S = 10.0
MAX_LINE_BYTES = 16 * 1024**2
DECIDE_ANSWERS = (
    *("data.system", "data.suffix", "data.chat_template", "generation.stop"),
    *keys_of("sampling"),
    *(f"environment.{key}" for key in ("name", "path", "params", "max_turns", "max_turn_tokens")),
)
DECIDE_REWARDS = tuple(
    f"scoring.{key}" for key in ("reward", "reward_path", "reward_model", "well_formed_reward", "answer_marker")
)
"""Settings under which all lines of a file were collected; of a prompt itself its text is compared."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Answers that are written down. above: reward that they exceed; -inf: whatever it is."""

    path: Path
    above: float

    def rows(self, prompt: Prompt, answers: Sequence[CollectedAnswer]) -> Iterator[bytes]:
        """Each with the columns of its prompt's row, as jsonl data has them."""
        entry = msgspec.json.decode(prompt.entry_json, type=dict[str, Any])
        question = entry["messages"] if "messages" in entry else entry["question"]
        for one in answers:
            if self.above == -math.inf or (one.reward is not None and one.reward > self.above):
                row = {"prompt": question, "answer": entry["answer"], "id": prompt.prompt_id}
                yield msgspec.json.encode(row | {"response": one.response, "reward": one.reward}) + b"\n"

    def forget_all_but(self, known: Collection[str]) -> None:
        """Rows of prompts whose line was not written any more. Raises ConfigError: lines were collected without it."""
        rows = [row for _, row in read_rows(self.path)] if self.path.exists() else []
        if known and not self.path.exists():
            raise ConfigError(
                f"--answers {self.path}: {len(known)} prompts of --out were collected without it; name another --out"
            )
        files.replace(self.path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows if row.get("id") in known))


def main(
    settings: Settings, out: Path, *, samples: int, prompts: int | None, rewards: bool, kept: Kept | None = None
) -> int:
    """Returns 0. Raises ConfigError, DataError; ChildFailedError: what was collected until then is kept."""
    if settings.generation.engine == "emulated":
        raise ConfigError('generation.engine "emulated" writes no answers to collect', key="generation.engine")
    if out.suffix == ".gz":
        raise ConfigError(f"--out {out}: lines are added as they come, which a .gz takes badly; gzip it afterwards")
    if kept is not None and settings.environments:
        raise ConfigError(
            "--answers keeps responses of one turn, and these talk to an environment", key="environment.name"
        )
    if kept is not None and _same_file(out, kept.path):
        raise ConfigError(f"--answers {kept.path} is the file of --out: name another, they hold different lines")
    decided = _decided(settings, rewards=rewards)
    known = _collected(out, settings.model.path, samples, decided, rewards=rewards)
    if not check_inputs(settings, scored=rewards).training:
        raise ConfigError('trainer.engine "none" has no data to collect from', key="trainer.engine")
    with tempfile.TemporaryDirectory(prefix="streamrl-collect-") as logs, writing_out(out):
        return asyncio.run(_collect(settings, out, samples, prompts, rewards, known, decided, Path(logs), kept))


def _same_file(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


def _decided(settings: Settings, *, rewards: bool) -> dict[str, Any]:
    """What a line says of its settings, as JSON has it."""
    keys = (*DECIDE_ANSWERS, *(DECIDE_REWARDS if rewards else ()))
    values = ((key, value_of(settings, key), value_of(Settings(), key)) for key in keys)
    return msgspec.to_builtins({key: value for key, value, default in values if value != default})


def _collected(out: Path, model: str, samples: int, decided: dict[str, Any], *, rewards: bool) -> dict[str, str]:
    """Id -> text of the prompts that ``out`` has already. Raises DataError where they are of another collection."""
    if not out.exists():
        return {}
    found: dict[str, str] = {}
    for number, row in read_rows(out):
        try:
            line = msgspec.convert(row, CollectedPrompt)
        except msgspec.ValidationError as error:
            raise DataError(f"--out {out}, line {number} was not written by `collect`: {error}") from error
        other = (
            line.model != model or len(line.output_tokens) != samples or bool(line.rewards or line.errors) != rewards
        )
        if other:
            raise DataError(
                f"--out {out} has {len(line.output_tokens)} answers a prompt of {line.model}, with"
                f"{'' if line.rewards or line.errors else 'out'} rewards: name another file, or ask for the same"
            )
        for key in {**line.settings, **decided}:
            before, now = (one.get(key, value_of(Settings(), key)) for one in (line.settings, decided))
            if before != now:
                raise DataError(
                    f"--out {out} was collected with {key} = {to_toml(before)}, not {to_toml(now)}: name another file"
                )
        found[line.id] = line.prompt
    return found


async def _collect(
    settings: Settings,
    out: Path,
    samples: int,
    count: int | None,
    rewards: bool,
    known: dict[str, str],
    decided: dict[str, Any],
    logs: Path,
    kept: Kept | None,
) -> int:
    model_dir = await prepare_model(settings.model.path, logs, lambda text: print(text, flush=True))
    source = await asyncio.to_thread(open_source, settings, model_dir, scored=rewards)
    problems = source.problems[:count]
    for remark in source.remarks:
        print(f"note: {remark}", flush=True)
    if rewards:
        for doubt in await check_workers(settings, problems):
            print(f"note: {doubt}", flush=True)
    asked = [source.lookup(one.prompt_id) for one in problems if one.prompt_id not in known]
    questions: dict[str, str] = {one.prompt_id: one.question for one in problems}
    if other := next((one for one in problems if known.get(one.prompt_id, one.question) != one.question), None):
        raise DataError(f"--out {out} has another prompt as {other.prompt_id} than the data: name another file")
    print(f"{len(asked)} prompts of {len(problems)}, {samples} answers each, to {out}", flush=True)
    job = CollectJob(
        settings=public(settings),
        model_dir=str(model_dir),
        samples=samples,
        rewards=rewards,
        answers=kept is not None,
    )
    prompt_of = {prompt.prompt_id: prompt for prompt in asked}
    if kept is not None:
        kept.forget_all_but(known)
    seeds: dict[str, int] = {one.prompt_id: settings.run.seed + index for index, one in enumerate(problems)}
    lines = [msgspec.json.encode(job), *_prompts(asked, questions, seeds)]
    done: list[CollectedPrompt] = []
    said_s = time.monotonic()
    with out.open("ab") as file:
        async for said in _answers(settings, lines, logs):
            one = msgspec.json.decode(said, type=Collected)
            if kept is not None:  # before its line, which says that the prompt is done
                with kept.path.open("ab") as rows:
                    rows.writelines(kept.rows(prompt_of[PromptId(one.line.id)], one.answers))
            file.write(msgspec.json.encode(msgspec.structs.replace(one.line, settings=decided)) + b"\n")
            file.flush()
            done.append(one.line)
            if time.monotonic() - said_s >= SAID_EVERY_S:
                said_s = time.monotonic()
                print(_said(done, len(asked)), flush=True)
    print(_said(done, len(asked)))
    return ExitCode.OK


def _prompts(asked: Sequence[Prompt], questions: dict[str, str], seeds: dict[str, int]) -> Iterator[bytes]:
    """seeds: by prompt, so that a collection that went on draws as one that never stopped."""
    for prompt in asked:
        yield msgspec.json.encode(
            CollectPrompt(
                id=prompt.prompt_id,
                question=questions[prompt.prompt_id],
                text=prompt.text,
                prompt_ids=prompt.prompt_ids.tolist(),
                entry=prompt.entry_json,
                seed=seeds[prompt.prompt_id],
            )
        )


async def _answers(settings: Settings, lines: Sequence[bytes], logs: Path) -> AsyncIterator[bytes]:
    """Lines of the worker. Raises ChildFailedError, ConfigError: it ends with an error, or says nothing for long."""
    silent_s = settings.liveness.startup_s + settings.pipeline.rollout_timeout_s
    log_path = logs / "collect.log"
    with log_path.open("ab") as words:
        process = await asyncio.create_subprocess_exec(
            *python_module("workers", "collect", "--log-dir", str(logs)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=words,
            limit=MAX_LINE_BYTES,
            preexec_fn=ending_with_this_process(),
        )
    assert process.stdin is not None and process.stdout is not None  # noqa: PT018 PIPE
    try:
        with contextlib.suppress(ConnectionError):  # how it ended is said below
            process.stdin.write(b"\n".join(lines))
            await process.stdin.drain()
            process.stdin.close()
        while True:
            try:
                async with asyncio.timeout(silent_s):
                    line = await process.stdout.readline()
            except TimeoutError:
                raise ChildFailedError("collect", -9, f"no answer for {silent_s:.0f} s") from None
            if not line:
                break
            yield line
        code = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if code:
        said = last_words(log_path.read_text("utf-8", "replace"))
        raise ConfigError(said) if code == ExitCode.BAD_CONFIG else ChildFailedError("collect", code, said)


def _said(done: Sequence[CollectedPrompt], asked: int) -> str:
    lengths = [tokens for one in done for tokens in one.output_tokens]
    earned = [reward for one in done for reward in one.rewards]
    failed = sum(len(one.errors) for one in done)
    parts = [f"{len(done)} of {asked} prompts"]
    parts += [f"{fmean(lengths):.1f} tokens an answer, {max(lengths)} at most"] if lengths else []
    parts += [f"mean reward {fmean(earned):.3f}"] if earned else []
    parts += [f"{failed} answers without a reward: see `errors` there"] if failed else []
    return "; ".join(parts)
