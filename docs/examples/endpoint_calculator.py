"""A tool of endpoint_verifiers.py: verifiers starts this file as a server of its own, as a module by its name."""

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: float, b: float) -> float:
        """The sum of two numbers."""
        return a + b


if __name__ == "__main__":
    Calculator.run()
