"""``streamrl-worker``: the command line of every worker process.

torch is imported only by the command that needs it, so that ``--help`` is instant.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import structlog
import typer
import uvloop

from transport.contracts.settings import BrokerSettings
from transport.contracts.types import RunName, WorkerKind
from transport.errors import BrokerFullError, FatalError, StreamError
from transport.process import faults
from transport.process.logs import configure_logs
from transport.process.options import with_options
from transport.process.secret import BROKER_PASSWORD, ENGINE_KEY, SHARED_SECRET, read_secret
from transport.tensors.address import parse_ports
from workers.commands.gpus import take_gpu
from workers.errors import RewardSetupError

if TYPE_CHECKING:
    from workers.leases.lifecycle import WorkerFactory

EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
"""The run's reward cannot be had: what the settings or the command line say must change."""
EXIT_FATAL = 4
"""Starting this process again is no use; the last line of its log says why."""
EXIT_FULL = 5
"""The broker took no writes for as long as this process may wait: somebody has to make room first."""
EXIT_SIGNALLED = 143
"""As a shell reports SIGTERM: its work is not over, a supervisor starts it again."""

HEARTBEAT_VARIABLE = "STREAMRL_HEARTBEAT"
"""A file to touch whenever the lease was renewed: a container's health check looks at its age."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Worker processes of StreamRL. They join a run over its broker, at any time, and leave when it is over.",
)

Index = Annotated[
    str, typer.Option("--index", help='number of this worker among its kind, from 0, or "auto" for one that is free')
]
Gpus = Annotated[
    str, typer.Option("--gpus", help="GPUs of this machine of which this worker takes one that is free: 0,2-3 or all")
]
UserReward = Annotated[
    str, typer.Option("--reward", help="module:function this machine allows as reward; the run's must be the same")
]
RewardPath = Annotated[
    str, typer.Option("--reward-path", help="directory that the reward is imported from  [only what is installed]")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="allow code that comes with the model to run on this machine")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """The options of every worker that joins a run."""

    broker: Annotated[str, typer.Option("--broker", help="redis:// or rediss:// URL of the run's broker")]
    run: Annotated[str, typer.Option("--run", help="name of the run")]
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="directory for what this worker writes  [runs/<run>]", show_default=False),
    ] = None
    model_dir: Annotated[
        Path | None,
        typer.Option(
            "--model-dir",
            help="local Hugging Face directory of the base model  [prepared from the run's model.path]",
            show_default=False,
        ),
    ] = None
    tls_ca: Annotated[str, typer.Option("--tls-ca", help="CA file for a rediss:// broker")] = ""
    outage_s: Annotated[float, typer.Option("--outage-s", help="how long to wait for a broker that went away")] = (
        BrokerSettings().outage_s
    )

    @property
    def home(self) -> Path:
        """Where this worker writes: by default where the orchestrator does."""
        return self.run_dir or Path("runs") / self.run

    def serve(self, kind: WorkerKind, index: int | None, make: Callable[[Path], WorkerFactory], trust: bool) -> None:
        """Work for the run until it is over. make: a worker of a model directory.  trust: may the model bring code?"""
        from transport.broker.connect import connect
        from transport.process.clock import MonotonicClock
        from workers.commands.build import with_model
        from workers.leases.lifecycle import serve_worker

        password = read_secret(os.environ, BROKER_PASSWORD)
        settings = BrokerSettings(url=self.broker, password=password, tls_ca=self.tls_ca, outage_s=self.outage_s)
        heartbeat = os.environ.get(HEARTBEAT_VARIABLE)
        build = with_model(self.model_dir, trust, make)

        async def serve() -> bool:
            broker = await connect(settings, RunName(self.run))
            try:
                return await serve_worker(
                    broker, kind, index, build, MonotonicClock(), heartbeat_file=Path(heartbeat) if heartbeat else None
                )
            finally:
                await broker.close()

        configure_logs(process=kind.value if index is None else f"{kind.value}-{index}")
        faults.arm(os.environ.get("STREAMRL_FAULTS", ""))
        if not uvloop.run(serve()):
            _leave(EXIT_SIGNALLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publishing(Joining):
    """And of those that serve weights."""

    listen: Annotated[str, typer.Option("--listen", help="address to serve weights on  [tensors.host of the run]")] = ""
    advertise: Annotated[
        str, typer.Option("--advertise", help="what other hosts call this one  [tensors.advertise of the run]")
    ] = ""
    ports: Annotated[
        str, typer.Option("--ports", help="port, or range of ports, to serve weights on  [tensors.ports of the run]")
    ] = ""

    @property
    def address(self) -> dict[str, str]:
        """Settings of the section tensors that this machine overrides, where they are not empty."""
        try:
            parse_ports(self.ports)
        except ValueError as error:
            raise typer.BadParameter(f"--ports: {error}") from error
        return {"host": self.listen, "advertise": self.advertise, "ports": self.ports}


@app.command()
def prepare(
    model: Annotated[str, typer.Option("--model", help="model.path of the run")],
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Turn a model path into a local Hugging Face directory, try its chat template, and print the directory."""
    from workers.models.resolve import model_cache, prepare_model, try_chat_template

    directory = prepare_model(model, cache_dir=model_cache(os.environ), trust_remote_code=trust_remote_code)
    try_chat_template(directory)
    print(directory)


