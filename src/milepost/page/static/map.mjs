// The map of what is resident: every path a bar of pages, with its checkpoints and what runs on it.
// Drawn on a canvas, of which only what can be seen is drawn; the keyboard goes from run to run.

import { find, make, say } from "./dom.mjs";
import { layOut } from "./rows.mjs";
import { brief, count, plural } from "./words.mjs";

const ROW = 16;
const BAR = 8;
const AXIS = 22;
const LEFT = 12;
const RIGHT = 28;

const box = find("#map");
const canvas = box.querySelector("canvas");
const spacer = box.querySelector(".spacer");
const pen = canvas.getContext("2d");

let state = null;
let layout = { bars: [], byIndex: [], rows: 0, end: 0 };
let zoom = 1;
let selected = null;
let prompt = null;
let colours = {};
let lastScroll = null;

export function startMap() {
  new ResizeObserver(draw).observe(box);
  box.addEventListener("scroll", () => requestAnimationFrame(draw));
  box.addEventListener("keydown", onKey);
  box.addEventListener("click", (event) => select(barAt(event), false));
  box.addEventListener("mousemove", (event) => {
    box.style.cursor = barAt(event) ? "pointer" : "";
  });
  for (const [id, factor] of [["#zoom-in", 2], ["#zoom-out", 0.5], ["#zoom-fit", 0]]) {
    find(id).addEventListener("click", () => {
      zoom = factor ? Math.min(256, Math.max(1, zoom * factor)) : 1;
      draw();
    });
  }
  find("#table").addEventListener("toggle", fillTable);
  addLegend();
  takeColours();
}

export function takeColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["panel", "ink", "muted", "line", "reused", "running", "cached", "stray", "mark"]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
  for (const item of document.querySelectorAll("#marks canvas")) drawSign(item);
  draw();
}

// Show a state, and where a prompt of it resumed. Returns how long drawing took, in milliseconds.
export function showMap(newState, lastPrompt) {
  const began = performance.now();
  state = newState;
  prompt = lastPrompt;
  layout = layOut(state);
  const { runs, num_runs: numRuns } = state.tree;
  const paths = layout.bars.filter((bar) => !bar.below.length && !bar.starting).length;
  const cut = numRuns > runs.length ? `, the largest ${count(runs.length)} of ${count(numRuns)} runs are drawn` : "";
  say(find("#tree-note"), runs.length || state.running.length ? `${plural(paths, "path")} in ${plural(state.pages.used + state.pages.cached, "page")} of ${state.page_size} tokens, newest first${cut}.` : "Nothing is resident yet: send a prompt.");
  draw();
  describe();
  fillTable();
  return performance.now() - began;
}

export function goToPrompt(newPrompt, shouldGo) {
  prompt = newPrompt;
  const bar = prompt && prompt.hit !== null ? layout.byIndex[prompt.hit] : null;
  if (bar && shouldGo) select(bar, true);
  else draw();
}

// --- geometry ---------------------------------------------------------------------------------

function scale() {
  const width = box.clientWidth - LEFT - RIGHT;
  return (zoom * Math.max(width, 50)) / Math.max(layout.end, state ? 16 * state.page_size : 1);
}

const left = (tokens) => LEFT + tokens * scale() - box.scrollLeft;
const top = (row) => AXIS + 4 + row * ROW - box.scrollTop;

function barAt(event) {
  const { left: x0, top: y0 } = box.getBoundingClientRect();
  const [x, y] = [event.clientX - x0, event.clientY - y0];
  const isIn = (bar) => y >= top(bar.row) - 4 && y < top(bar.row) - 4 + ROW;
  const near = layout.bars.filter((bar) => isIn(bar) && left(bar.start) - 4 <= x);
  const hits = near.filter((bar) => x <= left(Math.max(bar.end, ...bar.heads.map((head) => head.tokens))) + 8);
  return hits.at(-1) ?? null;
}

// --- drawing ----------------------------------------------------------------------------------

