"""The live page in a real headless Chromium, served by the real service: what a person sees, and what cannot hurt."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from orchestrator.config.starts import GpuUse
from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import PipelineState
from orchestrator.http import open_listener
from orchestrator.observability.http.routes import Api, ControlRoutes, build_app
from orchestrator.observability.http.status import (
    CELLS,
    LAST_WORDS_S,
    Curves,
    LaneHistory,
    StatusBoard,
    reported_gpus,
)
from tests.fakes.browser import Browser, find_chromium
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.broker.base import ZERO_ID
from transport.contracts.messages import WorkerStatus
from transport.contracts.settings import ApiSettings, Settings
from transport.contracts.types import RunName, WorkerId, WorkerKind
from transport.process.clock import MonotonicClock
from transport.process.http import serve_http

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "<svg onload='window.hacked = 3'></svg> \x1b[31mred\x1b[0m \x9b2J \u202egnp.exe\u202c"
)
WORKERS = ("generate-0.1", "generate-1.2", "score-0.1", "train-0.1", "train-1.1")
ARRIVES_S = 20.0


KEY, RUN = "hush&more", RunName("page")
GO_ON = "streamrl-orchestrator run --resume --name page"


class LivePage:
    """A run that never was, as the service would tell of it. Start and stop the service as often as you like."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.board = StatusBoard(MonotonicClock(), go_on=GO_ON)
        self.server = MemoryServer()
        self.page_history = page_history()
        self.status = status()
        self._stop: Callable[[], None] = lambda: None
        self._thread = threading.Thread()
        self.url = self.bare_url = ""

    def start(self) -> None:
        """Serve, on the same port as before."""
        listener = open_listener(ApiSettings(), self._directory / "api.address")
        api = Api(self.board, self._directory / "metrics.jsonl", lambda: self.page_history)
        state = PipelineState(CoreSettings(num_batches=40, groups_per_batch=8, group_size=8))
        control = ControlRoutes(MemoryBroker(self.server, RUN), Settings(), state.view)
        app = build_app([*api.routes(), *control.routes()], host="127.0.0.1", key=KEY)
        started = threading.Event()

        async def serve() -> None:
            task = asyncio.create_task(serve_http(app, listener))
            loop = asyncio.get_running_loop()
            self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
            started.set()
            await asyncio.gather(task, return_exceptions=True)

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), name="page")
        self._thread.start()
        assert started.wait(5)
        self.bare_url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        self.url = f"{self.bare_url}#key={quote(KEY, safe='')}"

    def stop(self) -> None:
        self._stop()
        self._thread.join(10)

    def asked(self, count: int) -> list[tuple[str, str]]:
        """What stands on the events log, once it is ``count``: (id of the entry, name of the event).

        The page shows that it asks before its request has arrived.
        """
        deadline_s = time.monotonic() + ARRIVES_S
        while True:
            entries = asyncio.run(MemoryBroker(self.server, RUN).read(keys.EVENTS, ZERO_ID, count=100))
            found = [(entry.entry_id, entry.entry.fields["event"]) for entry in entries]
            if len(found) >= count or time.monotonic() > deadline_s:
                return found
            time.sleep(0.05)

    def tell(self, **changes: Any) -> None:
        """Publish a newer status."""
        self.status |= {"elapsed_s": self.status["elapsed_s"] + 1.0, **changes}
        self.board.put(dict(self.status))


