"""An environment with Python as its tool, see docs/agents.md: it runs what the model wrote, so it needs a jail.

--set environment.name=python_tool:PythonTool --set environment.path=docs/examples
--set environment.executes_answers=true
"""

from __future__ import annotations

import re
import subprocess
import sys

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
        command = [sys.executable, "-I", "-c", blocks[-1]]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=self.limit_s)
            said = ran.stdout + ran.stderr[-self.max_characters :]
        except subprocess.TimeoutExpired:
            said = f"no end within {self.limit_s:g} s"
        return said[: self.max_characters] or "it printed nothing", False, None
