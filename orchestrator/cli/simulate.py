"""``streamrl-orchestrator simulate``: a user's own scenario: arguments, and what is printed and written.

How to read the answer: docs/simulation.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
import typer

from orchestrator.cli.plan import (
    GBPS,
    AsJson,
    Batch,
    Deferred,
    Drafted,
    GroupSize,
    LinkGbps,
    Pipeline,
    Probes,
    ProfileFile,
    Recall,
    SmallCaches,
    SmallWeights,
    TokenCost,
    check_tail_aids,
    chosen_model,
    in_words,
    one_of,
    parse_pools,
    with_aids,
)
from orchestrator.core.dispatch.compute import Planned
from orchestrator.core.model.settings import LEAST_LOADED, PULLED, CoreSettings, default_dispatch
from orchestrator.errors import ConfigError, writing_out
from orchestrator.observability.report.bubbles import Cause
from orchestrator.observability.report.drawing import write_timeline
from orchestrator.planning.allocation import Pool, least_training_gpus
from orchestrator.planning.plan_search import SPARE_TOKENS, micro_batch_tokens_of, slots_of
from orchestrator.planning.profiles import NAME, Profile, extrapolated, hardware, read_profile
from orchestrator.sim.costs import (
    GPUS,
    Algorithm,
    DoesNotFitError,
    Gpu,
    generation_degrees,
    most_ranks,
    tensor_degrees,
)
from orchestrator.sim.generation import SampleTooLongError
from orchestrator.sim.lengths import long_tailed, read_lengths, representative
from orchestrator.sim.llms import LLMS
from orchestrator.sim.scenarios import PIPELINES, Layout, Workload, bound, shortened, takes_turns
from orchestrator.sim.simulate import Performance, performance
from transport.contracts.llms import Fp8

POLICIES = (*get_args(Planned), LEAST_LOADED, PULLED)
COLOCATED = "colocated"
FEWEST_ITERATIONS = 3
"""One that fills the pipeline, one that counts, one beside which nothing more is generated."""


def simulate(
    model: Annotated[
        str,
        typer.Option(help=f"{', '.join(LLMS)}; or a Hugging Face config.json. [Qwen2.5-72B, or that of --profile]"),
    ] = "",
    generate: Annotated[
        str,
        typer.Option(
            help=f"GPUs that generate, COUNTxTYPE[@SITE]. Types: {', '.join(GPUS)}; with --profile also {NAME}. "
            f"[40xH800, or 1x{NAME}]"
        ),
    ] = "",
    train: Annotated[
        str,
        typer.Option(
            help=f"GPUs that train; {COLOCATED}: those that generate, in turn, as --pipeline serial has it. "
            f"[88xH800, or 1x{NAME}]"
        ),
    ] = "",
    profile: ProfileFile = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=0, help="GPUs of a generation instance. [0: that with the lowest bound]")
    ] = 0,
    ranks: Annotated[
        int, typer.Option(min=0, help="Data-parallel ranks of the trainer. [0: as many as hold all models]")
    ] = 0,
    lengths: Annotated[
        Path | None,
        typer.Option(help="Response lengths, tokens: one a line, or JSON lines. [StreamRL's 20K data set, simulated]"),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 500,
    pipeline: Pipeline = "in_flight",
    dispatch: Annotated[str, typer.Option(help=f"{', '.join(POLICIES)} (docs/dispatch.md). [as in a run of it]")] = "",
    batch: Batch = 1024,
    group_size: GroupSize = 1,
    algorithm: TokenCost = "ppo",
    recall: Recall = 0.87,
    slots: Annotated[
        int, typer.Option(min=0, help="Samples that an instance decodes at once, at most. [256, or as profiled]")
    ] = 0,
    micro_batch_tokens: Annotated[
        int, typer.Option(min=0, help="Of a rank of the trainer. [65,536, or as profiled]")
    ] = 0,
    drafts: Drafted = 0.0,
    draft_depth: Annotated[
        int,
        typer.Option(
            min=0, max=64, help="Tokens drafted at every step, as SGLang and vLLM do. [0: as many as take least]"
        ),
    ] = 0,
    fp8_kv: SmallCaches = False,
    fp8_weights: SmallWeights = False,
    probes: Probes = False,
    defer: Deferred = 0,
    link_gbps: LinkGbps = 80.0,
    iterations: Annotated[
        int, typer.Option(min=FEWEST_ITERATIONS, help="To simulate; the first and last do not count.")
    ] = 20,
    seed: Annotated[int, typer.Option(help="Of lengths and of the ranker's errors.")] = 11,
    out: Annotated[Path | None, typer.Option(help="Directory for the timeline as a picture (SVG and PNG).")] = None,
    as_json: AsJson = False,
) -> None:
    settings = shortened(PIPELINES[one_of("--pipeline", pipeline, PIPELINES)], probes=probes, deferred=defer)
    if train == COLOCATED and not takes_turns(settings):
        raise ConfigError(
            f"GPUs that do both do them in turn, as --pipeline serial has it; {pipeline} trains while it generates",
            where="--train",
        )
    check_tail_aids(settings, batch=batch, group_size=group_size, dispatch=dispatch or "auto")
    if out is not None:  # before what takes long
        with writing_out(out):
            out.mkdir(parents=True, exist_ok=True)
    measured = None if profile is None else read_profile(profile)
    fp8 = Fp8(kv=fp8_kv, weights=fp8_weights)
    measured = with_aids(measured, drafts, fp8)
    llm = chosen_model(model or ("" if measured else "Qwen2.5-72B"), measured)
    one_of("--dispatch", dispatch or LEAST_LOADED, POLICIES)
    skipped: list[str] = []
    known = None if recall >= 1.0 else recall
    if lengths is None:
        groups = long_tailed(batch * iterations, seed=seed, recall=known, question_tokens=prompt_tokens)
    else:
        read = read_lengths(lengths, group_size, skipped.append)
        sizes = {"batch": batch, "group_size": group_size, "batches": iterations, "prompt_tokens": prompt_tokens}
        groups = representative(read, recall=known, seed=seed, **sizes)
    cost = one_of("--algorithm", algorithm, get_args(Algorithm))
    if draft_depth and not drafts:
        raise ConfigError("nothing is drafted without --drafts, the share that is accepted", where="--draft-depth")
    workload = Workload(llm=llm, lengths=groups, batch=batch, group_size=group_size, algorithm=cost)
    pools = _pools(generate, train, measured)
    try:
        layout = _layout(workload, pools, tensor_parallel, ranks, link_gbps, fp8)
        layout = replace(
            layout,
            slots=slots or slots_of(layout.generation_gpu),
            micro_batch_tokens=micro_batch_tokens or micro_batch_tokens_of(layout.training_gpu),
            drafts=drafts,
            draft_depth=draft_depth,
        )
        chosen = dispatch or default_dispatch(settings, num_workers=layout.instances)
        outcome = performance(workload, layout, settings, dispatch=chosen, iterations=iterations)
    except DoesNotFitError as error:
        raise ConfigError(f"{error}; {_what_fits(workload, *pools)}, or take a smaller --model") from error
    except SampleTooLongError as error:
        raise ConfigError(f"{error}; give it more GPUs, or a smaller --model") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    data = _as_data(outcome, layout, workload, pipeline, settings, chosen, iterations)
    alike = lengths is None and group_size > 1
    data["notes"] = [
        *skipped,
        *([] if model or measured else [f"no --model is given: it is {llm.name}"] if generate else []),
        *(["the samples of a group have one length: --lengths reads a file of real ones"] if alike else []),
        *([] if measured is None else _notes(measured, workload, layout)),
    ]
    typer.echo(msgspec.json.encode(data).decode() if as_json else _as_text(outcome, layout, data))
    if out is not None:
        for path in write_timeline(outcome.timeline, f"{llm.name}, {pipeline}, {chosen}", out):
            typer.echo(path, err=as_json)


# -- arguments


def _pools(generate: str, train: str, profile: Profile | None) -> tuple[Pool, Pool]:
    """(those that generate, those that train), the same where they are colocated. Raises ConfigError."""
    usual = ("40xH800", "88xH800") if profile is None else (f"1x{NAME}",) * 2
    known = hardware(profile)
    generation = _pool("--generate", generate or usual[0], known)
    training = generation if train == COLOCATED else _pool("--train", train or usual[1], known)
    measured = any(NAME in given for given in (generate, train))  # of one machine, which its profile names
    if profile is None and not measured and bool(generate) != bool(train):
        named, other, do = ("--generate", "--train", "train") if generate else ("--train", "--generate", "generate")
        both = "; or those that generate train too: --train colocated --pipeline serial" if generate else ""
        example = f"{other} {generate or (train if train != COLOCATED else usual[0])}"
        raise ConfigError(f"nothing says which GPUs {do}: add them, as {example}{both}", where=named)
    measured = training.gpu.measured
    if measured is not None and training is generation:
        raise ConfigError("what a switch between the stages takes was not profiled", where="--train")
    if measured is not None and measured.train is None:
        raise ConfigError("the profile has no trainer in it, so who trains?", where="--train")
    return generation, training


def _layout(
    workload: Workload, pools: tuple[Pool, Pool], tensor_parallel: int, ranks: int, link_gbps: float, fp8: Fp8
) -> Layout:
    """Raises ConfigError, DoesNotFitError."""
    generation, training = pools
    if training.gpu.measured is not None and ranks not in (0, training.num_gpus):
        raise ConfigError(f"one {NAME} is one rank: {training.num_gpus} of them are no {ranks}", where="--ranks")
    link = link_gbps * GBPS if generation.site != training.site else 0.0
    degrees = [tensor_parallel] if tensor_parallel else tensor_degrees(workload.llm, generation.gpu)
    layouts = [
        Layout(
            generation_gpus=generation.num_gpus,
            training_gpus=training.num_gpus,
            tensor_parallel=degree,
            ranks=ranks or most_ranks(workload.llm, training.gpu, training.num_gpus, algorithm=workload.algorithm),
            generation_gpu=generation.gpu,
            training_gpu=training.gpu,
            colocated=training is generation,
            link_bytes_per_s=link,
            fp8=fp8,
        )
        for degree in degrees
        if generation.num_gpus % degree == 0
    ]
    if not layouts:
        raise ConfigError(f"{generation.num_gpus} GPUs are no whole instances of {tensor_parallel}", where="--generate")
    return _fastest(workload, layouts)


def _fastest(workload: Workload, layouts: list[Layout]) -> Layout:
    """The layout whose generation has the lowest bound, of those that hold the longest sample.

    Raises DoesNotFitError when none does.
    """
    need = max(max(samples) for samples in workload.lengths.lengths) + max(workload.lengths.questions) + SPARE_TOKENS
    bounds: list[tuple[float, int]] = []
    refused = ""
    for place, layout in enumerate(layouts):
        try:
            room = layout.decode_cost(workload.llm).kv_capacity_tokens
            if room < need:
                raise DoesNotFitError(
                    f"{layout.tensor_parallel} {layout.generation_gpu.name} have room for {room:.0f} tokens of context "
                    f"of {workload.llm.name}, the longest sample needs {need}"
                )
            limit = bound(workload, layout)
        except DoesNotFitError as error:
            refused = str(error)
        else:
            bounds.append((max(limit.generation_s, limit.longest_s), place))
    if not bounds:
        raise DoesNotFitError(refused)
    return layouts[min(bounds)[1]]


def _pool(option: str, text: str, known: Mapping[str, Gpu]) -> Pool:
    try:
        pools = parse_pools(text, {}, known)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix(f"{error.where}: "), where=option) from error
    if len(pools) != 1:
        raise ConfigError("one pool of GPUs, as 40xH800", where=option)
    return pools[0]


def _what_fits(workload: Workload, generation: Pool, training: Pool) -> str:
    """The fewest GPUs of these types that would do."""
    need = max(max(samples) for samples in workload.lengths.lengths) + max(workload.lengths.questions) + SPARE_TOKENS
    degrees = generation_degrees(workload.llm, generation.gpu, context_tokens=need)
    ranks = least_training_gpus(workload.llm, training.gpu, need)
    if not degrees or not ranks:
        stage, gpu = ("generates", generation.gpu) if not degrees else ("trains", training.gpu)
        return f"no number of {gpu.name} {stage} it: name another type"
    return f"give it at least {degrees[0]} {generation.gpu.name} to generate and {ranks} {training.gpu.name} to train"


# -- the answer


def _notes(profile: Profile, workload: Workload, layout: Layout) -> list[str]:
    """Where the profile says less than was asked of it."""
    longest = max(max(samples) for samples in workload.lengths.lengths) + max(workload.lengths.questions)
    generates, trains = layout.generation_gpu.measured is not None, layout.training_gpu.measured is not None
    return list(
        extrapolated(
            profile,
            context_tokens=longest if generates else 0,
            slots=layout.slots if generates else 0,
            micro_batch_tokens=layout.micro_batch_tokens if trains else 0,
        )
    )


def _as_data(
    outcome: Performance,
    layout: Layout,
    workload: Workload,
    pipeline: str,
    settings: CoreSettings,
    dispatch: str,
    iterations: int,
) -> dict[str, Any]:
    return {
        "model": workload.llm.name,
        "pipeline": pipeline,
        "probes": settings.probes,
        "deferred": settings.oversampled_groups,
        "dispatch": dispatch,
        "iterations": iterations,
        "generation_gpus": layout.generation_gpus,
        "training_gpus": layout.training_gpus,
        "tensor_parallel": layout.tensor_parallel,
        "ranks": layout.ranks,
        "iteration_s": round(outcome.iteration_s, 3),
        "bound_s": round(outcome.bound_s, 3),
        "over_bound": round(outcome.iteration_s / outcome.bound_s, 4),
        "bound_generation_s": round(outcome.bound.generation_s, 3),
        "bound_training_s": round(outcome.bound.training_s, 3),
        "longest_alone_s": round(outcome.bound.longest_s, 3),
        "samples_per_s": round(outcome.samples_per_s, 4),
        "tokens_per_s": round(outcome.tokens_per_s, 1),
        "mean_token_age": round(outcome.mean_age, 4),
        "oldest_token_age": outcome.oldest_age,
        "idle": {
            stage: {cause.value: round(usage.idle_s.get(cause, 0.0) / usage.present_s, 4) for cause in Cause}
            for stage, usage in outcome.usage.items()
            if usage.present_s
        },
    }


def _as_text(outcome: Performance, layout: Layout, data: dict[str, Any]) -> str:
    trained_on = "the same" if layout.colocated else f"{layout.training_gpus} {layout.training_gpu.name}"
    pipeline = in_words(data["pipeline"], data["probes"], data["deferred"])
    lines = [
        f"{data['model']}, {pipeline}, {data['dispatch']}; {layout.generation_gpus} "
        f"{layout.generation_gpu.name} generate ({layout.instances} instances of {layout.tensor_parallel}), "
        f"{trained_on} train ({layout.ranks} ranks)",
        *(f"note: {note}" for note in data["notes"]),
        f"iteration   {outcome.iteration_s:.4g} s; {outcome.samples_per_s:.2f} samples/s, "
        f"{outcome.tokens_per_s:,.0f} response tokens/s",
        f"bound       {outcome.bound_s:.4g} s, so {outcome.iteration_s / outcome.bound_s:.3f} of it; generation "
        f"{outcome.bound.generation_s:.4g} s, training {outcome.bound.training_s:.4g} s, longest sample alone "
        f"{outcome.bound.longest_s:.4g} s",
        f"token age   at most {outcome.oldest_age} versions, {outcome.mean_age:.2f} on average",
        "time of slots and trainer (slots: the most that an instance ever used)",
    ]
    for stage, causes in data["idle"].items():
        idle = ", ".join(f"{cause} {share:.1%}" for cause, share in causes.items() if share >= 0.0005)
        lines.append(f"  {stage:<11} busy {1 - sum(causes.values()):4.0%}; idle: {idle}")
    return "\n".join(lines)
