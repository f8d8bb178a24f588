"""The live page of a real run in a real Chromium: every process, hostile prompts as text, and kills it outlives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.browser import Browser, find_chromium
from tests.fakes.live_run import LiveRun

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\x1b[2J say a digit"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LiveRun]:
    """A long run whose every prompt is hostile."""
    data = tmp_path / "hostile.jsonl"
    rows = [{"question": f"{HOSTILE} {number}", "answer": str(number)} for number in range(64)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = ("data.source=jsonl", f"data.path={data}", "data.prompt_column=question", "data.answer_column=answer")
    with LiveRun(tmp_path, *source, "data.task=", "data.params={}", "run.batches=4000", "generation.workers=2") as run:
        yield run


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    assert CHROMIUM is not None
    profile = tmp_path / "profile"
    profile.mkdir()
    with Browser(CHROMIUM, profile) as browser:
        browser.resize(1280, 900)
        yield browser


def test_the_page_of_a_real_run(run: LiveRun, browser: Browser):
    run.wait_for_batch(3)
    run.wait_until(lambda: "live page " in run.output, "address of the page")
    link, key = run.output.partition("live page ")[2].split()[0], (run.run_dir / "api.secret").read_text().strip()
    assert key not in run.output, "the output is a file"
    browser.open(f"{link}#key={key}")
    browser.wait_for("document.body.dataset.link === 'live'")
    browser.wait_for("document.querySelectorAll('.lane').length === 4")
    lanes = browser.evaluate("[...document.querySelectorAll('.lane')].map(lane => lane.dataset.key)")
    assert lanes == ["generate-0", "generate-1", "score-0", "train-0"]
    browser.wait_for("parseFloat(document.querySelector('#reward').textContent) >= 0")
    browser.wait_for("document.querySelectorAll('#curves canvas').length >= 3")

    browser.wait_for("document.querySelector('#samples details') !== null")
    browser.evaluate("document.querySelector('#samples details').open = true")
    assert HOSTILE.replace("\x1b", "\u241b") in browser.text("#samples pre")
    assert browser.evaluate("window.hacked === undefined")
    assert browser.errors == []

    run.kill("orchestrator", "serve")
    browser.wait_for("document.body.dataset.link === 'away'")
    trained = int(browser.text("#headline").removeprefix("batch ").partition("/")[0])
    browser.wait_for("document.body.dataset.link === 'live'", timeout_s=60)
    browser.wait_for(f"parseInt(document.querySelector('#headline').textContent.slice(6)) > {trained}", timeout_s=60)

    run.kill("workers", "generate", "--index", "1")
    browser.wait_for("/generate-1[.].*; replaced/.test(document.querySelector('#problems').textContent)")
    word = "document.querySelector('.lane[data-key=generate-1] .word').textContent"
    browser.wait_for(f"!['gone', 'starting'].includes({word})")
    assert browser.evaluate("document.querySelectorAll('.lane').length") == 4, "a replaced process has its old lane"
