// What workers do, and which colour that has. The words are the ones in their leases.

const OF_STATE = {
  decoding: "decode",
  scoring: "score",
  training: "train",
  "recording logprobs": "step",
  stepping: "step",
  publishing: "publish",
  loading: "load",
  "standing aside": "other",
  "saving a checkpoint": "save",
  "saving the model": "save",
  waiting: "wait",
  starting: "start",
};
const WORK_OF_KIND = { generate: "decode", score: "score", train: "train", critic: "train" };

const CAUSES = {
  "generate waiting": "no group that it may take",
  "generate decoding": "between decode steps",
  "score waiting": "nothing to score",
  "score scoring": "between samples",
  "train waiting": "waits for samples",
  "train training": "between rounds",
};

/** Name of the state's colour (a CSS variable without its "--s-"). */
export const toneOf = (doing) => OF_STATE[doing] || "other";

/** Of the useful work of a kind of worker. */
export const workTone = (kind) => WORK_OF_KIND[kind] || "other";

/** Why a worker of `kind` was not busy while it was `doing` this. */
export const causeOf = (kind, doing) => CAUSES[`${kind} ${doing}`] || doing;

/** Whether the busy share says anything of a state: the others are waits for a disk, a wire or a start. */
export const isMetered = (doing) => ["decode", "score", "train", "step", "wait"].includes(toneOf(doing));

let cache = new Map();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (cache = new Map()));

/** A colour of the style sheet in the current theme, for a canvas. */
export function token(name) {
  if (!cache.has(name)) cache.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return cache.get(name);
}

/** Of a tone. */
export const colour = (tone) => token(`s-${tone}`);
