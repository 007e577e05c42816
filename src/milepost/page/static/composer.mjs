// The field where a message is written, and what else belongs to it. A part that adds to messages
// (pictures, say) registers with `addSource`.

import { find, say } from "./dom.mjs";
import { textOf } from "./tree.mjs";

const question = find("#question");
const send = find("#send");
const stop = find("#stop");
const fault = find("#fault");
const MOST_LINES_PX = 240;

// Each {take() -> content parts that it gives away, putBack(parts), settled() -> false, at
// last, if something that was given to it cannot be sent}.
const sources = [];

export function addSource(source) {
  sources.push(source);
}

export function startComposer({ onSend, onStop }) {
  find("#ask").addEventListener("submit", async (event) => {
    event.preventDefault();
    const areWell = await Promise.all(sources.map((source) => source.settled()));
    if (send.hidden || areWell.includes(false)) return;
    const content = take();
    if (content) onSend(content);
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    find("#ask").requestSubmit();
  });
  question.addEventListener("input", fit);
  stop.addEventListener("click", onStop);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !stop.hidden && !document.querySelector("dialog[open]")) onStop();
  });
}

// What was written, as a message's content: a text, or a list of parts where there is more than that.
function take() {
  const text = question.value.trim();
  const parts = sources.flatMap((source) => source.take());
  if (!text && !parts.length) return null;
  question.value = "";
  fit();
  return parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text;
}

// Puts a content back that could not be sent, above what was written meanwhile.
export function giveBack(content) {
  const parts = typeof content === "string" ? [] : content.filter(({ type }) => type !== "text");
  if (parts.length) for (const source of sources) source.putBack(parts);
  question.value = [textOf(content), question.value].filter(Boolean).join("\n");
  fit();
}

function fit() {
  question.style.height = "auto";
  question.style.height = `${Math.min(MOST_LINES_PX, question.scrollHeight + 2)}px`;
}

export function showFault(text) {
  fault.hidden = !text;
  say(fault, text);
}

export function useComposer(isBusy) {
  const isElsewhere = ![document.body, question, send, stop].includes(document.activeElement);
  stop.hidden = !isBusy;
  send.hidden = isBusy;
  if (!isElsewhere) (isBusy ? stop : question).focus({ preventScroll: true });
}
