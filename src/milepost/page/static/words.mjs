// Numbers and reasons in words, the same everywhere on the page.

export const REASONS = [
  ["reused", "resumed: from the cache"],
  ["late_copy", "computed again: its copy came too late"],
  ["not_worth_loading", "computed again: sooner computed than loaded"],
  ["checkpoint_evicted", "computed again: its state was evicted"],
  ["no_checkpoint", "computed again: no state was kept there"],
  ["grid", "computed again: after the last saved state"],
  ["under_page", "computed again: too short, a prompt under one page is reused late or not at all"],
  ["kv_evicted", "computed again: its pages were evicted"],
  ["not_canonical", "computed again: seen only in an answer, whose bits are not a prompt's"],
  ["unseen", "new"],
  ["last_token", "the last token, needed to begin the answer"],
  ["disabled", "the cache was off"],
];

const SHORT = {
  checkpoint_evicted: "state evicted",
  no_checkpoint: "no state kept",
  grid: "after the last saved state",
  under_page: "too few to fill a page",
  kv_evicted: "pages evicted",
  not_canonical: "seen only in an answer",
  unseen: "new",
  last_token: "last token",
  late_copy: "copied too late",
  not_worth_loading: "sooner computed than loaded",
  disabled: "cache off",
};

const plain = new Intl.NumberFormat("en");

export const count = (number) => plain.format(number);

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

// 12,345 as 12.3k: where there is little room.
export function brief(number) {
  if (number < 1000) return number < 10 && number % 1 ? number.toFixed(1) : String(Math.round(number));
  const [unit, name] = number < 1e6 ? [1e3, "k"] : [1e6, "M"];
  return `${(number / unit).toFixed(number < 10 * unit ? 1 : 0)}${name}`;
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = number ? Math.min(units.length - 1, Math.floor(Math.log2(number) / 10)) : 0;
  const value = number / 1024 ** power;
  return `${value.toFixed(value < 10 && power ? 1 : 0)} ${units[power]}`;
}

export function share(part, whole) {
  if (!whole) return "0 %";
  const percent = (100 * part) / whole;
  return `${percent && percent < 10 ? percent.toFixed(1) : Math.round(percent)} %`;
}

export function ago(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  return seconds < 3600 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

// A wait, as precise as a reader needs it: 386 ms, 7.6 s.
export function wait(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

// What was computed, by reason: "12 new, 1 last token".
export function losses(lost) {
  const parts = REASONS.filter(([reason]) => lost[reason]);
  return parts.map(([reason]) => `${count(lost[reason])} ${SHORT[reason]}`).join(", ");
}
