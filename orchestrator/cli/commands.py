"""``streamrl-orchestrator``: the commands, their help, and which module each of them starts.

Each command imports what it needs when it is called, so that ``--help``, ``--dry-run`` and a bad configuration answer
at once (no torch, no transformers).
"""

from __future__ import annotations

import functools
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.plan import plan
from orchestrator.cli.rank import rank
from orchestrator.cli.simulate import simulate
from orchestrator.cli.usage import advice
from orchestrator.config.load import (
    Resolved,
    check_resume,
    is_chosen,
    preset_names,
    presets_of,
    read_preset,
    render,
    resolve,
)
from orchestrator.config.run_directory import RunDir, newest_name, next_free_name
from orchestrator.config.starts import read_starts
from orchestrator.errors import ConfigError, check_out
from transport.contracts.settings import Settings
from transport.process.files import check_own
from transport.process.programs import add_version, group_with_hints, with_options

EXIT_CODES = (
    "Exit codes: 0 finished (also --resume of a run that was finished); 1 failed; "
    "2 bad configuration or data, nothing started; "
    "3 stalled: no progress for liveness.stall_s, kept for --resume; "
    "5 the disk is full or may not be written, or the broker is full, kept for --resume; "
    "130 interrupted, kept for --resume."
)
DEFAULT_PRESET = "smollm2"

app = typer.Typer(
    name="streamrl-orchestrator",
    cls=group_with_hints(advice),
    help=f"Reinforcement learning post-training of LLMs.\n\n{EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug keeps its plain traceback
    rich_markup_mode=None,
)


add_version(app)


app.add_typer(rank, name="rank")
app.command(
    help="Choose among GPUs: which generate, which train, how each stage is split; with the iteration time, the idle "
    "shares and the cost to expect, by simulation. Nothing is started. Exit codes: 0 a plan; 2 nothing fits, or an "
    "argument is wrong. [docs/planning.md]"
)(plan)
app.command(
    help="Simulate a scenario with the code that decides live: seconds of an iteration, bubbles by cause, distance to "
    "the physical bound. Nothing is started. [docs/simulation.md]"
)(simulate)


def _find(given: Path) -> Path:
    """A run may also be named as ``run --name`` does: below the directory where runs are kept by default."""
    below = Path(Settings().run.dir) / given
    return below if not RunDir(given).exists() and below.exists() else given


RunDirectory = Annotated[
    Path, typer.Argument(metavar="RUN", callback=_find, help="Directory of the run, <dir>/<name>, or its name in runs.")
]
RunsBroker = Annotated[
    str | None,
    typer.Option(
        "--broker",
        help="URL of the run's broker, where it is one of your own with a password: that goes to no address that only "
        "the run's files name.",
    ),
]
LauncherOption = Annotated[
    str | None,
    typer.Option(
        "--launcher",
        metavar="KIND",
        help="Who starts the workers: local, slurm, ray or kubernetes: --set launcher.kind=KIND. [docs/clusters.md]",
    ),
]
RunsDirectory = Annotated[str | None, typer.Option("--dir", help="Where runs are kept: --set run.dir=DIR.")]


