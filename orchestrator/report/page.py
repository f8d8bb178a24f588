"""One run as one HTML file: no script, no link, no file beside it; it opens anywhere and can be mailed.

Owns: what stands where. Never: numbers of its own. Invariant: every string from a run passes ``escaped``, and the
page's own policy forbids scripts and requests, so that a model's output cannot act even if one were forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator.report.bubbles import Cause, Usage
from orchestrator.report.curves import Series, draw_chart, series_of
from orchestrator.report.drawing import escaped, to_svg
from orchestrator.report.record import RunRecord
from orchestrator.report.timeline_drawing import CAUSE_COLORS, draw_timeline

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
body { font: 14px/1.45 sans-serif; color: #222; margin: 24px; max-width: 1240px }
h1 { font-size: 22px } h2 { font-size: 17px; margin-top: 32px; border-bottom: 1px solid #ddd }
table { border-collapse: collapse } td, th { padding: 3px 12px 3px 0; text-align: right; border-bottom: 1px solid #eee }
td:first-child, th:first-child, td.text { text-align: left }
pre { background: #f6f6f6; padding: 8px; white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0 }
.sample { border-left: 3px solid #ccc; padding-left: 10px; margin: 14px 0 } .note { color: #777 }
svg { max-width: 100%; height: auto } .scroll { overflow-x: auto }
"""
MAX_TROUBLES = 200
"""Lines of what failed; a run with more has a reason that shows in the first ones."""

CHARTS: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (
    ("reward", (("mean", "reward"), ("with filtered", "reward_with_filtered"), ("standard deviation", "reward_std"))),
    ("share without use", (("groups without signal", "no_signal"), ("samples cut", "truncated"))),
    (
        "response length, tokens",
        (("P50", "response_tokens_p50"), ("P90", "response_tokens_p90"), ("max", "response_tokens_max")),
    ),
    ("loss", (("loss", "loss"),)),
    ("gradient norm", (("norm", "grad_norm"),)),
    ("entropy, all tokens", (("entropy", "entropy"),)),
    ("tokens of a batch", (("generated", "tokens_generated"), ("trained", "tokens_trained"))),
    ("KL to the reference", (("kl", "kl"),)),
    ("staleness, versions", (("mean", "staleness"), ("max", "staleness_max"))),
    (
        "|logprob of trainer - of generation|, computed tokens",
        (("mean", "logprob_mismatch"), ("max", "logprob_mismatch_max"), ("total variation", "mismatch_tv")),
    ),
    (
        "tail recall of predicted lengths",
        (("20%", "ranker_recall_20"), ("10%", "ranker_recall_10"), ("5%", "ranker_recall_5")),
    ),
    ("clipped share of computed tokens", (("low", "clip_fraction_low"), ("high", "clip_fraction_high"))),
    ("seconds a batch", (("seconds", "seconds"),)),
    ("tokens/s", (("tokens/s", "tokens_per_s"),)),
)
"""(title, [(line's name, key in metrics.jsonl)]); a chart without numbers is left out."""


def render_report(run: RunRecord) -> str:
    """The whole page."""
    sections = [
        summary(run),
        section("Curves", curves(run)),
        *([section("Held-out problems", evaluations(run))] if run.evaluations else []),
        section("Timeline", f'<div class="scroll">{to_svg(draw_timeline(run.timeline, title=run.name))}</div>'),
        section("Idle seconds by cause", idle_table(run)),
        section("What failed and was retried", troubles(run)),
        section("Samples", samples(run.samples)),
        section("Configuration", f"<details><summary>config.toml</summary><pre>{escaped(run.config)}</pre></details>"),
    ]
    return html_page(run.name, sections)


def html_page(title: str, sections: Iterable[str]) -> str:
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<style>{STYLE}</style></head><body>\n'
    )
    return head + f"<h1>{escaped(title)}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"


