"""The table of ``simulate --paper``: as text for a terminal, and as data for a program.

Owns: the layout. Never: numbers of its own. Invariant: text and data say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.sim.paper import Compared
from orchestrator.sim.trials import MOVE

HEADERS = ("paper", "ours", f"+-{MOVE:.0%}: worst - best", "moved most by", "over its bound")


def table(compared: Sequence[Compared]) -> str:
    """A paragraph for each source, a line for each row, its notes below it."""
    lines = [_line("", HEADERS)]
    source = ""
    for one in compared:
        if one.row.source != source:
            source = one.row.source
            lines += ["", source]
        lines.append(_line(one.row.what, _fields(one)))
        if one.row.note:
            lines.append(f"      {one.row.note}")
    return "\n".join(lines) + "\n"


def _line(what: str, fields: Sequence[str]) -> str:
    paper, ours, swing, most, over = fields
    return f"  {what:<68} {paper:>20}  {ours:>14}  {swing:>22}  {most:<32} {over}".rstrip()


def _fields(one: Compared) -> tuple[str, str, str, str, str]:
    unit = "" if one.row.unit == "x" else one.row.unit
    bounds = [over for over in one.over_bounds if over]
    return (
        f"{one.row.paper}{unit if one.row.low or one.row.high else ''}",
        _range(one.low, one.high) + unit,
        _range(one.swing.worst, one.swing.best) if one.swing else "",
        _most(one),
        _range(min(bounds), max(bounds)) if bounds else "",
    )


def _most(one: Compared) -> str:
    if one.swing is None or not one.swing.most:
        return ""
    return f"{one.swing.most} ({one.swing.share:.0%})"


def _range(low: float, high: float) -> str:
    shown = [f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}" for value in (low, high)]
    return shown[0] if shown[0] == shown[1] else " - ".join(shown)


def as_data(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """One JSON object a row."""
    return [_row_data(one) for one in compared]


def _row_data(one: Compared) -> dict[str, Any]:
    row, swing = one.row, one.swing
    data: dict[str, Any] = {
        "key": row.key,
        "source": row.source,
        "what": row.what,
        "paper": row.paper,
        "paper_low": row.low,
        "paper_high": row.high,
        "ours": {cell.label: round(value, 4) for cell, value in zip(row.cells, one.values, strict=True)},
        "unit": row.unit.strip(),
        "over_bound": {cell.label: round(over, 4) for cell, over in zip(row.cells, one.over_bounds, strict=True)},
        "note": row.note,
    }
    if swing is not None:
        data["moved_by_20_percent"] = {
            "worst": round(swing.worst, 4),
            "worst_by": swing.worst_by,
            "best": round(swing.best, 4),
            "best_by": swing.best_by,
            "most": swing.most,
            "share": round(swing.share, 4),
            "does_not_fit": list(swing.refused),
        }
    return data
