// The run's key: out of the link that the run printed (#key=...), or typed in. Kept while this tab is open.
//
// Invariant: the key stays in this tab. It is sent to this server alone, in a header, and stands in no address: the part
// behind # is not sent, and is taken out of the address bar as soon as it was read.

const NAME = "key";

let key = sessionStorage.getItem(NAME) || "";

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

/** The server does not know it: it is of another run, or was mistyped. */
export function forgetKey() {
  key = "";
  sessionStorage.removeItem(NAME);
}

/** What a request carries. */
export const authorization = () => ({ Authorization: `Bearer ${key}` });

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
