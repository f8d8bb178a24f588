// The live page: asks for the status every second and for the history every two, and says so when no answer comes.
//
// Owns: polling and the head of the page. Invariant: what is shown is either fresh or marked as old, and the page
// recovers by itself as soon as there is an answer again.

import { byId, setText } from "./dom.js";
import { authorization, forgetKey, hasKey, onKey } from "./key.js";
import { showCurves, showEvaluations } from "./curves.js";
import { showLanes } from "./lanes.js";
import { showBatches, showEvaluation, showFlow, showLongest, showQueues, showRanker, showSamples, showScaling } from "./panels.js";
import { duration, number, visible } from "./text.js";
import { showBubbles, showLastMinute } from "./usage.js";

const STATUS_MS = 1000;
const HISTORY_MS = 2000;
const HIDDEN_MS = 5000;
const ANSWER_MS = 5000;
const STALE_S = 4; // the orchestrator publishes twice a second
const SLOW_S = 5;

let status = null;
let history = null;
let newsAt = 0; // when the status last differed from the one before
let problem = ""; // why there is no answer
let refused = false; // the last key was not the run's

async function ask(path) {
  const response = await fetch(path, { cache: "no-store", headers: authorization(), signal: AbortSignal.timeout(ANSWER_MS) });
  if (response.status === 401) {
    forgetKey();
    refused = true;
    throw new Error("the key is not this run's");
  }
  refused = false;
  if (!response.ok) throw new Error(response.status === 503 ? "the orchestrator is away" : `the server answers ${response.status}`);
  return response.json();
}

/** Call `work` now and forever, `every` ms after it ended; less often while the page is hidden. */
async function repeat(work, every) {
  for (;;) {
    await work();
    await new Promise((resolve) => {
      const wake = () => {
        clearTimeout(timer);
        document.removeEventListener("visibilitychange", wake);
        resolve();
      };
      const timer = setTimeout(wake, document.hidden ? HIDDEN_MS : every);
      document.addEventListener("visibilitychange", wake);
    });
  }
}

async function pollStatus() {
  if (!hasKey()) return showLink();
  try {
    const news = await ask("status");
    if (!news || !news.run) throw new Error("the orchestrator is away");
    if (!status || news.elapsed_s !== status.elapsed_s || news.run !== status.run) newsAt = performance.now() - 1000 * (news.age_s || 0);
    status = news;
    problem = "";
    showStatus();
  } catch (error) {
    problem = error instanceof TypeError || error.name === "TimeoutError" ? "no answer from this address" : error.message;
  }
  showLink();
}

async function pollHistory() {
  if (!hasKey()) return;
  try {
    const news = await ask("history");
    if (!news || !news.lanes) return;
    history = news;
    showCurves(history.curves, history.components);
    showEvaluations(history.evaluations || [], history.components);
    showSamples(history.samples);
    showLanes(history.lanes, status || {});
    showLastMinute();
    showBubbles(history.bubbles || {});
  } catch {
    // The status is asked for more often, and says why there is no answer.
  }
}

// -- whether what is shown is true now

/** The pill, and in the line under it what there is to say: why nothing is new, or what the run waits for. */
function showLink() {
  const silent_s = (performance.now() - newsAt) / 1000;
  const away = problem || (silent_s > STALE_S ? "the orchestrator is away" : "");
  const state = !hasKey() ? "locked" : !status ? "connecting" : status.finish_reason || (away && allTrained()) ? "over" : away ? "away" : "live";
  byId("link").dataset.state = document.body.dataset.link = state;
  setText(byId("link"), state === "live" && status.stop_reason ? "stopping" : state);
  byId("unlock").hidden = state !== "locked";
  if (state === "live") showWait();
  else say({ locked: "none", connecting: "none", over: "none", away: "stuck" }[state], "", lastWords(state, away, silent_s));
}

const allTrained = () => status.num_batches > 0 && status.trained_version >= status.num_batches;

