"""The terminal while a run is on: one table where there is a terminal, plain lines where there is none.

Invariant: whatever a model wrote is stripped of control characters before a terminal sees it.
"""

from __future__ import annotations

import errno
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrator.errors import printable
from orchestrator.observability.metrics import reward_components, sets_of
from transport.broker import keys
from transport.contracts.messages import STARTING

QUEUES_SHOWN = 6
ASIDE_SHOWN = 4


class View(Protocol):
    """What the supervisor shows its user."""

    def note(self, text: str) -> None: ...  # one line that stays

    def batch(self, line: Mapping[str, Any]) -> None: ...  # one that was trained

    def status(self, status: Mapping[str, Any]) -> None: ...  # of the whole run, a few times a second

    def close(self) -> None: ...


def plain_console(*, pipe_columns: int | None = None) -> Console:
    """Console that prints texts as they are: a name in brackets is no markup.

    pipe_columns: its width where stdout is no terminal; None: as rich finds it.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    if pipe_columns is not None and not console.is_terminal:
        console.width = pipe_columns
    return console


def open_view(*, plain: bool) -> View:
    """A table if stdout is a terminal and ``plain`` is not asked for, else lines. Who stops reading ends no run."""
    console = plain_console()
    return UnreadView(PlainView() if plain or not console.is_terminal else TableView(console))


class UnreadView:
    """``view``, whose reader may go away: a terminal that is closed, a pager that is left. What it would say then is
    dropped, and so is all that this process writes there afterwards. Whether the run ends is up to the signal that a
    terminal sends (``nohup`` keeps it away).
    """

    def __init__(self, view: View) -> None:
        self._view = view

    def note(self, text: str) -> None:
        self._say(partial(self._view.note, text))

    def batch(self, line: Mapping[str, Any]) -> None:
        self._say(partial(self._view.batch, line))

    def status(self, status: Mapping[str, Any]) -> None:
        self._say(partial(self._view.status, status))

    def close(self) -> None:
        self._say(self._view.close)

    def _say(self, say: Callable[[], None]) -> None:
        try:
            say()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            _write_nowhere()


def _write_nowhere() -> None:
    """Stdout, and stderr where it goes to the same place: what lies in their buffers has to go somewhere at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    gone = os.fstat(sys.stdout.fileno())
    for stream in (sys.stderr, sys.stdout):
        if os.path.samestat(os.fstat(stream.fileno()), gone):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def batch_line(line: Mapping[str, Any], num_batches: int | None = None, *, left_s: float | None = None) -> str:
    """One trained batch as a line of at most COLUMNS characters: what is not known, or has no place, is left out.

    left_s: seconds to the end of the run, where that is known.
    """
    count = f"{line['batch'] + 1}/{num_batches}" if num_batches else f"{line['batch'] + 1}"
    width = 2 * len(str(num_batches)) + 1 if num_batches else 0
    components = reward_components(line)
    found = {
        name: text.format(line[name])
        for name, text in NUMBERS.items()
        if name in line and (line[name] or name in EVEN_IF_0)
    }
    for name, value in components.items():
        share = name.removesuffix("_with_filtered") in SHARES
        found[name] = f"{name.replace('_', '-')} " + (f"{value:4.0%}" if share else f"{value:.2f}")
    if left_s is not None:
        found["left"] = f"{duration(left_s)} left"
    order = ["reward", *components, *NUMBERS, "left"]
    shown, room = set[str](), COLUMNS - len(f"batch {count:<{width}}")
    for name in ("reward", *components, "left", *FIRST, *NUMBERS):
        if name in found and name not in shown and len(found[name]) + 2 <= room:
            shown.add(name)
            room -= len(found[name]) + 2
    named = dict.fromkeys(name for name in order if name in shown)
    return "  ".join([f"batch {count:<{width}}", *(found[name] for name in named)])


