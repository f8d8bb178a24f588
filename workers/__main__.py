"""``streamrl-worker``: the command line of every worker process.

torch is imported only by the command that needs it, so that ``--help`` is instant.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import msgspec
import structlog
import typer
import uvloop

# The working directory comes before us with ``python -m``: a transport.py of the user's is not ours
if sys.path[0] == os.getcwd() != str(Path(__file__).parents[1]):
    del sys.path[0]

from transport.contracts.settings import BrokerSettings, Name
from transport.contracts.types import RunName, WorkerKind
from transport.errors import MISTAKES, BrokerFullError, DirectoryError, FatalError, StreamError
from transport.process import faults
from transport.process.programs import (
    LAUNCHED,
    add_version,
    configure_logs,
    ending_signals,
    group_with_hints,
    python_module,
    versions,
    with_options,
)
from transport.process.secret import BROKER_PASSWORD, ENGINE_KEY, SHARED_SECRET, read_secret
from transport.tensors.base import parse_ports
from workers.errors import SETUP_MISTAKES

if TYPE_CHECKING:
    from workers.commands.build import Make
    from workers.leases.lifecycle import WorkerFactory

EXIT_FAILED = 1
"""Starting it again is worth a try: the broker or a server was away for too long."""
EXIT_BAD_CONFIG = 2
"""What the command line, the environment or the run's settings say must change: a model, a reward, a GPU, a port."""
EXIT_FATAL = 4
"""Starting this process again is no use; the last line of its log says why."""
EXIT_FULL = 5
"""The broker took no writes for as long as this process may wait, or a directory takes none: make room first."""
EXIT_SIGNALLED = 143
"""As a shell reports SIGTERM: its work is not over, a supervisor starts it again. A storage unit has no other end."""

BAD_CONFIG = (*MISTAKES, *SETUP_MISTAKES)

RANK_VARIABLES = ("RANK", "SLURM_PROCID")
"""In which torchrun, and Slurm's srun, number the processes that they start."""

MAX_SITE_CHARACTERS = 64  # the page shows it

HEARTBEAT_VARIABLE = "STREAMRL_HEARTBEAT"
"""A file to touch whenever the lease was renewed; with a number it is ``<file>.<number>``, as several ranks may share a
container, whose health check goes by the oldest of them (compose/health.sh)."""

ORCHESTRATOR_COMMANDS = [
    "run",
    "collect",
    "plan",
    "simulate",
    "settings",
    "list",
    "stop",
    "inspect",
    "logs",
    "retry",
    "drop",
    "timeline",
    "report",
    "compare",
    "pause",
    "resume",
    "drain",
    "checkpoint",
    "set",
    "replay",
    "serve",
    "rank",
]
"""What only the other program has."""


def advice(message: str, typed: list[str]) -> str:
    """For a command of the other program; "" for any other message."""
    if message.startswith("No such command") and typed and typed[0] in ORCHESTRATOR_COMMANDS:
        return f"it is one of streamrl-orchestrator: streamrl-orchestrator {typed[0]}"
    return ""


app = typer.Typer(
    cls=group_with_hints(advice),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Worker processes of StreamRL. They join a run over its broker, at any time, and leave when it is over.\n\n"
    "Exit codes: 0 the run is over, or the command is done; 1 failed, starting it again is worth a try; 2 bad command "
    "line, environment or settings; 4 starting it again is no use; 5 the broker or a directory takes no writes; "
    "143 ended by a signal, its work goes to others.",
)


add_version(app)