@app.command()
@with_options(Joining)
def generate(
    joining: Joining,
    index: Index = "0",
    gpus: Gpus = "",
    trust_remote_code: TrustRemoteCode = False,
    engine_url: Annotated[
        str, typer.Option("--engine-url", help="SGLang or vLLM server to use, http://host:port  [its own]")
    ] = "",
    server_command: Annotated[
        str, typer.Option("--server-command", help="how to start SGLang or vLLM  [that of this Python]")
    ] = "",
    server_args: Annotated[str, typer.Option("--server-args", help="more arguments for that server")] = "",
) -> None:
    """Generate rollouts: claim dispatch plans, run the engine, push each sample back the moment it ends."""
    from workers.commands.build import ServerChoice, generation_worker

    take_gpu(gpus)
    secret = _shared_secret()
    server = ServerChoice(
        url=engine_url,
        key=read_secret(os.environ, ENGINE_KEY),
        command=(*shlex.split(server_command),),
        args=(*shlex.split(server_args),),
    )

    def make(model: Path) -> WorkerFactory:
        return generation_worker(joining.home, model, trust_remote_code, secret, server)

    joining.serve(WorkerKind.GENERATE, _number(index), make, trust_remote_code)


@app.command()
@with_options(Joining)
def score(joining: Joining, index: Index = "0", reward: UserReward = "", reward_path: RewardPath = "") -> None:
    """Score rollouts: rewards, reference logprobs, and the group's advantages once it is whole."""
    from workers.commands.build import scoring_worker
    from workers.scoring.jail import hide_from_children

    hide_from_children()
    joining.serve(WorkerKind.SCORE, _number(index), lambda model: scoring_worker(model, reward, reward_path), False)


@app.command()
@with_options(Publishing)
def train(
    joining: Publishing,
    index: Annotated[int, typer.Option("--index", help="rank of this trainer process, from 0")] = 0,
    gpus: Gpus = "",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Train on the stream of rounds, publish each version of the weights, save checkpoints."""
    from workers.commands.build import trainer_worker

    take_gpu(gpus)
    address, secret = joining.address, _shared_secret()

    def make(model: Path) -> WorkerFactory:
        return trainer_worker(joining.home, model, index, trust_remote_code, address, secret)

    joining.serve(WorkerKind.TRAIN, index, make, trust_remote_code)


@app.command()
@with_options(Publishing)
def publish(
    joining: Publishing,
    index: Index = "0",
    weights_dir: Annotated[
        Path | None,
        typer.Option(
            "--weights-dir", help="where POST /update may take checkpoints from, on this machine  [no paths are taken]"
        ),
    ] = None,
) -> None:
    """Publish weights to the generation workers of a service run: its model first, then what POST /update names."""
    from workers.commands.build import publishing_worker

    address, secret = joining.address, _shared_secret()

    def make(model: Path) -> WorkerFactory:
        return publishing_worker(joining.home, model, weights_dir, address, secret)

    joining.serve(WorkerKind.PUBLISH, _number(index), make, False)


@app.command()
def evaluate(
    run_dir: Annotated[Path, typer.Option("--run-dir", help="directory of the run")],
    model: Annotated[str, typer.Option("--model", help='"base", "final" or a Hugging Face directory')] = "final",
    reward: UserReward = "",
    reward_path: RewardPath = "",
) -> None:
    """Answer the run's held-out problems greedily and print one JSON line of mean reward components."""
    from workers.commands.evaluate import evaluate_run
    from workers.models.resolve import model_cache
    from workers.scoring.jail import hide_from_children

    hide_from_children()
    cache_dir = model_cache(os.environ)
    print(json.dumps(evaluate_run(run_dir, model, cache_dir=cache_dir, reward=reward, reward_path=reward_path)))


@app.command()
def profile() -> None:
    """Measure this machine's engine and trainer for `streamrl-orchestrator profile`; settings come as JSON on stdin."""
    import asyncio

    import msgspec

    from transport.contracts.settings import Settings
    from workers.models.resolve import model_cache, prepare_model
    from workers.profile.command import profile as measure

    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)
    trusted = settings.model.trust_remote_code
    directory = prepare_model(settings.model.path, cache_dir=model_cache(os.environ), trust_remote_code=trusted)
    measured = asyncio.run(measure(settings, directory, lambda text: print(text, file=sys.stderr, flush=True)))
    print(msgspec.json.encode(measured).decode())


def _shared_secret() -> bytes:
    """What the ends of a tensor connection prove to each other, b"" on one machine."""
    return read_secret(os.environ, SHARED_SECRET).encode()


def _number(index: str) -> int | None:
    """The index that was given; None for one to be found."""
    if index != "auto" and not index.isdecimal():
        raise typer.BadParameter(f'--index is a number or "auto", not {index!r}')
    return None if index == "auto" else int(index)


def main() -> None:
    """Run the command line; an error of ours is one line and an exit code, a bug keeps its traceback."""
    try:
        app()
    except StreamError as error:
        structlog.get_logger(__name__).error("ended", error=type(error).__name__)
        print(f"error: {error}", file=sys.stderr)
        _leave(exit_code(error))


def exit_code(error: StreamError) -> int:
    """The exit code of a worker that ends by ``error``."""
    match error:
        case RewardSetupError():
            return EXIT_BAD_CONFIG
        case BrokerFullError():
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
