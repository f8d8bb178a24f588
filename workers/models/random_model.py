"""Small random models that exist without any download: for tests and first steps.

Owns: their seeded weights and their character tokenizer. Invariant: the same name and revision give the same bytes on
every machine with the same torch.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from workers.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REVISION = 1
"""Raised when a model or the tokenizer changes, so that no old one is taken from the cache."""

SEED = 20_251_120

PAD, UNKNOWN, START, END = SPECIAL = ("<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>")
ALPHABET = "\n abcdefghijklmnopqrstuvwxyz0123456789.,:;?!+-*/=()<>'\"%$#_&"
"""Text is lower-cased first. A random model draws each of these 60-odd tokens about equally often, so that within 16
tokens it says a given digit one time in five and ends one time in five: even untrained, it has some reward and lengths
that vary. With 256 byte tokens it has neither."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\\n' + message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ 'assistant\\n' }}{% endif %}"
)


def builder(name: str) -> Callable[[Path], None]:
    """The function that writes the random model ``name`` into a directory. Raises ModelError for another name."""
    builders = {"qwen3-tiny": build_qwen3_tiny, "qwen3-small": build_qwen3_small}
    if name not in builders:
        raise ModelError(f"random:{name} is not known; known: {', '.join(f'random:{known}' for known in builders)}")
    return builders[name]


def build_qwen3_tiny(directory: Path) -> None:
    """Write a Qwen3 of 2 layers and 78,208 parameters, float32, with its tokenizer."""
    _build_qwen3(directory, hidden=64, mlp=128, layers=2, heads=4)


def build_qwen3_small(directory: Path) -> None:
    """The same of 6 layers and 5 million parameters: its steps take milliseconds, and arithmetic takes most of them."""
    _build_qwen3(directory, hidden=256, mlp=768, layers=6, heads=8)


def _build_qwen3(directory: Path, *, hidden: int, mlp: int, layers: int, heads: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = character_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index(END),
        pad_token_id=SPECIAL.index(PAD),
    )
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        torch.manual_seed(SEED)
        Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, made here so that it needs no file and works offline."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )
