// The chat: a conversation that is sent whole with each turn, and what the cache gave for it.

import { complete } from "./api.mjs";
import { showChats, startChats } from "./chats.mjs";
import { giveBack, showFault, startComposer, useComposer } from "./composer.mjs";
import { find, make } from "./dom.mjs";
import { Reply, unfinished } from "./reply.mjs";
import { maxModelLen, maxRequestBytes, requestFields } from "./settings.mjs";
import { dropChats, getChat, putChat } from "./store.mjs";
import { add, get, messagesOf, nameOf, newChat, path, remove, show } from "./tree.mjs";
import { Answer, drawTurn, openEditor } from "./turns.mjs";
import { bytes } from "./words.mjs";

const OPEN = "milepost-chat";
const NEAR_PX = 60;
const KEEP_MS = 2000;
const FIELDS_BYTES = 1024; // of a request, for what is added to its messages

const turns = find("#turns");
const system = find("#system");

let chat = newChat("");
let running = null;
let isFollowing = true;
let followedTo = 0;
let onRefused = () => {};

export async function startChat(whenRefused) {
  onRefused = whenRefused;
  startComposer({ onSend: ask, onStop: () => running?.abort() });
  find("#new-chat").addEventListener("click", () => begin());
  system.addEventListener("input", () => {
    chat.system = system.value;
  });
  turns.addEventListener("scroll", () => {
    isFollowing = turns.scrollHeight - turns.scrollTop - turns.clientHeight < NEAR_PX;
  });
  turns.addEventListener("load", follow, true); // pictures have no height before
  const last = sessionStorage.getItem(OPEN) ?? "";
  startChats({ current: () => chat, open, renamed, dropped });
  begin();
  const kept = await getChat(last).catch(() => null);
  if (kept && !chat.messages.length) open(kept);
}

// --- which chat ---------------------------------------------------------------------------------

function begin() {
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
  open({ ...newChat(id), system: system.value });
  find("#question").focus({ preventScroll: true });
}

function open(wanted) {
  running?.abort();
  chat = wanted;
  for (const message of chat.messages) if (message.role === "assistant") message.report ??= unfinished();
  system.value = chat.system;
  sessionStorage.setItem(OPEN, chat.id);
  showFault("");
  draw();
  for (const opener of document.querySelectorAll("#chat-list [aria-current]")) opener.removeAttribute("aria-current");
  showChats();
}

function renamed(id, name) {
  if (chat.id === id) chat.name = name;
}

function dropped(ids) {
  if (!ids.includes(chat.id)) return;
  chat.id = ""; // what still comes for it is not kept
  begin();
}

function draw() {
  const shown = path(chat);
  const hint = make("li", "empty", "Ask something, then ask again in the same chat: from the second turn on, what was said before comes from the cache.");
  turns.replaceChildren(...(shown.length ? shown.map((message) => drawTurn(chat, message, act)) : [hint]));
  isFollowing = true;
  followedTo = 0;
  follow();
}

// Scrolls to the end, unless somebody has scrolled away from it since.
function follow() {
  const end = turns.scrollHeight - turns.clientHeight;
  isFollowing &&= turns.scrollTop > Math.min(followedTo, end) - NEAR_PX;
  if (!isFollowing) return;
  turns.scrollTop = end;
  followedTo = end;
}

async function keep(kept) {
  if (!kept.id) return;
  if (!kept.messages.length) return dropChats([kept]).then(showChats);
  kept.at = Date.now();
  return putChat(kept, nameOf(kept)).then(showChats, () => showFault("This browser has no room to keep the chat."));
}

// --- what a person does -------------------------------------------------------------------------

// Sends a new message. If nothing comes of it, it goes back where it was typed.
function ask(content) {
  const leaf = chat.leaf;
  const asked = add(chat, leaf, { role: "user", content });
  answer(asked, { undo: (mine) => { remove(mine, asked, leaf); giveBack(content); } });
}

