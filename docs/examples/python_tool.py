"""An environment with Python as its tool, see docs/agents.md: it runs what the model wrote, so it needs a jail.

--set environment.name=python_tool:PythonTool --set environment.path=docs/examples
--set environment.executes_answers=true
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from threading import Timer

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


class PythonTool:
    """The last block of Python of a turn is run, and what it prints is said; a turn without one is the answer.

    It pays nothing: what the policy wrote is scored by the run's reward, which no answer of its can reach.
    """

    def __init__(self, limit_s: float = 5.0, max_characters: int = 500):
        self.limit_s, self.max_characters = limit_s, max_characters

    def reset(self, prompt: str, entry: dict):
        return None

    def step(self, text: str, tokens: list[int]):
        blocks = BLOCK.findall(text)
        if not blocks:
            return None, True, None
        return self.run(blocks[-1]) or "it printed nothing", False, None

    def run(self, program: str) -> str:
        """What it prints, of which no more is read than is said: a program may print without end."""
        command = [sys.executable, "-I", "-u", "-c", program]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        ) as running:
            late = Timer(self.limit_s, os.killpg, (running.pid, signal.SIGKILL))
            late.start()
            printed = running.stdout.read(4 * self.max_characters)
            ended_late = not late.is_alive()
            late.cancel()
            late.join()
            os.killpg(running.pid, signal.SIGKILL)
        if ended_late:
            return f"no end within {self.limit_s:g} s"
        return printed.decode(errors="replace")[: self.max_characters]
