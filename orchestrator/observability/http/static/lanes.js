// The lanes: what every process did in the last minutes, and what it does now.

import { byId, keyed, make, setText } from "./dom.js";
import { placeOf } from "./headline.js";
import { colour, isMetered, toneOf, workTone } from "./states.js";
import { duration, percent } from "./text.js";

const HEIGHT = 26;
const LETTER_A = "a".charCodeAt(0);
const BUSY_MAX = 9;
const MAX_LANES = 64; // as many as /history has

let drawn = null; // the newest history's lanes
let asked = null; // the last answer, as it came
let cursor = null; // {place, cell} that is read out

/** lanes: of /history, or null where nothing of them is new.  status: of /status. */
export function showLanes(lanes, status) {
  if (lanes && lanes !== asked) drawn = drawn ? carriedOver(drawn, lanes) : lanes;
  asked = lanes || asked;
  drawn = drawn || { cells: 300, cell_s: 1, until_s: 0, states: [], lanes: [] };
  const now = new Map((status.workers || []).map((worker) => [placeOf(worker.worker), worker]));
  const past = new Map(drawn.lanes.map((lane) => [lane.place, lane]));
  const order = { generate: 0, score: 1, train: 2 };
  const places = [...new Set([...past.keys(), ...now.keys()])].sort(
    (a, b) => (order[kindOf(a)] ?? 3) - (order[kindOf(b)] ?? 3) || a.localeCompare(b, undefined, { numeric: true }),
  );
  const shown = places.slice(0, MAX_LANES);
  const more = Math.max(places.length - shown.length, drawn.lanes_left_out || 0);
  setText(byId("lanes-more"), more ? `${more} more processes are not drawn.` : "");
  keyed(byId("lanes"), shown, createLane, (row, place) => updateLane(row, past.get(place), now.get(place), status));
  showLegend();
  readOut();
}

/**
 * `news`, and in its empty cells what was known before: an orchestrator that was replaced begins its lanes anew, but the
 * run's clock goes on. A clock that went back belongs to another run.
 */
function carriedOver(before, news) {
  const shift = Math.round((news.until_s - before.until_s) / news.cell_s);
  if (shift < 0) return news;
  const states = [...new Set([...news.states, ...before.states])];
  const letter = (name) => String.fromCharCode(LETTER_A + states.indexOf(name));
  const known = new Map(news.lanes.map((lane) => [lane.place, lane]));
  const blank = { doing: " ".repeat(news.cells), busy: "0".repeat(news.cells) };
  for (const lane of before.lanes) if (!known.has(lane.place)) known.set(lane.place, { ...lane, ...blank });
  const lanes = [...known.values()].map((lane) => {
    const old = before.lanes.find((one) => one.place === lane.place);
    if (!old) return lane;
    const cells = [...lane.doing].map((char, cell) => {
      if (char !== " ") return char;
      const past = old.doing[cell + shift] ?? " ";
      return past === " " ? " " : letter(before.states[past.charCodeAt(0) - LETTER_A]);
    });
    const busy = [...lane.busy].map((char, cell) => (lane.doing[cell] === " " ? (old.busy[cell + shift] ?? "0") : char));
    return { ...lane, doing: cells.join(""), busy: busy.join("") };
  });
  return { ...news, states, lanes: lanes.filter((lane) => lane.doing.trim()) };
}

/** What the lane's process did in a cell, "" where there was none. */
export function doingAt(lane, cell) {
  const letter = lane.doing[cell];
  return letter === undefined || letter === " " ? "" : drawn.states[letter.charCodeAt(0) - LETTER_A] || "other";
}

/** The share of a cell that was computed, 0 where a state says nothing of it. */
export const busyAt = (lane, cell) => (isMetered(doingAt(lane, cell)) ? Number(lane.busy[cell]) / BUSY_MAX : 0);

/** The lanes as they were drawn last. */
export const drawnLanes = () => drawn || { cells: 0, lanes: [] };

const kindOf = (place) => place.slice(0, place.lastIndexOf("-"));

function createLane(place) {
  const row = make("div", "lane");
  const canvas = make("canvas");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.addEventListener("pointermove", (event) => point(place, event.offsetX / canvas.clientWidth));
  canvas.addEventListener("pointerleave", () => moveCursor(null));
  canvas.addEventListener("focus", () => moveCursor({ place, cell: drawn.cells - 1 }));
  canvas.addEventListener("blur", () => moveCursor(null));
  canvas.addEventListener("keydown", (event) => step(place, event));
  const label = make("div", "who");
  label.append(make("b", "", place), make("span", "muted"));
  const doing = make("div", "doing");
  doing.append(make("i", "dot"), make("span", "word"), make("span", "muted"), make("span", "busy muted"));
  row.append(label, canvas, doing);
  return row;
}

