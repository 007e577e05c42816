// The list of kept chats: opened, renamed, deleted.

import { find, make, say } from "./dom.mjs";
import { dropChats, getChat, listChats, putChat } from "./store.mjs";

const sure = find("#sure-dialog");
let controls = null;

// `controls` are current() -> chat, open(chat), renamed(id, name), dropped([ids]).
export function startChats(given) {
  controls = given;
  find("#drop-chats").addEventListener("click", async () => {
    const all = await listChats();
    if (await isSure(`Delete all ${all.length} chats? They are in this browser alone.`)) await drop(all);
  });
  find("#show-chats").addEventListener("click", () => setOpen(!isOpen()));
  find("#new-chat").addEventListener("click", showChat);
  find("#hide-chats").addEventListener("click", () => setOpen(false));
  find("#chats").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && isNarrow.matches) setOpen(false);
  });
  isNarrow.addEventListener("change", () => setOpen(!isNarrow.matches, false));
  setOpen(!isNarrow.matches, false);
}

const isNarrow = matchMedia("(max-width: 75rem)");
const isOpen = () => !find("#chats").hidden;

function setOpen(isWanted, takesFocus = true) {
  find("#chats").hidden = !isWanted;
  find("#show-chats").setAttribute("aria-expanded", String(isWanted));
  if (takesFocus && isNarrow.matches) (isWanted ? find("#new-chat") : find("#show-chats")).focus();
}

// On a narrow screen the list lies over what it opens.
function showChat() {
  if (!isNarrow.matches) return;
  setOpen(false);
  find("#show-chat").click();
}

export async function showChats() {
  const list = find("#chat-list");
  const chats = await listChats();
  // A list that is as it was is left alone: somebody may be in it with the keyboard, or rename.
  const shown = JSON.stringify([controls.current().id, chats.map(({ id, name }) => [id, name])]);
  if (shown === list.dataset.shown || list.querySelector("input")) return;
  list.dataset.shown = shown;
  list.replaceChildren(...chats.map(row));
  find("#drop-chats").hidden = chats.length === 0;
  say(find("#chats-note"), chats.length ? "Kept in this browser alone." : "Chats are kept here, in this browser alone.");
}

function row({ id, name, at }) {
  const item = make("li");
  const opener = item.appendChild(make("button", "opener", name));
  opener.type = "button";
  opener.title = `${name}\n${new Date(at).toLocaleString()}`;
  if (controls.current().id === id) opener.setAttribute("aria-current", "true");
  opener.addEventListener("click", async () => {
    const chat = await getChat(id);
    if (chat) controls.open(chat);
    showChat();
  });
  item.append(small("✎", `Rename ${name}`, () => rename(item, id, name)), small("✕", `Delete ${name}`, async () => {
    if (await isSure(`Delete “${name}”?`)) await drop([{ id }]);
  }));
  return item;
}

function small(sign, label, act) {
  const button = make("button", "quiet", sign);
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", act);
  return button;
}

function rename(item, id, name) {
  const field = make("input");
  field.value = name;
  field.maxLength = 120;
  field.setAttribute("aria-label", "Name of the chat");
  item.replaceChildren(field);
  field.select();
  let isOver = false;
  const end = async (isKept) => {
    if (isOver) return;
    isOver = true;
    const wanted = field.value.trim();
    field.remove();
    delete find("#chat-list").dataset.shown;
    const chat = isKept && wanted && wanted !== name ? await getChat(id) : null;
    if (chat) {
      await putChat({ ...chat, name: wanted }, wanted);
      controls.renamed(id, wanted);
    }
    await showChats();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === "Escape") {
      event.stopPropagation();
      end(event.key === "Enter");
    }
  });
  field.addEventListener("blur", () => end(true));
}

async function drop(chats) {
  await dropChats(chats);
  controls.dropped(chats.map(({ id }) => id));
  await showChats();
}

function isSure(question) {
  say(find("#sure-question"), question);
  sure.showModal();
  return new Promise((done) => {
    const over = new AbortController();
    const answer = (event) => {
      over.abort();
      done(event.submitter?.value === "yes");
    };
    for (const kind of ["submit", "cancel"]) sure.addEventListener(kind, answer, { signal: over.signal });
  });
}
