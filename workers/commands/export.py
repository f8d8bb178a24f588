"""``streamrl-worker export``: a checkpoint of a run becomes a plain Hugging Face directory. torch is imported last.

Owns: the order. The files of weights are opened before anything slow begins: a live run may remove the checkpoint, and
what was found is read to the end all the same, tensor by tensor.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from transport.contracts.ledger import CheckpointMeta, checkpoints_place
from transport.contracts.settings import Settings
from transport.errors import DECODE_ERRORS
from transport.process.storage import Place
from workers.errors import RunFilesError
from workers.models import prepare_model
from workers.trainer.checkpoint import check_base_model, newest_model

if TYPE_CHECKING:
    from workers.trainer.policy.stored import StoredTensors


def export_checkpoint(
    run_dir: Path, version: int | None, out: Path, *, cache_dir: Path, dtype: str = "", trust: bool = False
) -> CheckpointMeta:
    """Write the model of a checkpoint of the run as a plain Hugging Face directory. The run may be live.

    version: None for the newest that is whole.  dtype: of the weights; "": trainer.save_dtype of the run.
    Raises: RunFilesError: ``run_dir`` is no run that trains a model, it has no such checkpoint, or ``out`` is there.
    ModelError: the run's base model cannot be had.  CheckpointError: the disk refuses.
    """
    settings = read_settings(run_dir)
    if settings.trainer.engine != "torch":
        raise RunFilesError(f'{run_dir} trained no model: its trainer.engine is "{settings.trainer.engine}"')
    if out.exists() or out.is_symlink():
        raise RunFilesError(f"{out} is there already: remove it, or choose another directory")
    path, meta, weights = newest_model(checkpoints_place(settings, run_dir), version, _open)
    base = prepare_model(settings.model.path, cache_dir=cache_dir, trust_remote_code=trust)
    check_base_model(path, meta, base)
    from workers.trainer.policy.export import Exporter

    named, lora = dtype or settings.trainer.save_dtype, settings.trainer.lora
    exporter = Exporter(model_dir=base, dtype=named, lora=lora, trust_remote_code=trust)
    with closing(weights):
        exporter.write(weights, out)
    return meta


def _open(path: Place, names: list[str]) -> StoredTensors:
    from workers.trainer.policy.stored import StoredTensors

    return StoredTensors.open(path, names)


def read_settings(run_dir: Path) -> Settings:
    """Of the run in ``run_dir``. Raises RunFilesError."""
    path = run_dir / "config.toml"
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Settings)
    except (OSError, *DECODE_ERRORS) as error:
        raise RunFilesError(
            f"{path} is not the configuration of a run ({error}): give the directory <dir>/<name>"
        ) from error