function updateLane(row, lane, worker, status) {
  const [label, canvas, doing] = row.children;
  setText(label.lastElementChild, worker ? versionText(worker, status) : "");
  const word = worker ? worker.doing : "gone";
  doing.children[0].dataset.tone = worker ? toneOf(worker.doing) : "gone";
  setText(doing.children[1], word);
  setText(doing.children[2], worker ? detail(worker) : "");
  setText(doing.children[3], worker && typeof worker.idle === "number" ? `${percent(Math.min(1, 1 - worker.idle))} busy` : "");
  canvas.setAttribute("aria-label", `${row.dataset.key}: ${word}`);
  draw(canvas, lane, row.dataset.key);
}

/** Which weights a generation worker serves, how they came, and how far behind that is. */
function versionText(worker, status) {
  const known = (status.generation || []).find((one) => one.worker_id === worker.worker);
  if (!known || !known.loaded) return "";
  const behind = status.newest ? status.newest.version - known.loaded.version : 0;
  const way = worker.way ? ` by ${worker.way}` : "";
  return behind > 0 ? `v${known.loaded.version}${way}, ${behind} behind` : `v${known.loaded.version}${way}`;
}

function detail(worker) {
  const parts = [duration(worker.since_s)];
  if (worker.running) parts.push(`${worker.running} running`);
  if (worker.waiting) parts.push(`${worker.waiting} queued`);
  return parts.join(" · ");
}

function draw(canvas, lane, place) {
  const ratio = devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * ratio);
  const height = Math.round(HEIGHT * ratio);
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, width, height);
  if (!lane) return;
  const kind = lane.kind;
  for (let cell = 0; cell < drawn.cells; cell++) {
    const doing = doingAt(lane, cell);
    if (!doing) continue;
    const left = Math.round((cell * width) / drawn.cells);
    const right = Math.round(((cell + 1) * width) / drawn.cells);
    drawCell(pen, left, right - left, height, doing, kind, busyAt(lane, cell));
  }
  if (cursor && cursor.place === place) {
    pen.fillStyle = colour("ink");
    pen.fillRect(Math.round(((cursor.cell + 0.5) * width) / drawn.cells) - ratio / 2, 0, ratio, height);
  }
}

function drawCell(pen, left, width, height, doing, kind, busy) {
  const waits = toneOf(doing) === "wait";
  pen.fillStyle = colour(toneOf(doing));
  pen.globalAlpha = waits || !isMetered(doing) ? 1 : 0.3;
  pen.fillRect(left, 0, width, height);
  pen.globalAlpha = 1;
  if (!isMetered(doing)) return;
  pen.fillStyle = colour(waits ? workTone(kind) : toneOf(doing));
  pen.fillRect(left, height * (1 - busy), width, height * busy);
}

function showLegend() {
  const used = drawn.states.filter((state, index) =>
    drawn.lanes.some((lane) => lane.doing.includes(String.fromCharCode(LETTER_A + index))),
  );
  keyed(
    byId("legend"),
    used,
    (state) => {
      const item = make("li");
      const dot = make("i", "dot");
      dot.dataset.tone = toneOf(state);
      item.append(dot, make("span", "", state));
      return item;
    },
    () => {},
  );
}

// -- reading a lane

function point(place, share) {
  moveCursor({ place, cell: Math.min(drawn.cells - 1, Math.max(0, Math.floor(share * drawn.cells))) });
}

function step(place, event) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30, Home: -drawn.cells, End: drawn.cells };
  if (!(event.key in steps)) return;
  event.preventDefault();
  const cell = cursor ? cursor.cell : drawn.cells - 1;
  moveCursor({ place, cell: Math.min(drawn.cells - 1, Math.max(0, cell + steps[event.key])) });
}

function moveCursor(to) {
  cursor = to;
  const past = new Map(drawn.lanes.map((lane) => [lane.place, lane]));
  for (const row of byId("lanes").children) draw(row.children[1], past.get(row.dataset.key), row.dataset.key);
  readOut();
}

function readOut() {
  const lane = cursor && drawn.lanes.find((one) => one.place === cursor.place);
  if (!lane) return setText(byId("lanes-readout"), "The height of a colour is the share of its second that was computed. Point at a lane, or use the arrow keys in it.");
  const ago = Math.round((drawn.cells - 1 - cursor.cell) * drawn.cell_s);
  const doing = doingAt(lane, cursor.cell) || "not there";
  const busy = isMetered(doing) ? `, busy ${percent(busyAt(lane, cursor.cell))}` : "";
  setText(byId("lanes-readout"), `${lane.place}, ${ago ? `${duration(ago)} ago` : "now"}: ${doing}${busy}`);
}