def status() -> dict[str, Any]:
    """A status with every field that the core has, and workers."""
    view = msgspec.to_builtins(PipelineState(CoreSettings(num_batches=40, groups_per_batch=8, group_size=8)).view())
    row = {"since_s": 3.0, "running": 0, "waiting": 0, "weights": "", "counters": {}, "idle": 0.25}
    return {
        "run": "a <b>run</b>",
        "events_cursor": "0-0",
        "elapsed_s": 300.0,
        **view,
        "trained_version": 12,
        "newest": {"epoch": 1, "version": 12, "digest": "ab"},
        "running": 5,
        "wait": {"stage": "training", "waits_for": "round 12/3", "owner": "train-0.1", "waited_s": 1.0},
        "blocked": None,
        "generation": [
            {"worker_id": "generate-0.1", "loaded": {"epoch": 1, "version": 12}},
            {"worker_id": "generate-1.2", "loaded": {"epoch": 1, "version": 11}},
        ],
        "batches": [{"batch": 12, "stages": {"running": 5, "ready": 3}, "trained": False}],
        "longest": [
            {
                "group_id": "12/4",
                "worker_id": "generate-0.1",
                "running_s": 83.0,
                "missing": [2],
                "group_size": 8,
                "attempt": 1,
            }
        ],
        "queues": {"plans:generate-0.1": 3, "tasks:reward": 0, "dead": 2, "events": 900},
        "workers": [
            {**row, "worker": worker, "kind": worker.partition("-")[0], "doing": doing}
            for worker, doing in zip(WORKERS, ("decoding", "loading", "scoring", "training", "waiting"), strict=True)
        ],
        "given_up": "its reward never came",
        "last": {"batch": 11, "reward": 0.4321, "response_tokens": 14.5, "staleness": 0.5, "staleness_max": 1},
    }


def page_history() -> dict[str, Any]:
    lanes = LaneHistory()
    for second in range(CELLS):
        doing = "decoding" if second % 10 < 8 else "waiting"
        statuses = [
            WorkerStatus(
                worker_id=WorkerId(worker),
                kind=WorkerKind(worker.partition("-")[0]),
                host="here",
                pid=1,
                protocol=1,
                doing=doing,
                elapsed_s=float(second),
                busy_s=second / 2,
            )
            for worker in WORKERS
        ]
        lanes.note({status.worker_id: status for status in statuses}, float(second))
    learning = {"loss": -0.01, "mismatch_k3": 0.001, "entropy": 2.0}
    lines = [
        {"batch": batch, "reward": batch / 30, "right": batch / 40, "seconds": 4.0, **learning} for batch in range(12)
    ]
    sample = {
        "row": "11/0/3",
        "reward": 0.75,
        "components": {"<i>right</i>": 1.0},
        "worker": "generate-0.1",
        "tokens": 19,
        "finish": "stop",
        "versions": [11, 12],
        "engine_s": 1.5,
        "question": "What is 1 + 1?",
        "expected": "2 <b>exactly</b>",
        "prompt": "<|user|>What is 1 + 1?",
        "prompt_cut": 0,
        "response": HOSTILE,
        "response_cut": 4,
        "response_end": "the end",
    }
    curves = Curves()
    for line in lines:
        curves.add(line)
    return {
        "lanes": lanes.as_dict(),
        "curves": curves.as_dict(),
        "bubbles": {"batches": [1, 9], "stages": {"generation": {"computing": 60.0, "pipeline": 30.0, "skew": 10.0}}},
        "components": ["right"],
        "samples": [sample, {**sample, "row": "11/0/4", "response": "2", "response_cut": 0, "response_end": ""}],
    }


