// A chat as a tree of messages: to edit a question or to ask again adds a branch, and the chat shows
// one path. Knows nothing of the page.

export const textOf = (content) =>
  typeof content === "string" ? content : (content ?? []).map((part) => part.text ?? "").join("");

// Parts of a content that are pictures: {type, image_url: {url}, name}.
export const picturesOf = (content) =>
  typeof content === "string" ? [] : (content ?? []).filter(({ type }) => type === "image_url");

export function newChat(id) {
  return { id, name: "", at: 0, system: "", messages: [], leaf: null };
}

// Adds a message below another one, or as a first one below null; the chat shows it.
export function add(chat, parent, message) {
  const added = { ...message, id: (chat.messages.at(-1)?.id ?? -1) + 1, parent };
  chat.messages.push(added);
  chat.leaf = added.id;
  return added;
}

export const get = (chat, id) => chat.messages.find((message) => message.id === id) ?? null;

// The messages that are shown, first to last.
export function path(chat, leaf = chat.leaf) {
  const found = [];
  for (let message = get(chat, leaf); message; message = get(chat, message.parent)) found.push(message);
  return found.reverse();
}

// A message and the others that follow the same one.
export const versions = (chat, message) =>
  chat.messages.filter(({ parent, role }) => parent === message.parent && role === message.role);

// Shows another version, with what was said last below it.
export function show(chat, message) {
  let leaf = message;
  for (;;) {
    const next = chat.messages.findLast(({ parent }) => parent === leaf.id);
    if (!next) break;
    leaf = next;
  }
  chat.leaf = leaf.id;
}

// Takes a message back that has nothing below it, and shows `leaf` instead.
export function remove(chat, message, leaf = message.parent) {
  chat.messages = chat.messages.filter((other) => other !== message);
  chat.leaf = leaf;
}

// Bytes of the pictures in a chat. Versions of a question share theirs.
export function pictureBytes(chat) {
  const parts = new Set(chat.messages.flatMap(({ content }) => picturesOf(content)));
  return [...parts].reduce((sum, { image_url: image }) => sum + image.url.length, 0);
}

// A content without what is for this page alone.
const plain = (content) =>
  typeof content === "string" ? content : content.map(({ name, ...part }) => part);

// What the API reads of a path.
export function messagesOf(chat, leaf = chat.leaf) {
  const system = chat.system.trim();
  const said = path(chat, leaf).map(({ role, content, reasoning, calls, callId }) => {
    if (role === "tool") return { role, content, tool_call_id: callId };
    const message = { role, content: plain(content) };
    if (reasoning) message.reasoning_content = reasoning;
    if (calls?.length) message.tool_calls = calls.map(({ id, name, input }) => ({ id, type: "function", function: { name, arguments: input } }));
    return message;
  });
  return system ? [{ role: "system", content: system }, ...said] : said;
}

const NAME_LENGTH = 60;

export function nameOf(chat) {
  if (chat.name) return chat.name;
  const first = chat.messages.find(({ role }) => role === "user");
  const text = first ? textOf(first.content).replace(/\s+/g, " ").trim() : "";
  if (!text) return picturesOf(first?.content)[0]?.name ?? "New chat";
  return text.length > NAME_LENGTH ? `${text.slice(0, NAME_LENGTH - 1)}…` : text;
}
