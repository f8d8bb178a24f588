// Groups, batches, queues, the longest running groups, GPUs, and samples.

import { byId, keyed, make, rows, setText } from "./dom.js";
import { serves } from "./headline.js";
import { duration, number, plural, shortened, visible } from "./text.js";
import { showBar } from "./usage.js";

const STAGES = [
  ["pending", "wait for a worker"],
  ["running", "being generated"],
  ["scoring", "being scored"],
  ["ready", "ready to train"],
  ["rounds_outstanding", "rounds at the trainer"],
];
const SERVICE_STAGES = 2;
const STAGE_TONES = { pending: "wait", running: "decode", scoring: "score", ready: "step", trained: "train", ended: "other" };
const MAX_BATCHES = 4;
const MAX_LONGEST = 8;
const IS_QUEUE = /^(plans:|tasks:|dead$)/;

/** How many groups are at each stage; a service only generates. */
export function showFlow(status) {
  setText(byId("flow-title"), serves(status) ? "Where the prompts are" : "Where the groups are");
  keyed(
    byId("flow"),
    STAGES.map(([name]) => name).slice(0, serves(status) ? SERVICE_STAGES : STAGES.length),
    () => {
      const item = make("li");
      item.append(make("b"), make("span"));
      return item;
    },
    (item, name, index) => {
      setText(item.firstElementChild, String(status[name] ?? "–"));
      setText(item.lastElementChild, STAGES[index][1]);
    },
  );
}

/** The evaluation of held-out problems that is under way; nothing where there is none. */
export function showEvaluation(status) {
  const current = status.evaluation;
  byId("evaluation").hidden = !current;
  if (!current) return;
  const places = ["waiting", "running", "scoring"].filter((name) => current[name]).map((name) => `${current[name]} ${name}`);
  const held = current.held ? "; newer weights wait for it" : "";
  const answered = `${current.answered} of ${current.problems} answers to held-out problems`;
  setText(byId("evaluation"), `Evaluating v${current.weights.version}: ${[answered, ...places].join(", ")}${held}.`);
}

const RANKER_STATES = {
  trusted: "dispatch may rely on them",
  not_trusted: "not trusted: plans are even",
  not_yet_measured: "too few to judge: plans are even",
};

/** How right predictions of response lengths were; nothing where they are not judged. */
export function showRanker(status) {
  const ranker = status.ranker;
  byId("ranker").hidden = !ranker;
  if (!ranker) return;
  const recalls = [ranker.recall_20, ranker.recall_10, ranker.recall_5].map((recall) => recall.toFixed(2)).join("/");
  const found = ranker.num_groups ? `tail recall ${recalls} at 20/10/5% of ${ranker.num_groups} groups, ${RANKER_STATES[ranker.state]}` : "none judged yet";
  setText(byId("ranker"), `Predicted lengths: ${found}.`);
}

/** The last change of the number of generation workers, and why; nothing where it is fixed or never changed. */
export function showScaling(status) {
  const scaling = status.scaling;
  byId("scaling").hidden = !scaling || scaling.changed < 0;
  if (byId("scaling").hidden) return;
  const leaving = scaling.draining.length ? `; leaving: ${scaling.draining.join(", ")}` : "";
  setText(byId("scaling"), `Generation workers ${scaling.from_workers} → ${scaling.to_workers} after batch ${scaling.changed + 1}: ${visible(scaling.reason)}${leaving}.`);
}

/** Who computes on which GPU of the machine, and which are idle, then those of workers that came by themselves; nothing
    where there are none. */
export function showGpus(status) {
  const gpus = status.gpus || [];
  byId("gpus-panel").hidden = !gpus.length;
  rows(
    byId("gpus"),
    gpus.map((gpu) => [
      gpu.number === null ? "" : String(gpu.number),
      visible(gpu.memory_mib ? `${gpu.name}, ${Math.round(gpu.memory_mib / 1024)} GiB` : gpu.name),
      gpu.workers.join(", ") || (gpu.held ? "held by another run" : "idle"),
      gpu.workers.length && gpu.share !== null ? `${Math.round(100 * gpu.share)}%` : "",
    ]),
  );
}

/** The oldest batches that are not trained, with their slots by stage, or the oldest requests of a service with their
    samples; empty rows keep the place. */
export function showBatches(status) {
  setText(byId("open-title"), serves(status) ? "Open requests" : "Open batches");
  const open = (serves(status) ? openRequests(status.requests) : openBatches(status.batches || [])).slice(0, MAX_BATCHES);
  keyed(
    byId("open-batches"),
    Array.from({ length: MAX_BATCHES }, (_, index) => String(index)),
    () => {
      const row = make("div", "batch");
      row.append(make("span"), make("div", "bar"));
      return row;
    },
    (row, _, index) => updateBatch(row, open[index]),
  );
}

function openBatches(batches) {
  return batches.filter((batch) => !batch.trained).map((batch) => ({ name: `batch ${batch.batch + 1}`, stages: batch.stages }));
}

