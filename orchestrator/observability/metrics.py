"""The lines of ``metrics.jsonl``: what passes as events and commands, summed up for each batch and each evaluation.

A line for each trained batch, by ``batch``; one for each evaluation of held-out problems, by ``eval`` (its number).
docs/metrics.md explains every key.

Invariants: a line is written once per (incarnation of the trainer, batch) and per evaluation, however often a step is
reported, also over restarts of the orchestrator; a step that is reported after that of a later batch gets its line at
the end, and resets nothing. What a line says of samples is true of those that its batch trained, each once: a row that
was generated again counts as it was last, and a group counts where it was trained, not where it was admitted.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, BinaryIO

import structlog

from transport.contracts.messages import (
    Command,
    CriticReported,
    DispatchGroups,
    EvaluationOutcome,
    Event,
    GroupPlan,
    GroupScored,
    HeldOutAnswer,
    JournalRecord,
    RankerJudged,
    RolloutFinished,
    RunResumed,
    SlotOutcome,
    StepDone,
    TrainRound,
    WeightsLoaded,
)
from transport.contracts.pass_at_k import pass_rates
from transport.contracts.settings import EvalSettings
from transport.contracts.types import FinishReason, GroupId, batch_of, is_evaluation
from transport.process.files import writing

log = structlog.get_logger(__name__)

GROUPS: Mapping[str, str] = {
    "reward": "reward reward_std reward_with_filtered no_signal",
    "lengths": "response_tokens response_tokens_p50 response_tokens_p90 response_tokens_max truncated "
    "environment_share",
    "loss": "loss grad_norm lr skipped_nonfinite entropy kl computed_tokens clip_fraction_low clip_fraction_high",
    "staleness": "staleness staleness_max logprob_mismatch logprob_mismatch_max mismatch_k3 mismatch_tv fp8_off",
    "throughput": "seconds samples_per_s tokens_per_s train_s wait_s publish_s publish_wait_s samples_trained "
    "tokens_trained groups_trained samples_generated tokens_generated groups_filtered groups_stale groups_dead "
    "groups_deferred groups_probed groups_raised rows_in_steps tokens_in_steps delta_s saved_s",
    "critic": "value_staleness value_staleness_max",
    "run": "batch version incarnation time_s eval",
}
"""Group -> its keys, for whoever shows a number among a hundred others."""
PREFIXES = ("eval", "ranker", "critic")  # of keys that are groups of their own
_GROUP_OF = {key: group for group, keys in GROUPS.items() for key in keys.split()}


def grouped(key: str) -> str:
    """A key under its group's name: ``loss/kl``, ``eval/right``, ``eval/hard/pass@4``; any other is of the reward."""
    if key.startswith(("eval/", "mix/")):  # of a named set, of a part of the data
        return key
    if key not in _GROUP_OF:
        for prefix in PREFIXES:
            if key.startswith(f"{prefix}_"):
                return f"{prefix}/{key.removeprefix(f'{prefix}_')}"
    return f"{_GROUP_OF.get(key, 'reward')}/{key}"


def reward_components(line: Mapping[str, Any]) -> dict[str, float]:
    """Means of the reward's own components in a batch's line, in its order."""
    others = ("bubble_", "generation_present", "trainer_present")
    return {
        key: value
        for key, value in line.items()
        if isinstance(value, float | int) and key not in _GROUP_OF and grouped(key) == f"reward/{key}"
        if not key.startswith(others)
    }


KEPT_BATCHES = 64  # one so far behind the newest is not trained again; as many as a trainer reports again


@dataclass(slots=True)
class _Group:
    """What was reported last of one prompt group."""

    score: GroupScored | None = None
    versions: dict[int, int] = field(default_factory=dict[int, int])  # sample -> oldest weights
    truncated: set[int] = field(default_factory=set[int])  # samples that were cut at the limit
    probed_tokens: float | None = None  # expected of it when its probe started; None once its others have