COLUMNS = 100
"""Of a line that says how a batch went: a terminal of this width shows it as one line."""
NUMBERS = {
    "reward": "reward {:.3f}",
    "no_signal": "no signal {:.0%}",
    "truncated": "cut {:.0%}",
    "response_tokens": "{:3.0f} tokens",
    "seconds": "{:.1f} s",
    "loss": "loss {:+.3f}",
    "grad_norm": "grad {:.2f}",
    "staleness": "staleness {:.1f}",
    "reward_with_filtered": "with filtered {:.3f}",
    "kl": "kl {:.4f}",
    "logprob_mismatch": "mismatch {:.4f}",
    "tokens_per_s": "{:.0f} tokens/s",
}
"""What is said of a batch beside the reward's components, as it stands in the line."""
FIRST = ("seconds", "no_signal", "grad_norm", "truncated", "loss")
"""Where there is no room for all: these, then those above in their order."""
EVEN_IF_0 = ("reward", "loss", "grad_norm")
SHARES = ("right", "well_formed")  # components of our own rewards that are shares of the samples


def duration(seconds: float) -> str:
    """In the two largest units: ``1 h 20 min``, ``3 min 10 s``, ``45 s``."""
    whole = max(0, round(seconds))
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


class TimeLeft:
    """How long a run still takes, by its last batches."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=10)  # more would be slow to follow a run that changes
        self._batch = 0
        self.num_batches: int | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        if "seconds" in line:
            self._seconds.append(line["seconds"])
        self._batch = line["batch"] + 1

    @property
    def left_s(self) -> float | None:
        """Seconds, None before the first batch, and for a run without an end."""
        if not self._seconds or not self.num_batches:
            return None
        return max(0, self.num_batches - self._batch) * fmean(self._seconds)


def _known(line: Mapping[str, Any], formats: Sequence[tuple[str, str]]) -> list[str]:
    return [text.format(line[name]) for name, text in formats if name in line]


def evaluation_lines(line: Mapping[str, Any]) -> list[str]:
    """How an evaluation ended, and a line for each of its named sets."""
    formats = (
        ("eval_reward", "reward {:.3f}"),
        ("eval_well_formed", "well-formed {:.0%}"),
        ("eval_right", "right {:.0%}"),
        ("eval_seconds", "{:.1f} s"),
        ("eval_share", "{:.0%} of generation"),
    )
    sets = sets_of([line])
    parts = [f"evaluation of version {line['version']}", *_known(line, formats)]
    short = f"ended short: {line['eval_short']}" if line.get("eval_short") else ""
    answered = f"{line['eval_answered']} of {line['eval_problems']} {'answers' if sets else 'problems'}"
    said = ["  ".join([*parts, answered, short]).rstrip()]
    for name, measured in sets.items():
        passes = [key for key in measured if key.startswith("pass@")]
        shown = (
            ("reward", "reward {:.3f}"),
            *((key, f"{key} {{:.0%}}") for key in dict.fromkeys((*passes[:1], *passes[-1:]))),
            ("right", "right {:.0%}"),
            ("problems", "{} problems"),
        )
        numbers = {key: line[f"eval/{name}/{key}"] for key in measured}
        said.append("  ".join([f"  {name}", *_known(numbers, shown)]))
    return said


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
    """How far the run is, and what was asked of it."""
    asked = [word for key, word in (("paused", "paused"), ("stop_reason", "stopping")) if status.get(key)]
    return "  ".join([how_far(status), *asked])


def how_far(status: Mapping[str, Any]) -> str:
    """Batches that are trained; a service gets as many requests as there are."""
    requests = status.get("num_requests")
    if requests is None:
        return f"trained {status.get('trained_version', 0)}/{status.get('num_batches', 0)}"
    return f"requests {requests}, {len(status.get('requests', ()))} of them open"


def scaling_line(scaling: Mapping[str, Any]) -> str:
    """``status["scaling"]`` as a line: the last change and why; "" before the first."""
    if scaling["changed"] < 0:
        return ""
    change = f"{scaling['from_workers']} -> {scaling['to_workers']} after batch {scaling['changed'] + 1}"
    return printable(f"generation workers {change}: {scaling['reason']}")


def gap_line(scaling: Mapping[str, Any]) -> str:
    """By how much generation was slower when it was judged last, and what more workers would save; "" before that."""
    if scaling.get("judged", -1) < 0:
        return ""
    slower, by_s = ("generation", scaling["delta_s"]) if scaling["delta_s"] > 0 else ("training", -scaling["delta_s"])
    return (
        f"batch {scaling['judged'] + 1}: {slower} is slower by {by_s:.3g} s; more workers would shorten generation by "
        f"{scaling['saved_s']:.3g} s"
    )


def blocked_line(blocked: Mapping[str, Any]) -> str:
    """``status["blocked"]`` as a line: the stage, what it waits for, who should act, for how long nothing came."""
    why = f" ({blocked['why']})" if blocked.get("why") else ""
    return (
        f"blocked: {blocked['stage']} waits for {blocked['waits_for']}; to act: {blocked['owner']}{why}; "
        f"no progress for {blocked['still_s']:.0f} s"
    )


def aside_workers(status: Mapping[str, Any]) -> list[str]:
    return [worker["worker_id"] for worker in status.get("generation", ()) if worker.get("aside_s") is not None]


def aside_lines(status: Mapping[str, Any]) -> list[str]:
    """Generation workers that stand aside, a line each: for how long, and why."""
    return [
        f"{worker['worker_id']} stands aside since {duration(worker['aside_s'])}: it cannot load "
        f"{_newest(status)} ({worker['load_problem']}); it is asked again"
        for worker in status.get("generation", ())
        if worker.get("aside_s") is not None
    ]


def _newest(status: Mapping[str, Any]) -> str:
    newest = status.get("newest")
    return f"weights e{newest['epoch']}v{newest['version']}" if newest else "weights"


def trouble_line(status: Mapping[str, Any]) -> str:
    """What went wrong so far, "" where nothing did: workers that were lost, restarts, units that were given up."""
    dead = status.get("queues", {}).get(keys.DEAD, 0)
    counts = (
        (status.get("num_lost", 0), "worker lost", "workers lost"),
        (status.get("restarts", 0), "restart", "restarts"),
        (dead, "dead letter", "dead letters"),
    )
    return "  ".join(f"{count} {one if count == 1 else many}" for count, one, many in counts if count)


class PlainView:
    """Lines on stdout, flushed: one a batch, and one whenever what blocks, what went wrong or who works changes."""

    def __init__(self) -> None:
        self._time_left = TimeLeft()
        self._blocked: tuple[str, ...] = ()
        self._said: dict[str, str] = {}
        self._aside = set[str]()

    def note(self, text: str) -> None:
        print(printable(text), flush=True)

    def batch(self, line: Mapping[str, Any]) -> None:
        self._time_left.add(line)
        print(batch_line(line, self._time_left.num_batches, left_s=self._time_left.left_s), flush=True)

    def status(self, status: Mapping[str, Any]) -> None:
        self._time_left.num_batches = status.get("num_batches")
        self._note_change("scaling", scaling_line(status["scaling"]) if status.get("scaling") else "")
        self._note_change("gap", gap_line(status["scaling"]) if status.get("scaling") else "")
        self._note_change("trouble", trouble_line(status))
        self._note_aside(status)
        blocked = status.get("blocked")
        named = tuple(str(blocked[name]) for name in ("stage", "waits_for", "owner")) if blocked else ()
        if named == self._blocked:
            return
        self._blocked = named
        if status.get("broker"):
            return  # said by a note of its own
        self.note(blocked_line(blocked) if blocked else "it goes on")

    def _note_aside(self, status: Mapping[str, Any]) -> None:
        """Each worker that stands aside once, and that it does no more."""
        lines = dict(zip(aside_workers(status), aside_lines(status), strict=True))
        for worker in lines.keys() - self._aside:
            self.note(lines[worker])
        for worker in self._aside - lines.keys():
            self.note(f"{worker} stands aside no more")
        self._aside = set(lines)

    def _note_change(self, what: str, text: str) -> None:
        if text != self._said.get(what, ""):
            self._said[what] = text
            self.note(text)

    def close(self) -> None: ...


class TableView:
    """A rich live table under the lines that stay."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._time_left = TimeLeft()
        self._live = Live(Text("starting"), console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def note(self, text: str) -> None:
        said = Text(printable(text), style="yellow" if text.startswith(WARNINGS) else "")
        self._console.print(said, soft_wrap=True)  # an address or a command stays one: it is there to be copied

    def batch(self, line: Mapping[str, Any]) -> None:
        self._time_left.add(line)
        said = Text(printable(batch_line(line, self._time_left.num_batches, left_s=self._time_left.left_s)))
        said.highlight_regex(r"^batch +\S+", "dim")
        said.highlight_regex(r"reward \S+", "bold green")
        said.highlight_regex(r"no signal \S+|cut \S+", "yellow")
        said.highlight_regex(r"(\d+ h )?\d+ (min|s)( \d+ s)? left", "cyan")
        said.highlight_regex(r"loss .*", "dim")
        self._console.print(said)

    def status(self, status: Mapping[str, Any]) -> None:
        self._time_left.num_batches = status.get("num_batches")
        self._live.update(Group(*_headline(status, self._time_left.left_s), _worker_table(status.get("workers", ()))))

    def close(self) -> None:
        self._live.stop()


WARNINGS = ("warning", "given up", "blocked", "damaged")
BAR = 24  # characters


def _headline(status: Mapping[str, Any], left_s: float | None) -> list[Text]:
    """How it goes, in one line; what went wrong; where the groups are; what is waited for; what waits in queues."""
    state, style = _state(status)
    done, total = status.get("trained_version", 0), status.get("num_batches") or 0
    filled = round(BAR * min(1.0, done / total)) if total else 0
    bar = ("━" * filled, "green"), ("━" * (BAR - filled), "bright_black")
    first = Text.assemble(
        (state, f"bold {style}"),
        ("  " + str(status.get("run", "")), "bold"),
        f"  {how_far(status)}  ",
        *(bar if status.get("num_requests") is None else ()),
        f"  {duration(status.get('elapsed_s', 0.0))}",
        ", " if left_s is not None else "",
        (f"{duration(left_s)} left" if left_s is not None else "", "cyan"),
    )
    stages = ("pending", "running", "scoring", "ready", "rounds_outstanding")
    groups = "  ".join(f"{name.replace('_', ' ')} {status[name]}" for name in stages if name in status)
    queues = {name: depth for name, depth in status.get("queues", {}).items() if depth}
    deepest = sorted(queues.items(), key=lambda item: -item[1])[:QUEUES_SHOWN]
    wait, blocked = status.get("wait"), status.get("blocked")  # something is waited for also where all is well
    lines = [
        (trouble_line(status), "bold yellow"),
        (status.get("given_up", "") and f"given up: {status['given_up']}", "yellow"),
        (f"groups: {groups}", ""),
        ("{stage} waits for {waits_for}  {waited_s:.0f} s".format_map(wait) if wait and not blocked else "", ""),
        ("queues: " + ("  ".join(f"{name} {depth}" for name, depth in deepest) or "empty"), "dim"),
        (ranker_line(status["ranker"]) if status.get("ranker") else "", "dim"),
        (scaling_line(status["scaling"]) if status.get("scaling") else "", ""),
        *((line, "yellow") for line in aside_lines(status)[:ASIDE_SHOWN]),
        (blocked_line(blocked) if blocked else "", "bold red"),
    ]
    shown = (Text(printable(text), style=style, overflow="fold") for text, style in lines if text)
    return [Text(""), first, *shown]


def _state(status: Mapping[str, Any]) -> tuple[str, str]:
    """How the run is, in a word, and its colour."""
    if status.get("broker"):
        return "broker away", "red"
    if status.get("blocked"):
        return "blocked", "red"
    if status.get("stop_reason") or status.get("finish_reason"):
        return "ending", "yellow"
    if status.get("paused"):
        return "paused", "yellow"
    ready = any(worker["doing"] != STARTING and worker["kind"] != "score" for worker in status.get("workers", ()))
    return ("healthy", "green") if ready else ("starting", "yellow")


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
            " ".join(filter(None, (str(worker["weights"]), worker.get("way", "")))),
        )
    return table
