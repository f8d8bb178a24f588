// The run's curves: small multiples over batches, drawn as SVG.

import { byId, keyed, make, setText } from "./dom.js";
import { number } from "./text.js";

const WIDTH = 360;
const HEIGHT = 150;
const LEFT = 42;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;
const SVG = "http://www.w3.org/2000/svg";

const CHARTS = [
  { title: "Reward", names: ["reward", "reward_with_filtered"], labels: ["mean", "with filtered"], floor: 0 },
  { title: "Reward components", components: true },
  { title: "Share of groups without signal, of samples cut", names: ["no_signal", "truncated"], labels: ["no signal", "cut"], floor: 0 },
  { title: "Response tokens", names: ["response_tokens", "response_tokens_max"], labels: ["mean", "longest"], floor: 0 },
  { title: "Staleness of a batch's samples, versions", names: ["staleness", "staleness_max"], labels: ["mean", "most"], floor: 0 },
  { title: "Tail recall of predicted lengths", names: ["ranker_recall_20", "ranker_recall_10", "ranker_recall_5"], labels: ["20%", "10%", "5%"], floor: 0 },
  { title: "Seconds a batch", names: ["seconds", "train_s", "wait_s", "publish_s"], labels: ["all", "train", "wait", "publish"], floor: 0, robust: true },
  { title: "Tokens a second", names: ["tokens_per_s"], floor: 0, robust: true },
];
const NOT_CURVES = /^(batch|version|incarnation|time_s)$/;
const shared = { batch: null }; // the batch that is read out, in all charts at once

let last = null;

/** curves: {name: [number | null]} of /history.  components: names of the reward's components. */
export function showCurves(curves, components) {
  last = { curves, components };
  const charts = CHARTS.map((chart) => (chart.components ? { ...chart, names: components } : chart));
  const present = charts.map((chart) => withSeries(chart, curves)).filter((chart) => chart.series.length);
  const told = new Set(charts.flatMap((chart) => chart.names));
  const others = Object.keys(curves)
    .filter((name) => !told.has(name) && !NOT_CURVES.test(name))
    .map((name) => withSeries({ title: name.replaceAll("_", " "), names: [name] }, curves));
  drawAll(byId("curves"), present.length ? present : [{ title: "Reward", series: [] }], curves.batch || []);
  if (byId("more").open) drawAll(byId("more-curves"), others, curves.batch || []);
}

/** lines: of evaluations in metrics.jsonl, drawn where their version's batches end. */
export function showEvaluations(lines, components) {
  const told = lines.filter((line) => "eval_reward" in line);
  const column = (name) => told.map((line) => line[name] ?? null);
  const names = ["reward", ...components];
  const columns = Object.fromEntries([...names.map((name) => [name, column(`eval_${name}`)]), ["share", column("eval_share")]]);
  const charts = [
    { title: "Held-out problems: reward and components", names, floor: 0 },
    { title: "Evaluation's share of generation", names: ["share"], floor: 0 },
  ].map((chart) => withSeries(chart, columns));
  drawAll(byId("evaluations"), told.length ? charts : [], told.map((line) => line.version - 1));
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
    createChart,
    (figure, _, index) => updateChart(figure, charts[index], batches),
  );
}

function createChart(title) {
  const figure = make("figure");
  const caption = make("figcaption");
  caption.append(make("b", "", title), make("span", "readout"));
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "img" });
  svg.addEventListener("pointermove", (event) => point(svg, event));
  svg.addEventListener("pointerleave", () => read(null));
  svg.addEventListener("blur", () => read(null));
  svg.addEventListener("keydown", step);
  const key = make("p", "key");
  figure.append(caption, svg, key);
  return figure;
}

