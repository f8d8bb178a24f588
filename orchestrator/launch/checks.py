"""What must hold before the processes of a run start, and the model that they need.

Each check answers a mistake at once, in words that name the setting, before a run has made anything. What only workers
can know, as torch stays out of this process, a worker process is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog

from orchestrator.config.run_directory import RunDir
from orchestrator.core.model.settings import MAX_ANSWERS, answers_of_evaluation
from orchestrator.errors import ChildFailedError, ConfigError, DataError, ExitCode
from orchestrator.http import check_endpoint, check_listening
from orchestrator.launch.ownership import check_name
from orchestrator.launch.processes import Children, last_words
from orchestrator.loop.ranking import open_ranker
from orchestrator.prompts.dataset import Problem, Problems, load_problems
from orchestrator.prompts.source import trial_rows
from ranker.protocol import RankerError
from transport.broker.redis_streams import connect
from transport.contracts.code_tasks import CODE_REWARD, read_task
from transport.contracts.gym_tasks import REFUSED, refusal
from transport.contracts.ledger import checkpoints_place
from transport.contracts.settings import SERVER_ENGINES, DataSettings, Settings, data_parts, eval_sets, public
from transport.contracts.types import RunName
from transport.contracts.user_files import read_lengths
from transport.errors import BrokerUnavailableError, LengthFileError, ListenError, SecretError
from transport.process.programs import ending_with_this_process, python_module
from transport.process.storage import prepare
from transport.tensors.base import Endpoint, is_loopback, parse_ports
from transport.tensors.ucx import is_installed
from transport.tensors.wire import ChannelServer

log = structlog.get_logger(__name__)

PREPARING_S = 60.0
"""Between two words on a preparation that goes on."""
NOTE = "note: "
"""Beginning of a remark, also in what a worker prints that prepares a model."""
FIRST_ANSWER_S = 5.0
"""A broker that does not answer its user's first call so soon is down or misspelt: say so, do not wait for it."""


def check_inputs(settings: Settings, *, scored: bool = True) -> Problems:
    """Read the files that settings name once before anything starts: a mistake in them is answered at once.

    scored: responses will be.

    A run without a trainer has neither data nor a ranker.
    Raises: DataError naming the file; ConfigError for a task whose answers may not be graded.
    """
    if settings.trainer.engine == "none":
        return Problems(training=[], held_out=[])
    loaded = Problems(training=[], held_out=[])
    refused = {
        name: refusal(data.task) for name, data in data_parts(settings.data).items() if _verifies(settings, data)
    }
    tasks = [data.task for data in data_parts(settings.data).values()]
    if not any(refused.values()) or not set(tasks) & set(REFUSED):  # a misspelt name is said first, none refused loaded
        loaded = load_problems(settings, scored=scored)
    for name, reason in refused.items():
        if reason:
            key = f"data.mix.{name}.task" if name else "data.task"
            raise ConfigError(f"{key}: {reason}", key="data.mix" if name else key)
    check_evaluation(settings, loaded.held_out)
    if settings.scoring.reward == CODE_REWARD:
        check_code_tasks((*loaded.training, *loaded.held_out))
    check_ranker_files(settings)
    return loaded


def check_evaluation(settings: Settings, held_out: Iterable[Problem]) -> None:
    """Raises DataError: an evaluation within the run asks for more answers than ``MAX_ANSWERS``."""
    asked = eval_sets(settings)
    answers = sum(asked[problem.eval_set].samples for problem in held_out)
    if settings.eval.every and answers > MAX_ANSWERS:
        raise DataError(
            f"eval.every: one evaluation asks for {answers} answers (problems times samples of all sets), and a run "
            f"takes {MAX_ANSWERS} at most: lower eval.problems or samples of [eval.sets], or set eval.every=0 and "
            "ask all of them when the run is over (streamrl-worker evaluate)"
        )


def check_ranker_files(settings: Settings) -> None:
    """Raises DataError naming the one of the ranker's files that cannot be used."""
    if settings.ranker.model or settings.ranker.base_lengths or settings.ranker.scores:
        try:
            open_ranker(settings, RunDir(Path(settings.run.dir) / settings.run.name).ranker)
        except RankerError as error:
            raise DataError(str(error)) from error


