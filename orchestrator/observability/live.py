"""The terminal while a run is on: one table where there is a terminal, plain lines where there is none.

Invariant: whatever a model wrote is stripped of control characters before a terminal sees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrator.terminal_text import printable

QUEUES_SHOWN = 6


class View(Protocol):
    """What the supervisor shows its user."""

    def note(self, text: str) -> None:
        """One line that stays."""
        ...

    def batch(self, line: Mapping[str, Any]) -> None:
        """A batch was trained."""
        ...

    def status(self, status: Mapping[str, Any]) -> None:
        """The current state of the whole run, a few times a second."""
        ...

    def close(self) -> None: ...


def open_view(*, plain: bool) -> View:
    """A table if stdout is a terminal and ``plain`` is not asked for, else lines."""
    console = Console(highlight=False)
    return PlainView() if plain or not console.is_terminal else TableView(console)


def batch_line(line: Mapping[str, Any], num_batches: int | None = None) -> str:
    """One trained batch as a line of text; a number that is not known is left out."""
    total = f"/{num_batches}" if num_batches else ""
    parts = [f"batch {line['batch'] + 1}{total}"]
    formats = (
        ("reward", "reward {:.3f}"),
        ("reward_with_filtered", "with filtered {:.3f}"),
        ("well_formed", "well-formed {:.0%}"),
        ("right", "right {:.0%}"),
        ("no_signal", "no signal {:.0%}"),
        ("truncated", "cut {:.0%}"),
        ("response_tokens", "{:.1f} tokens"),
        ("seconds", "{:.1f} s"),
        ("samples_per_s", "{:.1f} samples/s"),
        ("tokens_per_s", "{:.0f} tokens/s"),
        ("staleness", "staleness {:.2f}"),
        ("loss", "loss {:+.4f}"),
        ("grad_norm", "grad {:.2f}"),
        ("logprob_mismatch", "mismatch {:.4f}"),
    )
    parts += [text.format(line[name]) for name, text in formats if name in line]
    return "  ".join(parts)


def mismatch_line(line: Mapping[str, Any], limit: float) -> str:
    """A warning where trainer and engine disagree on the sampled tokens by more than ``limit``; "" where they do not.

    Weights that are ``staleness`` versions apart disagree, too: only at 0 is it the two implementations alone.
    """
    found = line.get("logprob_mismatch", 0.0)
    if not limit or found <= limit:
        return ""
    return (
        f"warning: batch {line['batch'] + 1}: logprobs of trainer and engine differ by {found:.3f} on average "
        f"(largest {line.get('logprob_mismatch_max', 0.0):.2f}, staleness {line.get('staleness', 0.0):.2f}), "
        f"more than algorithm.mismatch_limit {limit:g}"
    )


def evaluation_line(line: Mapping[str, Any]) -> str:
    """One evaluation as a line of text."""
    parts = [f"evaluation of version {line['version']}"]
    formats = (
        ("eval_reward", "reward {:.3f}"),
        ("eval_well_formed", "well-formed {:.0%}"),
        ("eval_right", "right {:.0%}"),
        ("eval_seconds", "{:.1f} s"),
        ("eval_share", "{:.0%} of generation"),
    )
    parts += [text.format(line[name]) for name, text in formats if name in line]
    short = f"ended short: {line['eval_short']}" if line.get("eval_short") else ""
    return "  ".join([*parts, f"{line['eval_answered']} of {line['eval_problems']} problems", short]).rstrip()


RANKER_STATES = {
    "trusted": "dispatch may rely on it",
    "not_trusted": "not trusted: plans are even",
    "not_yet_measured": "too few to judge: plans are even",
}


def ranker_line(ranker: Mapping[str, Any]) -> str:
    """``status["ranker"]`` as a line: how right predictions were, and whether dispatch relies on them."""
    if not ranker["num_groups"]:
        return "ranker: nothing judged yet"
    recalls = "/".join(f"{ranker[name]:.2f}" for name in ("recall_20", "recall_10", "recall_5"))
    return f"ranker: recall {recalls} at 20/10/5% of {ranker['num_groups']} groups, {RANKER_STATES[ranker['state']]}"


def progress(status: Mapping[str, Any]) -> str:
    """How far the run is; a service gets as many requests as there are."""
    requests = status.get("num_requests")
    if requests is None:
        done = f"trained {status.get('trained_version', 0)}/{status.get('num_batches', 0)}"
    else:
        done = f"requests {requests}, {len(status.get('requests', ()))} of them open"
    asked = [word for key, word in (("paused", "paused"), ("stop_reason", "stopping")) if status.get(key)]
    return "  ".join([done, *asked])


def scaling_line(scaling: Mapping[str, Any]) -> str:
    """``status["scaling"]`` as a line: the last change and why; "" before the first."""
    if scaling["changed"] < 0:
        return ""
    change = f"{scaling['from_workers']} -> {scaling['to_workers']} after batch {scaling['changed'] + 1}"
    return printable(f"generation workers {change}: {scaling['reason']}")


def blocked_line(blocked: Mapping[str, Any]) -> str:
    """``status["blocked"]`` as a line: the stage, what it waits for, who should act, for how long nothing came."""
    return (
        f"blocked: {blocked['stage']} waits for {blocked['waits_for']}; to act: {blocked['owner']}; "
        f"no progress for {blocked['still_s']:.0f} s"
    )


class PlainView:
    """Lines on stdout, flushed: one a batch, one whenever something else blocks or nothing does any more, or workers
    come or go."""

    def __init__(self) -> None:
        self._num_batches: int | None = None
        self._blocked: tuple[str, ...] = ()
        self._scaled = ""

    def note(self, text: str) -> None:
        print(printable(text), flush=True)

    def batch(self, line: Mapping[str, Any]) -> None:
        print(batch_line(line, self._num_batches), flush=True)

    def status(self, status: Mapping[str, Any]) -> None:
        self._num_batches = status.get("num_batches")
        scaled = scaling_line(status["scaling"]) if status.get("scaling") else ""
        if scaled != self._scaled:
            self._scaled = scaled
            self.note(scaled)
        blocked = status.get("blocked")
        named = tuple(str(blocked[name]) for name in ("stage", "waits_for", "owner")) if blocked else ()
        if named == self._blocked:
            return
        self._blocked = named
        self.note(blocked_line(blocked) if blocked else "it goes on")

    def close(self) -> None: ...


class TableView:
    """A rich live table under the lines that stay."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_batches: int | None = None
        self._live = Live(Text("starting"), console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def note(self, text: str) -> None:
        self._console.print(Text(printable(text)), soft_wrap=True)  # an address stays one: it is there to be clicked

    def batch(self, line: Mapping[str, Any]) -> None:
        self._console.print(Text(batch_line(line, self._num_batches)))

    def status(self, status: Mapping[str, Any]) -> None:
        self._num_batches = status.get("num_batches")
        self._live.update(Group(_headline(status), _worker_table(status.get("workers", ()))))

    def close(self) -> None:
        self._live.stop()


def _headline(status: Mapping[str, Any]) -> Text:
    queues = {name: depth for name, depth in status.get("queues", {}).items() if depth}
    deepest = sorted(queues.items(), key=lambda item: -item[1])[:QUEUES_SHOWN]
    stages = ("pending", "running", "scoring", "ready", "rounds_outstanding")
    groups = "  ".join(f"{name.replace('_', ' ')} {status[name]}" for name in stages if name in status)
    parts = [
        f"{status.get('run', '')}  {status.get('elapsed_s', 0.0):.0f} s  {progress(status)}",
        f"groups: {groups}",
        "queues: " + ("  ".join(f"{name} {depth}" for name, depth in deepest) or "empty"),
        _waiting(status.get("wait")),
        ranker_line(status["ranker"]) if status.get("ranker") else "",
        scaling_line(status["scaling"]) if status.get("scaling") else "",
    ]
    text = Text("\n".join(part for part in parts if part), style="bold")
    if blocked := status.get("blocked"):
        text.append("\n" + printable(blocked_line(blocked)), style="bold red")
    return text


def _waiting(wait: Mapping[str, Any] | None) -> str:
    """What the pipeline waits for at this moment; a healthy one does too."""
    if not wait:
        return ""
    return printable(f"{wait['stage']} waits for {wait['waits_for']}  {wait['waited_s']:.0f} s")


def _worker_table(workers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("worker", "doing", "for", "idle", "running", "waiting", "tokens/s", "weights"):
        table.add_column(column, justify="left" if column in ("worker", "doing", "weights") else "right")
    for worker in workers:
        table.add_row(
            str(worker["worker"]),
            printable(str(worker["doing"])),
            f"{worker['since_s']:.0f} s",
            f"{worker['idle']:.0%}" if "idle" in worker else "",
            str(worker["running"] or ""),
            str(worker["waiting"] or ""),
            f"{worker['tokens_per_s']:.0f}" if worker.get("tokens_per_s") else "",
            str(worker["weights"]),
        )
    return table
