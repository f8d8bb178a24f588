"""Workers as jobs of Slurm, or as steps of the allocation that this process runs in; ``srun`` is the handle of each.

    on a login node            srun ──► a job of its own, for each worker; what the trainer's ranks are is one job
    in a batch script (below)  srun ──► a step of the allocation; workers beyond it are jobs of their own

srun passes on the environment (through slurmctld, never argv), output and exit code, and ends its job when it dies, so
a supervisor that was killed leaves little behind; what it left is found by name when the run is resumed. A job's
comment names the run's directory, by which two runs with one name are told apart.

Source: ours. Exit codes as measured with Slurm 22.05: a cancelled job or step is 143, a killed task 137, and 0
where the node was lost: only its last words tell that from work that is done.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from asyncio.subprocess import PIPE, Process
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from orchestrator.errors import ConfigError
from orchestrator.launch.launchers.base import NODE_LOST, ProcessSpec, Resources
from orchestrator.launch.launchers.local import start_child
from transport.contracts.settings import Settings
from transport.contracts.types import WorkerKind
from transport.errors import TransientError
from transport.process.programs import quoted
from transport.process.words import control_character

log = structlog.get_logger(__name__)

ANSWER_S = 20.0
"""For one question to slurmctld: a busy one retries by itself for about 10 s."""
GONE_S = 1.0
"""For a program that was killed to be gone."""
NOTICE_S = 180
"""Before its time limit a batch script is told (Slurm may do so a minute earlier)."""
SAVE_S = 90
"""After the notice the run goes on for so long, in which a checkpoint follows the batch in training; then it stops."""
NODE_FAILED = b"srun: error: Node failure"
ALLOCATION = "SLURM_JOB_ID"
PROGRAMS = ("srun", "squeue", "scancel", "sinfo")


class SlurmUnavailableError(TransientError):
    """slurmctld did not answer, or not as it should."""


def check_installed() -> None:
    """Raises ConfigError: this machine has no Slurm."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise ConfigError(
            f'launcher.kind: "slurm" needs {", ".join(missing)} in PATH on this machine: type the command on a login '
            "node of the cluster, or print a batch script with --dry-run",
            key="launcher.kind",
        )


class SlurmLauncher:
    is_local = False

    def __init__(
        self, settings: Settings, run_dir: Path, begun: Collection[str], environ: Mapping[str, str] = os.environ
    ) -> None:
        """begun: names of the processes that a run begins with, for which its batch script has room.  environ: of this
        process; inside an allocation it names the job.
        """
        self._settings = settings
        self._run = settings.run.name
        self._comment = str(run_dir.resolve())
        self._allocation = environ.get(ALLOCATION, "")
        self._begun = begun
        self._has_components = "SLURM_HET_SIZE" in environ
        self._started: dict[str, SrunProcess] = {}

    async def open(self, *, resume: bool) -> None:
        check_installed()
        try:
            await self._check_partition()
            left = await self._jobs()
        except SlurmUnavailableError as error:
            raise ConfigError(f"launcher.kind: Slurm does not answer here: {error}", key="launcher.kind") from error
        others = sorted({comment for _, _, comment in left if comment != self._comment})
        if others:
            raise ConfigError(
                f"launcher.kind: jobs of another run {self._run!r} are on this cluster, from {others[0]}: choose "
                "another --name, or end them with scancel",
                key="run.name",
            )
        for job_id, name, _ in left:  # this run's directory is locked, so who started them is gone
            log.warning("ending a job of an earlier start", job=job_id, name=name)
            await _ask("scancel", job_id)

    async def _check_partition(self) -> None:
        partition, known = self._settings.launcher.place, (await _ask("sinfo", "-h", "-o", "%R")).split()
        if not known:
            raise SlurmUnavailableError("sinfo names no partition")
        if partition and not set(partition.split(",")) <= set(known):
            raise ConfigError(
                f"launcher.place: there is no partition {partition!r}; there are: {', '.join(known)}",
                key="launcher.place",
            )

    async def start(self, spec: ProcessSpec, output: Path) -> SrunProcess:
        is_step = bool(self._allocation) and spec.name in self._begun
        command, name = self.command(spec, as_step=is_step), self._name(spec.name)
        # a process of a batch script inherits what its allocation was asked for, which is not for another job
        inherited = () if is_step else [key for key in os.environ if key.startswith("SLURM_") and key != "SLURM_CONF"]
        begun_at = _size(output)
        process = await start_child(
            ["env", *(f"--unset={key}" for key in inherited), *command] if inherited else command,
            {**spec.env, **({"STREAMRL_RANKS": os.urandom(8).hex()} if spec.ranks > 1 else {})},
            output,
        )
        started = self._started[spec.name] = SrunProcess(
            process, name, self._allocation if is_step else "", output, begun_at
        )
        return started

    def command(self, spec: ProcessSpec, *, as_step: bool) -> list[str]:
        """The srun command line of one process."""
        launcher, ask = self._settings.launcher, spec.resources
        words = ["srun", "--quiet", f"--job-name={self._name(spec.name)}", f"--ntasks={spec.ranks}", "--mpi=none"]
        words += _asking(ask, as_step=as_step)
        words += ["--kill-on-bad-exit=1"] if spec.ranks > 1 else []
        if as_step:
            words += ["--exact", *self._component(spec)]
        else:
            words += [f"--comment={self._comment}", *([f"--partition={launcher.place}"] if launcher.place else [])]
            words += launcher.options
        return [*words, *spec.argv]

    def _component(self, spec: ProcessSpec) -> list[str]:
        """Of the batch script's heterogeneous job: the trainer's ranks have one of their own."""
        return [f"--het-group={int(spec.kind is WorkerKind.TRAIN)}"] if self._has_components else []

    def _name(self, process: str) -> str:
        return f"streamrl/{self._run}/{process}"

    async def _jobs(self) -> list[tuple[str, str, str]]:
        """(id, name, comment) of this user's jobs that carry the run's name."""
        lines = (await _ask("squeue", "-h", "--me", "-o", "%i|%j|%k")).splitlines()
        jobs = [tuple(line.split("|", 2)) for line in lines]
        return [(job[0], job[1], job[2]) for job in jobs if len(job) == 3 and job[1].startswith(self._name(""))]

    async def pending(self) -> Mapping[str, str]:
        waiting = {started.name: name for name, started in self._started.items() if started.returncode is None}
        if not waiting:
            return {}
        try:
            lines = (await _ask("squeue", "-h", "--me", "-t", "PENDING", "-o", "%i|%j|%r")).splitlines()
        except SlurmUnavailableError as error:
            return {name: f"Slurm does not answer: {error}" for name in waiting.values()}
        found = [line.split("|", 2) for line in lines]
        return {waiting[job[1]]: f"Slurm job {job[0]}: {job[2]}" for job in found if job[1] in waiting}

    async def close(self) -> None:
        """Jobs that outlived their srun, which a node that does not answer may cause, are cancelled."""
        try:
            for job_id, _, comment in await self._jobs():
                if comment == self._comment:
                    await _ask("scancel", job_id)
        except SlurmUnavailableError as error:
            log.warning("jobs may be left", run=self._run, error=str(error))