def section(title: str, body: str) -> str:
    return f"<h2>{escaped(title)}</h2>\n{body}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table of plain strings, escaped here."""
    lines = ["<tr>" + "".join(f"<th>{escaped(cell)}</th>" for cell in header) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def summary(run: RunRecord) -> str:
    lines = run.lines
    if not lines:
        return '<p class="note">No batch was trained.</p>'
    samples, tokens = (sum(line.get(f"{what}_trained", 0) for line in lines) for what in ("samples", "tokens"))
    facts = [
        f"{len(lines)} batches in {run.timeline.end_s:.0f} s",
        f"reward {_reward(lines[0])} → {_reward(lines[-1])}",
        f"{samples} samples, {tokens} tokens trained",
        *([run.damage] if run.damage else []),
    ]
    return f"<p>{escaped(' · '.join(facts))}</p>"


def _reward(line: Mapping[str, Any]) -> str:
    return f"{line['reward']:.3f}" if "reward" in line else "none"


def curves(run: RunRecord) -> str:
    components = [series_of(name, run.lines, name) for name in run.components]
    charts = [(title, [series_of(name, run.lines, key) for name, key in parts]) for title, parts in CHARTS]
    charts.insert(1, ("reward components", components))
    return drawn(charts)


def evaluations(run: RunRecord) -> str:
    """Curves over versions, and what each evaluation cost."""
    names = ["reward", *run.components]
    charts = drawn(
        [("reward by version", [series_of(name, run.evaluations, f"eval_{name}", over="version") for name in names])]
    )
    header = ["version", "reward", "answered", "tokens each", "tokens", "seconds", "share of generation", "ended short"]
    return charts + table(header, [_evaluation_row(line) for line in run.evaluations])


def _evaluation_row(line: Mapping[str, Any]) -> list[str]:
    return [
        f"{line['version']}",
        f"{line['eval_reward']:.3f}" if "eval_reward" in line else "",
        f"{line['eval_answered']} of {line['eval_problems']}",
        f"{line.get('eval_response_tokens', 0.0):.1f}",
        f"{line['eval_tokens']}",
        f"{line['eval_seconds']:.1f} s",
        f"{line['eval_share']:.1%}",
        f"{line['eval_short']}",
    ]


def drawn(charts: Iterable[tuple[str, Sequence[Series]]]) -> str:
    """The charts side by side, without those that have no numbers."""
    drawings = [draw_chart(title, series) for title, series in charts]
    return "\n".join(to_svg(drawing) for drawing in drawings if drawing) or '<p class="note">Nothing yet.</p>'


def idle_table(run: RunRecord) -> str:
    """Seconds and shares of each generation worker, of all together, and of the trainer."""
    header = ["", "present", "busy", *(cause.value for cause in Cause)]
    rows = [_usage_row(track, run.usage[track]) for track in run.timeline.workers]
    if len(rows) > 1:
        rows.append(_usage_row("generation, all", run.usage_of("generation")))
    rows.append(_usage_row("trainer", run.usage_of("trainer")))
    colors = " ".join(f'<span style="color:{color}">■</span> {cause}' for cause, color in CAUSE_COLORS.items())
    return table(header, rows) + f'<p class="note">{colors}; a worker with half of its slots empty is half idle.</p>'


def _usage_row(name: str, usage: Usage) -> list[str]:
    seconds = [usage.busy_s, *(usage.idle_s.get(cause, 0.0) for cause in Cause)]
    whole = usage.present_s or 1.0
    return [name, f"{usage.present_s:.1f} s", *(f"{part:.1f} s  {part / whole:.0%}" for part in seconds)]


def troubles(run: RunRecord) -> str:
    found = [mark for mark in run.timeline.marks if mark.trouble]
    if not found:
        return '<p class="note">Nothing.</p>'
    rows = [[f"{mark.at_s:.1f} s", mark.track, mark.name] for mark in found[:MAX_TROUBLES]]
    more = f'<p class="note">and {len(found) - MAX_TROUBLES} more</p>' if len(found) > MAX_TROUBLES else ""
    return f"<p>{len(found)} times</p>" + table(["at", "where", "what"], rows) + more


def samples(kept: Sequence[Mapping[str, Any]]) -> str:
    """Newest first. Their text is whatever a model wrote."""
    return "\n".join(_sample(sample) for sample in kept) or '<p class="note">None were kept.</p>'


def _sample(sample: Mapping[str, Any]) -> str:
    components = sample.get("components")
    numbers = components.items() if isinstance(components, dict) else ()
    facts = [f"{sample.get('row', '')}", f"reward {sample.get('reward', '')}"]
    facts += [f"{name} {value}" for name, value in numbers]
    facts += [f"{sample.get('tokens', '')} tokens", f"{sample.get('finish', '')}"]
    texts = "".join(f"<pre>{escaped(str(sample.get(name, '')))}</pre>" for name in ("prompt", "response"))
    return f'<div class="sample">{escaped(" · ".join(facts))}{texts}</div>'
