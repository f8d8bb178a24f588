// The run's key, and requests that carry it. It comes out of the link that the run printed (#key=...), or is typed in,
// and is kept while this tab is open.
//
// Invariant: the key stays in this tab. It is sent to this server alone, in a header, and stands in no address: the part
// behind # is not sent, and is taken out of the address bar as soon as it was read. No browser adds the header by
// itself, so a page of another origin can neither read nor control a run.

const NAME = "key";
const ANSWER_MS = 5000;

let key = sessionStorage.getItem(NAME) || "";
let refused = false; // the last key was not the run's

function takeFromAddress() {
  const found = new URLSearchParams(location.hash.slice(1)).get(NAME);
  if (!found) return false;
  keep(found);
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

function keep(text) {
  key = text.trim();
  sessionStorage.setItem(NAME, key);
}

/** Whether there is one; it may be wrong. */
export const hasKey = () => key !== "";

/** Whether the server did not know the last one: it is of another run, or was mistyped. */
export const wasRefused = () => refused;

/** The JSON that the server answers. Throws an Error that says why there is none. */
export async function ask(path, method = "GET") {
  const asked = key;
  const headers = { Authorization: `Bearer ${asked}` };
  let response;
  try {
    response = await fetch(path, { method, cache: "no-store", headers, signal: AbortSignal.timeout(ANSWER_MS) });
  } catch {
    throw new Error("no answer from this address");
  }
  const unknown = response.status === 401;
  if (asked === key) refused = unknown; // a late answer to the key before says nothing of a new one
  if (unknown) {
    if (asked === key) {
      key = "";
      sessionStorage.removeItem(NAME);
    }
    throw new Error("the key is not this run's");
  }
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(answer.error || `the server answers ${response.status}`);
  return answer;
}

/** Call `ready` whenever a new key was given: in the form, or by another link opened in this tab. */
export function onKey(form, input, ready) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!input.value.trim()) return;
    keep(input.value);
    input.value = "";
    ready();
  });
  addEventListener("hashchange", () => takeFromAddress() && ready());
}

takeFromAddress();