@functools.cache
def _is_trusted(question: str) -> bool:
    """Answer that is typed at the terminal; False without one."""
    return sys.stdin.isatty() and sys.stderr.isatty() and typer.confirm(f"{question}. Use it?", err=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The options that say how a run is configured. Its methods raise ConfigError."""

    preset: Annotated[
        str | None,
        typer.Option(help=f"Start from a preset: {', '.join(preset_names())}. [{DEFAULT_PRESET} without --config]"),
    ] = None
    config_file: Annotated[
        list[Path] | None,
        typer.Option("--config", help="TOML file laid over the preset; may be repeated, a later one wins."),
    ] = None
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="One setting, over all files; may be repeated."),
    ] = None
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Also --config files that others can have written, and that name programs."),
    ] = False

    def overrides(self, **named: str | None) -> list[str]:
        """Those of ``--set``, and those of options of their own: ``run_name``."""
        own = [f"{key.replace('_', '.', 1)}={value}" for key, value in named.items() if value is not None]
        return [*(self.override or []), *own]

    def resolve(self, overrides: list[str]) -> Resolved:
        files = self.config_file or []
        preset = self.preset or (None if files else DEFAULT_PRESET)
        return resolve(preset, files, overrides, os.environ, trusts=self._trusts)

    def _trusts(self, question: str) -> bool:
        return self.trust or _is_trusted(question)

    def resolve_new(self, overrides: list[str]) -> Resolved:
        """For a run that begins: a name that was not chosen is numbered when it is taken."""
        resolved = self.resolve(overrides)
        run = resolved.settings.run
        free = next_free_name(Path(run.dir), run.name)
        chosen = free == run.name or is_chosen(resolved, "run.name")
        return resolved if chosen else self.resolve([*overrides, f"run.name={free}"])

    def resolve_resumed(self, overrides: list[str]) -> Resolved:
        """The settings a run was started with, and over them what is asked for now.

        The run is found by the name and directory that the arguments alone give, the newest of a preset's where no name
        is given; its own config.toml comes first. It goes on where it is found, also as a copy of the run that its
        config.toml was written for.
        """
        asked = self.resolve([argument for argument in overrides if argument.startswith("run.")])
        directory, name = Path(asked.settings.run.dir), asked.settings.run.name
        if not is_chosen(asked, "run.name"):
            name = newest_name(directory, name)
        stored = directory / name / "config.toml"
        if not stored.is_file():
            raise ConfigError(f"there is no run to resume: {stored} does not exist; name it with --name and --dir")
        check_own(stored.parent.resolve())
        before = resolve(None, [], [], {}, stored=stored)
        self._check_preset(before, RunDir(stored.parent))
        places = (("run.dir", str(directory), before.settings.run.dir), ("run.name", name, before.settings.run.name))
        moved = [f"{key}={found}" for key, found, written in places if found != written]
        files = self.config_file or []
        resolved = resolve(None, files, [*overrides, *moved], os.environ, stored=stored, trusts=self._trusts)
        check_resume(before.settings, resolved)
        return resolved

    def _check_preset(self, before: Resolved, rundir: RunDir) -> None:
        """Raises ConfigError: ``--preset`` names another one than the run began with. before: as it was."""
        if self.preset is None:
            return
        read_preset(self.preset)
        named = [start.preset for start in read_starts(rundir)[:1]] or [*presets_of(before)]
        if self.preset not in named:
            began = f"began with preset {named[0]}" if any(named) else "began without a preset"
            raise ConfigError(
                f"the run {before.settings.run.name} {began}, and a resumed run keeps its own settings: leave out "
                "--preset, and name what shall change with --set or --config; or start a new run under another --name",
                where=f"--preset {self.preset}",
            )


@app.command(help=f"Train: start every process of a run and see it through.\n\n{EXIT_CODES}")
@with_options(Configuration)
def run(
    configuration: Configuration,
    name: Annotated[
        str | None, typer.Option(help="Name of the run: --set run.name=NAME. [the preset's, numbered when it is taken]")
    ] = None,
    directory: RunsDirectory = None,
    launcher: LauncherOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run of this name, with its own settings.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the settings that are not defaults, with where each value came from, and stop; "
            "`settings NAME` explains one. "
            "With a --launcher but local: print what would be submitted, a batch script or manifests.",
        ),
    ] = False,
    all_settings: Annotated[bool, typer.Option("--all", help="With --dry-run: defaults, too.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="With --dry-run --launcher kubernetes: a new directory for the manifests, a Kustomize base."),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live table.")] = False,
) -> None:
    overrides = configuration.overrides(run_name=name, run_dir=directory, launcher_kind=launcher)
    resolved = configuration.resolve_resumed(overrides) if resume else configuration.resolve_new(overrides)
    if all_settings and not dry_run:
        raise typer.BadParameter("--all goes with --dry-run: it prints settings, and starts nothing")
    if out is not None:
        if not dry_run:
            raise typer.BadParameter("--out goes with --dry-run: it starts nothing")
        from orchestrator.launch.submission import write_base

        write_base(resolved, sys.argv[2:], out)
        typer.echo(f"written; see it with: kubectl kustomize {out}")
        return
    if dry_run and resolved.settings.launcher.kind != "local":
        from orchestrator.launch.submission import submission

        typer.echo(submission(resolved, sys.argv[2:]), nl=False)
        return
    if dry_run:
        from orchestrator.launch.checks import check_ranker_files, check_workers_inputs
        from orchestrator.launch.gpus import place_gpus, with_numbers
        from orchestrator.launch.processes import workers_of

        check_workers_inputs(resolved.settings)
        check_ranker_files(resolved.settings)
        placed = place_gpus(resolved.settings)
        lines = placed.lines(workers_of(placed.settings)) if placed else ()
        shown = render(with_numbers(resolved, placed), defaults=all_settings) + "".join(f"# {line}\n" for line in lines)
        typer.echo(shown, nl=False)
        return
    from orchestrator.launch import supervisor

    raise typer.Exit(supervisor.run(resolved, resume=resume, plain=plain))


@app.command(
    help="Answer the prompts of a configuration with its model alone, and write lengths and rewards to a file: for "
    "`rank train`, ranker.base_lengths and data.rewards. Called again, it goes on where it ended. [docs/ranker.md]"
)
@with_options(Configuration)
def collect(
    configuration: Configuration,
    out: Annotated[Path, typer.Option(help="File of JSON lines to write, or to go on with.")],
    samples: Annotated[int, typer.Option(min=1, help="Answers to each prompt.")] = 4,
    prompts: Annotated[int | None, typer.Option(min=1, help="The first so many prompts. [all of them]")] = None,
    rewards: Annotated[bool, typer.Option("--rewards/--no-rewards", help="Also score each answer.")] = True,
    answers: Annotated[
        Path | None,
        typer.Option(help="File that gets the answers as rows to imitate (data.response_column=response). [none]"),
    ] = None,
    above: Annotated[
        float | None, typer.Option(help="Of those, only answers with a reward above it. [all that ended by themselves]")
    ] = None,
) -> None:
    from orchestrator.cli import collect as collecting

    check_out(out)
    settings = configuration.resolve(configuration.overrides()).settings
    kept = None if answers is None else collecting.Kept(answers, -math.inf if above is None else above)
    if above is not None and (kept is None or not rewards):
        raise ConfigError("--above chooses among answers by their rewards: it needs --answers FILE, and rewards")
    raise typer.Exit(collecting.main(settings, out, samples=samples, prompts=prompts, rewards=rewards, kept=kept))


@app.command(
    help="Explain settings: default, range, unit, what each does. Without NAME all of them, as docs/settings.md."
)
def settings(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="trainer.lr, or a section: trainer.")
    ] = None,
) -> None:
    from orchestrator.config.schema import ENTRIES, FIELDS, SECTIONS, TABLES, explained, nearest, settings_table

    for name in names or []:
        if name not in (*FIELDS, *SECTIONS, *ENTRIES, *TABLES):
            hint = (
                nearest(name, [*FIELDS, *ENTRIES]) or nearest(name, [*SECTIONS]) or f"; sections: {', '.join(SECTIONS)}"
            )
            raise ConfigError(f"there is no setting {name}{hint}", where="settings")
    typer.echo("\n\n".join(map(explained, names)) if names else settings_table())


@app.command(
    name="list", help="The runs of a directory, the newest first: name, state, batches, reward, last event, model."
)
def list_(
    directory: Annotated[Path | None, typer.Option("--dir", help="Where runs are kept. [runs]")] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Objects instead, with why each ended and how to go on; times in UTC."),
    ] = False,
) -> None:
    from orchestrator.cli import runs

    raise typer.Exit(
        runs.main_list(directory or Path(Settings().run.dir), chosen=directory is not None, as_json=as_json)
    )


@app.command(help="Stop a run as Ctrl-C in its terminal does, wait until it has, and say how to go on with it.")
def stop(
    run_dir: RunDirectory,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0.0, metavar="SECONDS", help="How long to wait for its end at most.")
    ] = 120.0,
) -> None:
    from orchestrator.cli import runs

    raise typer.Exit(runs.main_stop(run_dir, wait_s=wait_s))


@app.command(help="Look into a run: what it is doing, or what it did. [--follow, --audit]")
def inspect(
    run_dir: RunDirectory,
    audit: Annotated[
        bool, typer.Option("--audit", help="Recompute that every row of every trained batch was trained exactly once.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on looking until the run is over; plain lines without a terminal.")
    ] = False,
    broker: RunsBroker = None,
) -> None:
    from orchestrator.cli import inspect as inspection

    raise typer.Exit(inspection.main(run_dir, audit=audit, follow=follow, broker_url=broker))


@app.command(help="What the processes of a run wrote, merged by time; their files are in <run>/logs.")
def logs(
    run_dir: RunDirectory,
    process: Annotated[
        str | None, typer.Argument(metavar="[PROCESS]", help="orchestrator, train-0, score-0, ...  [all of them]")
    ] = None,
    num_lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, metavar="LINES", help="The last so many lines.")
    ] = 40,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then those that come, until the run has ended.")
    ] = False,
) -> None:
    from orchestrator.cli import logs

    raise typer.Exit(logs.main(run_dir, process, num_lines=num_lines, follow=follow))


def _dead_letters(name: str, text: str, *, drop: bool) -> None:

    @app.command(name=name, help=text)
    def handle(
        run_dir: RunDirectory,
        letter_ids: Annotated[
            list[str] | None, typer.Argument(metavar="ID...", help="Dead letters, as inspect names them.")
        ] = None,
        all_letters: Annotated[bool, typer.Option("--all", help="Every dead letter.")] = False,
        broker: RunsBroker = None,
    ) -> None:
        from orchestrator.cli import control

        raise typer.Exit(control.main_letters(run_dir, letter_ids or [], broker, all_letters=all_letters, drop=drop))


_dead_letters("retry", "Put dead letters back into their queues, where their units are still wanted.", drop=False)
_dead_letters("drop", "Forget dead letters.", drop=True)


@app.command(help="Write a run's trace for Perfetto, and draw it: what every worker did, and why it was idle.")
def timeline(
    run_dir: RunDirectory,
    svg: Annotated[bool, typer.Option("--svg", help="Also draw it as timeline.svg.")] = False,
    png: Annotated[bool, typer.Option("--png", help="Also draw it as timeline.png.")] = False,
    batches: Annotated[
        str, typer.Option(metavar="FIRST-LAST", help="Draw only these, from 1: timeline-FIRST-LAST.svg. [all]")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Directory to write to. [the run's]")] = None,
) -> None:
    from orchestrator.observability.report import pages

    raise typer.Exit(pages.timeline(run_dir, svg=svg, png=png, out=out, batches=batches))


@app.command(help="Write a run's report: one HTML file with its curves, timeline, idle seconds, failures and samples.")
def report(
    run_dir: RunDirectory,
    out: Annotated[Path | None, typer.Option(help="File to write. [report.html of the run]")] = None,
) -> None:
    from orchestrator.observability.report import pages

    raise typer.Exit(pages.report(run_dir, out))


@app.command(help="Put several runs side by side in one HTML file: results, settings that differ, curves, timelines.")
def compare(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUNS", help="Directories of the runs, or their names.")],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("comparison.html"),
) -> None:
    from orchestrator.observability.report import pages

    raise typer.Exit(pages.compare([_find(run_dir) for run_dir in run_dirs], out))


def _control(request: str, text: str) -> None:

    @app.command(name=request, help=f"Ask a running run: {text} Visible in its journal and status.")
    def ask(run_dir: RunDirectory, broker: RunsBroker = None) -> None:
        from orchestrator.cli import control

        raise typer.Exit(control.main(run_dir, request, broker))


_control("pause", "dispatch nothing new; running samples finish.")
_control("resume", "end a pause.")
_control("drain", "finish the batch in training, save the last checkpoint and the final model, end. [--resume goes on]")
_control("checkpoint", "save a checkpoint after the batch in training.")


@app.command(
    name="set",
    help="Change a setting of a running run: run.batches, trainer.checkpoint_every, or of pipeline max_staleness, "
    "update, max_refills, max_attempts, rollout_timeout_s. It holds until --resume is given another.",
)
def set_(
    run_dir: RunDirectory,
    assignment: Annotated[str, typer.Argument(metavar="SECTION.KEY=VALUE")],
    broker: RunsBroker = None,
) -> None:
    from orchestrator.cli import control

    raise typer.Exit(control.main_set(run_dir, assignment, broker))


@app.command(
    help="Measure this machine's engine and trainer, alone and at once, fit the cost model to them, and write it: for "
    "`simulate` and `plan` (--profile), for plans of dispatch and the number of workers (`run --config`). Settings as "
    "for `run` say which: batches of up to generation.slots samples and micro-batches of up to "
    "trainer.micro_batch_tokens tokens are measured. It takes one to five minutes and wants the machine for itself; "
    "coefficients are seconds a step, a sample, a token. [docs/simulation.md]"
)
@with_options(Configuration)
def profile(
    configuration: Configuration,
    out: Annotated[
        Path, typer.Option(help="Files to write, without their endings: .json for --profile, .toml for --config.")
    ] = Path("profile"),
    fp8_kv: Annotated[
        bool, typer.Option("--fp8-kv", help="Measure the engine once more with keys and values in one byte, not two.")
    ] = False,
    fp8_weights: Annotated[
        bool, typer.Option("--fp8-weights", help="And with its weights in one byte; with both options at once, both.")
    ] = False,
) -> None:
    resolved = configuration.resolve(configuration.overrides())
    from orchestrator.cli import profile
    from transport.contracts.llms import Fp8

    raise typer.Exit(profile.main(resolved.settings, out, Fp8(kv=fp8_kv, weights=fp8_weights)))


@app.command(help="Replay a run's journal: the same events must give the same commands.")
def replay(run_dir: RunDirectory) -> None:
    from orchestrator.sim import replay as replaying

    raise typer.Exit(replaying.main(run_dir))


@app.command(
    help="The control plane alone, against a broker that is there: workers join with streamrl-worker, at "
    "any time. The broker's password comes from STREAMRL_BROKER_PASSWORD. With --run-dir it is the process that "
    f"`run` starts, and reads <run-dir>/config.toml.\n\n{EXIT_CODES} 4: starting it again is no use."
)
@with_options(Configuration)
def serve(
    configuration: Configuration,
    broker: Annotated[str, typer.Option(help="redis://host:port, rediss://host:port or unix://path.")],
    run_name: Annotated[str | None, typer.Option("--run", help="Name of the run. [the preset's]")] = None,
    directory: RunsDirectory = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Start the generation workers that the run asks for as it grows: local, slurm, ray or kubernetes. "
            "[they join by hand]",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run of this name.")] = False,
    or_resume: Annotated[
        bool,
        typer.Option(
            "--or-resume",
            help="Go on with the run of this name where there is one, as it was (paused, if it was); else start it.",
        ),
    ] = False,
    run_dir: Annotated[Path | None, typer.Option(help="Directory with the run's config.toml, made by `run`.")] = None,
    model_dir: Annotated[
        Path | None, typer.Option(help="Hugging Face directory with the model's tokenizer. [prepared from model.path]")
    ] = None,
) -> None:
    from orchestrator.launch.app import main, main_alone

    if run_dir is not None:
        if run_name is None or model_dir is None:
            raise ConfigError("--run-dir needs --run and --model-dir")
        raise typer.Exit(
            main(run=run_name, broker_url=broker, run_dir=run_dir, model_dir=model_dir, environ=os.environ)
        )
    overrides = configuration.overrides(run_name=run_name, run_dir=directory, broker_url=broker, launcher_kind=launcher)
    resolved = configuration.resolve(overrides)
    there = or_resume and RunDir(Path(resolved.settings.run.dir) / resolved.settings.run.name).exists()
    if resume or there:
        resolved = configuration.resolve_resumed(overrides)
    grows = launcher is not None
    raise typer.Exit(main_alone(resolved, resume=resume or there, reopen=resume, model_dir=model_dir, grows=grows))
