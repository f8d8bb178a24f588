"""Names of a model's tensors: those of its modules in memory, and those in its files, where transformers renames them.

    in files       embed_out.weight        layers.0.attn.LayerNorm.gamma     experts.0.up_proj.weight, experts.1. ...
    in the module  lm_head.weight          layers.0.attn.LayerNorm.weight    experts.gate_up_proj
                   renamed                 renamed, of old files             converted: several tensors become one

A run's own messages and checkpoints name tensors as the modules do. What others read (servers, a saved directory) has
the names of files.

Owns: the way from one to the other, as transformers itself has it for the family. Never: reads a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadNames:
    """Module name -> the names in files that become it, in order.  converted: names in files whose tensors transformers
    changes as it loads them, beyond their names.
    """

    sources: dict[str, list[str]]
    converted: list[str]


def names_read(module: Any, stored: Iterable[str]) -> ReadNames:
    """What ``from_pretrained`` makes of names in files. module: the model or a part of it, on any device.

    A name that the module does not have is under itself, renamed.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(module)
    renamings: Any = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters: Any = [rule for rule in rules if not isinstance(rule, WeightRenaming)]
    known = {name: True for named in (module.named_parameters, module.named_buffers) for name, _ in named()}
    known |= dict.fromkeys((name for name, _ in module.named_parameters(remove_duplicate=False)), True)
    sources: dict[str, list[str]] = {}
    converted: list[str] = []
    for name in stored:
        target, converter = rename_source_key(name, renamings, converters, module.base_model_prefix, known)
        sources.setdefault(target, []).append(name)
        if converter is not None:
            converted.append(name)
    return ReadNames(sources=sources, converted=converted)


def names_in_files(module: Any, names: Iterable[str]) -> dict[str, str]:
    """Module name -> the name in files, as ``save_pretrained`` writes it; each its own where nothing is renamed."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, apply_renamings

    rules = get_model_conversion_mapping(module, add_legacy=False)[::-1]
    # what a prefix was depends on the directory that was read: transformers leaves it out, too, for a new model
    back: Any = [rule.reverse_transform() for rule in rules if type(rule).__name__ != "PrefixChange"]
    renamings = [rule for rule in back if isinstance(rule, WeightRenaming)]
    found = {name: apply_renamings(name, renamings) for name in names}
    again = names_read(module, found.values()).sources
    return {name: where if again.get(name) == [where] else name for name, where in found.items()}
