"""What ``run --dry-run`` prints where an engine starts the processes: a batch script, manifests, or a list."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from orchestrator.config.load import Resolved
from orchestrator.errors import ConfigError, writing_out
from orchestrator.launch.checks import check_cluster
from orchestrator.launch.launchers.base import ProcessSpec
from orchestrator.launch.processes import Fleet
from transport.broker.base import without_password
from transport.contracts.settings import Settings
from transport.process.programs import command, quoted
from transport.process.secret import BROKER_PASSWORD, SHARED_SECRET


def submission(resolved: Resolved, typed: Sequence[str]) -> str:
    """Nothing is started or asked. typed: arguments of ``run`` as its user typed them. No secret is in it."""
    settings, specs = resolved.settings, _specs(resolved.settings, typed)
    match settings.launcher.kind:
        case "slurm":
            from orchestrator.launch.launchers.slurm import batch_script

            return batch_script(settings, specs, _kept(typed), command("streamrl-orchestrator"))
        case "kubernetes":
            from orchestrator.launch.launchers.kubernetes_manifests import manifests_text

            return manifests_text(resolved, specs)
        case _:
            return "".join(f"{_line(spec)}\n" for spec in specs)


def write_base(resolved: Resolved, typed: Sequence[str], directory: Path) -> None:
    """A Kustomize base in ``directory``, which is made. Raises ConfigError: it has files already, or another engine."""
    from orchestrator.launch.launchers.kubernetes_manifests import kustomize_base

    if resolved.settings.launcher.kind != "kubernetes":
        raise ConfigError("--out is the directory of a Kustomize base: it goes with --dry-run --launcher kubernetes")
    files = kustomize_base(resolved, _specs(resolved.settings, typed))
    with writing_out(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise ConfigError(f"--out: {directory} has files already; name another directory, or remove it")
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")


def _specs(settings: Settings, typed: Sequence[str]) -> Sequence[ProcessSpec]:
    check_cluster(_on_its_cluster(settings))
    _check_typed(settings, typed)
    url = without_password(settings.broker.url)[0] or "BROKER"
    run_dir = Path(settings.run.dir) / settings.run.name
    fleet = Fleet(
        settings=settings, run_dir=run_dir, model_dir=Path("MODEL"), url=url, env={}, is_local=False, worker_url=url
    )
    return fleet.workers()


def _on_its_cluster(settings: Settings) -> Settings:
    """As they are where a batch script runs, which names its own host."""
    if settings.launcher.address or settings.broker.url or settings.launcher.kind != "slurm":
        return settings
    launcher = msgspec.structs.replace(settings.launcher, address="batch-host")
    return msgspec.structs.replace(settings, launcher=launcher)


def _check_typed(settings: Settings, typed: Sequence[str]) -> None:
    """Raises ConfigError for a secret on the command line: it would stand in what is printed."""
    password = without_password(settings.broker.url)[1]
    secrets = [secret for secret in (password, settings.broker.password, settings.api.secret) if secret]
    if any(secret in word for secret in secrets for word in typed):
        raise ConfigError(f"--dry-run prints no secret: give it by {BROKER_PASSWORD} or {SHARED_SECRET} instead")


DROPPED, WITH_VALUE = ("--dry-run", "--resume", "--plain"), ("--name",)


def _kept(typed: Sequence[str]) -> list[str]:
    """Without what the script says itself."""
    kept: list[str] = []
    words = iter(typed)
    for word in words:
        if word in WITH_VALUE:
            next(words, None)
        elif word not in DROPPED and not word.startswith(tuple(f"{option}=" for option in WITH_VALUE)):
            kept.append(word)
    return kept


def _line(spec: ProcessSpec) -> str:
    ask = spec.resources
    wants = f"{ask.cpus} CPU, {ask.gpus} GPU" + (f", {ask.memory_mib} MiB" if ask.memory_mib else "")
    ranks = f"{spec.ranks} ranks in one placement group, each " if spec.ranks > 1 else ""
    return f"{spec.name}  {ranks}{wants}  {quoted(*spec.argv)}"