function draw() {
  if (!state || !box.clientWidth) return;
  const [width, height] = [box.clientWidth, box.clientHeight];
  const ratio = window.devicePixelRatio || 1;
  spacer.style.width = `${Math.max(width, LEFT + RIGHT + layout.end * scale())}px`;
  spacer.style.height = `${AXIS + 8 + layout.rows * ROW}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const isSeen = (row) => top(row) > -ROW && top(row) < height;
  for (const bar of layout.bars) drawFork(bar, height);
  for (const bar of layout.bars) if (isSeen(bar.row)) drawBar(bar);
  drawResumed(height);
  for (const bar of layout.bars) if (isSeen(bar.row)) drawSigns(bar);
  for (const bar of layout.bars) if (bar.others && isSeen(bar.othersRow)) drawOthers(bar);
  drawAxis(width, height);
}

function box4(x0, x1, y, colour) {
  pen.fillStyle = colour;
  pen.fillRect(x0, y, Math.max(x1 - x0, 0), BAR);
}

function drawBar(bar) {
  const y = top(bar.row);
  const size = state.page_size;
  const [x0, x1] = [left(bar.start), left(bar.end)];
  if (bar.pages) {
    const reached = bar.end - bar.strays * size;
    box4(x0, left(reached), y, colours.cached);
    box4(left(reached), x1, y, colours.stray);
    if (bar.usedTo > bar.start) box4(x0, left(bar.usedTo), y, colours.running);
    cutIntoPages(bar, y, size * scale());
  }
  for (const head of bar.heads) {
    const from = bar.starting ? 0 : bar.end;
    pen.strokeStyle = colours.running;
    pen.lineWidth = 1;
    const until = Math.max(head.position, bar.starting ? head.prompt : 0);
    if (until > from) pen.strokeRect(left(from) + 0.5, y + 0.5, left(until) - left(from) - 1, BAR - 1);
    if (bar.starting) box4(left(0), left(head.position), y, colours.running);
  }
  if (bar === selected) {
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 1.5;
    pen.strokeRect(x0 - 2, y - 2.5, Math.max(x1 - x0, 3) + 4, BAR + 5);
  }
}

// A bar of pages, where there is room to tell them apart.
function cutIntoPages(bar, y, width) {
  if (width < 4) return;
  pen.fillStyle = colours.panel;
  const from = Math.max(0, Math.floor(-left(bar.start) / width));
  for (let page = Math.max(1, from); page < bar.pages; page += 1) {
    const x = left(bar.start) + page * width;
    if (x > box.clientWidth) return;
    pen.fillRect(x - 0.5, y, 1, BAR);
  }
}

// One line down from where paths part, along all that go on below.
function drawFork(bar, height) {
  if (!bar.pages || bar.below.length < 2) return;
  const [y0, y1] = [top(bar.row) + BAR, top(bar.below[1].row) + BAR];
  if (y1 < 0 || y0 > height) return;
  pen.fillStyle = colours.muted;
  pen.fillRect(Math.round(left(bar.end)) - 1, y0, 1, y1 - y0);
}

// The way of the prompt that was chosen, or came last, up to where it resumed.
function drawResumed(height) {
  const bar = prompt && prompt.hit !== null ? layout.byIndex[prompt.hit] : null;
  if (!bar || !prompt.state_length) return;
  for (let one = bar; one; one = one.above) {
    const y = top(one.row) + BAR + 1;
    if (y < 0 || y > height) continue;
    pen.fillStyle = colours.reused;
    const until = Math.min(prompt.state_length, one === bar ? Infinity : one.end);
    pen.fillRect(left(one.start), y, left(until) - left(one.start), 2.5);
  }
}

function drawSigns(bar) {
  const y = top(bar.row);
  let lastX = -9;
  for (const mark of [...bar.marks].reverse()) {
    const x = left(mark.position);
    if (x - lastX < 1.5) continue;
    lastX = x;
    drawMark(pen, x, y, mark.uses > 0);
  }
  for (const head of bar.heads) drawHead(pen, left(head.position), y);
  if (prompt && prompt.hit !== null && layout.byIndex[prompt.hit] === bar && prompt.state_length) drawHere(pen, left(prompt.state_length), y);
}

function drawMark(on, x, y, isUsed) {
  on.fillStyle = colours.mark;
  if (!isUsed) {
    on.globalAlpha = 0.6;
    on.fillRect(x - 0.75, y - 2, 1.5, BAR + 3);
    on.globalAlpha = 1;
    return;
  }
  on.fillRect(x - 1, y - 3, 2, BAR + 4);
  on.beginPath();
  on.moveTo(x - 1, y - 3);
  on.lineTo(x + 4, y - 0.5);
  on.lineTo(x - 1, y + 2);
  on.fill();
}

function drawHead(on, x, y) {
  on.fillStyle = colours.running;
  on.strokeStyle = colours.panel;
  on.lineWidth = 1.5;
  on.beginPath();
  on.arc(x, y + BAR / 2, 4, 0, 2 * Math.PI);
  on.fill();
  on.stroke();
}

function drawHere(on, x, y) {
  on.fillStyle = colours.reused;
  on.beginPath();
  on.moveTo(x, y + BAR + 1);
  on.lineTo(x - 4.5, y + BAR + 7);
  on.lineTo(x + 4.5, y + BAR + 7);
  on.fill();
}

function drawOthers(bar) {
  const [runs, pages, marks] = bar.others;
  const y = top(bar.othersRow);
  const x = left(bar.end);
  pen.fillStyle = colours.muted;
  pen.font = "11px system-ui, sans-serif";
  pen.fillText(`… ${plural(runs, "more run")}: ${plural(pages, "page")}, ${plural(marks, "checkpoint")}`, x + 4, y + BAR);
}

function drawAxis(width, height) {
  pen.fillStyle = colours.panel;
  pen.fillRect(0, 0, width, AXIS);
  pen.font = "11px system-ui, sans-serif";
  const step = niceStep(70 / scale());
  for (let tokens = 0; left(tokens) < width; tokens += step) {
    if (left(tokens) < 0) continue;
    pen.fillStyle = colours.line;
    pen.globalAlpha = 0.6;
    pen.fillRect(Math.round(left(tokens)), AXIS - 5, 1, tokens ? height : 5);
    pen.globalAlpha = 1;
    pen.fillStyle = colours.muted;
    const label = tokens ? brief(tokens) : "token 0";
    if (left(tokens) + pen.measureText(label).width < width) pen.fillText(label, Math.max(left(tokens) - (tokens ? 8 : 0), 4), 12);
  }
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}

// --- selection --------------------------------------------------------------------------------

function onKey(event) {
  const bars = layout.bars;
  if (!bars.length) return;
  const place = bars.indexOf(selected);
  const near = { ArrowDown: bars[place + 1], ArrowUp: bars[Math.max(place - 1, 0)], ArrowLeft: selected?.above?.pages ? selected.above : selected, ArrowRight: selected?.below[0] ?? selected, Home: bars[0], End: bars.at(-1) };
  if (event.key === "Escape") select(null, false);
  if (!(event.key in near)) return;
  event.preventDefault();
  select(near[event.key] ?? selected ?? bars[0], true);
}

function select(bar, shouldScroll) {
  selected = bar;
  if (bar && shouldScroll) {
    const y = AXIS + bar.row * ROW;
    if (y < box.scrollTop + AXIS || y > box.scrollTop + box.clientHeight - 2 * ROW) box.scrollTop = y - box.clientHeight / 2;
    const x = LEFT + bar.start * scale();
    if (x < box.scrollLeft || x > box.scrollLeft + box.clientWidth - 60) box.scrollLeft = x - box.clientWidth / 3;
  }
  describe();
  draw();
}

// The run that is selected, in words; it is found again by its id when a new state comes.
function describe() {
  if (selected) selected = layout.bars.find((bar) => bar.id === selected.id) ?? null;
  say(find("#map-detail"), selected ? words(selected) : "Choose a run of pages to read about it.");
}

function words(bar) {
  const parts = [];
  if (bar.starting) parts.push("A prompt whose pages are not published yet");
  else if (bar.pages) parts.push(`Tokens ${count(bar.start)} to ${count(bar.end)} in ${plural(bar.pages, "page")}`);
  else parts.push("Prompts shorter than a page");
  for (const head of bar.heads.slice(0, 3)) parts.push(head.position < head.prompt ? `request ${head.id} is computing its prompt, ${count(head.position)} of ${count(head.prompt)} tokens` : `request ${head.id} is answering, at token ${count(head.tokens)}`);
  if (bar.heads.length > 3) parts.push(`${bar.heads.length - 3} more requests run here`);
  if (bar.numMarks) parts.push(`${plural(bar.numMarks, "checkpoint")}: ${bar.marks.slice(0, 4).map(markWords).join(", ")}${bar.numMarks > 4 ? " …" : ""}`);
  else if (bar.pages) parts.push("no checkpoint");
  if (bar.strays) parts.push(`${plural(bar.strays, "page")} that no checkpoint reaches`);
  if (bar.below.length > 1) parts.push(`${bar.below.length} paths go on from here`);
  return `${parts.join("; ")}.`;
}

const KINDS = { branch_point: "where paths part", mark: "at a mark", sparse: "inside a long prompt", boundary: "at a block's end", prompt_end: "near a prompt's end", answer_end: "at an answer's end", preempted: "of a request that gave way" };

function markWords({ position, kind, uses }) {
  return `at ${count(position)} (${KINDS[kind] ?? kind}, ${uses ? `resumed from ${uses === 1 ? "once" : `${count(uses)} times`}` : "not used yet"})`;
}

function fillTable() {
  if (!find("#table").open || !state) return;
  const bars = layout.bars.filter((bar) => bar.pages).sort((a, b) => b.end - a.end).slice(0, 20);
  find("#table tbody").replaceChildren(
    ...bars.map((bar) => {
      const row = make("tr");
      const marks = bar.marks.map(({ position }) => count(position)).slice(0, 6).join(", ");
      for (const text of [count(bar.start), count(bar.end), count(bar.pages), marks || "none", bar.heads.length ? String(bar.heads.length) : ""]) row.append(make("td", "", text));
      return row;
    }),
  );
}

// --- legend -----------------------------------------------------------------------------------

const SIGNS = [
  ["cached", "cached pages"],
  ["running", "pages in use by a running request"],
  ["stray", "pages that no checkpoint reaches"],
  ["used", "checkpoint that was resumed from"],
  ["unused", "checkpoint, not used yet"],
  ["head", "a running request"],
  ["here", "where the chosen or last prompt resumed"],
];

function addLegend() {
  for (const [sign, words] of SIGNS) {
    const item = find("#marks").appendChild(make("li"));
    const picture = item.appendChild(make("canvas"));
    picture.dataset.sign = sign;
    picture.setAttribute("aria-hidden", "true");
    item.append(make("span", "", words));
  }
}

function drawSign(picture) {
  const ratio = window.devicePixelRatio || 1;
  [picture.width, picture.height] = [26 * ratio, 16 * ratio];
  const on = picture.getContext("2d");
  on.setTransform(ratio, 0, 0, ratio, 0, 0);
  const { sign } = picture.dataset;
  on.fillStyle = { running: colours.running, stray: colours.stray }[sign] ?? colours.cached;
  on.fillRect(1, 4, 24, BAR);
  if (sign === "used" || sign === "unused") drawMark(on, 12, 4, sign === "used");
  if (sign === "head") drawHead(on, 13, 4);
  if (sign === "here") {
    on.fillStyle = colours.reused;
    on.fillRect(1, 4 + BAR, 12, 2.5);
    drawHere(on, 13, 2);
  }
}
