"""Tasks of verifiers for endpoint_verifiers.py, in a file of their own: verifiers runs it, too, as a module by its
name, for the tool.
"""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    """Of a single turn: the policy answers, and is judged."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.rstrip(" .").endswith(self.data.answer))


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: float, b: float) -> float:
        """The sum of two numbers."""
        return a + b


class ToolTask(SumTask):
    """The same with a tool, which verifiers serves."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]


TASKS = {"single_turn": SumTask, "tool": ToolTask}


if __name__ == "__main__":
    Calculator.run()
