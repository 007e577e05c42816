// The chat: a conversation that is sent whole with each turn, and what the cache gave for it.

import { complete } from "./api.mjs";
import { fillBar, find, make, say } from "./dom.mjs";
import { REASONS, brief, count, losses, plural, wait } from "./words.mjs";

const turns = find("#turns");
const question = find("#question");
const stop = find("#stop");
const send = find("#send");

let history = [];
let running = null;

export function startChat(onRefused) {
  find("#ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = question.value.trim();
    if (!text || running) return;
    question.value = "";
    answer(text, onRefused);
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    find("#ask").requestSubmit();
  });
  stop.addEventListener("click", () => running?.abort());
  find("#new-chat").addEventListener("click", () => {
    running?.abort();
    begin();
  });
  begin();
}

function begin() {
  history = [];
  const hint = make("li", "empty", "Ask something, then ask again in the same chat: from the second turn on, what was said before comes from the cache.");
  turns.replaceChildren(hint);
  question.focus({ preventScroll: true });
}

function addTurn(who) {
  turns.querySelector(".empty")?.remove();
  const turn = turns.appendChild(make("li"));
  turn.append(make("div", "who", who));
  return turn;
}

function body() {
  const system = find("#system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...history] : history;
  const request = { messages };
  for (const [id, field] of [["#temperature", "temperature"], ["#max-tokens", "max_tokens"]]) {
    if (find(id).value !== "") request[field] = Number(find(id).value);
  }
  return request;
}

async function answer(text, onRefused) {
  addTurn("You").append(make("div", "said", text));
  history.push({ role: "user", content: text });
  const turn = addTurn("Model");
  const reply = new Reply(turn);
  running = new AbortController();
  setBusy(true);
  const mine = history;
  try {
    for await (const event of complete(body(), running.signal)) reply.take(event);
    reply.end();
  } catch (error) {
    if (error.name === "AbortError") reply.end("stopped");
    else {
      turn.append(make("div", "gave bad", error.message));
      onRefused(error);
    }
  }
  // A turn that brought nothing leaves no half exchange behind: the next one would be refused.
  if (reply.text) mine.push({ role: "assistant", content: reply.text });
  else mine.pop();
  running = null;
  setBusy(false);
}

function setBusy(isBusy) {
  turns.setAttribute("aria-busy", String(isBusy));
  stop.hidden = !isBusy;
  send.hidden = isBusy;
  (isBusy ? stop : question).focus({ preventScroll: true });
}

// One answer as it comes.
class Reply {
  constructor(turn) {
    this.turn = turn;
    this.text = "";
    this.began = performance.now();
    this.first = null;
    this.last = null;
    this.usage = null;
    this.said = turn.appendChild(make("div", "said"));
  }

  take(event) {
    if (event.usage) this.usage = event.usage;
    const delta = event.choices?.[0]?.delta ?? {};
    const thought = delta.reasoning_content ?? "";
    const said = delta.content ?? "";
    if (!thought && !said) return;
    this.last = performance.now();
    this.first ??= this.last;
    const follows = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;
    if (thought) this.thoughts().append(thought);
    if (said) {
      this.text += said;
      this.said.append(said);
    }
    if (follows) turns.scrollTop = turns.scrollHeight;
  }

  thoughts() {
    if (!this.thought) {
      const box = make("details");
      box.append(make("summary", "", "Reasoning"));
      this.thought = box.appendChild(make("div", "thought"));
      this.turn.insertBefore(box, this.said);
    }
    return this.thought;
  }

  end(note = "") {
    const parts = [];
    if (note) parts.push(note);
    if (this.usage) {
      const details = this.usage.prompt_tokens_details;
      const [cached, whole] = [details.cached_tokens, this.usage.prompt_tokens];
      const bar = this.turn.appendChild(make("div", "bar"));
      const lost = details.lost_tokens ?? {};
      fillBar(bar, REASONS.map(([reason]) => [reason, reason === "reused" ? cached : lost[reason] ?? 0]), whole);
      parts.push(`${count(cached)} of ${plural(whole, "prompt token")} cached`);
      if (cached < whole) parts.push(`computed: ${losses(lost)}`);
    }
    if (this.first !== null) parts.push(`first token ${wait(this.first - this.began)}`);
    const tokens = this.usage?.completion_tokens ?? 0;
    if (tokens > 1) parts.push(`${brief((1000 * (tokens - 1)) / Math.max(this.last - this.first, 1))} tokens/s`);
    const gave = this.turn.appendChild(make("div", "gave"));
    say(gave, parts.join(" · "));
    turns.scrollTop = turns.scrollHeight;
  }
}
