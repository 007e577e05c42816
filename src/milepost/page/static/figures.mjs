// Figures over the last minutes, memory by kind, and the last prompts.

import { drawn, fillBar, find, make, say } from "./dom.mjs";
import { REASONS, ago, brief, bytes, count, losses, plural, share } from "./words.mjs";

const WINDOW_S = 300;
const RECENT_S = 60;
const SHORTEST_S = 0.3;
const [AT, QUERIES, HITS, COMPUTED, DECODED, RUNNING_S, WAITING_S] = [0, 1, 2, 3, 4, 5, 6];

const rate = (column) => (a, b, seconds) => (b[column] - a[column]) / seconds;
const FIGURES = [
  { name: "Hit rate", unit: "of prompt tokens", of: (a, b) => (b[QUERIES] > a[QUERIES] ? (b[HITS] - a[HITS]) / (b[QUERIES] - a[QUERIES]) : null), most: 1, show: (v) => (v === null ? "–" : share(v, 1)) },
  { name: "Computed", unit: "prompt tokens/s", of: rate(COMPUTED), show: brief },
  { name: "Answers", unit: "tokens/s", of: rate(DECODED), show: brief },
  { name: "Running", unit: "requests", of: rate(RUNNING_S), now: (state) => state.num_running, show: String },
  { name: "Waiting", unit: "requests", of: rate(WAITING_S), now: (state) => state.num_waiting, show: String },
];

let chosen = null;
let onChoose = () => {};

export function startFigures(choose) {
  onChoose = choose;
  for (const { name, unit } of FIGURES) {
    const item = find("#figures").appendChild(make("li"));
    item.append(make("div", "name", name), make("div", "value", "–"));
    const svg = item.appendChild(drawn("svg", { viewBox: "0 0 300 30", preserveAspectRatio: "none", "aria-hidden": "true" }));
    svg.append(drawn("line", { x1: 0, x2: 300, y1: 30, y2: 30 }), drawn("path"));
    item.append(make("div", "muted", unit));
  }
}

export function showFigures(state) {
  const samples = state.samples;
  const last = samples.at(-1);
  const start = before(samples, RECENT_S);
  FIGURES.forEach((figure, place) => {
    const item = find("#figures").children[place];
    const seconds = start[AT] - last[AT];
    const nothing = figure.most ? null : 0;
    const value = figure.now?.(state) ?? (seconds > 0 ? figure.of(start, last, seconds) : nothing);
    say(item.querySelector(".value"), figure.show(value));
    item.querySelector("path").setAttribute("d", line(figure, samples));
  });
}

// The counters of `seconds` ago, on the straight line between the samples around that moment.
export function before(samples, seconds) {
  const next = samples.findIndex((sample) => sample[AT] <= seconds);
  if (next <= 0) return samples.at(next);
  const [a, b] = [samples[next - 1], samples[next]];
  const part = (a[AT] - seconds) / (a[AT] - b[AT]);
  return a.map((value, column) => value + part * (b[column] - value));
}

// Every value is a mean over the time between two samples. Where nothing happened counters stand
// still, and the line is at 0; a share of nothing is a gap.
export function line(figure, samples) {
  const points = [];
  let a = before(samples, WINDOW_S);
  for (const b of samples) {
    const seconds = a[AT] - b[AT];
    if (b[AT] >= WINDOW_S || seconds <= SHORTEST_S) continue;
    points.push([a[AT], b[AT], figure.of(a, b, seconds)]);
    a = b;
  }
  const most = figure.most ?? Math.max(1, ...points.map(([, , value]) => value));
  let path = "";
  let isDrawing = false;
  for (const [from, to, value] of points) {
    if (value === null) {
      isDrawing = false;
      continue;
    }
    const y = (29 - (28 * value) / most).toFixed(1);
    const x = (seconds) => (WINDOW_S - seconds).toFixed(1);
    path += `${isDrawing ? "L" : "M"}${x(from)} ${y}L${x(to)} ${y}`;
    isDrawing = true;
  }
  return path;
}

export function showMemory(state) {
  const { pages, slots, engine } = state;
  const box = find("#memory");
  if (!box.children.length) {
    if (state.pages_a_slot) say(find("#memory-note"), "Pages and slots share one memory: what is free can become either.");
    for (const kind of ["Pages (KV)", "Slots (states)"]) {
      const bar = make("div", "bar");
      bar.setAttribute("role", "img");
      box.append(make("div", "kind", kind), bar, make("div", "said"));
    }
  }
  const held = [[pages, engine.page_bytes], [slots, engine.slot_bytes]];
  const isOne = state.pages_a_slot > 0;
  // In one memory whatever is free may become either kind: bars are drawn of the whole of it.
  const whole = isOne ? engine.cache_bytes : null;
  held.forEach(([pool, each], place) => {
    const [bar, said] = [box.children[3 * place + 1], box.children[3 * place + 2]];
    fillBar(bar, [["used", pool.used * each], ["cached", pool.cached * each]], whole ?? pool.total * each);
    const room = isOne ? `${bytes((pool.used + pool.cached) * each)} of ${bytes(whole)}` : `${count(pool.free)} free of ${bytes(pool.total * each)}`;
    const text = `${count(pool.used)} in use · ${count(pool.cached)} cached · ${room}`;
    say(said, text);
    bar.setAttribute("aria-label", text);
  });
}

export function showPrompts(state) {
  const list = find("#prompts");
  const prompts = state.prompts.slice(-7).reverse();
  if (chosen !== null && !prompts.some(({ id }) => id === chosen)) choose(null);
  while (list.children.length > prompts.length) list.lastChild.remove();
  while (list.children.length < prompts.length) list.append(row());
  prompts.forEach((prompt, place) => fillRow(list.children[place].firstChild, prompt));
  const seen = new Set(["reused", "unseen"]);
  for (const { lost } of prompts) for (const reason of Object.keys(lost)) seen.add(reason);
  showLegend(REASONS.filter(([reason]) => seen.has(reason)));
  return prompts.find(({ id }) => id === chosen) ?? prompts[0] ?? null;
}

function row() {
  const item = make("li");
  const button = item.appendChild(make("button"));
  button.type = "button";
  button.append(make("span", "age"), make("span", "bar"), make("span", "said"));
  button.addEventListener("click", () => choose(button.dataset.id === chosen ? null : button.dataset.id));
  return item;
}

function choose(id) {
  chosen = id;
  onChoose(id);
}

function fillRow(button, prompt) {
  const [age, bar, said] = button.children;
  button.dataset.id = prompt.id;
  button.setAttribute("aria-pressed", String(prompt.id === chosen));
  say(age, ago(prompt.at));
  const parts = REASONS.map(([reason]) => [reason, reason === "reused" ? prompt.reused : prompt.lost[reason] ?? 0]);
  fillBar(bar, parts.filter(([, size]) => size), prompt.num_tokens);
  say(said, `${count(prompt.reused)} of ${count(prompt.num_tokens)}`);
  const why = losses(prompt.lost);
  button.title = why ? `computed: ${why}` : "";
  button.setAttribute("aria-label", `${ago(prompt.at)} ago: ${count(prompt.reused)} of ${plural(prompt.num_tokens, "token")} from the cache${why ? `; computed: ${why}` : ""}`);
}

function showLegend(reasons) {
  const list = find("#reasons");
  const names = reasons.map(([reason]) => reason).join();
  if (list.dataset.names === names) return;
  list.dataset.names = names;
  list.replaceChildren(
    ...reasons.map(([reason, words]) => {
      const item = make("li");
      item.append(make("i", reason), make("span", "", words));
      return item;
    }),
  );
}
