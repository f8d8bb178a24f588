// The live page: asks for the status every second and for the history every two, and says so when no answer comes.
//
// Owns: polling and the head of the page. Invariant: what is shown is either fresh or marked as old, and the page
// recovers by itself as soon as there is an answer again.

import { isDraining, showControls } from "./controls.js";
import { showCurves, showEvaluations } from "./curves.js";
import { byId, setText } from "./dom.js";
import { headlineOf, serves, showFacts, showProblems, waitOf } from "./headline.js";
import { ask, hasKey, onKey, wasRefused } from "./key.js";
import { showLanes } from "./lanes.js";
import { showBatches, showEvaluation, showFlow, showGpus, showLongest, showQueues, showRanker, showSamples, showScaling } from "./panels.js";
import { duration, number, visible } from "./text.js";
import { showBubbles, showLastMinute } from "./usage.js";

const STATUS_MS = 1000;
const HISTORY_MS = 2000;
const HIDDEN_MS = 5000;
const ENDED_S = 30; // an orchestrator that died is back by then
const STALE_S = 4; // the orchestrator publishes twice a second

let status = null;
let history = null;
let newsAt = 0; // when the status last differed from the one before
let problem = ""; // why there is no answer

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
  if (!hasKey()) return showHead();
  try {
    const news = await ask("status");
    if (!news.run) throw new Error("the orchestrator is away");
    if (!status || news.elapsed_s !== status.elapsed_s || news.run !== status.run) newsAt = performance.now() - 1000 * (news.age_s || 0);
    status = news;
    problem = "";
    showStatus();
  } catch (error) {
    problem = error.message;
  }
  showHead();
}

async function pollHistory() {
  if (!hasKey()) return;
  try {
    const news = await ask("history");
    if (!news.lanes) return;
    history = news;
    showCurves(history.curves, history.components);
    showEvaluations(history.evaluations || [], history.components);
    showSamples(history.samples, history.curves);
    if (status) {
      showStatus();
      showHead();
    }
    showLastMinute();
    showBubbles(history.bubbles || {});
  } catch {
    // The status is asked for more often, and says why there is no answer.
  }
}

// -- the head of the page

/** How the run is, or why nothing is known of it. body[data-link]: locked, connecting, live, away, stopped, over. */
function showHead() {
  const silent_s = (performance.now() - newsAt) / 1000;
  const away = problem || (silent_s > STALE_S ? "the orchestrator is away" : "");
  const link = !hasKey() ? "locked" : !status ? "connecting" : linkOf(away);
  document.body.dataset.link = link;
  byId("unlock").hidden = link !== "locked";
  const { level, word, text } = headOf(link);
  byId("health").dataset.level = level;
  setText(byId("health"), word);
  setText(byId("headline"), visible(text));
  setText(byId("wait"), visible(link === "live" ? waitOf(status) : lastWords(link, away, silent_s)) || "\u00a0");
  if (status) showControls(link === "live", status);
  document.title = status && link !== "locked" ? `${word}: ${text} · ${visible(status.run)}` : "StreamRL";
}

function linkOf(away) {
  if (status.finish_reason || (away && (allTrained() || isDraining()))) return "over";
  return status.stopped ? "stopped" : away ? "away" : "live";
}

function headOf(link) {
  if (link === "locked") return { level: "calm", word: "Locked", text: "" };
  if (link === "connecting") return { level: "calm", word: "Connecting", text: "" };
  const known = link === "over" || link === "stopped" ? { ...status, finish_reason: status.finish_reason || link } : status;
  const { level, word, text } = headlineOf(known, history && history.curves);
  const words = { away: ["bad", "Away"], stopped: ["warn", "Stopped"], over: ["calm", "Finished"] }[link] || [level, word];
  return { level: words[0], word: words[1], text };
}

const allTrained = () => status.num_batches > 0 && status.trained_version >= status.num_batches;

function lastWords(link, away, silent_s) {
  if (link === "locked") return wasRefused() ? "That was not this run's key." : "";
  if (link === "connecting") return away || "Asking for the status.";
  if (link === "over") return status.finish_reason ? `The run is over: ${status.finish_reason}. This is how it ended.` : "The run is over. This is the last that it said.";
  const goOn = status.go_on ? `go on with: ${status.go_on}` : "";
  if (link === "stopped") return `Stopped ${status.stopped}${goOn && `; ${goOn}`}`;
  const ended = goOn && silent_s > ENDED_S ? ` If the run has ended, ${goOn}` : "";
  return `No news for ${duration(silent_s)}: ${away}. What you see is old; the page goes on by itself.${ended}`;
}

function showStatus() {
  document.body.dataset.kind = serves(status) ? "service" : "training";
  setText(byId("run"), visible(status.run));
  setText(byId("elapsed"), duration(status.elapsed_s));
  byId("progress").hidden = serves(status);
  byId("progress").value = status.num_batches ? status.trained_version / status.num_batches : 0;
  showReward();
  showProblems(status);
  showFacts(status);
  showFlow(status);
  showBatches(status);
  showEvaluation(status);
  showRanker(status);
  showScaling(status);
  showQueues(status);
  showLongest(status);
  showGpus(status);
  showLanes(history && history.lanes, status);
}

/** The held-out reward where there is one; else that of the newest batch, of filtered groups as well, as the mean over
 * the trained ones falls while the model solves more groups whole. After a restart of the orchestrator the curve still
 * knows it. */
function showReward() {
  const asked = ((history && history.evaluations) || []).filter((line) => "eval_reward" in line);
  const curves = (history && history.curves) || {};
  const rewards = (curves.reward || []).map((value, at) => (curves.reward_with_filtered || [])[at] ?? value).filter((value) => value !== null);
  const last = status.last && "reward" in status.last ? status.last.reward_with_filtered ?? status.last.reward : rewards.at(-1);
  const first = asked[0], newest = asked.at(-1);
  setText(byId("reward-title"), newest ? "Held-out reward" : "Reward");
  setText(byId("reward"), number(newest ? newest.eval_reward : last));
  if (newest) setText(byId("reward-from"), asked.length > 1 ? `of v${newest.version}, from ${number(first.eval_reward)} of v${first.version}; reward of the last batch ${number(last)}` : `of v${newest.version}; reward of the last batch ${number(last)}`);
  else setText(byId("reward-from"), rewards.length > 1 ? `from ${number(rewards[0])} in the first batch` : "mean of the last batch");
}

onKey(byId("unlock"), byId("key"), () => {
  status = history = null;
  problem = "";
  pollStatus();
  pollHistory();
});
repeat(pollStatus, STATUS_MS);
repeat(pollHistory, HISTORY_MS);