def remarks(settings: Settings, problems: Problems) -> list[str]:
    """What is allowed, and hardly meant, a sentence each."""
    said: list[str] = []
    warmup, batches = settings.trainer.warmup_batches, settings.run.batches
    if warmup >= batches and settings.trainer.engine != "none":
        rate = "the rate never comes to trainer.lr"
        said.append(f"trainer.warmup_batches = {warmup} is not below run.batches = {batches}: {rate}")
    if problems.also_held_out:
        one = problems.also_held_out == 1
        rows = "1 row asks" if one else f"{problems.also_held_out} rows ask"
        said.append(f"{rows} what a held-out row asks, and {'stays' if one else 'stay'} out of training")
    if problems.repeated:
        rows = "1 row repeats" if problems.repeated == 1 else f"{problems.repeated} rows repeat"
        said.append(f"{rows} the prompt of another row of the training data")
    if settings.eval.ends and settings.eval.sets and (answers := answers_of_evaluation(settings)) > MAX_ANSWERS:
        said.append(
            f"[eval.sets] ask for {answers} answers, and an evaluation within a run takes {MAX_ANSWERS} at most: "
            "neither the untrained nor the trained model is asked in the run (streamrl-worker evaluate does it later)"
        )
    counts = Counter(problem.part for problem in problems.training)
    shares = {name: part.weight for name, part in settings.data.mix.items()} or {"": 1.0}
    for name, weight in shares.items():
        wanted = weight / sum(shares.values()) * settings.pipeline.groups_per_batch
        if 0 < counts[name] < wanted:
            where = f"data.mix.{name}" if name else "the data"
            held = "1 prompt" if counts[name] == 1 else f"{counts[name]} prompts"
            said.append(
                f"{where} has {held} to train on, and a batch takes {wanted:.3g} of it: some stand in a batch twice"
            )
    return said


def _verifies(settings: Settings, data: DataSettings) -> bool:
    """Whether a verifier of ours grades reasoning_gym's answers of this part."""
    return data.source == "reasoning_gym" and not (settings.scoring.reward or settings.scoring.reward_model)


def check_code_tasks(problems: Iterable[Problem]) -> None:
    """Raises DataError naming the first row that reward "code" cannot judge by, and what is wrong with it."""
    for problem in problems:
        try:
            read_task(msgspec.json.decode(problem.entry_json, type=_CodeRow).metadata)
        except ValueError as error:
            raise DataError(f'{problem.prompt_id} is no problem for scoring.reward "code": {error}') from error


class _CodeRow(msgspec.Struct):
    """What of a problem's entry_json is read here."""

    metadata: dict[str, Any]


def check_cluster(settings: Settings) -> None:
    """Whether processes on other nodes could reach each other with these settings. Raises ConfigError."""
    launcher, broker = settings.launcher, settings.broker
    if launcher.kind == "local":
        return
    several = launcher.kind == "slurm" or (launcher.kind == "ray" and launcher.place)
    if several and not (broker.url or launcher.address):
        raise ConfigError(
            "launcher.address: nodes must reach the broker: set it to what they call this host (the embedded broker "
            "then listens there, with its password), or name a broker of your own with broker.url",
            key="launcher.address",
        )
    host = urlsplit(broker.url).hostname if broker.url and not broker.url.startswith("unix") else launcher.address
    if not host or is_loopback(host):
        return  # all nodes are on this machine
    sections = {"tensors.host": settings.tensors.host}
    sections |= {"rows.host": settings.rows.host} if settings.rows.store == "units" else {}
    for key, listening in sections.items():
        if is_loopback(listening):
            raise ConfigError(
                f"{key}: {listening} is reached from its own node alone, and {launcher.kind} has several: set it to "
                "0.0.0.0, and STREAMRL_SECRET",
                key=key,
            )


async def check_places(settings: Settings) -> None:
    """Whether what the processes of a run on this host listen on is free, and what they are to reach answers.

    Raises: ConfigError naming the setting; BrokerUnavailableError, BrokerRejectedError.
    """
    check_listening(settings.api)
    check_endpoint(settings.endpoint, settings.api.secret)
    tensors, generation = settings.tensors, settings.generation
    listening = {"tensors": tensors} | ({"rows": settings.rows} if settings.rows.store == "units" else {})
    for name, section in listening.items():
        try:
            endpoint = Endpoint(
                host=section.host, ports=parse_ports(section.ports), secret=settings.api.secret.encode()
            )
            ChannelServer(lambda _: None, endpoint, request_s=FIRST_ANSWER_S).check()
        except ListenError as error:
            raise ConfigError(f"{name}.ports: {error}", key=f"{name}.ports") from error
        except SecretError as error:
            raise ConfigError(f"{name}.host: {error}", key=f"{name}.host") from error
    if tensors.ucx == "on" and not is_installed():
        hint = "install it with: pip install 'streamrl[ucx]', or set it to \"auto\""
        raise ConfigError(f"tensors.ucx: UCX is not installed; {hint}", key="tensors.ucx")
    if generation.engine_url:
        try:
            await _connect_to(generation.engine_url)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"generation.engine_url: no server answers at {generation.engine_url} ({error}); start it first, or "
                "correct the address",
                key="generation.engine_url",
            ) from error
    if settings.trainer.checkpoint_dir and settings.trainer.engine != "none":
        place = checkpoints_place(settings, Path(settings.run.dir) / settings.run.name)
        await asyncio.to_thread(prepare, place)
    if settings.broker.url:
        try:
            broker = await connect(settings.broker, RunName(settings.run.name), outage_s=FIRST_ANSWER_S)
        except BrokerUnavailableError as error:
            advice = "start it, correct broker.url, or leave it out: a run brings a broker of its own"
            raise type(error)(error.address, f"{error.reason.rstrip('.')}; {advice}") from error
        try:
            await check_name(broker, RunDir(Path(settings.run.dir) / settings.run.name))
        finally:
            await broker.close()