@dataclass(slots=True)
class _Since:
    """What happened since the line before, whichever batch it was for. filtered: scores of groups that were."""

    samples: int = 0
    tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    filtered: list[GroupScored] = field(default_factory=list[GroupScored])


class MetricsLog:
    """Notes groups from the events and rounds from the commands, and appends a line to ``path`` for each batch."""

    def __init__(
        self,
        path: Path,
        *,
        trains: bool = True,
        passes: int = 1,
        held_out: EvalSettings | None = None,
        no_fp8_since: Callable[[], int] | None = None,
        stages: Callable[[int], Mapping[str, float]] = lambda batch: {},
        write: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> None:
        """trains: a run that does not has no batches, and nothing is kept of its samples.  passes: over each batch.
        held_out: how its sets of held-out problems are asked.  no_fp8_since: first version that is generated without
        fp8, 0 while engines use it; None in a run without.
        stages: batch -> how they compare, where workers come and go by it.
        write: gets the lines in place of ``path``, which is not read then, and nothing is warned of: for the audit.
        """
        self._no_fp8_since = no_fp8_since
        self._stages = stages
        self._held_out = held_out or EvalSettings()
        self._trains = trains
        self._passes = passes
        self._groups: dict[GroupId, _Group] = {}
        self._members: dict[int, dict[GroupId, None]] = {}  # batch -> groups that its rounds hold
        self._since = _Since()
        self._write = write or partial(append_line, path)
        self._warns = write is None
        file = MetricsFile(lines=(), damaged=()) if write is not None else read_file(path)
        if said := file.say():
            log.warning(said, path=str(path))
        self._written = {(line.get("incarnation", 0), line["batch"]) for line in file.lines if "batch" in line}
        self._evaluated = {line["eval"] for line in file.lines if "eval" in line}
        self._engine_s: defaultdict[str, float] = defaultdict(float)  # by lane, in slots since the last evaluation
        # Of the next line: the last step, or when weights were loaded after a start: starting up is no batch's time.
        self._begun_s: float | None = None
        self._ranker: dict[str, float] = {}
        self._critic: dict[str, float] = {}
        self._repeats = Repeats()
        self.last_line: dict[str, Any] = {}
        self.last_evaluation: dict[str, Any] = max(
            (line for line in file.lines if "eval" in line), key=lambda line: line["eval"], default={}
        )

    def recall(self, records: Iterable[JournalRecord], rounds: Iterable[TrainRound] = ()) -> None:
        """Take note of what was before a restart, so that the batches that were open then are whole in their lines.

        records: the newest of the journal.  rounds: those that are not in a checkpoint yet. How many slots had ended
        untrained since the last line is not known.
        """
        for command in rounds:
            self._note_command(command, 0.0)
        newest = (0, -1)
        for record in records:
            event = record.event
            if not isinstance(event, StepDone):
                self.observe(event, (), record.now_s)
            elif (key := (event.weights.epoch, event.batch)) > newest:  # not reported again
                newest = key
                self._begun_s, self._since = record.now_s, _Since()

    def observe(self, event: Event, commands: Iterable[Command], now_s: float) -> dict[str, Any] | None:
        """Take note of one applied event. Returns the batch's line if this event finished a batch."""
        if not self._trains:
            return None
        match event:
            case WeightsLoaded() if self._begun_s is None:
                self._begun_s = now_s
            case RunResumed():
                self._begun_s = None
            case RolloutFinished():
                self._finished(event)
            case GroupScored() if not is_evaluation(event.group_id):
                self._groups.setdefault(event.group_id, _Group()).score = event
            case RankerJudged():
                self._ranker = ranker_numbers(event)
            case CriticReported(report=StepDone() as step):
                self._critic = critic_numbers(step)
            case _:
                pass
        for command in commands:
            self._note_command(command, now_s)
        return self._finish(event, now_s) if isinstance(event, StepDone) else None

    def _finished(self, event: RolloutFinished) -> None:
        lane = "eval" if is_evaluation(event.row_id) else "train"
        self._engine_s[lane] += event.engine_s
        if lane == "eval":
            return
        self._since.samples += 1
        self._since.tokens += event.policy_tokens
        name, _, sample = event.row_id.rpartition("/")
        group, index = self._groups.setdefault(GroupId(name), _Group()), int(sample)
        group.versions[index] = event.oldest.version
        if event.finish_reason is FinishReason.LENGTH:
            group.truncated.add(index)
        else:
            group.truncated.discard(index)

    def _note_command(self, command: Command, now_s: float) -> None:
        match command:
            case TrainRound(kind="train"):  # each pass over the batch sends its groups again: they are counted once
                members = self._members.setdefault(command.batch, {})
                members |= {rows.group_id: None for rank in command.ranks for rows in rank}
            case SlotOutcome() if command.outcome != "trained":
                self._since.outcomes[command.outcome] += 1
                ended = self._groups.pop(command.group_id, None)
                if ended and ended.score and command.outcome == "filtered":
                    self._since.filtered.append(ended.score)
            case DispatchGroups(plans=plans):
                for plan in plans:
                    self._note_probe(plan)
            case EvaluationOutcome():
                cost, self._engine_s = self._engine_s, defaultdict(float)
                if command.number not in self._evaluated:
                    share = cost["eval"] / (sum(cost.values()) or 1.0)
                    self._evaluated.add(command.number)
                    self.last_evaluation = evaluation_line(command, now_s, share, self._held_out)
                    self._write(self.last_evaluation)
            case _:
                pass

    def _deferred(self, batch: int) -> dict[str, int]:
        """Groups of the batch that an earlier one had begun with."""
        earlier = sum(batch_of(name) < batch for name in self._members.get(batch, ()))
        return {"groups_deferred": earlier} if earlier else {}

    def _note_probe(self, plan: GroupPlan) -> None:
        """Its probe starts; or others of it, which are expected to be longer since."""
        if plan.alone:
            self._since.outcomes["probed"] += 1
            self._groups.setdefault(plan.group_id, _Group()).probed_tokens = plan.predicted_tokens
        elif (group := self._groups.get(plan.group_id)) is not None and group.probed_tokens is not None:
            self._since.outcomes["raised"] += plan.predicted_tokens > group.probed_tokens
            group.probed_tokens = None

    def _finish(self, event: StepDone, now_s: float) -> dict[str, Any] | None:
        key = (event.weights.epoch, event.batch)
        if key in self._written:
            if key == max(self._written):  # the journal missed it because of a kill: what follows begins here
                self._since, self._begun_s = _Since(), now_s
            return None
        seconds = now_s - self._begun_s if self._begun_s is not None else now_s
        since, self._since, self._begun_s = self._since, _Since(), now_s
        trained = [self._groups[name] for name in self._members.get(event.batch, ()) if name in self._groups]
        samples, tokens = event.num_rows // self._passes, event.num_tokens // self._passes
        rates = {"samples_per_s": samples / seconds, "tokens_per_s": tokens / seconds} if seconds > 0 else {}
        line: dict[str, Any] = {
            "batch": event.batch,
            "version": event.weights.version,
            "incarnation": event.weights.epoch,
            "time_s": round(now_s, 3),
            "seconds": round(seconds, 3),
            **summarise(event.batch, trained, since.filtered),
            **self._deferred(event.batch),
            "samples_trained": samples,
            "tokens_trained": tokens,
            "samples_generated": since.samples,
            "tokens_generated": since.tokens,
            **{f"groups_{outcome}": count for outcome, count in sorted(since.outcomes.items())},
            **rates,
            "rows_in_steps": event.num_rows,
            "tokens_in_steps": event.num_tokens,
            **self._fp8(event.weights.version),
            **self._stages(event.batch),
            **event.metrics,
            **self._ranker,
            **self._critic,
        }
        # JSON has no NaN and no infinity.
        line = {name: each for name, each in line.items() if not isinstance(each, float) or math.isfinite(each)}
        if key >= max(self._written, default=key):
            self.last_line = line
        before = event.batch - KEPT_BATCHES
        self._members = {batch: members for batch, members in self._members.items() if batch >= before}
        self._groups = {name: group for name, group in self._groups.items() if batch_of(name) >= before}
        self._written.add(key)
        self._write(line)
        for text in filter(None, (skipped_line(line), no_gradient_line(line)) if self._warns else ()):
            warning = self._repeats.said(text)
            if not warning:
                continue
            log.warning(warning)
        return line

    def _fp8(self, version: int) -> dict[str, int]:
        """How many versions ago fp8 was given up, this one counted; 0 while engines use it."""
        if self._no_fp8_since is None:
            return {}
        since = self._no_fp8_since()
        return {"fp8_off": max(0, version - since + 1) if since else 0}


def warnings_of(line: Mapping[str, Any], mismatch_limit: float) -> list[str]:
    """What is wrong with a trained batch, each as a sentence without "warning": for terminal, live page and report."""
    said = (mismatch_line(line, mismatch_limit), fp8_line(line), skipped_line(line), no_gradient_line(line))
    return [text for text in said if text]


class Repeats:
    """Warnings, each kind said once and then at ten times as many batches. A kind differs by its words, not numbers."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def said(self, warning: str) -> str:
        """Words for one more ``warning``; "" where it was said often enough."""
        kind = re.sub(r"\d[\d.]*", "#", warning)
        self._first.setdefault(kind, warning)
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 1:
            return warning
        return f"{warning} ({count} batches so far)" if re.fullmatch("10+", str(count)) else ""

    def all(self) -> list[str]:
        """The first of each kind, with how many more there were."""
        more = ((first, self._counts[kind] - 1) for kind, first in self._first.items())
        return [f"{first} (and {left} more batch{'es' * (left > 1)})" if left else first for first, left in more]


def mismatch_line(line: Mapping[str, Any], limit: float) -> str:
    """Where trainer and engine disagree on the sampled tokens by more than ``limit``; "" where they do not.

    Weights that are ``staleness`` versions apart disagree, too: only at 0 is it the two implementations alone.
    """
    found = line.get("logprob_mismatch", 0.0)
    if not limit or found <= limit:
        return ""
    return (
        f"batch {line['batch'] + 1}: logprobs of trainer and engine differ by {found:.3f} on average "
        f"(largest {line.get('logprob_mismatch_max', 0.0):.2f}, staleness {line.get('staleness', 0.0):.2f}), "
        f"more than algorithm.mismatch_limit {limit:g}"
    )


def fp8_line(line: Mapping[str, Any]) -> str:
    """Said of the batch after which fp8 was given up; "" of all others."""
    if line.get("fp8_off") != 1:
        return ""
    found = line.get("logprob_mismatch")
    differ = "are not comparable" if found is None else f"differ by {found:.3f} on average"
    return (
        f"batch {line['batch'] + 1}: logprobs of trainer and engine {differ}, for generation.fp8_mismatch_batches in a "
        f"row too much for generation.fp8_mismatch_limit: nothing is held in fp8 from version {line['version']} on"
    )


def skipped_line(line: Mapping[str, Any]) -> str:
    """How many steps of a trained batch were not taken, and what may be why; "" where all were."""
    skipped = line.get("skipped_nonfinite")
    if not skipped:
        return ""
    return (
        f"batch {line['batch'] + 1} did not take {skipped:.0f} of its optimizer steps: loss or gradient was not "
        "finite; a loss divides by zero or overflows, rewards are far too large, or training broke the weights"
    )


def taught_nothing(line: Mapping[str, Any]) -> bool:
    """Was no row in the steps of a trained batch, or was the norm of their gradient exactly 0?

    Without a row there was no step, hence no norm; an emulated trainer reports none either, but rows.
    """
    return line.get("rows_in_steps") == 0 or line.get("grad_norm") == 0.0


def no_gradient_line(line: Mapping[str, Any]) -> str:
    """Why a trained batch taught nothing, and what to do; "" where it taught something."""
    if not taught_nothing(line):
        return ""
    if not line.get("groups_trained"):
        dead = line.get("groups_dead", 0)
        dropped = (
            "all of its groups were dropped; ask problems that the model solves now and then, or a larger group_size"
        )
        why = f"none of its groups was left, {dead} are dead; logs/orchestrator.log says why" if dead else dropped
    elif line.get("no_signal") == 1.0 and line.get("reward_std") == 0.0 and line.get("reward", 0.0) > 0.0:
        why = (
            f"every answer earns the same reward ({line['reward']:.3g}): where that is the best there is, the task is "
            "solved; ask harder problems, or end the run"
        )
    elif line.get("no_signal") == 1.0:
        why = (
            "the rewards within each of its groups are equal; set pipeline.drop_no_signal=true to replace such groups, "
            "or ask problems that the model solves now and then"
        )
    elif not line.get("computed_tokens", 1):
        why = "none of its rows has a factor in the loss: no advantage, and no reward above algorithm.ce_above"
    else:
        why = "although rewards differ within groups; see clip_fraction_low and clip_fraction_high in metrics.jsonl"
    return f"batch {line['batch'] + 1} carries no gradient: {why}"


def summarise(batch: int, trained: Sequence[_Group], filtered: Sequence[GroupScored]) -> dict[str, Any]:
    """Means and quantiles over the samples that ``batch`` trained; nothing for an empty batch.

    filtered: scores of groups that were filtered meanwhile; they count where the policy is judged.
    """
    scores = [group.score for group in trained if group.score]
    line: dict[str, Any] = {"groups_trained": len(trained)} if trained else {}
    if scores:
        rewards = [reward for score in scores for reward in score.rewards]
        tokens = [length for score in scores for length in score.response_tokens]
        line |= {"reward": fmean(rewards), "reward_std": pstdev(rewards)}
        if left_out := [reward for score in filtered for reward in score.rewards]:
            line["reward_with_filtered"] = fmean([*rewards, *left_out])
        names = sorted({name for score in scores for name in score.components})
        line |= {name: mean_of_component(name, scores) for name in names}
        judged = [*scores, *filtered]
        line |= {f"{name}_with_filtered": mean_of_component(name, judged) for name in names if filtered}
        line |= {
            "no_signal": sum(not score.signal for score in judged) / len(judged),
            "response_tokens": fmean(tokens),
            **quantiles(tokens),
            "response_tokens_max": max(tokens),
        }
        line |= of_parts(judged)
        if environment := sum(score.environment_tokens for score in scores):
            line["environment_share"] = environment / sum(tokens)
    if lags := [max(0, batch - version) for score in scores for version in score.value_versions]:
        line |= {"value_staleness": fmean(lags), "value_staleness_max": max(lags)}
    staleness = [max(0, batch - version) for group in trained for version in group.versions.values()]
    if staleness:
        line |= {
            "truncated": sum(len(group.truncated) for group in trained) / len(staleness),
            "staleness": fmean(staleness),
            "staleness_max": max(staleness),
        }
    return line


def of_parts(scores: Sequence[GroupScored]) -> dict[str, float]:
    """Means of each part of [data.mix] over its samples, those of filtered groups included: ``mix/NAME/reward``."""
    line: dict[str, float] = {}
    for name in sorted({score.part for score in scores if score.part}):
        own = [score for score in scores if score.part == name]
        components = sorted({component for score in own for component in score.components})
        means = {
            "reward": fmean([reward for score in own for reward in score.rewards]),
            **{component: mean_of_component(component, own) for component in components},
            "response_tokens": fmean([length for score in own for length in score.response_tokens]),
            "groups": len(own),
        }
        line |= {f"mix/{name}/{key}": value for key, value in means.items()}
    return line


OF_CRITIC = (
    *("value_loss", "value_mean", "return_mean", "explained_variance", "value_clip_fraction"),
    *("grad_norm", "lr", "skipped_nonfinite"),
)
"""Of a step of the critic, what is no metric of the policy's."""


def critic_numbers(step: StepDone) -> dict[str, float]:
    """What a batch's line says of the critic's newest step, which may be one of another batch."""
    said = {f"critic_{name}": step.metrics[name] for name in OF_CRITIC if name in step.metrics}
    return {"critic_version": step.weights.version, **said}


def mean_of_component(name: str, scores: Sequence[GroupScored]) -> float:
    return fmean(score.components[name] for score in scores if name in score.components)


def quantiles(tokens: Sequence[int]) -> dict[str, int]:
    """P50 and P90 of response lengths, tokens: the smallest length that so many of the samples do not exceed."""
    ordered = sorted(tokens)
    return {f"response_tokens_p{q}": ordered[max(0, -(-len(ordered) * q // 100) - 1)] for q in (50, 90)}


def ranker_numbers(judged: RankerJudged) -> dict[str, float]:
    """How right predictions were, as part of a batch's line; nothing before the first groups were judged."""
    if not judged.num_groups:
        return {}
    numbers = {name: round(getattr(judged, name), 3) for name in ("recall_20", "recall_10", "recall_5")}
    numbers |= {"tau": round(judged.kendall_tau, 3), "drift": round(judged.drift, 3), "trusted": float(judged.trusted)}
    return {f"ranker_{name}": number for name, number in numbers.items()}


def evaluation_line(outcome: EvaluationOutcome, now_s: float, share: float, held_out: EvalSettings) -> dict[str, Any]:
    """An evaluation as a line of ``metrics.jsonl``. share: of the engines' seconds since the one before.

    held_out: how many samples each named set has, and what counts as a pass.
    """
    line: dict[str, Any] = {
        "eval": outcome.number,
        "version": outcome.weights.version,
        "incarnation": outcome.weights.epoch,
        "time_s": round(now_s, 3),
    }
    if outcome.answered:  # else there are no means
        line |= {"eval_reward": outcome.reward}
        line |= {f"eval_{name}": mean for name, mean in sorted(outcome.components.items())}
        line |= {"eval_response_tokens": outcome.response_tokens}
    by_set: dict[str, list[HeldOutAnswer]] = {name: [] for name in held_out.sets}
    for answer in outcome.answers:
        by_set.setdefault(answer.eval_set, []).append(answer)
    for name, answers in by_set.items():
        samples = held_out.sets[name].samples if name in held_out.sets else 1
        numbers = set_numbers(answers, samples, held_out.passed_by) if answers else {}
        line |= {f"eval/{name}/{key}": value for key, value in numbers.items()}
    return line | {
        "eval_problems": outcome.problems,
        "eval_answered": outcome.answered,
        "eval_seconds": round(outcome.seconds, 3),
        "eval_tokens": outcome.tokens,
        "eval_share": round(share, 4),
        "eval_short": outcome.reason,
    }


def set_numbers(answers: Sequence[HeldOutAnswer], samples: int, passed_by: str) -> dict[str, float]:
    """Of one named set: means over its answers, and with several samples pass@k over the problems that have them all.

    passed_by: component that is 1 where an answer passes; the reward itself where an answer has none of that name.
    """
    names = sorted({name for answer in answers for name in answer.components})
    passed: defaultdict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        passed[answer.prompt_id].append(answer.components.get(passed_by, answer.reward) >= 1)
    whole = [sum(each) for each in passed.values() if len(each) == samples]
    return {
        "reward": fmean(answer.reward for answer in answers),
        **{name: fmean(answer.components.get(name, 0.0) for answer in answers) for name in names},
        **(pass_rates(samples, whole) if samples > 1 and whole else {}),
        "response_tokens": fmean(answer.response_tokens for answer in answers),
        "problems": len(passed),
        "answered": len(answers),
    }


def sets_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The named sets in lines of evaluations, in order -> what is known of each, e.g. ``reward``, ``pass@1``."""
    found: dict[str, list[str]] = {}
    for key in {key: None for line in lines for key in line if key.startswith("eval/")}:
        name, _, number = key.removeprefix("eval/").partition("/")
        found.setdefault(name, []).append(number)
    return found


# --- the file ---------------------------------------------------------------------------------------------------------
# A last line without an end is being written, or a kill tore it: readers wait for its end, and the next append removes
# it.


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsFile:
    """What a metrics file holds; a last line without an end is neither good nor damaged."""

    lines: Sequence[dict[str, Any]]  # the good ones, in order
    damaged: Sequence[int]  # numbers of the others, from 1

    def say(self) -> str:
        """Which lines are damaged, "" where none is."""
        if not self.damaged:
            return ""
        named = ", ".join(map(str, self.damaged[:5])) + (", ..." if len(self.damaged) > 5 else "")
        return f"metrics.jsonl: {len(self.damaged)} damaged, skipped: line {named}"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of trained batches in a metrics file, in order."""
    return [line for line in read_file(path).lines if "batch" in line]


def read_file(path: Path) -> MetricsFile:
    """A metrics file, also a damaged one; an empty one where there is none."""
    lines: list[dict[str, Any]] = []
    damaged: list[int] = []
    with path.open("rb") if path.exists() else nullcontext(()) as file:
        for number, raw in enumerate(file, start=1):
            line = parse_line(raw)
            if line is not None:
                lines.append(line)
            elif raw.endswith(b"\n"):
                damaged.append(number)
    return MetricsFile(lines=lines, damaged=damaged)


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """One line of a metrics file; None where it is no object with the number of a batch or an evaluation."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("batch", line.get("eval")), int):
        return None
    return line


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append one line, without a tail that a kill tore off: behind it, it would be lost, too. Raises DirectoryError."""
    with writing(path.parent), path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        if file.read() not in (b"", b"\n"):
            file.seek(0)
            tail = file.read().rpartition(b"\n")[2]
            if parse_line(tail) is not None:
                file.write(b"\n")
            else:
                file.truncate(end - len(tail))
        file.write(json.dumps(line).encode() + b"\n")


# --- while it grows ---------------------------------------------------------------------------------------------------


class _Growing:
    """Whole lines that were appended to a file since the last call; only they are read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._seen_bytes = 0

    def _is_replaced(self, file: BinaryIO) -> bool:
        """Whether another file, or a shorter one, stands at the path: the next lines are its first."""
        now = os.fstat(file.fileno())
        if now.st_ino == self._inode and now.st_size >= self._seen_bytes:
            return False
        self._inode, self._seen_bytes = now.st_ino, 0
        return True

    def _appended(self, file: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
        """Where each good line begins, and the line."""
        file.seek(self._seen_bytes)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            if (line := parse_line(raw)) is not None:
                yield self._seen_bytes, line
            self._seen_bytes += len(raw)


class NewLines(_Growing):
    """Every good line of a growing metrics file, each returned once."""

    def __init__(self, path: Path, *, skip: bool = False) -> None:
        """skip: leave out the lines that are there now."""
        super().__init__(path)
        self._num_read = 0
        if skip:
            self.read()

    def read(self) -> list[dict[str, Any]]:
        """The lines since the last call. A file that was replaced goes on after as many lines as were returned."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            known = self._num_read if self._is_replaced(file) else 0
            lines = [line for _, line in self._appended(file)][known:]
        self._num_read += len(lines)
        return lines


class BatchLines(_Growing):
    """Lines of any batches of a growing metrics file, for several threads; eight bytes a batch are kept."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._begins = array("Q")
        self._lock = threading.Lock()

    def read(self, first: int, count: int) -> list[dict[str, Any]]:
        """Up to ``count`` lines from number ``first`` on, as ``read_metrics`` has them; [] where there are none."""
        if not self._path.exists():
            return []
        with self._lock, self._path.open("rb") as file:
            if self._is_replaced(file):  # and read anew
                self._begins = array("Q")
            self._begins.extend(begin for begin, line in self._appended(file) if "batch" in line)
            lines: list[dict[str, Any]] = []
            for begin in self._begins[first : first + count]:
                file.seek(begin)
                if line := parse_line(file.readline()):
                    lines.append(line)
            return lines
