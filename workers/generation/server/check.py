"""Whether a server is what the run needs: of a tested version, a model of this kind, our loader.

Owns: these checks and what each refusal says. Never: changes the server. What it does not tell, its vocabulary and the
shapes of its tensors, the loader looks at.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from transport.errors import InputFileError
from transport.process.json_files import read_json
from workers.errors import ModelError
from workers.generation.server.sglang_http import ServerInfo, SglangClient

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's own config.json says. max_context: tokens, 0 where it names no limit."""

    model_type: str
    vocab_size: int
    max_context: int


def model_facts(directory: Path) -> ModelFacts:
    """Raises ModelError when config.json is missing or names no vocabulary."""
    path = directory / "config.json"
    try:
        config = read_json(path, dict[str, Any])
    except InputFileError as error:
        raise ModelError(str(error)) from error
    text: dict[str, Any] = config.get("text_config") or config
    if not isinstance(text.get("vocab_size"), int):
        raise ModelError(f"{path} has no vocab_size")
    return ModelFacts(
        model_type=str(config.get("model_type", "")),
        vocab_size=text["vocab_size"],
        max_context=int(text.get("max_position_embeddings") or 0),
    )


async def check_server(client: SglangClient, model: ModelFacts) -> ServerInfo:
    """Check the healthy server behind ``client``.

    Raises: ModelError: it serves another kind of model, or cannot take weights from us; as every call else.
    """
    served = await client.model_info()
    if not served.is_generation or (served.model_type or "") != model.model_type:
        raise ModelError(
            f"{client.url} serves {served.model_path!r} of type {served.model_type!r}, "
            f"the run's model is of type {model.model_type!r}"
        )
    info, kind = await client.server_info(), client.kind
    if info.version not in kind.tested:
        log.warning(f"untested {kind.name} version", version=info.version, tested=kind.tested, url=client.url)
    if kind.loader not in (info.custom_weight_loader or ()):
        raise ModelError(
            f"{client.url} cannot take new weights: install streamrl beside its {kind.name} and start it with "
            f"{kind.option} {kind.loader}"
        )
    return info
