"""A model's chat template is a program of whoever made the model: it is tried before anything depends on its end.

Owns: the trial, in a child process under limits. Never: renders for use. Not held: a template that goes on for ever
only for certain messages.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
from pathlib import Path
from typing import Any

from workers.errors import ModelError

CPU_S = 10
"""A trial takes a millisecond."""
WALL_S = 60.0
"""Where the machine is so busy that 10 s of its time take longer."""
MEMORY_BYTES = 1024**3
"""More than the process had before."""
MAX_CHARACTERS = 1024**2
"""Of a trial's text; it has a few hundred."""
HELLO = {"role": "user", "content": "Hello"}
TRIALS = (
    [HELLO],
    [{"role": "system", "content": "Be brief."}, HELLO, {"role": "assistant", "content": "Hi."}, HELLO],
)


def try_chat_template(directory: Path) -> None:
    """Raises ModelError for a template that does not end, or takes too much memory, for a few short messages.

    One that refuses them is not at fault; a tokenizer that cannot be read is named by whoever uses it.
    """
    tokenizer = _tokenizer(directory)
    if tokenizer is None or not tokenizer.chat_template:
        return
    trial = multiprocessing.get_context("fork").Process(target=_render, args=(tokenizer,), daemon=True)
    trial.start()
    trial.join(WALL_S)
    if trial.is_alive():
        trial.kill()
        trial.join()
    if trial.exitcode != 0:
        raise ModelError(
            f"the chat template of {directory} does not end within {CPU_S} s, {MEMORY_BYTES // 1024**2} MiB and "
            f"{MAX_CHARACTERS} characters for a few short messages: mend it (tokenizer_config.json or "
            "chat_template.jinja), or use another model"
        )


def _tokenizer(directory: Path) -> Any:
    """None where it cannot be read. What is all in tokenizer.json needs no torch: 0.4 s instead of 3 s."""
    from transformers import PreTrainedTokenizerFast

    if (directory / "tokenizer.json").is_file():
        try:
            return PreTrainedTokenizerFast.from_pretrained(directory)
        except Exception:  # whatever its parser makes of a stranger's file
            pass
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception:
        return None


def _render(tokenizer: Any) -> None:
    """In the child: exits with 0 if all trials ended, and is killed by the kernel if one does not."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, most in ((resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, size + MEMORY_BYTES)):
        hard = resource.getrlimit(kind)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))
    code = 0
    for messages in TRIALS:
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except MemoryError:
            code = 1
        except Exception:  # it refuses these messages, for whatever reason: said when it is given real ones
            continue
        else:
            code = code or int(len(text) > MAX_CHARACTERS)
    os._exit(code)
