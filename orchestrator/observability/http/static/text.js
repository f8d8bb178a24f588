// How numbers and foreign text look. Owns: formats. Never: the document.

/** A number in about three digits, "–" where there is none. */
export function number(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size >= 1e6) return value.toExponential(2);
  if (size >= 100) return value.toFixed(0);
  return value.toFixed(size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

export function percent(share) {
  return typeof share === "number" && Number.isFinite(share) ? `${Math.round(100 * share)}%` : "–";
}

/** "8 s", "3 min 20 s", "2 h 5 min". */
export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return whole % 60 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${whole / 60} min`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** "40 s", "13 min", "2 h 5 min": as exact as a guess is. */
export const roughly = (seconds) => duration(seconds < 90 ? seconds : 60 * Math.round(seconds / 60));

export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** At most `most` characters of a text in one line: of a long one its beginning and, longer, its end, where answers are. */
export function shortened(text, most) {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length <= most ? line : `${line.slice(0, most / 3)} … ${line.slice((-2 * most) / 3)}`;
}

// Control characters of terminals (C0, DEL, C1), and those that reorder or hide what is read: a sample may hold any.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** What a model wrote, with every character that cannot be seen made visible. It is shown as text only. */
export function visible(text) {
  return String(text).replace(HIDDEN, (char) => {
    const code = char.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  });
}
