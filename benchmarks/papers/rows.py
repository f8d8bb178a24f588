"""The papers' results as data, and the experiment of ours that stands beside each of them.

Owns: published numbers with their table or figure. Never: settings (``settings.py``), running them
(``trials.py``), printing (``comparison.py``). Invariant: a row says against what it is measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.learning import RESULTS, Bench, found_in, share_of
from benchmarks.papers.experiments import (
    Experiment,
    Generation,
    Growing,
    Known,
    OracleShare,
    Pipelined,
    TrainingStage,
    Transfer,
)
from benchmarks.papers.settings import (
    CROSSING_TRAINERS,
    GPUS,
    GROWING_START,
    LENGTHS,
    LINK_BYTES_PER_S,
    asyncflow,
    colocated,
    fully_async,
    in_flight,
    like_verl,
    rolling,
    split,
    sync_stream,
    tensor_parallel,
)
from orchestrator.sim.costs import H20, H800
from orchestrator.sim.llms import QWEN_7B, QWEN_32B, QWEN_72B
from transport.contracts.llms import Llm

DRIFT = Path(__file__).with_name("ranker_drift.json")
"""What ``benchmarks.ranker --only drift --out`` printed last: its logs are not part of the project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One number: ``factor`` times the seconds of ``over`` by those of ``of``; of ``of`` alone where there is no
    ``over``."""

    label: str
    of: Experiment
    over: Experiment | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One result of a paper beside ours.

    paper: as printed; "-" where it gives no number.  low, high: the same as numbers, None where there is none.
    cells: ours, the range of them where there are several.  unit: behind our numbers.  note: what differs.
    """

    key: str
    source: str
    what: str
    cells: tuple[Cell, ...]
    paper: str = "-"
    low: float | None = None
    high: float | None = None
    unit: str = "x"
    note: str = ""


def _table_3() -> list[Row]:
    base = colocated(QWEN_72B)
    steps = (
        (
            "ranked",
            "+ skewness-aware dispatch",
            colocated(QWEN_72B, dispatch="scored"),
            1.08,
            "the context is in the cost of our steps and not in the paper's latency: even shares end nearer together",
        ),
        (
            "stream",
            "+ disaggregated stream, synchronous",
            sync_stream(QWEN_72B),
            1.23,
            "the paper's split is not printed; ranks of ours hold all models of PPO, or pay for bringing them",
        ),
        (
            "async",
            "+ fully asynchronous, the paper's dispatch",
            fully_async(QWEN_72B),
            1.48,
            "the same dispatch and versions; the split is ours",
        ),
        (
            "best",
            "ours: in flight, at most one version old",
            in_flight(),
            None,
            "the paper takes versions at batch boundaries; ours come between two steps",
        ),
        ("rolling", "ours: rolling, at most two versions old", rolling(), None, "not in the paper"),
    )
    return [
        Row(
            key=f"table3_{key}",
            source="StreamRL Table 3",
            what=f"72B, 20K, over colocated: {what}",
            cells=(Cell(label="72B 20K", of=experiment, over=base),),
            paper=f"{published:.2f}" if published else "-",
            low=published,
            high=published,
            note=note,
        )
        for key, what, experiment, published, note in steps
    ]