class SrunProcess:
    """One srun: a job of its own, or a step of job ``allocation``. Signals go to its tasks by scancel.

    A signal to srun itself would end the job at once, without time for a worker to hand its work back.
    """

    def __init__(self, process: Process, name: str, allocation: str, output: Path, begun_at: int) -> None:
        """output, begun_at: where it writes, and from which byte on."""
        self._process = process
        self.name = name
        self._allocation = allocation
        self._output, self._begun_at = output, begun_at
        self._asking: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        code = await self._process.wait()
        return NODE_LOST if code == 0 and self._lost_node() else code

    def _lost_node(self) -> bool:
        with self._output.open("rb") as file:
            file.seek(self._begun_at)
            return any(line.startswith(NODE_FAILED) for line in file)

    def terminate(self) -> None:
        self._signal("TERM")

    def kill(self) -> None:
        self._signal("KILL")

    def _signal(self, number: str) -> None:
        asking = asyncio.get_running_loop().create_task(self._cancel(number), name=f"scancel {self.name}")
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    async def _cancel(self, number: str) -> None:
        try:
            if self._allocation:
                lines = (await _ask("squeue", "-h", "-s", "-j", self._allocation, "-o", "%i|%j")).splitlines()
                steps = [step for step, _, name in (line.partition("|") for line in lines) if name == self.name]
                if steps:
                    await _ask("scancel", f"--signal={number}", *steps)
            else:
                await _ask("scancel", "--me", f"--name={self.name}", "--state=PENDING")
                await _ask("scancel", "--me", f"--name={self.name}", "--state=RUNNING", f"--signal={number}")
        except SlurmUnavailableError as error:
            log.warning("a signal did not arrive", process=self.name, error=str(error))
        if number == "KILL" and self._process.returncode is None:
            await asyncio.wait({asyncio.ensure_future(self._process.wait())}, timeout=ANSWER_S)
            if self._process.returncode is None:  # its node does not answer: srun ends the job when it ends
                self._process.kill()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


