// Numbers as people read them: separators, units of bytes, shares, masses. Knows nothing of what is counted.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** 12,345; three digits below 100; a dash for what is not known. */
export function count(value) {
  if (!isNumber(value)) return "–";
  return Math.abs(value) >= 100 || Number.isInteger(value) ? WHOLE.format(value) : SHORT.format(value);
}

/** 890 B, 1.5 MB: powers of ten, as the server's budgets. */
export function bytes(value) {
  if (!isNumber(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (Math.abs(value) >= 1000 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${SHORT.format(value)} ${units[at]}`;
}

/** 43% */
export function percent(share) {
  if (!isNumber(share)) return "–";
  const value = share * 100;
  if (value > 0 && value < 0.1) return "<0.1%";
  return `${value < 10 ? SHORT.format(Math.round(value * 10) / 10) : WHOLE.format(value)}%`;
}

/** 0.8 s, 12 ms */
export function seconds(value) {
  if (!isNumber(value)) return "–";
  return value < 1 ? `${WHOLE.format(value * 1000)} ms` : `${SHORT.format(value)} s`;
}

/** A token so that it can be seen: spaces and line breaks get marks. */
export function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ /, "·").replace(/ $/, "·");
}