@pytest.fixture
def page(tmp_path: Path) -> Iterator[LivePage]:
    page = LivePage(tmp_path)
    page.tell()
    page.start()
    yield page
    page.stop()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all tests here: starting it takes longer than most of them."""
    assert CHROMIUM is not None
    with Browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """As if it was new, but for its cache."""
    chromium.resize(1280, 900)
    chromium.prefer("light")
    chromium.errors.clear()
    yield chromium
    chromium.open("about:blank")


def show(browser: Browser, page: LivePage) -> None:
    browser.open("about:blank")  # from the page itself its link would load nothing: only the key differs
    browser.open(page.url)
    browser.wait_for("document.querySelectorAll('#samples details').length === 2")
    page.tell()  # a page that took long to load must not find the status old
    browser.wait_for("document.body.dataset.link === 'live'")


LOCKED = "document.body.dataset.link === 'locked' && !document.querySelector('#unlock').hidden"
LIVE = "document.body?.dataset.link === 'live' && document.querySelector('#unlock')?.hidden"


def type_key(browser: Browser, key: str) -> None:
    """As a person pastes it and presses the button."""
    browser.evaluate(f"document.querySelector('#key').value = {json.dumps(key)}")
    browser.evaluate("document.querySelector('#unlock button').click()")


def test_the_printed_link_opens_the_run_and_keeps_its_key_out_of_sight(page: LivePage, browser: Browser):
    show(browser, page)
    assert browser.evaluate("location.href") == page.bare_url, (
        "the key would stand in the address bar, and in bookmarks"
    )
    browser.reload()
    browser.wait_for(LIVE)
    browser.evaluate("document.querySelector('.skip').click()")
    assert browser.evaluate("location.hash") == "#page"
    browser.wait_for(LIVE)
    assert browser.errors == []


def test_whoever_has_no_key_sees_nothing_and_is_told_where_it_is(page: LivePage, browser: Browser):
    browser.open(page.bare_url)
    browser.evaluate("sessionStorage.clear()")
    browser.open(page.bare_url + "?again")
    browser.wait_for(LOCKED)
    assert "api.secret" in browser.text("#unlock")
    assert browser.text("#run") == "StreamRL"
    assert browser.evaluate("document.querySelectorAll('.lane').length") == 0
    assert browser.errors == [], "without a key it does not even ask"
    type_key(browser, "of another run")
    browser.wait_for("document.querySelector('#wait').textContent.includes('not this run')")
    browser.wait_for(LOCKED)
    type_key(browser, f" {KEY} ")
    browser.wait_for(LIVE)
    browser.wait_for("document.querySelectorAll('.lane').length > 0")


def coloured_pixels(place: str) -> str:
    """JavaScript: how many pixels of a lane are painted."""
    return painted(f"document.querySelector('.lane[data-key=\"{place}\"] canvas')")


def painted(canvas: str) -> str:
    """JavaScript: how many pixels of a canvas are painted."""
    data = f"{canvas}.getContext('2d').getImageData(0, 0, {canvas}.width, {canvas}.height).data"
    return f"{data}.filter((value, index) => index % 4 === 3 && value > 0).length"


def test_evaluations_are_shown_once_there_are_any(page: LivePage, browser: Browser):
    show(browser, page)
    assert browser.evaluate("document.querySelector('#evaluation').hidden")
    assert browser.evaluate("document.querySelectorAll('#evaluations figure').length") == 0
    lines = [
        {"eval": n, "version": 4 * n, "eval_reward": n / 4, "eval_right": n / 5, "eval_share": 0.1} for n in range(3)
    ]
    hard = {"eval/hard/reward": 0.25, "eval/hard/right": 0.25, "eval/hard/pass@1": 0.25, "eval/hard/pass@4": 0.75}
    lines[-1] |= hard
    page.page_history = {**page.page_history, "evaluations": [*lines, {"eval": 3, "version": 12}]}
    evaluation = {"number": 3, "weights": {"epoch": 1, "version": 12}, "problems": 16, "answered": 5}
    page.tell(evaluation={**evaluation, "waiting": 7, "running": 4, "scoring": 0, "seconds": 2.0, "held": True})
    browser.wait_for("document.querySelectorAll('#evaluations figure').length === 3")
    browser.wait_for("!document.querySelector('#evaluation').hidden")
    assert browser.text("#evaluation") == (
        "Evaluating v12: 5 of 16 answers to held-out problems, 7 waiting, 4 running; newer weights wait for it."
    )
    assert browser.text("#evaluations .key") == "reward 0.500right 0.400"
    assert browser.text("#evaluations figure:nth-of-type(2) b") == "Held out: hard"
    assert browser.text("#evaluations figure:nth-of-type(2) .key") == "reward 0.250pass@1 0.250pass@4 0.750"
    assert not browser.errors


def test_the_page_tells_what_the_run_does(page: LivePage, browser: Browser):
    show(browser, page)
    lanes = browser.evaluate("[...document.querySelectorAll('.lane')].map(lane => lane.innerText)")
    assert [lane.split()[0] for lane in lanes] == ["generate-0", "generate-1", "score-0", "train-0", "train-1"]
    assert "decoding" in lanes[0]
    assert "v11, 1 behind" in lanes[1]
    assert "75% busy" in lanes[3]
    assert browser.evaluate(coloured_pixels("train-1")) > 1000
    assert (browser.text("#health"), browser.text("#headline")) == (
        "Running",
        "batch 12/40, 2 min left, 2 dead letters",
    )
    assert browser.text("#problems") == "Given up: its reward never came (streamrl-orchestrator inspect, retry, drop)"
    assert (browser.text("#reward"), browser.text("#reward-from")) == ("0.432", "from 0 in the first batch")
    assert "training waits for round 12/3" in browser.text("#wait")
    assert "to act: train-0.1" in browser.text("#wait")
    assert "Weightsv12staleness 0.500, at most 1" in browser.text("#facts")
    titles = browser.evaluate("[...document.querySelectorAll('#curves figcaption b')].map(title => title.textContent)")
    assert titles[:3] == ["Loss", "Mismatch of trainer and engine (k3)", "Entropy"]
    assert browser.text("#longest tr") == "12/4 (attempt 2)1 min 23 s1 of 8generate-0.1"
    assert "dead letters2" in browser.evaluate("document.querySelector('#queues tr.alarm').textContent")
    assert browser.evaluate("document.querySelectorAll('#curves canvas').length") >= 3
    assert browser.evaluate(painted("document.querySelector('#curves canvas')")) > 500
    browser.wait_for("document.querySelector('#idle').textContent.includes('no group that it may take')")
    assert browser.text("#bubbles-title") == "Idle time by cause, batches 2 to 10"
    assert "pipeline bubble 30%skew bubble 10%" in browser.text("#bubbles")
    assert browser.evaluate("document.title").startswith("Running: batch 12/40")
    assert browser.errors == []


def test_a_service_shows_its_requests(page: LivePage, browser: Browser):
    one = {"samples": 64, "started": 40, "ended": 30, "failed": 1, "taken": 8}
    page.tell(num_requests=12, requests={"12": one}, batches=[])
    page.page_history = {**page.page_history, "bubbles": {}, "samples": []}
    browser.open("about:blank")
    browser.open(page.url)
    browser.wait_for("document.body.dataset.link === 'live' && document.querySelector('.lane') !== null")
    assert browser.text("#headline").startswith("12 requests, 1 open")
    assert browser.text("#facts").startswith("Requests121 openSamples of open requests6430 ended")
    shown = "[...document.querySelectorAll('main h2')].filter(h2 => h2.offsetParent).map(h2 => h2.textContent)"
    assert browser.evaluate(shown) == [
        "Processes, the last five minutes", "Where the prompts are", "Where the last minute went", "Queues"
    ], "no panel of a service is empty"  # fmt: skip
    assert browser.text("#open-title") == "Open requests"
    assert browser.text("#open-batches .batch span") == "request 12"
    bar = "document.querySelector('#open-batches .bar').title"
    assert browser.evaluate(bar) == "24 pending, 10 running, 22 ready, 8 taken"
    assert "12 requests" in browser.evaluate("document.title")
    assert browser.evaluate("document.querySelector('#checkpoint').hidden")
    assert browser.errors == []


def test_the_gpus_of_the_machine_are_shown_with_who_has_them(page: LivePage, browser: Browser):
    show(browser, page)
    assert browser.evaluate("document.getElementById('gpus-panel').hidden")
    gpus = [
        GpuUse(number=0, name=HOSTILE, memory_mib=81559, workers=["train-0", "generate-0"], share=0.45),
        GpuUse(number=1, name="H100", memory_mib=81559),
        GpuUse(number=2, name="H100", held=True),
    ]
    train = WorkerStatus(
        worker_id=WorkerId("train-0.1"), kind=WorkerKind.TRAIN, host="there", pid=1, protocol=1, gpus=("GPU-a H200",)
    )
    rows = [*msgspec.to_builtins(gpus), *reported_gpus((), {train.worker_id: train})]
    page.board.put(page.status | {"gpus": rows, "elapsed_s": 301.0})
    browser.wait_for("document.querySelectorAll('#gpus tr').length === 4")
    cells = "[...row.children].slice(1).map(cell => cell.textContent)"
    shown = browser.evaluate(f"[...document.querySelectorAll('#gpus tr')].map(row => {cells})")
    assert shown[0][0].endswith("80 GiB")
    assert shown[0][1:] == ["train-0, generate-0", "45%"]
    assert shown[1:] == [
        ["H100, 80 GiB", "idle", ""],
        ["H100", "held by another run", ""],
        ["H200 on there", "train-0", ""],
    ]
    assert not browser.evaluate("window.hacked")


def test_of_a_large_fleet_some_lanes_are_drawn_and_the_others_counted(page: LivePage, browser: Browser):
    row = page.status["workers"][0]
    page.tell(workers=[{**row, "worker": f"generate-{index}.1"} for index in range(300)])
    show(browser, page)
    browser.wait_for("document.querySelectorAll('.lane').length === 64")
    assert browser.text("#lanes-more") == "239 more processes are not drawn."


def test_what_a_model_wrote_is_text_and_nothing_else(page: LivePage, browser: Browser):
    show(browser, page)
    browser.evaluate("document.querySelector('#samples details').open = true")
    assert browser.text("#samples pre:nth-of-type(2)") == "2 <b>exactly</b>"
    assert browser.text("#samples pre:nth-of-type(3)") == (
        "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
        "<svg onload='window.hacked = 3'></svg> \u241b[31mred\u241b[0m [U+009B]2J [U+202E]gnp.exe[U+202C]"
    )
    assert browser.text("#run") == "a <b>run</b>"
    assert browser.text("#samples pre:nth-of-type(4)") == "the end"
    assert browser.text("#samples summary .components") == "<i>right</i> 1"
    assert browser.text("#samples summary .question") == "What is 1 + 1?"
    assert browser.evaluate("document.querySelectorAll('#samples :is(script, img, svg, i, pre b), #run b').length") == 0
    assert browser.evaluate("window.hacked === undefined")
    inserted = (
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 4'; document.body.append(s)"
    )
    browser.evaluate(f"(() => {{ {inserted} }})()")
    assert browser.evaluate("window.hacked === undefined"), "the policy lets a script run that is not the page's own"
    assert any("Content Security Policy" in error for error in browser.errors)


def test_samples_hold_still_while_one_is_read(page: LivePage, browser: Browser):
    show(browser, page)
    browser.evaluate("document.querySelector('#samples details').open = true")
    newer = {**page.page_history["samples"][0], "row": "12/0/0"}
    page.page_history = {**page.page_history, "samples": [newer, *page.page_history["samples"]]}
    browser.wait_for("document.querySelector('#samples-note').textContent.includes('Newer samples wait')")
    assert browser.evaluate("document.querySelectorAll('#samples details').length") == 2
    browser.evaluate("document.querySelector('#samples details').open = false")
    browser.wait_for("document.querySelector('#samples details').dataset.key === '12/0/0'")


def test_old_news_are_called_old_and_the_page_recovers_by_itself(page: LivePage, browser: Browser):
    show(browser, page)
    height = "document.querySelector('#lanes').getBoundingClientRect().top + scrollY"
    top = browser.evaluate(height)
    page.stop()
    browser.wait_for("document.body.dataset.link === 'away'")
    assert "no answer" in browser.text("#wait")
    assert browser.text("#reward") == "0.432", "the last that was known stays"
    assert browser.evaluate(height) == top, "the page jumps"
    page.start()
    page.tell(trained_version=13)
    browser.wait_for("document.querySelector('#headline').textContent.startsWith('batch 13/40')")
    assert browser.evaluate("document.body.dataset.link") == "live"


def test_a_run_that_was_stopped_says_so_and_how_to_go_on_until_it_does(page: LivePage, browser: Browser):
    show(browser, page)
    began_s = time.monotonic()
    asyncio.run(page.board.last_words("by Ctrl-C"))
    assert time.monotonic() - began_s >= LAST_WORDS_S, "a page that asks every second hears of it"
    page.stop()
    browser.wait_for("document.body.dataset.link === 'stopped'")
    assert browser.text("#health") == "Stopped"
    assert browser.text("#wait") == f"Stopped by Ctrl-C; go on with: {GO_ON}"
    assert "left" not in browser.text("#headline")
    page.board = StatusBoard(MonotonicClock(), go_on=GO_ON)
    page.start()
    page.tell(trained_version=13)
    browser.wait_for("document.body.dataset.link === 'live'")


def test_a_status_that_stands_still_is_old_too(page: LivePage, browser: Browser):
    page.board = StatusBoard(clock := ManualClock())
    page.stop()
    page.board.put(page.status)
    clock.advance(60.0)
    page.start()
    browser.open(page.url)
    browser.wait_for("document.body.dataset.link === 'away'")
    assert "No news for 1 min" in browser.text("#wait")
    page.tell(blocked={"stage": "training", "waits_for": "a round", "owner": "train-0.1", "still_s": 310.0})
    browser.wait_for("document.body.dataset.link === 'live'")
    assert browser.text("#health") == "Blocked"
    assert browser.text("#headline") == "batch 12/40, no progress for 5 min 10 s, 2 dead letters"
    blocked = "Blocked for 5 min 10 s: training waits for a round; to act: train-0.1"
    assert browser.text("#problems li") == blocked
    page.tell(blocked=None, wait=None, finish_reason="all batches are trained")
    browser.wait_for("document.body.dataset.link === 'over'")
    assert "all batches are trained" in browser.text("#wait")


@pytest.mark.parametrize("width", [390, 900, 1280, 1920])
def test_nothing_is_wider_than_the_window(page: LivePage, browser: Browser, width: int):
    browser.resize(width, 800)
    show(browser, page)
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate("document.querySelector('.lane canvas').clientWidth") > width / 4


def test_colours_follow_the_users_scheme(page: LivePage, browser: Browser):
    colours = set()
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        show(browser, page)
        ink, ground = browser.evaluate(
            "(style => [style.color, style.backgroundColor])(getComputedStyle(document.body))"
        )
        assert contrast(ink, ground) > 7
        colours.add(ground)
        pale = {text: found for text, *pair in browser.evaluate(TEXTS) if (found := contrast(*pair)) < 4.5}
        assert not pale
    assert len(colours) == 2


TEXTS = """[...document.querySelectorAll('body *')]
  .filter(element => element.offsetParent)
  .filter(element => [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()))
  .map(element => {
    const ground = of => (colour => colour === 'rgba(0, 0, 0, 0)' ? ground(of.parentElement) : colour)(
      getComputedStyle(of).backgroundColor);
    return [element.textContent.slice(0, 40), getComputedStyle(element).color, ground(element)];
  })"""
"""JavaScript: [text, its colour, that of its ground] of all text that is seen."""


def contrast(one: str, other: str) -> float:
    """Of two colours ``rgb(r, g, b)``, by WCAG 2."""
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_lanes_curves_and_samples_are_reached_and_read_by_keyboard(page: LivePage, browser: Browser):
    show(browser, page)
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.className") == "skip"
    browser.press("Enter")
    browser.press("Tab")
    assert (
        browser.evaluate("document.activeElement.closest('section').getAttribute('aria-labelledby')") == "reward-title"
    )
    browser.evaluate("document.querySelector('.lane[data-key=generate-0] canvas').focus()")
    browser.press("ArrowLeft")
    assert browser.text("#lanes-readout") == "generate-0, 1 s ago: waiting, busy 44%"
    browser.evaluate("document.querySelector('#curves .chart').focus()")
    browser.press("ArrowLeft")
    assert browser.text("#curves .readout") == "batch 11: -0.010"
    assert "right 0.250" in browser.text("#curves")
    browser.evaluate("document.querySelector('#samples summary').focus()")
    browser.press("Enter")
    assert browser.evaluate("document.querySelector('#samples details').open")


def test_the_run_is_paused_and_drained_by_keyboard_and_only_if_that_is_meant(page: LivePage, browser: Browser):
    show(browser, page)
    is_busy = "document.querySelector('#pause').getAttribute('aria-busy') === 'true'"
    browser.evaluate("document.querySelector('#pause').focus()")
    browser.press("Enter")
    browser.press("Enter")
    browser.wait_for(is_busy)
    page.tell()
    ((entry, event),) = page.asked(1)
    assert event == "PauseRequested"
    assert browser.evaluate(is_busy), "it is on the log, and not applied yet"
    page.tell(paused=True, events_cursor=entry)
    browser.wait_for("document.querySelector('#pause').textContent === 'Resume'")
    assert browser.text("#health") == "Paused"
    assert browser.evaluate("document.activeElement.id") == "pause", "the focus stays where it was"

    browser.evaluate("document.querySelector('#drain').focus()")
    browser.press("Enter")
    browser.press("Enter")  # the harmless answer has the focus
    assert len(page.asked(1)) == 1
    page.server.down = True
    browser.press("Enter")
    browser.press("Tab")
    browser.press("Enter")
    browser.wait_for("document.querySelector('#control-note').textContent !== ''")
    assert browser.text("#control-note") == "No drain: the broker does not answer."
    page.server.down = False
    browser.press("Enter")
    browser.press("Tab")
    browser.press("Enter")
    browser.wait_for("document.querySelector('#drain').getAttribute('aria-busy') === 'true'")
    browser.wait_for("document.querySelector('#control-note').textContent === ''")
    assert [event for _, event in page.asked(2)] == ["PauseRequested", "StopRequested"]


def test_what_goes_wrong_is_in_the_headline_and_said_below_it(page: LivePage, browser: Browser):
    show(browser, page)
    lost = {"worker": "generate-1.1", "reason": "its process <b>ended</b>", "at_s": page.status["elapsed_s"] - 5}
    page.tell(queues={}, lost=[lost], num_lost=3, warnings=["batch 12 carries no gradient"])
    browser.wait_for("document.querySelector('#headline').textContent.endsWith('3 restarts, 1 warning')")
    assert browser.text("#problems li") == "Lost generate-1.1, 6 s ago: its process <b>ended</b>; replaced"
    assert browser.text("#problems li:nth-of-type(2)") == "Warning: batch 12 carries no gradient"
    page.tell(lost=[{**lost, "at_s": page.status["elapsed_s"] - 500}], warnings=[])
    browser.wait_for("document.querySelector('#health').textContent === 'Healthy'")
    assert browser.text("#headline").endswith("left, 3 restarts"), "what was healed long ago is counted"
    page.tell(workers=[], lost=[], num_lost=0)
    browser.wait_for("document.querySelector('#health').textContent === 'Starting'")


def test_lanes_go_on_when_the_orchestrator_was_replaced(page: LivePage, browser: Browser):
    show(browser, page)
    painted = browser.evaluate(coloured_pixels("generate-1"))
    fresh = LaneHistory()
    fresh.note({}, CELLS + 10.0)
    page.page_history = {**page.page_history, "lanes": fresh.as_dict()}
    page.tell(workers=[])
    browser.wait_for("document.querySelector('.lane .word').textContent === 'gone'")
    browser.wait_for(f"{coloured_pixels('generate-1')} !== {painted}")
    assert 0.9 * painted < browser.evaluate(coloured_pixels("generate-1")) < painted, "ten cells later"
    assert browser.evaluate("document.querySelectorAll('.lane').length") == len(WORKERS)
