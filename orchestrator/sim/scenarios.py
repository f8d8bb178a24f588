"""Named pipelines, and workloads at the papers' scale: scenarios from an LLM, GPUs and a split of them.

Pipelines differ in settings of the core only, so each runs live as it runs here (``docs/modes.md``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from orchestrator.core.costs.analytic import GPUS_PER_NODE, Algorithm, decode_cost, switch_s, train_cost, transfer_cost
from orchestrator.core.costs.hardware import ASSUMED, H800, Assumptions, Gpu
from orchestrator.core.costs.llms import QWEN_72B, Llm
from orchestrator.core.model.settings import CoreSettings
from orchestrator.sim.engine import CostModel, Scenario
from orchestrator.sim.lengths import RecordedLengths
from transport.contracts.types import UpdateMode

HEARTBEAT_S = 60.0
"""Of simulated workers and ticks at this scale: nothing is lost here, so no decision waits for one."""
NO_TIMEOUT_S = 1e9
MINI_BATCHES = 4
"""Of a batch, where the trainer waits for mini-batches: StreamRL sec. 4.1 leaves the constant to the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained. batch: prompts, with ``group_size`` samples each."""

    llm: Llm = QWEN_72B
    lengths: RecordedLengths
    batch: int = 1024
    group_size: int = 1
    algorithm: Algorithm = "ppo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which GPUs do what. colocated: the same GPUs do both in turn, and ``training_gpus`` are those of generation.

    tensor_parallel: GPUs of one generation instance.  ranks: data-parallel ranks of the trainer.
    slots: samples that an instance decodes at once, at most.  micro_batch_tokens: of one rank and round.
    link_bytes_per_s: of an edge of the weight transfer; 0: the network of a node, of the slower kind.
    """

    generation_gpus: int
    training_gpus: int
    tensor_parallel: int = 8
    ranks: int = 4
    generation_gpu: Gpu = H800
    training_gpu: Gpu = H800
    colocated: bool = False
    slots: int = 256
    micro_batch_tokens: int = 65_536
    link_bytes_per_s: float = 0.0

    @property
    def instances(self) -> int:
        return self.generation_gpus // self.tensor_parallel

    @property
    def gpus(self) -> int:
        """How many there are in all."""
        return self.generation_gpus + (0 if self.colocated else self.training_gpus)


_BASE = CoreSettings(num_batches=1, groups_per_batch=1, group_size=1, rollout_timeout_s=NO_TIMEOUT_S)

PIPELINES: dict[str, CoreSettings] = {
    "serial": msgspec.structs.replace(_BASE, max_staleness=0, release="batch", update=UpdateMode.BARRIER),
    "mini_batch": msgspec.structs.replace(_BASE, max_staleness=0, release="mini_batch", update=UpdateMode.BARRIER),
    "stream": msgspec.structs.replace(_BASE, max_staleness=0, release="stream", update=UpdateMode.BARRIER),
    "one_step_batch": msgspec.structs.replace(_BASE, max_staleness=1, release="batch", update=UpdateMode.BARRIER),
    "fully_async": msgspec.structs.replace(_BASE, max_staleness=1, release="stream", update=UpdateMode.BARRIER),
    "enlarged": msgspec.structs.replace(_BASE, max_staleness=1, rollout_batches=2, update=UpdateMode.BARRIER),
    "sub_step": msgspec.structs.replace(_BASE, max_staleness=1, release="stream", update=UpdateMode.STAGGERED),
    "in_flight": msgspec.structs.replace(_BASE, max_staleness=1, release="stream", update=UpdateMode.IN_FLIGHT),
    "rolling": msgspec.structs.replace(_BASE, max_staleness=1, update=UpdateMode.IN_FLIGHT, membership="rolling"),
    "rolling_staggered": msgspec.structs.replace(
        _BASE, max_staleness=1, update=UpdateMode.STAGGERED, membership="rolling"
    ),
    "rolling_2": msgspec.structs.replace(_BASE, max_staleness=2, update=UpdateMode.IN_FLIGHT, membership="rolling"),
    "in_flight_2": msgspec.structs.replace(_BASE, max_staleness=2, release="stream", update=UpdateMode.IN_FLIGHT),
}
"""Name -> settings of the core. AsyncFlow's delayed parameter update is "fully_async" (``docs/modes.md``); StreamRL's
colocated baseline is "serial" on a colocated layout."""


def scenario(
    workload: Workload,
    layout: Layout,
    pipeline: CoreSettings,
    *,
    iterations: int,
    assumed: Assumptions = ASSUMED,
    dispatch: str = "scored",
    record: bool = False,
    trace: bool = False,
) -> Scenario:
    """One run of ``pipeline``. dispatch: as the setting. Raises DoesNotFitError when the LLM does not fit."""
    decode = decode_cost(workload.llm, layout.generation_gpu, layout.tensor_parallel, assumed)
    costs = _costs(workload, layout, assumed)
    core = msgspec.structs.replace(
        pipeline,
        num_batches=iterations,
        groups_per_batch=workload.batch,
        group_size=workload.group_size,
        mini_batch_groups=max(1, workload.batch // MINI_BATCHES),
        micro_batch_tokens=layout.micro_batch_tokens,
        dispatch=dispatch,
        decode_cost=decode,
        train_token_s=costs.train.token_s / layout.ranks,
        max_response_tokens=max(max(samples) for samples in workload.lengths.lengths),
        checkpoint_every=1,
        max_retained_bytes=1 << 62,
    )
    return Scenario(
        core=core,
        workers=layout.instances,
        capacity=layout.slots,
        dp_size=layout.ranks,
        lengths=workload.lengths,
        costs=costs,
        decode=(decode,) * layout.instances,
        max_s=1e9,
        record=record,
        trace=trace,
    )


def _costs(workload: Workload, layout: Layout, assumed: Assumptions) -> CostModel:
    llm, gpu = workload.llm, layout.training_gpu
    slower = min(gpu.network_bytes_per_s, layout.generation_gpu.network_bytes_per_s)
    link = layout.link_bytes_per_s or GPUS_PER_NODE * slower
    transfer = transfer_cost(llm, link, layout.instances, assumed)
    trainer, engine = gpu.measured, layout.generation_gpu.measured
    costs = CostModel(
        train=train_cost(llm, gpu, layout.training_gpus, layout.ranks, workload.algorithm, assumed),
        publish_s=trainer.publish_s if trainer is not None else 0.0,
        transfer_s=transfer.transfer_s(),
        load_s=engine.load_s if engine is not None else transfer.load_s,
        checkpoint_s=0.0,
        heartbeat_s=HEARTBEAT_S,
    )
    if trainer is not None and trainer == engine:  # one machine, as it was profiled
        costs = replace(costs, decode_beside=trainer.decode_beside, train_beside=trainer.train_beside)
    if not layout.colocated:
        return costs
    switch = switch_s(llm, gpu, layout.training_gpus, workload.algorithm, assumed)
    return replace(costs, switch_s=switch)
