// How the run is, in one line, and below it each thing that is wrong.

import { byId, keyed, make, setText } from "./dom.js";
import { duration, number, plural, roughly, visible } from "./text.js";

const RECENT_S = 300; // a loss that is longer ago is history: it is counted, and no longer explained
const BATCHES_BEHIND = 8; // time left is estimated from so many

/** status: of /status.  curves: of /history, or null.  Returns {level, word, text}. */
export function headlineOf(status, curves) {
  const { level, word } = healthOf(status);
  const problems = problemsOf(status).map((problem) => problem.brief);
  return { level, word, text: [...progressOf(status, curves), ...problems].filter(Boolean).join(", ") };
}

function healthOf(status) {
  if (status.broker) return { level: "bad", word: "Broker away" };
  if (status.blocked) return { level: "bad", word: "Blocked" };
  if (status.stop_reason) return { level: "warn", word: "Draining" };
  if (status.paused) return { level: "warn", word: "Paused" };
  if (problemsOf(status).some((problem) => problem.text)) return { level: "warn", word: "Running" };
  const ready = status.newest && (status.workers || []).some((worker) => worker.kind === "generate");
  return ready ? { level: "good", word: "Healthy" } : { level: "calm", word: "Starting" };
}

function progressOf(status, curves) {
  if (serves(status)) return [plural(status.num_requests, "request"), `${Object.keys(status.requests).length} open`];
  const held = status.finish_reason || status.blocked || status.stop_reason || status.paused;
  return [`batch ${status.trained_version}/${status.num_batches}`, held ? "" : timeLeft(status, curves)];
}

/** By the median of the last batches: one that waited for a worker to start says nothing of the next. */
function timeLeft(status, curves) {
  const seconds = ((curves && curves.seconds) || []).slice(-BATCHES_BEHIND).filter((value) => value !== null);
  const each_s = seconds.sort((a, b) => a - b)[Math.floor(seconds.length / 2)];
  const left = status.num_batches - status.trained_version;
  return left > 0 && each_s !== undefined ? `${roughly(left * each_s)} left` : "";
}

/** Whether the run is a service: it gets requests, and trains no batches. */
export const serves = (status) => typeof status.num_requests === "number";

/** [{key, level, brief, text}]: brief for the headline, text below it, "" where there is nothing more to say. */
export function problemsOf(status) {
  const { blocked, queues = {}, warnings = [], lost = [], num_lost = 0, given_up = "" } = status;
  const found = [];
  if (blocked) {
    const text = `${blocked.stage} waits for ${blocked.waits_for}; to act: ${blocked.owner}${blocked.why ? ` (${blocked.why})` : ""}`;
    found.push({ key: "blocked", level: "bad", brief: `no progress for ${duration(blocked.still_s)}`, text: `Blocked for ${duration(blocked.still_s)}: ${text}` });
  }
  for (const worker of (status.generation || []).filter(({ aside_s }) => typeof aside_s === "number")) {
    const text = `${worker.worker_id} stands aside since ${duration(worker.aside_s)}: it cannot load the newest weights (${worker.load_problem}); it is asked again`;
    found.push({ key: `aside ${worker.worker_id}`, level: "warn", brief: `${worker.worker_id} stands aside`, text });
  }
  for (const { worker, trouble } of (status.workers || []).filter((one) => one.trouble)) found.push({ key: `trouble ${worker}`, level: "warn", brief: `trouble of ${worker}`, text: `${worker}: ${trouble}` });
  for (const [of, { count, last }] of Object.entries(status.failed || {})) found.push({ key: `failed ${of}`, level: "calm", brief: "", text: `${plural(count, "attempt")} at ${of} failed and ${count === 1 ? "is" : "are"} made again, the last one: ${last}` });
  if (queues.dead) found.push({ key: "dead", level: "bad", brief: plural(queues.dead, "dead letter"), text: `Given up: ${given_up || plural(queues.dead, "unit")} (streamrl-orchestrator inspect, retry, drop)` });
  if (num_lost) found.push(losses(status, lost, num_lost));
  for (const text of status.damaged_checkpoints || []) found.push({ key: text, level: "warn", brief: "damaged checkpoint", text: `Damaged checkpoint, the run goes on from version ${status.went_back_to || 0}: ${text}` });
  for (const text of status.remarks || []) found.push({ key: text, level: "calm", brief: "", text: `Note: ${text}` });
  warnings.forEach((text, index) => found.push({ key: `warning ${index}`, level: "warn", brief: "", text: `Warning: ${text}` }));
  if (warnings.length) found.push({ key: "warnings", level: "warn", brief: plural(warnings.length, "warning"), text: "" });
  return found;
}

