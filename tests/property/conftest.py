"""Says at the end of every run which seed the machines drew from."""

from __future__ import annotations

import pytest

from tests.property.exploring import SEED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"tests/property explored from seed {SEED}; again: STREAMRL_SEED={SEED} make test")