async def _ask(*words: str) -> str:
    """What a command of Slurm prints. Raises SlurmUnavailableError."""
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=PIPE, stderr=PIPE
        )
    except OSError as error:
        raise SlurmUnavailableError(f"{words[0]} cannot be started: {error.strerror}") from error
    try:
        async with asyncio.timeout(ANSWER_S):
            out, errors = await process.communicate()
    except TimeoutError as error:
        raise SlurmUnavailableError(f"{words[0]} said nothing for {ANSWER_S:.0f} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            with suppress(TimeoutError):  # at once, unless a child of its own holds its output
                async with asyncio.timeout(GONE_S):
                    await process.wait()
    if process.returncode:
        raise SlurmUnavailableError(f"{words[0]}: {errors.decode(errors='replace').strip()}")
    return out.decode(errors="replace")


def _asking(ask: Resources, *, as_step: bool) -> list[str]:
    words = [f"--cpus-per-task={ask.cpus}"]
    words += [f"--mem={ask.memory_mib}M"] if ask.memory_mib else ["--mem=0"] if as_step else []
    return words + ([f"--gpus-per-task={ask.gpus}"] if ask.gpus else [])


# -- the batch script


def batch_script(settings: Settings, specs: Sequence[ProcessSpec], arguments: Sequence[str], program: str) -> str:
    """For ``sbatch``: one heterogeneous job, whose first component has broker, orchestrator and all workers but the
    trainer's ranks, which are the second; it is queued again, and goes on, after its time limit or a preemption.

    USR1, near the time limit or as a preemption's grace begins: a checkpoint is asked for, later TERM follows. TERM, of
    a preemption in which Slurm kills 30 s later: the run stops at once, and keeps what it has.

    arguments: of ``run``, as they were typed, without --dry-run and --resume.  program: streamrl-orchestrator, quoted.
    Raises: ConfigError: the time limit is so short that it would be told of its end as it begins.
    """
    launcher, name = settings.launcher, settings.run.name
    if 0 < launcher.time_limit_s < 2 * NOTICE_S:
        raise ConfigError(
            f"launcher.time_limit_s: {launcher.time_limit_s} s leave no time to train: the script is told of its end "
            f"{NOTICE_S} to {NOTICE_S + 60} s before it, to save and be queued again; give it {2 * NOTICE_S} or more",
            key="launcher.time_limit_s",
        )
    others = [spec for spec in specs if spec.kind is not WorkerKind.TRAIN]
    ranks = [spec for spec in specs if spec.kind is WorkerKind.TRAIN]

    def component(parts: Sequence[ProcessSpec], own_cpus: int) -> list[str]:
        words = [f"--ntasks={sum(part.ranks for part in parts) + own_cpus}", f"--cpus-per-task={launcher.cpus}"]
        words += [f"--mem-per-cpu={math.ceil(launcher.memory_mib / launcher.cpus)}M"] if launcher.memory_mib else []
        gpus = sum(part.resources.gpus * part.ranks for part in parts)
        words += [f"--gpus={gpus}"] if gpus else []
        return words + ([f"--partition={launcher.place}"] if launcher.place else []) + launcher.options

    first = [f"--job-name=streamrl-{name}", "--requeue", "--open-mode=append", "--no-kill"]
    first += [f"--signal=B:USR1@{NOTICE_S}", f"--output=streamrl-{name}.out"]
    if launcher.time_limit_s:
        first.append(f"--time={math.ceil(launcher.time_limit_s / 60)}")
    lines = ["#!/bin/bash", *map(_directive, [*first, *component(others, 1)])]
    if ranks:
        lines += ["#SBATCH hetjob", *map(_directive, component(ranks, 0))]
    own = "" if settings.broker.url or launcher.address else ' --set launcher.address="$(hostname)"'
    where, run_dir = quoted("--name", name, "--dir", settings.run.dir), f"{settings.run.dir}/{name}"
    lines += [
        "set -u",
        "[ ! -f /dev/stdout ] || chmod 600 /dev/stdout  # what a run says is for its user alone",
        "again= run= code=1",
        'stop() { again=1 told=1; kill -TERM "${run:=$!}"; }',
        f'save() {{ again=1 told=1; : "${{run:=$!}}"; timeout {SAVE_S} {program} checkpoint {quoted(run_dir)} &',
        f'  sleep {SAVE_S} & wait -n $! "$run"; kill -TERM "$run"; }}',
        "trap save USR1  # the time limit is near, or the grace of a preemption begins",
        "trap stop TERM  # of a preemption: Slurm kills 30 s later",
        f"if [ -f {quoted(f'{run_dir}/config.toml')} ]; then",
        f"  {program} run --resume {where} --launcher slurm --plain{own} &",
        "else",
        f"  {program} run {quoted(*arguments, '--name', name, '--plain')}{own} &",
        "fi",
        "run=${run:-$!}",
        "# A signal interrupts wait, which says so; the run's own end is asked for again. 127: it was said before.",
        'while told=; wait "$run"; end=$?; [ $end -eq 127 ] || code=$end; [ -n "$told" ]; do :; done',
        'if [ -n "$again" ] && [ $code -ne 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _directive(word: str) -> str:
    """A line of options for sbatch, which reads it up to the end of the line. Raises ConfigError: the word has one."""
    if control_character(word):
        raise ConfigError(
            f"launcher.options: {word!r} has control characters, which would end its line of the batch script",
            key="launcher.options",
        )
    return f"#SBATCH {quoted(word)}"