function shape(tag, attributes, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

function updateChart(figure, chart, batches) {
  const [caption, svg, key] = figure.children;
  const at = shared.batch === null ? batches.length - 1 : nearest(batches, shared.batch);
  const reading = chart.series
    .map((one) => (chart.series.length > 1 || chart.components ? `${one.label} ` : "") + number(one.values[at]))
    .join(" · ");
  const batch = batches.length ? `batch ${batches[at] + 1}: ` : "";
  setText(caption.lastElementChild, reading ? (shared.batch === null ? reading : batch + reading) : "no batch trained yet");
  svg.setAttribute("aria-label", `${chart.title}, ${batch}${reading}`);
  svg.replaceChildren(...marks(chart, batches, at));
  keyed(
    key,
    chart.series.length > 1 ? chart.series.map((one) => one.label) : [],
    (label) => make("span", "", label),
    (item, _, index) => (item.dataset.line = String(chart.series[index].tone)),
  );
}

function marks(chart, batches, at) {
  const values = chart.series.flatMap((one) => one.values).filter((value) => value !== null);
  const { low, high, ticks } = scale(chart.robust ? withoutPeaks(values) : values, chart.floor);
  const first = batches[0] ?? 0;
  const last = Math.max(batches.at(-1) ?? 1, first + 1);
  const x = (batch) => LEFT + ((batch - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (Math.min(value, high) - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const parts = ticks.flatMap((tick) => [
    shape("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }),
    shape("text", { class: "tick", x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, tickText(tick)),
  ]);
  if (batches.length) {
    parts.push(shape("text", { class: "tick", x: LEFT, y: HEIGHT - 5 }, `batch ${first + 1}`));
    if (batches.length > 1) parts.push(shape("text", { class: "tick", x: WIDTH - RIGHT, y: HEIGHT - 5, "text-anchor": "end" }, String(last + 1)));
  }
  for (const one of [...chart.series].reverse()) {
    parts.push(shape("path", { class: "line", "data-line": one.tone, d: path(one.values, batches, x, y) }));
    const value = one.values[at];
    if (typeof value === "number") parts.push(shape("circle", { class: "spot", "data-line": one.tone, cx: x(batches[at]), cy: y(value), r: 3 }));
  }
  const peak = Math.max(...values);
  if (peak > high) {
    parts.push(shape("text", { class: "tick cut", x: WIDTH - RIGHT, y: TOP + 10, "text-anchor": "end" }, `cut, up to ${tickText(peak)}`));
  }
  if (shared.batch !== null && batches.length) {
    parts.push(shape("line", { class: "cursor", x1: x(batches[at]), x2: x(batches[at]), y1: TOP, y2: HEIGHT - BOTTOM }));
  }
  return parts;
}

/** An SVG path; a batch without the number is a gap. */
function path(values, batches, x, y) {
  let pen = "M";
  return values
    .map((value, index) => {
      if (value === null) {
        pen = "M";
        return "";
      }
      const part = `${pen}${x(batches[index]).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
      return part;
    })
    .join("");
}

/** Without rare peaks, such as the start of the run in its first batch: they would press everything else flat. */
function withoutPeaks(values) {
  const sorted = [...values].sort((a, b) => a - b);
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

// -- reading: one cursor for all charts

function nearest(batches, batch) {
  let best = 0;
  batches.forEach((one, index) => {
    if (Math.abs(one - batch) < Math.abs(batches[best] - batch)) best = index;
  });
  return best;
}

function point(svg, event) {
  const batches = last.curves.batch || [];
  if (!batches.length) return;
  const box = svg.getBoundingClientRect();
  const share = (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
  read(batches[0] + Math.min(1, Math.max(0, share)) * (batches.at(-1) - batches[0]));
}

function step(event) {
  const batches = last.curves.batch || [];
  const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -batches.length, End: batches.length };
  if (!(event.key in steps) || !batches.length) return;
  event.preventDefault();
  const at = shared.batch === null ? batches.length - 1 : nearest(batches, shared.batch);
  read(batches[Math.min(batches.length - 1, Math.max(0, at + steps[event.key]))]);
}

function read(batch) {
  shared.batch = batch;
  if (last) showCurves(last.curves, last.components);
}

byId("more").addEventListener("toggle", () => last && showCurves(last.curves, last.components));