function lastWords(state, away, silent_s) {
  if (state === "locked") return refused ? "That was not this run's key." : "";
  if (state === "connecting") return away || "Asking for the status.";
  if (state === "over") return `The run is over${status.finish_reason ? `: ${status.finish_reason}` : ""}. This is how it ended.`;
  return `No news for ${duration(silent_s)}: ${away}. What you see is old; the page goes on by itself.`;
}

/** What the run waits for: a healthy one waits for something all the time, so only a long wait is an alarm. */
function showWait() {
  const { wait, blocked } = status;
  const text = wait ? `${wait.stage} waits for ${wait.waits_for}, since ${duration(wait.waited_s)}; to act: ${wait.owner}` : "\u00a0";
  if (blocked) say("stuck", "Blocked.", `Nothing has progressed for ${duration(blocked.still_s)}: ${text}`);
  else if (wait) say(wait.waited_s < SLOW_S ? "flowing" : "slow", wait.waited_s < SLOW_S ? "Flowing." : "Waiting.", text);
  else say("none", "", text);
}

function say(level, word, text) {
  byId("wait").dataset.level = level;
  setText(byId("wait-word"), word);
  setText(byId("wait-text"), visible(text));
}

// -- the head of the page

function showStatus() {
  const last = status.last || {};
  setText(byId("run"), visible(status.run));
  setText(byId("elapsed"), duration(status.elapsed_s));
  showTiles(last);
  showFlow(status);
  showBatches(status);
  showEvaluation(status);
  showRanker(status);
  showScaling(status);
  showQueues(status);
  showLongest(status);
  showLanes(history && history.lanes, status);
  const done = serves() ? `${status.num_requests} requests` : `${status.trained_version}/${status.num_batches} · reward ${number(last.reward)}`;
  document.title = `${done} · ${visible(status.run)}`;
}

/** Whether the run is a service: it gets requests, and trains no batches. */
const serves = () => typeof status.num_requests === "number";

function showProgress() {
  setText(byId("batches-title"), serves() ? "Requests" : "Batches trained");
  byId("progress").hidden = serves();
  if (serves()) {
    setText(byId("batches"), String(status.num_requests));
    setText(byId("left"), `${Object.keys(status.requests).length} open`);
    return;
  }
  const trained = status.trained_version;
  setText(byId("batches"), `${trained} / ${status.num_batches}`);
  byId("progress").value = status.num_batches ? trained / status.num_batches : 0;
  const recent = (history && history.curves.seconds ? history.curves.seconds : []).slice(-8).filter((value) => value !== null);
  const each_s = recent.length ? recent.reduce((sum, value) => sum + value, 0) / recent.length : NaN;
  const left = status.num_batches - trained;
  setText(byId("left"), left > 0 && each_s ? `about ${duration(left * each_s)} left` : "\u00a0");
}

function showTiles(last) {
  showProgress();
  setText(byId("reward"), number(last.reward));
  const rewards = (history && history.curves.reward) || [];
  setText(byId("reward-from"), rewards.length > 1 ? `${number(rewards[0])} in the first batch` : "mean of the last batch");
  setText(byId("tokens"), "response_tokens" in last ? `${number(last.response_tokens)} tokens` : "–");
  setText(byId("tokens-max"), "response_tokens_max" in last ? `longest ${number(last.response_tokens_max)}` : "\u00a0");
  setText(byId("version"), status.newest ? `v${status.newest.version}` : "–");
  setText(byId("staleness"), "staleness" in last ? `staleness ${number(last.staleness)}, at most ${number(last.staleness_max)}` : "\u00a0");
  setText(byId("speed"), "samples_per_s" in last ? `${number(last.samples_per_s)} /s` : "–");
  setText(byId("speed-tokens"), "tokens_per_s" in last ? `samples; ${number(last.tokens_per_s)} tokens/s` : "\u00a0");
}

new ResizeObserver(() => status && showLanes(null, status)).observe(byId("lanes"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => status && showLanes(null, status));
onKey(byId("unlock"), byId("key"), () => {
  pollStatus();
  pollHistory();
});
repeat(pollStatus, STATUS_MS);
repeat(pollHistory, HISTORY_MS);