function openRequests(requests) {
  return Object.entries(requests).map(([name, { samples, started, ended, taken }]) => ({
    name: `request ${name}`,
    stages: { pending: samples - started, running: started - ended, ready: ended - taken, taken },
  }));
}

function updateBatch(row, batch) {
  const stages = batch ? Object.entries(batch.stages) : [];
  const total = stages.reduce((sum, [, count]) => sum + count, 0) || 1;
  setText(row.firstElementChild, batch ? batch.name : "\u00a0");
  row.classList.toggle("empty", !batch);
  showBar(row.lastElementChild, stages.map(([name, count]) => ({ name: `${count} ${name}`, tone: STAGE_TONES[name] || "other", share: count / total })));
  row.lastElementChild.title = stages.map(([name, count]) => `${count} ${name}`).join(", ");
}

/** Work queues by depth, dead letters always; logs apart, because what they keep is no backlog. */
export function showQueues(status) {
  const all = Object.entries(status.queues || {}).map(([name, depth]) => [visible(name), depth]);
  const queues = all.filter(([name]) => IS_QUEUE.test(name)).sort(([a], [b]) => a.localeCompare(b, undefined, { numeric: true }));
  if (!queues.some(([name]) => name === "dead")) queues.push(["dead", 0]);
  const named = queues.map(([name, depth]) => [name === "dead" ? "dead letters" : name, String(depth)]);
  rows(byId("queues"), named);
  [...byId("queues").children].forEach((row, index) => row.classList.toggle("alarm", queues[index][0] === "dead" && queues[index][1] > 0));
  rows(byId("logs"), all.filter(([name]) => !IS_QUEUE.test(name)).map(([name, depth]) => [name, String(depth)]));
}

/** Groups that have been generated for the longest. */
export function showLongest(status) {
  const running = (status.longest || []).slice(0, MAX_LONGEST);
  const lines = running.map((group) => [
    group.attempt ? `${group.group_id} (attempt ${group.attempt + 1})` : group.group_id,
    duration(group.running_s),
    `${group.missing.length} of ${group.group_size}`,
    group.worker_id,
  ]);
  rows(byId("longest"), lines.length ? lines : [["none", "", "", ""]]);
}

/** Samples, the newest first. The list holds still while one of them is open. curves: of /history. */
export function showSamples(samples, curves) {
  const list = byId("samples");
  const reading = list.querySelector("details[open]");
  const fresh = samples.length && (!list.children.length || list.firstElementChild.dataset.key !== samples[0].row);
  const note = reading && fresh ? "Newer samples wait until you close the open one." : "The best and the worst of recently scored groups. Open one to read all of it.";
  setText(byId("samples-note"), samples.length ? note : "No group has been scored yet.");
  byId("samples-panel").hidden = !samples.length && (curves.batch || []).length > 2; // made-up tokens are no text
  if (reading) return;
  const best = Math.max(...samples.map((sample) => sample.reward));
  keyed(
    list,
    samples.map((sample) => sample.row),
    () => make("details", "sample"),
    (element, _, index) => element.children.length || fillSample(element, samples[index], best),
  );
}

const LINE = 180; // characters of a text in the list

function fillSample(element, sample, best) {
  const summary = make("summary");
  const reward = make("b", "reward", sample.reward.toFixed(2));
  reward.dataset.good = sample.reward <= 0 ? "no" : sample.reward < best / 2 ? "some" : "yes";
  const components = Object.entries(sample.components).map(([name, value]) => `${visible(name)} ${number(value)}`).join(" · ");
  const whole = sample.response_cut ? `${sample.response} … ${sample.response_end}` : sample.response;
  summary.append(reward, make("span", "question", shortened(visible(sample.question || sample.prompt), LINE)));
  for (const [name, text] of [["expected", sample.expected], ["response", whole]]) {
    const cell = make("span", `cell ${name}`);
    cell.append(make("span", "label", name), make("bdi", "", text ? shortened(visible(text), LINE) : "–"));
    summary.append(cell);
  }
  summary.append(make("span", "components", components));
  const facts = [`sample ${sample.row}`, plural(sample.tokens, "token"), `ended by ${sample.finish}`, `weights v${sample.versions.join(", v")}`, sample.worker, `${number(sample.engine_s)} s in the engine`];
  element.append(summary, make("p", "small", facts.join(" · ")));
  addText(element, sample.prompt_cut ? `Prompt, without its first ${sample.prompt_cut} characters` : "Prompt", sample.prompt);
  if (sample.expected) addText(element, "Expected answer", sample.expected);
  addText(element, "Response", sample.response);
  if (sample.response_cut) addText(element, `${sample.response_cut} characters later`, sample.response_end);
}

function addText(element, title, text) {
  const pre = make("pre", "", visible(text));
  pre.dir = "auto";
  pre.tabIndex = 0;
  element.append(make("h3", "", title), pre);
}