def _figure_2() -> list[Row]:
    """Each stage alone: on more GPUs, and with longer responses."""

    generation = partial(Generation, dispatch="even", llm=QWEN_7B, tensor_parallel=4, recall=None)

    def training(*, gpus: int, max_tokens: int) -> TrainingStage:
        return TrainingStage(llm=QWEN_7B, gpus=gpus, ranks=gpus // 4, max_tokens=max_tokens)

    def on_gpus(stage: Callable[..., Experiment]) -> tuple[Cell, ...]:
        few = stage(gpus=8, max_tokens=8_192)
        return tuple(
            Cell(label=f"{gpus}", of=stage(gpus=gpus, max_tokens=8_192), over=few) for gpus in (16, 32, 64, 128)
        )

    def of_tokens(stage: Callable[..., Experiment]) -> tuple[Cell, ...]:
        short = stage(gpus=32, max_tokens=2_048)
        return tuple(
            Cell(label=f"{tokens}", of=short, over=stage(gpus=32, max_tokens=tokens))
            for tokens in (4_096, 8_192, 16_384)
        )

    lines = (
        (
            "gpus_generation",
            "7B, 8K, generation alone on 16 to 128 GPUs, over 8",
            on_gpus(generation),
            "a plateau",
            "its batch is not printed; ours has 1,024 samples, of which an instance on 128 GPUs has 32",
        ),
        (
            "gpus_training",
            "the same of training alone",
            on_gpus(training),
            "scales better",
            "short of linear by the optimizer's step and reducing of gradients, which more GPUs do not shorten",
        ),
        (
            "tokens_generation",
            "7B, 32 GPUs, seconds of generation with 4K to 16K tokens at most, over 2K",
            of_tokens(generation),
            "grows faster",
            "every step reads its context, which grows too; the paper's batch is not printed",
        ),
        (
            "tokens_training",
            "the same of training",
            of_tokens(training),
            "grows less",
            "optimizer and reduction do not grow, so that training grows less than its tokens",
        ),
    )
    return [
        Row(
            key=f"fig2_{key}",
            source="StreamRL Figure 2",
            what=what,
            cells=cells,
            paper=f"a curve: {paper}",
            note=note,
        )
        for key, what, cells, paper, note in lines
    ]


def _figure_8() -> list[Row]:
    def cells(ours: dict[tuple[Llm, int], Pipelined], verl: bool = False) -> tuple[Cell, ...]:
        def base(llm: Llm, tokens: int) -> Pipelined:
            return like_verl(colocated(llm, tokens)) if verl else colocated(llm, tokens)

        return tuple(
            Cell(label=f"{llm.name[8:]} {tokens // 1000}K", of=one, over=base(llm, tokens))
            for (llm, tokens), one in ours.items()
        )

    grid = [(llm, tokens) for llm in GPUS for tokens in LENGTHS]
    return [
        Row(
            key="fig8_sync",
            source="StreamRL Figure 8",
            what="synchronous stream over colocated, 7B-72B, 5K-20K",
            cells=cells({(llm, tokens): sync_stream(llm, tokens) for llm, tokens in grid}),
            paper="1.06 - 1.41",
            low=1.06,
            high=1.41,
            note="over the paper's own colocated pipeline (ColocationRL); its split of the GPUs is not printed",
        ),
        Row(
            key="fig8_async",
            source="StreamRL Figure 8",
            what="fully asynchronous over colocated, 7B-72B, 5K-20K",
            cells=cells({(llm, tokens): fully_async(llm, tokens) for llm, tokens in grid}),
            paper="1.30 - 2.66",
            low=1.30,
            high=2.66,
            note="the paper's range is over verl, see below; over colocated it prints 1.48 for 72B, 20K",
        ),
        Row(
            key="fig8_verl_sync",
            source="StreamRL Figure 8",
            what="synchronous stream over a colocated pipeline configured as verl",
            cells=cells({(llm, tokens): sync_stream(llm, tokens) for llm, tokens in grid}, verl=True),
            paper="1.12 - 2.12",
            low=1.12,
            high=2.12,
            note="half of the memory for caches and no CUDA graphs, as verl's defaults were; its trainer taken as ours",
        ),
        Row(
            key="fig8_verl_async",
            source="StreamRL Figure 8",
            what="fully asynchronous over the same",
            cells=cells({(llm, tokens): fully_async(llm, tokens) for llm, tokens in grid}, verl=True),
            paper="1.30 - 2.66",
            low=1.30,
            high=2.66,
            note="what else sets verl apart in the paper, its trainer and its own overheads, is not known",
        ),
    ]


def _figure_9() -> list[Row]:
    def row(key: str, what: str, recall: float | None, dispatch: str, paper: str = "-", note: str = "") -> Row:
        def generation(llm: Llm, policy: str) -> Generation:
            return Generation(
                llm=llm, gpus=GPUS[llm], tensor_parallel=tensor_parallel(llm), dispatch=policy, recall=recall
            )

        cells = tuple(
            Cell(label=llm.name[8:], of=generation(llm, dispatch), over=generation(llm, "random")) for llm in GPUS
        )
        return Row(key=key, source="StreamRL Figure 9", what=what, cells=cells, paper=paper, note=note)

    most, bars = "most of the oracle's", "the paper prints bars without numbers"
    rows = [
        row("fig9_oracle", "generation alone, 20K, over random: lengths known", None, "scored", note=bars),
        row("fig9_paper", "the same with recall .87, Algorithm 2 with the maximum", 0.87, "two_class_max", most, bars),
        row("fig9_ours", "the same with recall .87, ours", 0.87, "scored", most, bars),
    ]
    shares = tuple(
        Cell(
            label=llm.name[8:],
            of=OracleShare(
                ranked=Generation(llm=llm, gpus=GPUS[llm], tensor_parallel=tensor_parallel(llm), dispatch="scored")
            ),
        )
        for llm in GPUS
    )
    share = Row(
        key="fig9_oracle_share",
        source="StreamRL Figure 9",
        what="of what known lengths save over random, the share that recall .87 saves",
        cells=shares,
        paper=most,
        unit="",
        note="a long sample that was not expected ends an instance late, however well the rest is placed",
    )
    rows.append(share)
    return rows + [
        replace(
            row(f"table4_{name}", f"the same, ranker of the {name} ({recall} of the longest 20%)", recall, "scored"),
            source="StreamRL Table 4",
            note="the recall is an input",
        )
        for name, recall in (("3B", 0.85), ("1.5B", 0.81))
    ]


def _figure_10() -> Row:
    return Row(
        key="fig10_split",
        source="StreamRL Figure 10",
        what="asynchronous, 20K: our split over an even one",
        cells=tuple(
            Cell(label=llm.name[8:], of=fully_async(llm), over=fully_async(llm, generation_gpus=GPUS[llm] // 2))
            for llm in (QWEN_32B, QWEN_72B)
        ),
        paper="1.25",
        low=1.25,
        high=1.25,
        note="for the 32B half and half is nearly what our rule answers, too; the paper's sizes are not printed",
    )


def _figure_11() -> Row:
    layout = split(QWEN_7B, GROWING_START)
    return Row(
        key="fig11",
        source="StreamRL Figure 11",
        what="7B, lengths from 10K to 20K: a node is added after iterations",
        cells=tuple(Cell(label=f"addition {nth}", of=Growing(nth=nth, llm=QWEN_7B, layout=layout)) for nth in (2, 3)),
        paper="10, 16",
        low=10,
        high=16,
        unit="",
        note=f"{GROWING_START} of 32 GPUs at first, by Algorithm 1; a node more comes at once, after iteration 1",
    )


def _figure_12() -> Row:
    cells: list[Cell] = []
    for tokens in LENGTHS:
        single = fully_async(QWEN_7B, tokens)
        crossing = replace(
            single,
            layout=replace(
                single.layout,
                generation_gpus=32,
                generation_gpu=H20,
                training_gpus=CROSSING_TRAINERS[tokens],
                ranks=CROSSING_TRAINERS[tokens] // 2,
                link_bytes_per_s=LINK_BYTES_PER_S,
            ),
        )
        price = 32 * H800.price / (32 * H20.price + crossing.layout.training_gpus * H800.price)
        cells.append(Cell(label=f"{tokens // 1000}K", of=crossing, over=single, factor=price))
    return Row(
        key="fig12_two_datacenters",
        source="StreamRL Figure 12",
        what="7B, throughput by price: 32 H20 generate, H800 train, over one datacenter",
        cells=tuple(cells),
        paper="1.23 - 1.31",
        low=1.23,
        high=1.31,
        note="prices of Table 1; the abstract says 1.33; how many H800 train is not printed, here the cheapest",
    )


def _transfer() -> list[Row]:
    transfer = Transfer(bytes_per_s=LINK_BYTES_PER_S)
    return [
        Row(
            key="transfer",
            source="StreamRL sec. 7.3",
            what="72B weights over 80 Gbps",
            cells=(Cell(label="72B", of=transfer),),
            paper="< 10",
            high=10.0,
            unit=" s",
            note="145 GB of bf16 at 10 GB/s are 14.5 s: the paper's figure needs fewer bytes and names no way",
        ),
        Row(
            key="transfer_share",
            source="StreamRL sec. 7.3",
            what="the same as a share of an asynchronous iteration",
            cells=(Cell(label="72B", of=fully_async(QWEN_72B), over=transfer, factor=100.0),),
            paper="< 2",
            high=2.0,
            unit=" %",
            note="it is on its way while both stages go on",
        ),
    ]


def _asyncflow_table_1() -> list[Row]:
    serial = asyncflow(QWEN_7B, 512, "serial")
    steps = (
        ("stream", "stream", "stream", 2.01, "its baseline runs more tasks in sequence than generation and training"),
        (
            "async",
            "+ asynchronous",
            "fully_async",
            2.74,
            "the paper has more tasks in sequence than generation and training",
        ),
    )
    return [
        Row(
            key=f"asyncflow_{key}",
            source="AsyncFlow Table 1",
            what=f"7B, 512 NPUs, over sequential: {what}",
            cells=(Cell(label="7B 512", of=asyncflow(QWEN_7B, 512, mode), over=serial),),
            paper=f"{published:.2f}",
            low=published,
            high=published,
            note=note,
        )
        for key, what, mode, published, note in steps
    ]


def _asyncflow_figure_10() -> list[Row]:
    figure = "AsyncFlow Figure 10"
    sizes = {QWEN_7B: (32, 64, 128, 256, 512), QWEN_32B: (64, 128, 256, 512, 1024)}
    grid = [(llm, gpus) for llm, of_llm in sizes.items() for gpus in of_llm]

    def over(verl: bool) -> tuple[Cell, ...]:
        bases = {(llm, gpus): asyncflow(llm, gpus, "serial_colocated") for llm, gpus in grid}
        return tuple(
            Cell(
                label=f"{llm.name[8:]} {gpus}",
                of=asyncflow(llm, gpus, "fully_async"),
                over=like_verl(base) if verl else base,
            )
            for (llm, gpus), base in bases.items()
        )

    def linearity(llm: Llm, least: int, batch: int, label: str) -> Cell:
        """Throughput of 16 times the GPUs, over 16 times the throughput."""
        small, large = (asyncflow(llm, gpus, "fully_async", batch=batch) for gpus in (least, 16 * least))
        return Cell(label=label, of=large, over=small, factor=large.batch / small.batch / 16)

    return [
        Row(
            key="asyncflow_gain",
            source=figure,
            what="7B on 32-512, 32B on 64-1,024 NPUs, over colocated",
            cells=over(verl=False),
            paper="1.33 - 2.03",
            low=1.33,
            high=2.03,
            note="the paper's are over verl; which sizes of the 32B it has is not printed",
        ),
        Row(
            key="asyncflow_gain_verl",
            source=figure,
            what="the same over a colocated pipeline configured as verl",
            cells=over(verl=True),
            paper="1.33 - 2.03, mean 1.59",
            low=1.33,
            high=2.03,
            note="the paper's verl trains by FSDP on NPUs, of which no constant is known; its trainer is taken as ours",
        ),
        Row(
            key="asyncflow_linear_growing",
            source=figure,
            what="linearity at 16 times the NPUs, batch grows with them",
            cells=(linearity(QWEN_7B, 32, 0, "7B 512"), linearity(QWEN_32B, 64, 0, "32B 1024")),
            paper="0.65, 0.88",
            low=0.65,
            high=0.88,
            note="the paper does not say whether its batch grew",
        ),
        Row(
            key="asyncflow_linear_fixed",
            source=figure,
            what="the same with a fixed batch, of 4,096 and 8,192",
            cells=(linearity(QWEN_7B, 32, 4096, "7B 512"), linearity(QWEN_32B, 64, 8192, "32B 1024")),
            paper="0.65, 0.88",
            low=0.65,
            high=0.88,
            note="an instance then decodes fewer at once, and the longest sample takes as long on any number of them",
        ),
    ]


def _learned() -> list[Row]:
    """Read from what ``benchmarks/learning.py`` measured on a real run; without its files there is nothing of ours."""
    bench = Bench(results=RESULTS, work=RESULTS)
    found = found_in(bench)
    base, delayed = share_of(found, "sync"), share_of(found, "staleness_1")
    cells = () if base is None or delayed is None else (Cell(label="SmolLM2", of=Known(base), over=Known(delayed)),)
    note = "held-out problems right, 40 batches, three seeds" if cells else "not measured: make bench NAME=learning"
    return [
        Row(
            key=f"convergence_{key}",
            source=source,
            what=what,
            cells=cells,
            paper=paper,
            note=note,
        )
        for key, source, what, paper in (
            ("streamrl", "StreamRL sec. 7.4", "reward, one step asynchronous over synchronous", "comparable"),
            ("asyncflow", "AsyncFlow Figure 12", "reward, delayed update over synchronous", "negligible"),
        )
    ]


def _drift() -> Row:
    """Of the length ranker, as ``benchmarks/ranker.py`` measured it."""
    measured = json.loads(DRIFT.read_text()) if DRIFT.exists() else {}
    named = {"at once": "drift_text_first_20", "learnt again": "drift_text_last_20"} if measured else {}
    note = "math, Qwen2.5-3B and its RL-tuned child" if measured else "not measured: make bench NAME=ranker"
    return Row(
        key="ranker_drift",
        source="StreamRL sec. 5.2",
        what="tail recall at 20% when RL has tuned the policy, over before: at once, learnt again",
        cells=tuple(
            Cell(label=label, of=Known(measured["drift_text_before_20"]), over=Known(measured[name]))
            for label, name in named.items()
        ),
        paper="remains accurate",
        note=note,
    )


def rows() -> list[Row]:
    """All of them, in the papers' order."""
    return [
        *_figure_2(),
        *_table_3(),
        *_figure_8(),
        *_figure_9(),
        _figure_10(),
        _figure_11(),
        _figure_12(),
        *_transfer(),
        _drift(),
        *_asyncflow_table_1(),
        *_asyncflow_figure_10(),
        *_learned(),
    ]