const act = {
  maxModelLen,
  isLast: (message) => message.id === chat.leaf,

  show(message) {
    if (running) return;
    show(chat, message);
    draw();
    keep(chat);
  },

  edit(message, text) {
    if (running) return;
    const leaf = chat.leaf;
    const content = typeof message.content === "string" ? text : [...message.content.filter(({ type }) => type !== "text"), { type: "text", text }];
    const asked = add(chat, message.parent, { role: "user", content });
    answer(asked, { undo: (mine) => { remove(mine, asked, leaf); editAgain(message, text); } });
  },

  again(message) {
    if (running) return;
    const leaf = chat.leaf;
    answer(get(chat, message.parent), { undo: (mine) => { mine.leaf = leaf; } });
  },

  // Goes on with an answer that was cut.
  resume(message) {
    if (running) return;
    const { report } = message;
    answer(message, { resumed: message, undo: () => { message.report = report; } });
  },

  answerCalls(message, results) {
    if (running) return;
    const leaf = chat.leaf;
    const told = [];
    message.calls.forEach(({ id, name }, place) => {
      told.push(add(chat, chat.leaf, { role: "tool", name, callId: id, content: results[place] }));
    });
    answer(told.at(-1), { undo: (mine) => { for (const one of told.reverse()) remove(mine, one, leaf); } });
  },
};

function editAgain(message, text) {
  queueMicrotask(() => {
    const element = turns.querySelector(`[data-id="${message.id}"]`);
    if (element) openEditor(element, text, act, message);
  });
}

// --- an answer ----------------------------------------------------------------------------------

// Asks for what follows a message, or for the rest of `resumed`. `undo` takes back what led to it.
async function answer(parent, { resumed = null, undo }) {
  const mine = chat;
  showFault("");
  let body;
  try {
    body = { ...requestFields(), messages: messagesOf(mine, parent.id) };
    checkSize(body);
  } catch (error) {
    undo(mine);
    showFault(error.message);
    return draw();
  }
  if (resumed) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  const message = resumed ?? add(mine, parent.id, { role: "assistant", content: "", reasoning: "", calls: [] });
  delete message.report;
  const length = message.content.length;
  draw();
  turns.lastElementChild.remove();
  const shown = new Answer(mine, message, act, follow);
  turns.append(shown.element);
  follow();
  const controller = new AbortController();
  running = controller;
  setBusy(true);
  const reply = new Reply(message, performance.now());
  let fault = null;
  try {
    let keptAt = -Infinity;
    for await (const event of complete(body, controller.signal)) {
      const now = performance.now();
      shown.take(reply.take(event, now));
      follow();
      // Whoever closes the page meanwhile finds what had come.
      if (now - keptAt > KEEP_MS) {
        keptAt = now;
        keep(mine);
      }
    }
    reply.end();
  } catch (error) {
    if (!controller.signal.aborted) fault = error;
    reply.end(fault ? "ended by an error" : "stopped");
  }
  // A turn that brought nothing leaves no half exchange: the next one would be refused.
  const isEmpty = resumed ? message.content.length === length : !reply.hasText;
  if (isEmpty && (fault || !reply.usage)) {
    if (!resumed) remove(mine, message);
    undo(mine);
  }
  end(mine, controller, fault);
}

// Throws an Error with a text for people if the server would not read all of a request.
function checkSize(body) {
  const most = maxRequestBytes();
  if (new Blob([JSON.stringify(body)]).size + FIELDS_BYTES <= most) return;
  throw new Error(`With its pictures and texts this chat is larger than the ${bytes(most)} that the server takes: remove some, or begin a new chat.`);
}

function end(mine, controller, fault) {
  keep(mine);
  if (running !== controller) return;
  running = null;
  if (mine === chat) {
    const { scrollTop } = turns;
    const wasFollowing = isFollowing;
    draw();
    if (!wasFollowing) turns.scrollTop = scrollTop;
  }
  setBusy(false);
  if (!fault) return;
  showFault(fault instanceof TypeError ? "The server does not answer." : fault.message);
  onRefused(fault);
}

function setBusy(isBusy) {
  turns.setAttribute("aria-busy", String(isBusy));
  useComposer(isBusy);
}