async def _connect_to(url: str) -> None:
    """Raises OSError where nobody listens (TimeoutError: within FIRST_ANSWER_S), ValueError for no URL."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    async with asyncio.timeout(FIRST_ANSWER_S):
        _, writer = await asyncio.open_connection(parts.hostname, port)
    writer.close()


def check_workers_inputs(settings: Settings) -> None:
    """The same of what only workers read: for a run whose workers are all on this host."""
    scoring, generation = settings.scoring, settings.generation
    if scoring.reward_path and not Path(scoring.reward_path).is_dir():
        raise DataError(f"scoring.reward_path: there is no directory {scoring.reward_path}")
    if (path := settings.algorithm.functions_path) and not Path(path).is_dir():
        raise DataError(f"algorithm.functions_path: there is no directory {path}")
    if settings.environment.path and not Path(settings.environment.path).is_dir():
        raise DataError(f"environment.path: there is no directory {settings.environment.path}")
    if generation.lengths:
        try:
            read_lengths(Path(generation.lengths))
        except LengthFileError as error:
            raise DataError(f"generation.lengths: {error}") from error


async def check_workers(settings: Settings, problems: Sequence[Problem]) -> list[str]:
    """Have a worker process look for what would end the workers of this host, where settings name anything of the kind.

    problems: the reward is tried on the first of them.
    Returns: remarks on what it found, a sentence each.  Raises: ConfigError, ChildFailedError.
    """
    scoring, generation = settings.scoring, settings.generation
    here = settings.launcher.kind == "local"
    devices = (settings.trainer.device, generation.device) if here else ()
    own = settings.own_functions("advantage") or settings.own_functions("loss")
    critic = settings.critic.model if settings.has_critic else ""
    adapters = settings.trainer.engine == "torch" and settings.trainer.lora.rank
    models = scoring.reward_model or settings.algorithm.teacher or critic or adapters
    foreign = scoring.reward or models or own or settings.environments or generation.engine in SERVER_ENGINES
    if not (foreign or any(name.startswith("cuda") for name in devices)):
        return []
    asked = [public(settings), trial_rows(problems, scoring)]
    process = await asyncio.create_subprocess_exec(
        *python_module("workers", "check"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=ending_with_this_process(),
    )
    try:
        found, said = await process.communicate(b"\n".join(map(msgspec.json.encode, asked)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.returncode:
        words = last_words(said.decode(errors="replace"))
        if process.returncode == ExitCode.BAD_CONFIG:
            raise ConfigError(words)
        raise ChildFailedError("check", process.returncode, words)
    return found.decode(errors="replace").splitlines()


async def prepare_model(
    path: str, logs: Path, note: Callable[[str], None], *, settings: Settings | None = None
) -> Path:
    """Have a worker turn ``model.path`` into a local Hugging Face directory (torch stays out of this process).

    note: reports what is prepared, that it still is, and remarks on it.  settings: of the run that the model is for,
    which may refuse to train it; None: it is not trained.  Raises ConfigError for a model that cannot be used, else
    ChildFailedError with its last words, see ``logs``.
    """
    note(f"model {path}")
    log_path = logs / "prepare.log"
    with log_path.open("ab") as words:
        process = await asyncio.create_subprocess_exec(
            *python_module("workers", "prepare", "--model", path, *(_use(settings) if settings else ())),
            stdout=asyncio.subprocess.PIPE,
            stderr=words,
            preexec_fn=ending_with_this_process(),
        )
    started_s = time.monotonic()
    said = asyncio.create_task(process.communicate(), name="prepare")
    try:
        while not (await asyncio.wait({said}, timeout=PREPARING_S))[0]:  # a download takes as long as it takes
            note(f"preparing the model for {time.monotonic() - started_s:.0f} s; see {log_path}")
        output = said.result()[0]
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    finally:
        said.cancel()
    if process.returncode != 0:
        said_last = Children(logs, max_restarts=0).last_words("prepare")
        if process.returncode == ExitCode.BAD_CONFIG:
            raise ConfigError(said_last, key="model.path", where="model.path")
        raise ChildFailedError("prepare", -1 if process.returncode is None else process.returncode, said_last)
    *said_before, directory = output.decode().strip().splitlines()
    for line in said_before:
        if line.startswith(NOTE):
            note(line)
            log.warning("a remark on the model", remark=line.removeprefix(NOTE))
    return Path(directory)


def _use(settings: Settings) -> list[str]:
    """What a run will do with its model, as options of ``streamrl-worker prepare``."""
    if settings.trainer.engine != "torch":
        return []
    served = ["--served"] if settings.generation.engine in SERVER_ENGINES else []
    return ["--trains", "--max-context", str(settings.generation.max_context), *served]
