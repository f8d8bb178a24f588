// The run's curves: small multiples over batches, drawn by uPlot (uplot/), with one cursor for all of them.

import { byId, keyed, make, setText } from "./dom.js";
import { token } from "./states.js";
import { number } from "./text.js";

const HEIGHT = 130;
const MAX_DOTS = 12;
const LINES = [
  { tone: "s-decode" },
  { tone: "s-publish" },
  { tone: "s-train", dash: [5, 3] },
  { tone: "s-score", dash: [2, 3] },
];

const REWARD = { title: "Reward", names: ["reward", "reward_with_filtered"], labels: ["trained groups", "with filtered ones"], floor: 0, height: 230, quiet: true };
const LEARNING = [
  { title: "Loss", names: ["loss"] },
  { title: "KL to the reference", names: ["kl"], floor: 0 },
  { title: "Mismatch of trainer and engine (k3)", names: ["mismatch_k3"], floor: 0 },
  { title: "Entropy", names: ["entropy"], floor: 0 },
  { title: "Reward components", components: true },
  { title: "Gradient norm", names: ["grad_norm"], floor: 0, robust: true },
  { title: "No signal, cut at the limit", names: ["no_signal", "truncated"], labels: ["share of groups", "share of samples"], floor: 0 },
];
const SPEED = [
  { title: "Response tokens", names: ["response_tokens", "response_tokens_max"], labels: ["mean", "longest"], floor: 0 },
  { title: "Seconds a batch", names: ["seconds", "train_s", "wait_s", "publish_s"], labels: ["all", "train", "wait", "publish"], floor: 0, robust: true },
  { title: "Tokens a second", names: ["tokens_per_s"], floor: 0, robust: true },
  { title: "Staleness of samples, versions", names: ["staleness", "staleness_max"], labels: ["mean", "most"], floor: 0 },
  { title: "Tail recall of predicted lengths", names: ["ranker_recall_20", "ranker_recall_10", "ranker_recall_5"], labels: ["20%", "10%", "5%"], floor: 0 },
];
const BATCH_STEPS = Array.from({ length: 8 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
const NOT_CURVES = /^(batch|version|incarnation|time_s)$/;
const drawn = new Map(); // figure -> {plot, labels, chart, batches}
const cursor = { sync: { key: "batches", scales: ["x", null] }, drag: { x: false, y: false }, y: false };
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) drawn.get(target.parentElement)?.plot.setSize({ width: target.clientWidth, height: target.clientHeight });
});

let last = null;

/** curves: {name: [number | null]} of /history.  components: names of the reward's components. */
export function showCurves(curves, components) {
  last = { curves, components };
  const batches = curves.batch || [];
  const learning = [...LEARNING.map((chart) => (chart.components ? { ...chart, names: components } : chart)), ...ofParts(curves)];
  drawAll(byId("reward-curve"), [withSeries(REWARD, curves)], batches);
  drawAll(byId("curves"), present(learning, curves, 3), batches);
  byId("speed-panel").hidden = !batches.length;
  drawAll(byId("speed-curves"), present(SPEED, curves, 0), batches);
  if (!byId("more").open) return;
  const shown = new Set([REWARD, ...learning, ...SPEED].flatMap((chart) => chart.names));
  const others = Object.keys(curves).filter((name) => !shown.has(name) && !NOT_CURVES.test(name));
  drawAll(byId("more-curves"), others.map((name) => withSeries({ title: name.replaceAll("_", " "), names: [name] }, curves)), batches);
}

/** One chart for each number of the parts of [data.mix] (mix/PART/NAME), with a line a part. */
function ofParts(curves) {
  const charts = new Map();
  for (const key of Object.keys(curves)) {
    const [, part, name] = key.match(/^mix\/(.+)\/([^/]+)$/) || [];
    if (!name || name === "groups") continue;
    const title = name.replaceAll("_", " ");
    const chart = charts.get(name) || { title: `${title[0].toUpperCase()}${title.slice(1)} by part of the data`, names: [], labels: [] };
    charts.set(name, { ...chart, names: [...chart.names, key], labels: [...chart.labels, part] });
  }
  return [...charts.values()];
}

/** Those that have numbers; before the first batch the first few, empty, so that their place is seen. */
function present(charts, curves, few) {
  const all = charts.map((chart) => withSeries(chart, curves));
  const some = all.filter((chart) => chart.series.length);
  return some.length ? some : all.slice(0, few);
}

