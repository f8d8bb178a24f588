"""Names every key. A run's keys share one hash tag, so that Lua may touch several of them on a cluster."""

from __future__ import annotations

from transport.contracts.types import GroupId, RowId, RunName, WorkerId

EVENTS = "events"
"""Log: workers -> orchestrator."""
ROUNDS = "rounds"
"""Log: orchestrator -> trainer (messages.TrainerCommand)."""
WEIGHTS = "weights"
"""Log: trainer -> everyone (messages.WeightManifest)."""
UPDATES = "updates"
"""Work queue: orchestrator -> the publisher of a service run (messages.UpdateRequest)."""
DEAD = "dead"
"""Dead letters."""
SETTINGS = "settings"
"""Meta: the run's settings, MessagePack."""
MODEL = "model"
"""Meta: which model all processes of the run must have (model_identity.ModelIdentity, MessagePack)."""
TRIAL = "trial"
"""Meta: rows of the data that a reward is tried on before anything is scored (messages.TrialRows, MessagePack)."""
TRIED = "tried"
"""Meta: the reward (scoring.reward) that passed its trial on those rows, or scored without one."""

# What the broker keeps for itself; the Lua scripts get these names from here (lua.py).
EPOCHS = "epochs"
"""Hash: role -> fencing epoch."""
INCARNATIONS = "incarnations"
"""Hash: name -> number of processes that carried it."""
RETAINED_BYTES = "retained-bytes"
"""Counter: bytes of all column values."""
TASK_SPECS = "task-specs"
"""Hash: task -> its unit and columns, JSON."""
MARK = "mark"
"""What the writer of commands left with its last step (base.Mark)."""
STREAMS = "streams"
"""Set: short names of all streams, so that listing them scans nothing."""
WORKERS = "workers"
"""Set: workers that ever beat and whose lease has not been seen to end."""
LEASE_PREFIX = "lease:"
ROW_PREFIX = "row:"
GROUP_PREFIX = "group:"
SHARED_PREFIX = "rows:"
"""In the hash of a group: a column of all its rows (base.Block.shared)."""
STATE = "state"
"""Meta: what the run is doing as a whole; workers leave when it is STATE_FINISHED."""
STATE_RUNNING = b"running"
STATE_FINISHED = b"finished"
SUPERVISOR = "supervisor"
"""Meta: pid of the supervisor, written all the time, so that it notices a broker that takes no writes."""
TAKES_WRITES = "takes-writes"
"""Meta: written before anything is concluded from missing leases. A full server answers reads and refuses leases, so
that a worker's silence then says nothing about the worker."""
SPAWN = "spawn"
"""Meta: how many more generation workers the run has asked its supervisor for (messages.SpawnWorkers)."""
STATUS = "status"
"""Meta: the orchestrator's view, JSON, a few times a second while it lives (with a time to live)."""


def plans(worker: WorkerId) -> str:
    """Work queue: dispatch plans of one generation worker (messages.GroupPlan)."""
    return f"plans:{worker}"


def control(worker: WorkerId) -> str:
    """Log: orchestrator -> one worker (messages.WorkerCommand)."""
    return f"control:{worker}"


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
    return full(run, f"meta:{name}")


def session(run: RunName, client: str, slot: int) -> str:
    """The last request of one client's slot and its reply (see broker/README.md, "Sent once")."""
    return full(run, f"session:{client}:{slot}")
