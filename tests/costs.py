"""CPU seconds of each test, summed by tier and printed at the end of a session; a unit test that takes too many fails.

CPU, not wall time: it hardly depends on what else the machine does. Children that a test started and waited for count.
"""

from __future__ import annotations

import resource
from collections.abc import Generator

import pytest

from tests.fakes.preloaded import forked_cpu_s

PROPERTY = "cpu_s"
"""Name of a report's property; reports, with their properties, reach the controller of pytest-xdist."""
NUM_SLOWEST = 3
UNIT_WARN_S = 2.0
"""CPU seconds of a unit test above which the table lists it."""
UNIT_MAX_S = 4.0
"""CPU seconds of a unit test above which it fails: twice the limit, as a second process on a core costs up to half."""


def cpu_s() -> float:
    """CPU seconds of this process, of its children that were waited for, and of processes that it forked elsewhere."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + forked_cpu_s()


class Costs:
    """Pytest plugin: measures in the process that tests, sums up in the process that reports."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._reports: dict[str, dict[str, list[pytest.TestReport]]] = {}
        """Tier to test to the reports of its phases."""

    def pytest_runtest_logstart(self) -> None:
        self._since_s = cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record the phase's CPU seconds; fail a unit test whose own phase took too many (set-up is its fixtures')."""
        report = yield
        now_s = cpu_s()
        spent_s, self._since_s = now_s - self._since_s, now_s
        report.user_properties.append((PROPERTY, spent_s))
        if report.when == "call" and report.passed and _tier(report.nodeid) == "unit" and spent_s > UNIT_MAX_S:
            report.outcome = "failed"
            report.longrepr = (
                f"{report.nodeid} took {spent_s:.1f} s of CPU, a unit test at most {UNIT_MAX_S:.0f}: make it smaller, "
                "or move it to the tier that answers its question (CONTRIBUTING.md, Tests)"
            )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        tests = self._reports.setdefault(_tier(report.nodeid), {})
        tests.setdefault(report.nodeid, []).append(report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        costs = {
            tier: {test: sum(map(_spent_s, got)) for test, got in tests.items()}
            for tier, tests in self._reports.items()
        }
        write(f"{'tier':12} {'tests':>6} {'CPU s':>7} {'wall s':>7}  slowest, CPU s")
        for tier, tests in sorted(costs.items(), key=lambda item: -sum(item[1].values())):
            wall_s = sum(report.duration for got in self._reports[tier].values() for report in got)
            slowest = sorted(tests, key=tests.__getitem__, reverse=True)[:NUM_SLOWEST]
            first, *others = [f"{tests[test]:.1f} {test.removeprefix(f'tests/{tier}/')}" for test in slowest]
            write(f"{tier:12} {len(tests):6} {sum(tests.values()):7.1f} {wall_s:7.1f}  {first}")
            for other in others:
                write(f"{'':36} {other}")
        rest_s = cpu_s() - sum(sum(tests.values()) for tests in costs.values())
        write(f"{'start and collection':19} {rest_s:7.1f}")
        calls = [report for got in self._reports.get("unit", {}).values() for report in got if report.when == "call"]
        for report in calls:
            if _spent_s(report) > UNIT_WARN_S:
                write(
                    f"slow for a unit test, which fails above {UNIT_MAX_S:.0f} s of CPU: "
                    f"{_spent_s(report):.1f} s {report.nodeid}"
                )


def _tier(test: str) -> str:
    parts = test.partition("::")[0].split("/")
    return parts[1] if parts[0] == "tests" and len(parts) > 2 else parts[0]


def _spent_s(report: pytest.TestReport) -> float:
    return next((value for name, value in report.user_properties if name == PROPERTY), 0.0)  # pyright: ignore