/** lines: of evaluations in metrics.jsonl, drawn where their version's batches end. */
export function showEvaluations(lines, components) {
  const answered = lines.filter((line) => "eval_reward" in line);
  const column = (name) => answered.map((line) => line[name] ?? null);
  const names = ["reward", ...components];
  const columns = Object.fromEntries([...names.map((name) => [name, column(`eval_${name}`)]), ["share", column("eval_share")]]);
  const sets = [...setsOf(answered)];
  for (const key of sets.flatMap(([, keys]) => keys)) columns[key] = column(key);
  const charts = [
    { title: "Held-out problems", names, floor: 0 },
    ...sets.map(([name, keys]) => ({ title: `Held out: ${name}`, names: keys, labels: keys.map((key) => key.split("/").at(-1)), floor: 0 })),
    { title: "Evaluation's share of generation", names: ["share"], floor: 0 },
  ].map((chart) => withSeries(chart, columns));
  drawAll(byId("evaluations"), answered.length ? charts : [], answered.map((line) => line.version - 1));
}

/** Named sets of held-out problems -> the keys that are drawn of each: its reward, and of several samples pass@k. */
function setsOf(lines) {
  const sets = new Map();
  for (const key of new Set(lines.flatMap((line) => Object.keys(line)))) {
    const [, name] = key.match(/^\w+\/([^/]+)\/(?:reward|pass@\d+)$/) || [];
    if (name) sets.set(name, [...(sets.get(name) || []), key]);
  }
  return sets;
}

function withSeries(chart, curves) {
  const series = chart.names
    .map((name, index) => ({ label: chart.labels ? chart.labels[index] : name, values: curves[name], tone: index % 4 }))
    .filter((one) => one.values && one.values.some((value) => value !== null));
  return { ...chart, series };
}

function drawAll(parent, charts, batches) {
  keyed(
    parent,
    charts.map((chart) => chart.title),
    (title, index) => createChart(title, charts[index].height || HEIGHT),
    (figure, _, index) => updateChart(figure, charts[index], batches),
  );
  for (const [figure, { plot }] of drawn) {
    if (figure.isConnected) continue;
    plot.destroy();
    drawn.delete(figure);
  }
}

function createChart(title, height) {
  const figure = make("figure");
  const caption = make("figcaption");
  caption.append(make("b", "", title), make("span", "readout"));
  const host = make("div", "chart");
  host.style.height = `${height}px`;
  host.tabIndex = 0;
  host.setAttribute("role", "img");
  host.append(make("span", "cut"));
  host.addEventListener("pointermove", (event) => event.pointerType === "touch" && point(figure, event));
  host.addEventListener("blur", () => moveCursor(figure, null));
  host.addEventListener("keydown", (event) => step(figure, event));
  figure.append(caption, host, make("p", "key"));
  resized.observe(host);
  return figure;
}

/** Batches are counted from 1, as people do; the first line is drawn last, on top of the others. */
function updateChart(figure, chart, batches) {
  const [, host, key] = figure.children;
  const labels = chart.series.map((one) => one.label).join("\n");
  const before = drawn.get(figure);
  const data = [batches.map((batch) => batch + 1), ...chart.series.map((one) => one.values).reverse()];
  if (before && before.labels === labels) {
    Object.assign(before, { chart, batches });
    before.plot.setData(data);
  } else {
    if (before) before.plot.destroy();
    const state = { labels, chart, batches };
    drawn.set(figure, state);
    state.plot = new uPlot(options(figure, host, chart.series), data, host);
  }
  const peak = Math.max(...valuesOf(chart));
  const { high } = scaleOf(figure);
  setText(host.firstElementChild, peak > high ? `cut, up to ${tickText(peak)}` : "");
  keyed(
    key,
    isNamed(chart) ? chart.series.map((one) => one.label) : [],
    () => make("span"),
    (item, _, index) => (item.dataset.line = String(chart.series[index].tone)),
  );
  readOut(figure);
}

/** Whether its lines have names, and their values stand beside those; else the one value stands beside the title. */
const isNamed = (chart) => chart.series.length > 1 || Boolean(chart.components || (chart.labels && !chart.quiet));

function options(figure, host, series) {
  const axis = { stroke: () => token("muted"), font: "11px system-ui, sans-serif", grid: { stroke: () => token("line"), width: 1 }, ticks: { show: false } };
  const lines = series.map(({ tone }) => ({
    stroke: () => token(LINES[tone].tone),
    dash: LINES[tone].dash,
    width: 1.8,
    points: { show: true, size: 5, fill: () => token(LINES[tone].tone), filter: dotted },
  }));
  return {
    width: host.clientWidth,
    height: host.clientHeight,
    padding: [8, 18, 0, 0], // half of a label's width at the end of the axis
    legend: { show: false },
    cursor,
    scales: {
      x: { time: false, range: batchRange },
      y: { range: () => [scaleOf(figure).low, scaleOf(figure).high] },
    },
    axes: [
      { ...axis, size: 28, gap: 6, space: 60, grid: { show: false }, incrs: BATCH_STEPS, values: (_, ticks) => ticks.map(batchText) },
      { ...axis, size: 44, gap: 4, splits: () => scaleOf(figure).ticks, values: (_, ticks) => ticks.map(tickText) },
    ],
    series: [{}, ...lines.reverse()],
    hooks: { setCursor: [() => readOut(figure)] },
  };
}

