"""Names every key. A run's keys share one hash tag, so that Lua may touch several of them on a cluster."""

from __future__ import annotations

from transport.contracts.types import GroupId, RowId, RunName, WorkerId

EVENTS = "events"  # log: workers -> orchestrator
ROUNDS = "rounds"  # log: orchestrator -> trainer (messages.TrainerCommand)
WEIGHTS = "weights"  # log: trainer -> everyone (messages.WeightManifest)
ROUTES = "routes"  # log: orchestrator -> generation workers of other hosts than the trainer's (messages.WeightRoutes)
UPDATES = "updates"  # work queue: orchestrator -> the publisher of a service run (messages.UpdateRequest)
DEAD = "dead"  # dead letters

# Names of put_meta and get_meta; MessagePack where a type is named.
SETTINGS = "settings"  # settings.Settings
MODEL = "model"  # user_files.ModelIdentity: which model all processes of the run must have
TRIAL = "trial"  # messages.TrialRows: rows of the data that a reward is tried on before anything is scored
TRIED = "tried"  # the reward (scoring.reward) that passed its trial on those rows, or scored without one
STATE = "state"  # what the run is doing as a whole; workers leave when it is STATE_FINISHED
STATE_RUNNING = b"running"
STATE_FINISHED = b"finished"
SUPERVISOR = "supervisor"  # its pid, written all the time, so that it notices a broker that takes no writes
STOPPED = "stopped"  # by what the supervisor was asked to end, written before it ends its processes
TAKES_WRITES = "takes-writes"
"""Written before anything is concluded from missing leases. A full server answers reads and refuses leases, so that a
worker's silence then says nothing about the worker."""
SPAWN = "spawn"  # messages.SpawnWorkers: how many more generation workers the run has asked its supervisor for
PENDING = "pending"  # JSON {process: reason}: what an engine was asked to start and has not, in its own words
STATUS = "status"  # the orchestrator's view, JSON, a few times a second while it lives (with a time to live)

# What the broker keeps for itself; the Lua scripts get these names from here (redis_link.py).
OWNER = "owner"  # hash: the run that has this name here (base.RunClaim), and since when
OWNER_ALIVE = "owner-alive"  # the start of that run that is live (with a time to live)
EPOCHS = "epochs"  # hash: role -> fencing epoch
INCARNATIONS = "incarnations"  # hash: name -> number of processes that carried it
RETAINED_BYTES = "retained-bytes"  # counter: bytes of all column values
TASK_SPECS = "task-specs"  # hash: task -> its unit and columns, JSON
MARK = "mark"  # what the writer of commands left with its last step (base.Mark)
STREAMS = "streams"  # set: short names of all streams, so that listing them scans nothing
WORKERS = "workers"  # set: workers that ever beat and whose lease has not been seen to end
WORKERS_GROUP = "workers"  # the consumer group of every work queue, with "-" and the run's id behind it
META_PREFIX = "meta:"
LEASE_PREFIX, ROW_PREFIX, GROUP_PREFIX = "lease:", "row:", "group:"
SHARED_PREFIX = "rows:"  # in the hash of a group: a column of all its rows (base.Block.shared)
READY_PREFIX, NOTICED_PREFIX = "ready:", "noticed:"
"""In the hashes of rows and groups, before a task's name: the id of a unit's notice, and how many rows are ready."""


def plans(worker: WorkerId) -> str:
    """Work queue: dispatch plans of one generation worker (messages.GroupPlan)."""
    return f"plans:{worker}"


def control(worker: WorkerId) -> str:
    """Log: orchestrator -> one worker (messages.WorkerCommand)."""
    return f"control:{worker}"


def partial(group_id: GroupId) -> str:
    """Log: tokens of the running samples of a group (messages.PartialTokens); it goes with the group, or before."""
    return f"{_PARTIAL}{group_id}"


_PARTIAL = "partial:"


def is_of_group(stream: str) -> bool:
    """Whether it is the log of a single group. There are as many as groups run, so they are in no list for people."""
    return stream.startswith(_PARTIAL)


def own_prompt(group_id: GroupId) -> str:
    """Of put_meta and get_meta: the prompt that an agent brought for a group (workers/endpoint)."""
    return f"own-prompt:{group_id}"


def tasks(task: str) -> str:
    """Work queue: units whose inputs are complete, one queue a task."""
    return f"tasks:{task}"


def full(run: RunName, name: str) -> str:
    """The key on the server: ``streamrl:{<run>}:<name>``."""
    return f"streamrl:{{{run}}}:{name}"


def row(run: RunName, row_id: RowId) -> str:
    return full(run, f"{ROW_PREFIX}{row_id}")


def group(run: RunName, group_id: GroupId) -> str:
    return full(run, f"{GROUP_PREFIX}{group_id}")


def lease(run: RunName, worker: WorkerId) -> str:
    return full(run, f"{LEASE_PREFIX}{worker}")


def meta(run: RunName, name: str) -> str:
    return full(run, f"{META_PREFIX}{name}")


def session(run: RunName, client: str, slot: int) -> str:
    """The last request of one client's slot and its reply (see broker/README.md, "Sent once")."""
    return full(run, f"session:{client}:{slot}")
