// Figures over the last minutes, memory by kind, and the last prompts.

import { drawn, fillBar, find, make, say } from "./dom.mjs";
import { REASONS, ago, brief, bytes, count, losses, plural, share } from "./words.mjs";

const WINDOW_S = 300;
const RECENT_S = 60;
const [AT, QUERIES, HITS, COMPUTED, DECODED, RUNNING, WAITING] = [0, 1, 2, 3, 4, 5, 6];

const rate = (column) => (a, b, seconds) => (b[column] - a[column]) / seconds;
const FIGURES = [
  { name: "Hit rate", unit: "of prompt tokens", of: (a, b) => (b[QUERIES] > a[QUERIES] ? (b[HITS] - a[HITS]) / (b[QUERIES] - a[QUERIES]) : null), most: 1, show: (v) => (v === null ? "–" : share(v, 1)) },
  { name: "Computed", unit: "prompt tokens/s", of: rate(COMPUTED), show: brief },
  { name: "Answers", unit: "tokens/s", of: rate(DECODED), show: brief },
  { name: "Running", unit: "requests", of: (a, b) => b[RUNNING], now: true, show: String },
  { name: "Waiting", unit: "requests", of: (a, b) => b[WAITING], now: true, show: String },
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
  const start = samples.find((sample) => sample[AT] <= RECENT_S) ?? last;
  FIGURES.forEach((figure, place) => {
    const item = find("#figures").children[place];
    const seconds = start[AT] - last[AT];
    const value = figure.now || seconds > 0 ? figure.of(start, last, seconds) : figure.most ? null : 0;
    say(item.querySelector(".value"), figure.show(value));
    item.querySelector("path").setAttribute("d", line(figure, samples));
  });
}

// Where nothing happened a counter stands still; a share of nothing is a gap.
function line(figure, samples) {
  const points = [];
  for (let i = 1; i < samples.length; i += 1) {
    const [a, b] = [samples[i - 1], samples[i]];
    if (a[AT] - b[AT] > 0.3 && b[AT] < WINDOW_S) points.push([a[AT], b[AT], figure.of(a, b, a[AT] - b[AT])]);
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
    const x = (seconds) => Math.max(0, WINDOW_S - seconds).toFixed(1);
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
