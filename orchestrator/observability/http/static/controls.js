// The buttons: pause or resume, checkpoint, drain. Each asks for an event on the run's log, as the commands do; a button
// is busy until the run has applied it, and what could not be asked is said beside it.

import { byId, setText } from "./dom.js";
import { serves } from "./headline.js";
import { ask } from "./key.js";

const DRAINS = "The batch in training is finished and saved, then the run ends. A button cannot take that back; run --resume goes on with it later.";
const SERVICE_DRAINS = "It takes no further requests, finishes those that it has, and ends.";

let asked = null; // {name, entry}: what was asked for and is not applied yet; entry "" until it is on the log
let shown = { live: false, status: null };

/** live: whether the status is of now, so that what is asked can be seen to happen. */
export function showControls(live, status) {
  shown = { live, status };
  if (asked && asked.entry && isApplied(asked.entry, status.events_cursor)) asked = null;
  const open = live && !asked && !status.finish_reason;
  const stopping = Boolean(status.stop_reason);
  byId("controls").hidden = Boolean(status.finish_reason);
  byId("checkpoint").hidden = serves(status);
  update("pause", status.paused ? "Resume" : "Pause", open && !stopping);
  update("checkpoint", status.checkpoint_requested ? "Checkpoint is coming" : "Checkpoint", open && !status.checkpoint_requested);
  update("drain", stopping ? "Draining" : "Drain…", open && !stopping);
}

/** Whether the run was asked to end, also where no later status came to say so. */
export const isDraining = () => Boolean(shown.status && shown.status.stop_reason) || Boolean(asked && asked.name === "drain" && asked.entry);

function update(name, text, enabled) {
  const busy = asked && (asked.name === name || (name === "pause" && asked.name === "resume"));
  setText(byId(name), text);
  byId(name).setAttribute("aria-disabled", String(!enabled)); // "disabled" would take the focus away
  byId(name).setAttribute("aria-busy", String(Boolean(busy)));
}

/** Whether the entry of a Redis stream, "milliseconds-number", is at or before the cursor. */
function isApplied(entry, cursor) {
  const [[ms, number], [untilMs, untilNumber]] = [entry, String(cursor)].map((id) => id.split("-").map(Number));
  return ms < untilMs || (ms === untilMs && number <= untilNumber);
}

async function request(name) {
  if (asked) return;
  asked = { name, entry: "" };
  setText(byId("control-note"), "");
  showControls(shown.live, shown.status);
  try {
    asked.entry = (await ask(`control/${name}`, "POST")).entry;
  } catch (error) {
    asked = null;
    setText(byId("control-note"), `No ${name}: ${error.message}.`);
  }
  showControls(shown.live, shown.status);
}

function onPress(name, action) {
  byId(name).addEventListener("click", () => byId(name).getAttribute("aria-disabled") === "false" && action());
}

onPress("pause", () => request(shown.status.paused ? "resume" : "pause"));
onPress("checkpoint", () => request("checkpoint"));
onPress("drain", () => {
  setText(byId("confirm-text"), serves(shown.status) ? SERVICE_DRAINS : DRAINS);
  byId("confirm-drain").showModal();
});
byId("drain-no").addEventListener("click", () => byId("confirm-drain").close());
byId("drain-yes").addEventListener("click", () => {
  byId("confirm-drain").close();
  request("drain");
});
