// The few ways in which this page touches the document. Everything foreign goes through textContent.

export const byId = (id) => document.getElementById(id);

/** An element with classes and text. */
export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== "") element.textContent = text;
  return element;
}

/** Set text only where it differs: a selection in the page survives, and nothing is laid out in vain. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Give `parent` one child a key, in order; children that stay are kept, with their focus and what is open in them.
 * create(key, index) -> element; update(element, key, index).
 */
export function keyed(parent, keys, create, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  keys.forEach((key, index) => {
    const child = known.get(key) || create(key, index);
    child.dataset.key = key;
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] || null);
    update(child, key, index);
  });
  while (parent.children.length > keys.length) parent.lastElementChild.remove();
}

/** Rows of a table: each a list of texts. */
export function rows(body, lines) {
  keyed(
    body,
    lines.map((_, index) => String(index)),
    () => make("tr"),
    (row, _, index) => {
      const cells = lines[index];
      while (row.children.length < cells.length) row.append(make("td"));
      cells.forEach((text, column) => setText(row.children[column], text));
    },
  );
}