/** From the first batch to the last; around a single one uPlot would put a range of its own, of up to 100 batches. */
function batchRange(plot, low, high) {
  const places = plot.data[0];
  return places.length > 1 ? [low ?? places[0], high ?? places.at(-1)] : [places[0] ?? 1, (places[0] ?? 1) + 1];
}

/** Batches that have a dot: all of a few, of more the newest. */
const dotted = (plot) => plot.data[0].map((_, index) => index).slice(plot.data[0].length > MAX_DOTS ? -1 : 0);
const valuesOf = (chart) => chart.series.flatMap((one) => one.values).filter((value) => value !== null);

/** The vertical scale of a figure's chart: {low, high, ticks}. */
function scaleOf(figure) {
  const { chart } = drawn.get(figure);
  const values = valuesOf(chart);
  return scale(chart.robust ? withoutPeaks(values) : values, chart.floor);
}

/** Without rare peaks, such as the start of the run in its first batch: they would press everything else flat. */
function withoutPeaks(values) {
  const sorted = [...values].sort((a, b) => a - b);
  if (sorted.length < MAX_DOTS) return sorted; // of a few, none is rare
  const usual = sorted[Math.floor(0.97 * (sorted.length - 1))];
  return sorted.at(-1) > 2.5 * usual ? sorted.filter((value) => value <= 1.5 * usual) : sorted;
}

/** Round limits around the values, and two to five round ticks within them. */
function scale(values, floor) {
  let low = Math.min(...values, ...(floor === undefined ? [] : [floor]));
  let high = Math.max(...values);
  if (!Number.isFinite(low) || !Number.isFinite(high)) [low, high] = [0, 1];
  if (high - low < 1e-12) high = low + (Math.abs(low) || 1);
  const rough = (high - low) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const from = Math.floor(low / unit + 1e-9) * unit;
  const ticks = [];
  for (let tick = from; ticks.length < 8; tick += unit) {
    ticks.push(Number(tick.toPrecision(12)));
    if (tick >= high - 1e-9 * unit) break;
  }
  return { low: ticks[0], high: ticks.at(-1), ticks };
}

function tickText(tick) {
  const size = Math.abs(tick);
  if (size >= 1e9 || (size > 0 && size < 1e-3)) return tick.toExponential(0);
  if (size >= 1e6) return `${Number((tick / 1e6).toPrecision(3))}M`;
  return size >= 1e4 ? `${Number((tick / 1e3).toPrecision(3))}k` : String(Number(tick.toPrecision(4)));
}

const batchText = (batch, place) => (place ? String(batch) : `batch ${batch}`);

// -- reading: one cursor for all charts

/** The values under the cursor, else the newest. */
function readOut(figure) {
  const { plot, chart, batches } = drawn.get(figure);
  if (!plot) return; // it is being made
  const [caption, host, key] = figure.children;
  const at = plot.cursor.idx;
  const values = chart.series.map(({ values }) => number(at == null ? values.findLast((value) => value !== null) : values[at]));
  const batch = at == null ? "" : `batch ${batches[at] + 1}`;
  const named = chart.series.map(({ label }, index) => `${label} ${values[index]}`);
  if (isNamed(chart)) named.forEach((text, index) => setText(key.children[index], text));
  const alone = isNamed(chart) || (chart.quiet && !batch) ? "" : values.join();
  setText(caption.lastElementChild, chart.series.length ? [batch, alone].filter(Boolean).join(": ") : "no batch trained yet");
  host.setAttribute("aria-label", `${chart.title}, ${[batch, named.join(" · ")].filter(Boolean).join(": ")}`);
}

function point(figure, event) {
  const { plot } = drawn.get(figure);
  plot.setCursor({ left: event.clientX - plot.over.getBoundingClientRect().left, top: 1 }, true, true);
}

function step(figure, event) {
  const { plot, batches } = drawn.get(figure);
  const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -batches.length, End: batches.length };
  if (!(event.key in steps) || !batches.length) return;
  event.preventDefault();
  const at = plot.cursor.idx ?? batches.length - 1;
  moveCursor(figure, Math.min(batches.length - 1, Math.max(0, at + steps[event.key])));
}

function moveCursor(figure, at) {
  const { plot } = drawn.get(figure);
  plot.setCursor(at === null ? { left: -10, top: -10 } : { left: plot.valToPos(plot.data[0][at], "x"), top: 1 }, true, true);
}

byId("more").addEventListener("toggle", () => last && showCurves(last.curves, last.components));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(({ plot }) => plot.redraw(false)));
