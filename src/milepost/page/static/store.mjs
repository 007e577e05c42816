// Chats that this browser keeps. The oldest go first when there are too many, their pictures are too
// large together, or no room is left.
// Where a browser keeps nothing, they last until the page is closed.

import { pictureBytes } from "./tree.mjs";

const MAX_CHATS = 200;
const MAX_PICTURE_BYTES = 256 * 2 ** 20;
const CHATS = "chats";
const NAMES = "names";

const memory = new Map();
let opening = null;

function database() {
  opening ??= new Promise((done) => {
    const request = globalThis.indexedDB?.open("milepost", 1);
    if (!request) return done(null);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(CHATS, { keyPath: "id" });
      request.result.createObjectStore(NAMES, { keyPath: "id" });
    };
    request.onsuccess = () => done(request.result);
    request.onerror = () => done(null);
    return undefined;
  }).catch(() => null);
  return opening;
}

// Runs `work` on both stores, and returns the result of the request that it returns.
async function transact(mode, work) {
  const opened = await database();
  return new Promise((done, fail) => {
    const transaction = opened.transaction([CHATS, NAMES], mode);
    const request = work(transaction.objectStore(CHATS), transaction.objectStore(NAMES));
    transaction.oncomplete = () => done(request?.result);
    transaction.onabort = () => fail(transaction.error);
    transaction.onerror = () => fail(transaction.error);
  });
}

// [{id, name, at, bytes of pictures}, ...], newest first.
export async function listChats() {
  const names = (await database()) ? await transact("readonly", (_, all) => all.getAll()) : [...memory.values()].map(({ chat, name }) => entryOf(chat, name));
  return names.sort((a, b) => b.at - a.at);
}

export async function getChat(id) {
  if (!(await database())) return structuredClone(memory.get(id)?.chat ?? null);
  return (await transact("readonly", (chats) => chats.get(id))) ?? null;
}

export async function putChat(chat, name) {
  if (!(await database())) memory.set(chat.id, { chat: structuredClone(chat), name });
  else {
    await write(chat, name).catch(async (error) => {
      if (error?.name !== "QuotaExceededError") throw error;
      await dropChats((await listChats()).filter(({ id }) => id !== chat.id).slice(-10));
      await write(chat, name);
    });
  }
  await dropChats(surplus(await listChats()));
}

const entryOf = (chat, name) => ({ id: chat.id, name, at: chat.at, bytes: pictureBytes(chat) });

// The chats that go, of a list with the newest first. The newest one stays.
function surplus(list) {
  let sum = 0;
  return list.filter(({ bytes = 0 }, place) => {
    sum += bytes;
    return place > 0 && (place >= MAX_CHATS || sum > MAX_PICTURE_BYTES);
  });
}

function write(chat, name) {
  return transact("readwrite", (chats, names) => {
    chats.put(chat);
    return names.put(entryOf(chat, name));
  });
}

export async function dropChats(list) {
  if (!list.length) return;
  if (!(await database())) for (const { id } of list) memory.delete(id);
  else {
    await transact("readwrite", (chats, names) => {
      for (const { id } of list) {
        chats.delete(id);
        names.delete(id);
      }
    });
  }
}