function losses(status, lost, num_lost) {
  const alive = new Set((status.workers || []).map(({ worker }) => placeOf(worker)));
  const recent = lost.filter(({ at_s }) => status.elapsed_s - at_s < RECENT_S);
  const named = recent.map(({ worker, reason, at_s }) => {
    const now = alive.has(placeOf(worker)) ? "replaced" : "not replaced yet";
    return `${worker}, ${duration(status.elapsed_s - at_s)} ago: ${reason}; ${now}`;
  });
  const back = lost.every(({ worker }) => alive.has(placeOf(worker)));
  const brief = back ? plural(num_lost, "restart") : `${plural(num_lost, "worker")} lost`;
  return { key: "lost", level: back ? "calm" : "warn", brief, text: named.length ? `Lost ${named.reverse().join(". ")}` : "" };
}

export const placeOf = (worker) => worker.slice(0, worker.lastIndexOf("."));

/** Each with its text, in the list under the head. */
export function showProblems(status) {
  const told = problemsOf(status).filter((problem) => problem.text);
  keyed(
    byId("problems"),
    told.map((problem) => problem.key),
    () => make("li"),
    (item, _, index) => {
      item.dataset.level = told[index].level;
      setText(item, visible(told[index].text));
    },
  );
}

/** What the run waits for: a healthy one waits for something all the time. */
export function waitOf({ wait }) {
  return wait ? `${wait.stage} waits for ${wait.waits_for}, since ${duration(wait.waited_s)}; to act: ${wait.owner}` : "";
}

/** How many drafted tokens were drawn; empty while nothing is drafted. */
export function draftsOf({ workers }) {
  const total = (name) => (workers || []).reduce((sum, { counters }) => sum + ((counters || {})[name] || 0), 0);
  const drafted = total("drafted_tokens");
  return drafted ? `over 10 s; ${number(total("accepted_tokens"))} of ${number(drafted)} drafted tokens accepted` : "";
}

/** The numbers beside the reward. */
export function showFacts(status) {
  const last = status.last || {};
  const tokens_per_s = (status.workers || []).reduce((sum, worker) => sum + (worker.kind === "generate" ? worker.tokens_per_s || 0 : 0), 0);
  const counts = Object.values(status.requests || {});
  const taken = counts.reduce((sum, one) => sum + one.ended, 0);
  const facts = serves(status)
    ? [
        ["Requests", String(status.num_requests), `${counts.length} open`],
        ["Samples of open requests", String(counts.reduce((sum, one) => sum + one.samples, 0)), `${taken} ended`],
        ["Generation", `${number(tokens_per_s)} tokens/s`, draftsOf(status) || "over 10 s"],
        ["Weights", status.newest ? `v${status.newest.version}` : "–", status.newest ? "" : "not loaded yet"],
      ]
    : [
        ["Response", "response_tokens" in last ? `${number(last.response_tokens)} tokens` : "–", "response_tokens_max" in last ? `longest ${number(last.response_tokens_max)}` : ""],
        ["Cut at the limit", "truncated" in last ? `${Math.round(100 * last.truncated)}%` : "–", "of samples"],
        ["Weights", status.newest ? `v${status.newest.version}` : "–", "staleness" in last ? `staleness ${number(last.staleness)}, at most ${number(last.staleness_max)}` : ""],
        ["Training", "samples_per_s" in last ? `${number(last.samples_per_s)} samples/s` : "–", "tokens_per_s" in last ? `${number(last.tokens_per_s)} tokens/s` : ""],
        ["Generation", `${number(tokens_per_s)} tokens/s`, draftsOf(status) || "over 10 s"],
      ].filter(([, value]) => value);
  keyed(
    byId("facts"),
    facts.map(([name]) => name),
    (name) => {
      const fact = make("div");
      fact.append(make("dt", "", name), make("dd"), make("dd", "small"));
      return fact;
    },
    (fact, _, index) => {
      setText(fact.children[1], facts[index][1]);
      setText(fact.children[2], facts[index][2]);
    },
  );
}
