// Where time went: by the lanes of the last minute, and by the bubbles of the last batches.

import { byId, keyed, make, setText } from "./dom.js";
import { busyAt, doingAt, drawnLanes } from "./lanes.js";
import { causeOf, toneOf, workTone } from "./states.js";
import { percent } from "./text.js";

const WINDOW_CELLS = 60;
const SMALLEST = 0.005;
const STAGES = { generation: "decode", trainer: "train" };
const CAUSES = [
  ["pipeline", "pipeline bubble", "wait"],
  ["skew", "skew bubble", "load"],
  ["weights", "weight update", "publish"],
  ["scoring", "scoring", "score"],
  ["other", "broker and other", "other"],
];

/** A stacked bar. parts: [{name, tone, share}], shares of one. */
export function showBar(bar, parts) {
  keyed(
    bar,
    parts.map((part) => part.name),
    () => make("i", "part"),
    (piece, name, index) => {
      piece.dataset.tone = parts[index].tone;
      piece.style.flexGrow = String(parts[index].share);
      piece.title = `${name} ${percent(parts[index].share)}`;
    },
  );
}

/** Per kind of worker, how its last minute was spent: computing, or not, and then why. */
export function showLastMinute() {
  const { lanes } = drawnLanes();
  const kinds = [...new Set(lanes.map((lane) => lane.kind))];
  showUsages(byId("idle"), kinds, (kind) => lastMinute(lanes.filter((lane) => lane.kind === kind), kind));
}

function lastMinute(lanes, kind) {
  const parts = new Map([["computing", { tone: workTone(kind), seconds: 0 }]]);
  const add = (name, tone, seconds) => {
    if (!parts.has(name)) parts.set(name, { tone, seconds: 0 });
    parts.get(name).seconds += seconds;
  };
  const { cells } = drawnLanes();
  for (const lane of lanes) {
    for (let cell = Math.max(0, cells - WINDOW_CELLS); cell < cells; cell++) {
      const doing = doingAt(lane, cell);
      if (!doing) continue;
      const busy = busyAt(lane, cell);
      add("computing", workTone(kind), busy);
      add(causeOf(kind, doing), toneOf(doing) === workTone(kind) ? "wait" : toneOf(doing), 1 - busy);
    }
  }
  return shares([...parts].map(([name, part]) => ({ name, ...part })));
}

/** Idle time of the last whole batches by cause. bubbles: of /history. */
export function showBubbles(bubbles) {
  byId("bubbles-panel").hidden = !bubbles.stages;
  if (!bubbles.stages) return;
  const { batches, stages } = bubbles;
  setText(byId("bubbles-title"), `Idle time by cause, batches ${batches[0] + 1} to ${batches[1] + 1}`);
  showUsages(byId("bubbles"), Object.keys(STAGES), (stage) => causes(stage, stages[stage] || {}));
}

function causes(stage, seconds) {
  const known = [["computing", "computing", STAGES[stage]], ...CAUSES];
  return shares(known.map(([cause, name, tone]) => ({ name, tone, seconds: Math.max(0, seconds[cause] || 0) })));
}

function shares(parts) {
  const total = parts.reduce((sum, part) => sum + part.seconds, 0) || 1;
  return parts.map((part) => ({ name: part.name, tone: part.tone, share: part.seconds / total }));
}

function showUsages(parent, names, partsOf) {
  keyed(
    parent,
    names,
    (name) => {
      const element = make("div", "usage");
      element.append(make("b", "", name), make("div", "bar"), make("ul", "legend"));
      return element;
    },
    (element, name) => {
      const shown = partsOf(name).filter((part) => part.share >= SMALLEST);
      showBar(element.children[1], shown);
      showWords(element.children[2], shown);
    },
  );
}

function showWords(list, parts) {
  keyed(
    list,
    parts.map((part) => part.name),
    () => {
      const item = make("li");
      item.append(make("i", "dot"), make("span"));
      return item;
    },
    (item, name, index) => {
      item.firstElementChild.dataset.tone = parts[index].tone;
      setText(item.lastElementChild, `${name} ${percent(parts[index].share)}`);
    },
  );
}