Index = Annotated[
    str,
    typer.Option(
        help='number of this worker among its kind, from 0, for one that is started again under its number; "auto": '
        "one that no other worker had"
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The options of every worker that computes on GPUs."""

    gpus: Annotated[
        str, typer.Option(help="GPUs of this machine of which this worker takes what is free: 0,2-3 or all")
    ] = ""
    gpus_each: Annotated[int, typer.Option(min=1, help="GPUs that it takes of them")] = 1
    gpu_share: Annotated[
        float, typer.Option(help="of their memory, what it may use, 0 to 1; below 1 others may share these GPUs")
    ] = 1.0

    def take(self, *, of_all: bool = False) -> None:
        """Before torch is imported. of_all: without --gpus, of all that the machine has, if any. Raises GpuError."""
        from transport.process.gpus import list_gpus, take_gpus

        wanted = self.gpus or ("all" if of_all and list_gpus() else "")
        take_gpus(wanted, each=self.gpus_each, share=self.gpu_share)


UserReward = Annotated[
    str, typer.Option(help="module:function, or code, that this machine allows as reward; the run's must be the same")
]
EnvironmentOption = Annotated[
    str,
    typer.Option(
        "--environment", metavar="MODULE:FUNCTION", help="environment that the run may use here; several: a:b,c:d"
    ),
]
EnvironmentPath = Annotated[
    str, typer.Option(help="directory that the environment is imported from  [only what is installed]")
]
RewardPath = Annotated[str, typer.Option(help="directory that the reward is imported from  [only what is installed]")]
FunctionsPath = Annotated[
    str, typer.Option(help="directory that a loss or an advantage is imported from  [only what is installed]")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="allow code that comes with the model to run on this machine")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """The options of every worker that joins a run."""

    broker: Annotated[str, typer.Option(help="redis:// or rediss:// URL of the run's broker")]
    run: Annotated[str, typer.Option(help="name of the run")]
    run_dir: Annotated[
        Path | None, typer.Option(help="directory for what this worker writes  [runs/<run>]", show_default=False)
    ] = None
    model_dir: Annotated[
        Path | None,
        typer.Option(
            help="local Hugging Face directory of the base model  [prepared from the run's model.path]",
            show_default=False,
        ),
    ] = None
    tls_ca: Annotated[str, typer.Option(help="CA file for a rediss:// broker")] = ""
    tls_cert: Annotated[str, typer.Option(help="certificate for a rediss:// broker that asks for one")] = ""
    tls_key: Annotated[str, typer.Option(help="file of its private key")] = ""
    outage_s: Annotated[float, typer.Option(metavar="SECONDS", help="how long to wait for a broker that went away")] = (
        BrokerSettings().outage_s
    )
    run_id: Annotated[
        str,
        typer.Option(help="id of the run, from its journal/run.json  [of the run that has this name at the broker]"),
    ] = ""
    site: Annotated[
        str, typer.Option(help="name of the datacenter that this worker is in, where there are several")
    ] = ""

    @property
    def home(self) -> Path:
        """Where this worker writes: by default where the orchestrator does."""
        return self.run_dir or Path("runs") / self.run

    def serve(self, kind: WorkerKind, index: int | None, make: Make, *, trust: bool = False) -> None:
        """Work for the run, with its model, until it is over. trust: may the model bring code?"""
        from workers.commands.build import with_model

        self.join(kind, index, with_model(self.model_dir, trust, make))

    def join(self, kind: WorkerKind, index: int | None, build: WorkerFactory) -> None:
        """Work for the run until it is over."""
        from transport.broker.redis_streams import connect
        from transport.process.clock import MonotonicClock
        from workers.leases.lifecycle import serve_worker

        try:
            msgspec.convert(self.run, Name)
        except msgspec.ValidationError as error:
            raise typer.BadParameter(f"--run: {self.run!r} is no name of a run") from error
        if len(self.site) > MAX_SITE_CHARACTERS or not self.site.isprintable():
            raise typer.BadParameter(f"--site: {self.site!r} is no name of at most {MAX_SITE_CHARACTERS} characters")
        check_node(os.environ)
        password = read_secret(os.environ, BROKER_PASSWORD)
        settings = BrokerSettings(
            url=self.broker,
            password=password,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            outage_s=self.outage_s,
        )
        heartbeat = heartbeat_file(index)

        async def serve() -> bool:
            broker = await connect(settings, RunName(self.run))
            try:
                if self.run_id:
                    await broker.join_run(self.run_id)
                return await serve_worker(
                    broker, kind, index, build, MonotonicClock(), site=self.site, heartbeat_file=heartbeat
                )
            finally:
                await broker.close()

        configure_logs(process=kind.value if index is None else f"{kind.value}-{index}")
        faults.arm(os.environ.get("STREAMRL_FAULTS", ""))
        if not uvloop.run(serve()):
            _leave(EXIT_SIGNALLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publishing(Joining):
    """And of those that others fetch weights or rows from; of the run's settings it is tensors or rows that counts."""

    listen: Annotated[str, typer.Option(help="address to serve on  [host in the run's settings]")] = ""
    advertise: Annotated[str, typer.Option(help="what other hosts call this one  [advertise there]")] = ""
    ports: Annotated[str, typer.Option(help="port, or range of ports, to serve on  [ports there]")] = ""

    @property
    def address(self) -> dict[str, str]:
        """Settings of the section that this machine overrides, where they are not empty."""
        _ports(self.ports)
        return {"host": self.listen, "advertise": self.advertise, "ports": self.ports}


@app.command()
def prepare(
    model: Annotated[str, typer.Option(help="model.path of the run")],
    trains: Annotated[bool, typer.Option("--trains", help="also check that a trainer can train it")] = False,
    max_context: Annotated[int, typer.Option(min=0, help="generation.max_context of that run")] = 0,
    served: Annotated[bool, typer.Option("--served", help="SGLang or vLLM generates in that run")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Turn a model path into a local Hugging Face directory, check its kind and chat template, and print it.

    What is allowed and hardly meant is printed before it, each in a line that begins with "note: ".
    """
    from workers.models import check_kind, model_cache, prepare_model, remarks_on_ends, try_chat_template

    kept = model_cache(os.environ)
    directory = prepare_model(model, cache_dir=kept, trust_remote_code=trust_remote_code)
    remarks: list[str] = []
    if directory.parent != kept:  # those we wrote ourselves, as what they are
        check_kind(directory)
        if trains:
            from workers.commands.check import check_trained

            remarks += check_trained(directory, max_context, served=served, trust_remote_code=trust_remote_code)
    remarks += remarks_on_ends(directory, try_chat_template(directory))
    for remark in remarks:
        print(f"note: {remark}")
    print(directory)


@app.command()
@with_options(Joining, Gpus)
def generate(
    joining: Joining,
    gpus: Gpus,
    index: Index = "auto",
    trust_remote_code: TrustRemoteCode = False,
    engine_url: Annotated[str, typer.Option(help="SGLang or vLLM server to use, http://host:port  [its own]")] = "",
    server_command: Annotated[str, typer.Option(help="how to start SGLang or vLLM  [that of this Python]")] = "",
    server_args: Annotated[str, typer.Option(help="more arguments for that server")] = "",
    environment: EnvironmentOption = "",
    environment_path: EnvironmentPath = "",
) -> None:
    """Generate rollouts: claim dispatch plans, run the engine, push each sample back the moment it ends."""
    from workers.commands.build import ServerChoice, generation_worker

    gpus.take()
    secret = _shared_secret()
    server = ServerChoice(
        url=engine_url,
        key=read_secret(os.environ, ENGINE_KEY),
        command=(*shlex.split(server_command),),
        args=(*shlex.split(server_args),),
        gpus=gpus.gpus_each,
    )
    make = partial(
        generation_worker,
        run_dir=joining.home,
        trust_remote_code=trust_remote_code,
        secret=secret,
        server=server,
        environment=environment,
        environment_path=environment_path,
    )
    joining.serve(WorkerKind.GENERATE, _number(index), make, trust=trust_remote_code)


@app.command()
@with_options(Joining, Gpus)
def score(
    joining: Joining,
    gpus: Gpus,
    index: Index = "auto",
    reward: UserReward = "",
    reward_path: RewardPath = "",
    advantage: Annotated[
        str,
        typer.Option(
            help="module:function this machine allows as advantage, of parts with commas between; as the run's"
        ),
    ] = "",
    functions_path: FunctionsPath = "",
    teacher_url: Annotated[
        str,
        typer.Option(help="server that this machine may ask as teacher, http://host:port; the run's must be the same"),
    ] = "",
    tasks: Annotated[
        str,
        typer.Option(help="what it does, of reward,reference,advantages  [all that the run has]", show_default=False),
    ] = "",
) -> None:
    """Score rollouts: rewards, reference logprobs, and the group's advantages once it is whole."""
    gpus.take()
    from workers.commands.build import scoring_worker
    from workers.scoring.jail import hide_from_children

    hide_from_children()
    make = partial(
        scoring_worker,
        reward=reward,
        reward_path=reward_path,
        advantage=advantage,
        functions_path=functions_path,
        teacher_url=teacher_url,
        teacher_key=read_secret(os.environ, ENGINE_KEY) if teacher_url else "",
        tasks=tuple(filter(None, tasks.split(","))),
        secret=_shared_secret(),
    )
    joining.serve(WorkerKind.SCORE, _number(index), make)


@app.command()
@with_options(Publishing, Gpus)
def train(
    joining: Publishing,
    gpus: Gpus,
    index: Annotated[
        str,
        typer.Option(
            help='rank of this trainer process, from 0, or "auto" for one that is free on this machine  [RANK of '
            "torchrun, or SLURM_PROCID, else 0; auto looks there first]",
            show_default=False,
        ),
    ] = "",
    ranks: Annotated[int, typer.Option(min=1, help="start so many ranks, from 0, each on a GPU of --gpus")] = 1,
    trust_remote_code: TrustRemoteCode = False,
    loss: Annotated[
        str,
        typer.Option(help="module:function this machine allows as loss, of parts with commas between; as the run's"),
    ] = "",
    functions_path: FunctionsPath = "",
) -> None:
    """Train on the stream of rounds, publish each version of the weights, save checkpoints.

    As one of several that torchrun or srun starts it takes a GPU of its own, also without --gpus.
    """
    if ranks > 1:
        raise typer.Exit(_train_ranks(ranks, index, gpus))
    from workers.commands.build import trainer_worker

    own_gpus = LAUNCHED in os.environ  # an engine shows each rank its own
    gpus.take(of_all=index in ("", "auto") and bool(_rank_variable()) and not own_gpus)
    rank = _rank(index, joining.home)
    make = partial(
        trainer_worker,
        run_dir=joining.home,
        rank=rank,
        trust_remote_code=trust_remote_code,
        loss=loss,
        functions_path=functions_path,
        own_address=joining.address,
        secret=_shared_secret(),
    )
    joining.serve(WorkerKind.TRAIN, rank, make, trust=trust_remote_code)


@app.command()
@with_options(Joining, Gpus)
def critic(joining: Joining, gpus: Gpus, index: Index = "0", trust_remote_code: TrustRemoteCode = False) -> None:
    """Value rollouts, and train the critic on the rounds that the policy is trained on (algorithm.advantage = "gae").

    There is one in a run; its --model-dir is what the critic begins as  [critic.model, else model.path].
    """
    gpus.take()
    from workers.commands.build import critic_worker, with_critic_model

    make = partial(critic_worker, run_dir=joining.home, trust_remote_code=trust_remote_code, secret=_shared_secret())
    joining.join(WorkerKind.CRITIC, _number(index), with_critic_model(joining.model_dir, trust_remote_code, make))


@app.command()
@with_options(Publishing)
def publish(
    joining: Publishing,
    index: Index = "0",
    weights_dir: Annotated[
        Path | None,
        typer.Option(help="where POST /update may take checkpoints from, on this machine  [no paths are taken]"),
    ] = None,
) -> None:
    """Publish weights to the generation workers of a service run: its model first, then what POST /update names."""
    from workers.commands.build import publishing_worker

    make = partial(
        publishing_worker,
        run_dir=joining.home,
        weights_dir=weights_dir,
        own_address=joining.address,
        secret=_shared_secret(),
    )
    joining.serve(WorkerKind.PUBLISH, _number(index), make)


@app.command()
@with_options(Publishing)
def store(
    joining: Publishing,
    index: Index = "auto",
    max_bytes: Annotated[
        int, typer.Option(min=0, help="bytes that it holds at most  [rows.unit_bytes of the run]", show_default=False)
    ] = 0,
) -> None:
    """Keep the long columns of a run's rows, in memory, beside its broker (rows.store = "units")."""
    from workers.commands.build import storage_worker

    build = partial(storage_worker, max_bytes=max_bytes, own_address=joining.address, secret=_shared_secret())
    joining.join(WorkerKind.STORE, _number(index), build)


@app.command()
def storage_unit(
    max_bytes: Annotated[int, typer.Option(min=1, help="bytes of values that it holds at most; more is refused")],
    listen: Annotated[str, typer.Option(help="address to serve clients on")] = "127.0.0.1",
    advertise: Annotated[str, typer.Option(help="what other hosts call this one  [--listen]")] = "",
    ports: Annotated[str, typer.Option(help="port, or range of ports, to serve on  [any free one]")] = "",
) -> None:
    """Keep columns of clients' rows outside the broker, in memory; print the address for Client.connect(units=[...]).

    It joins no run, and ends by a signal, with all that it holds.
    """
    ending = ending_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # before the imports: numpy starts threads, which inherit it
    from transport.rows.units import StorageUnit
    from transport.tensors.base import Endpoint

    endpoint = Endpoint(host=listen, advertise=advertise, ports=_ports(ports), secret=_shared_secret())
    configure_logs(process="storage-unit")
    unit = StorageUnit(max_bytes=max_bytes, endpoint=endpoint)
    try:
        print(unit.start(), flush=True)
        signal.sigwait(ending)
    finally:
        unit.close()
    _leave(EXIT_SIGNALLED)


@app.command()
def evaluate(
    run_dir: Annotated[Path, typer.Option(help="directory of the run")],
    model: Annotated[
        str, typer.Option(help='"base", "final", "checkpoint" (the newest), "checkpoint:N" (version N) or a directory')
    ] = "final",
    reward: UserReward = "",
    reward_path: RewardPath = "",
    samples: Annotated[int, typer.Option(min=1, max=4096, help="answers to each problem; of several also pass@k")] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, help="of the answers  [0, greedy; with several the run's sampling.temperature]", show_default=False
        ),
    ] = None,
    passed_by: Annotated[str, typer.Option(help="component of the reward that is 1 where an answer passes")] = "right",
    environment: EnvironmentOption = "",
    environment_path: EnvironmentPath = "",
    answers: Annotated[
        Path | None, typer.Option(help="file that gets every answer with its reward, a JSON line each  [none]")
    ] = None,
) -> None:
    """Answer the run's held-out problems and print one JSON line: mean components of the reward, and pass@k."""
    from workers.commands.evaluate import evaluate_run
    from workers.models import model_cache
    from workers.scoring.jail import hide_from_children

    hide_from_children()
    cache_dir = model_cache(os.environ)
    figures = evaluate_run(
        run_dir,
        model,
        cache_dir=cache_dir,
        reward=reward,
        reward_path=reward_path,
        samples=samples,
        temperature=temperature,
        passed_by=passed_by,
        environment=environment,
        environment_path=environment_path,
        answers=answers,
    )
    print(json.dumps(figures))


@app.command(hidden=True)
def collect(
    log_dir: Annotated[Path, typer.Option(help="where a server that is started writes its log")],
) -> None:
    """Answers to prompts as lines of JSON, for `streamrl-orchestrator collect`; job and prompts come on stdin."""
    import asyncio

    from transport.contracts.collection import Collected, CollectJob, CollectPrompt
    from workers.commands.build import ServerChoice
    from workers.commands.collect import collect as answer
    from workers.scoring.jail import hide_from_children

    first, *rest = sys.stdin.buffer.read().splitlines()
    hide_from_children()
    job = msgspec.json.decode(first, type=CollectJob)
    prompts = [msgspec.json.decode(line, type=CollectPrompt) for line in rest]
    engine = job.settings.generation
    server = ServerChoice(
        url=engine.engine_url,
        key=read_secret(os.environ, ENGINE_KEY),
        command=tuple(engine.server_command),
        args=tuple(engine.server_args),
    )
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints is no line of ours

    def write(one: Collected) -> None:
        out.write(msgspec.json.encode(one) + b"\n")
        out.flush()

    asyncio.run(answer(job, prompts, write, server, log_dir / "server.log"))


@app.command(hidden=True)
def check() -> None:
    """What would end a run's workers on this host; two lines of JSON on stdin: settings, rows to try the reward on."""
    from transport.contracts.messages import TrialRows
    from transport.contracts.settings import Settings
    from workers.commands.check import check_workers
    from workers.scoring.jail import hide_from_children

    settings, trial = sys.stdin.buffer.read().splitlines()
    hide_from_children()
    check_workers(msgspec.json.decode(settings, type=Settings), msgspec.json.decode(trial, type=TrialRows))


@app.command()
def export(
    run_dir: Annotated[Path, typer.Option(help="directory of the run, which may be live")],
    out: Annotated[Path, typer.Option(help="directory to write; it must not be there")],
    checkpoint: Annotated[
        int | None, typer.Option(min=0, help="version of the checkpoint  [the newest]", show_default=False)
    ] = None,
    dtype: Annotated[
        Literal["", "auto", "float32", "bfloat16"], typer.Option(help="of the weights  [trainer.save_dtype of the run]")
    ] = "",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a checkpoint of a run as a plain Hugging Face directory, with tokenizer, and print the directory."""
    from workers.commands.export import export_checkpoint
    from workers.models import model_cache

    meta = export_checkpoint(
        run_dir, checkpoint, out, cache_dir=model_cache(os.environ), dtype=dtype, trust=trust_remote_code
    )
    print(f"version {meta.version} of {run_dir}", file=sys.stderr)
    print(out)


@app.command()
def profile() -> None:
    """Measure this machine's engine and trainer for `streamrl-orchestrator profile`; settings come as JSON on stdin."""
    import asyncio

    from transport.contracts.settings import Settings
    from workers.commands.profile import profile as measure
    from workers.models import model_cache, prepare_model

    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)
    trusted = settings.model.trust_remote_code
    directory = prepare_model(settings.model.path, cache_dir=model_cache(os.environ), trust_remote_code=trusted)
    measured = asyncio.run(measure(settings, directory, lambda text: print(text, file=sys.stderr, flush=True)))
    print(msgspec.json.encode(measured).decode())


def heartbeat_file(index: int | None) -> Path | None:
    """Of the worker with this number, None where nobody looks at it; what a process before left there is gone."""
    named = os.environ.get(HEARTBEAT_VARIABLE)
    if not named:
        return None
    file = Path(named if index is None else f"{named}.{index}")
    file.unlink(missing_ok=True)
    return file


def check_node(environ: Mapping[str, str]) -> None:
    """Of a worker that an engine started on a node.

    Raises: BadParameter: another version is here, or the run's directory is not.
    """
    if not (said := environ.get(LAUNCHED)):
        return
    wanted, _, file = said.partition(" ")
    own = versions("streamrl").get("streamrl", "")
    if own != wanted:
        raise typer.BadParameter(
            f"node {socket.gethostname()} has streamrl {own or 'of no version'}, and the run is of {wanted}: install it"
        )
    if not Path(file).exists():
        raise typer.BadParameter(
            f"node {socket.gethostname()} does not see {file}: put --dir on a file system that all nodes share"
        )


def _shared_secret() -> bytes:
    return read_secret(os.environ, SHARED_SECRET).encode()


def _ports(text: str) -> Sequence[int]:
    try:
        return parse_ports(text)
    except ValueError as error:
        raise typer.BadParameter(f"--ports: {error}") from error


def _number(index: str) -> int | None:
    """The index that was given; None for one to be found."""
    if index != "auto" and not index.isdecimal():
        raise typer.BadParameter(f'--index is a number or "auto", not {index!r}')
    return None if index == "auto" else int(index)


def _rank(index: str, home: Path) -> int:
    """Of this trainer process: as it was given, else as torchrun or Slurm numbers it, else one that is free."""
    variable = _rank_variable()
    if index not in ("", "auto"):
        number = _number(index)
        assert number is not None
        return number
    if not variable:
        from workers.leases.lifecycle import free_rank

        return free_rank(home) if index else 0
    if not os.environ[variable].isdecimal():
        raise typer.BadParameter(f"{variable} is {os.environ[variable]!r}, which is no rank; name it: --index 0")
    return int(os.environ[variable])


def _rank_variable() -> str:
    """That of the launcher that started this process; "" without one."""
    return next((name for name in RANK_VARIABLES if os.environ.get(name)), "")


def _train_ranks(ranks: int, index: str, gpus: Gpus) -> int:
    """Start this command once for each rank. Returns the exit code of all."""
    from transport.process.gpus import one_each
    from workers.commands.ranks import run_ranks

    if index or gpus.gpus_each != 1:
        raise typer.BadParameter("--ranks numbers its ranks, and gives each one GPU: leave out --index and --gpus-each")
    own = one_each(gpus.gpus, ranks, share=gpus.gpu_share)
    for rank in range(ranks):
        heartbeat_file(rank)  # a container started again keeps its files: an old one must not end the new ranks
    more = [["--ranks", "1", "--index", str(rank), *(["--gpus", own[rank]] if own else [])] for rank in range(ranks)]
    return run_ranks([python_module("workers", *sys.argv[1:], *options) for options in more])


def main() -> None:
    """Run the command line; an error of ours is one line and an exit code, a bug keeps its traceback."""
    try:
        app()
    except StreamError as error:
        if structlog.is_configured():  # a worker's log; other commands have none
            structlog.get_logger(__name__).error("ended", error=type(error).__name__)
        print(f"error: {error}", file=sys.stderr)
        _leave(exit_code(error))


def exit_code(error: StreamError) -> int:
    """The exit code of a worker that ends by ``error``."""
    match error:
        case error if isinstance(error, BAD_CONFIG):
            return EXIT_BAD_CONFIG
        case BrokerFullError() | DirectoryError():
            return EXIT_FULL
        case FatalError():
            return EXIT_FATAL
        case _:
            return EXIT_FAILED


def _leave(code: int) -> NoReturn:
    """Exit without waiting for threads: one that hangs, in an engine or a collective, is why we leave."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
