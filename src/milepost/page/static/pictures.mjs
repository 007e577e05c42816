// Pictures for the next message: dropped, pasted, or chosen from files. Those that are larger than a
// request can well hold are made smaller here.

import { addSource, showFault } from "./composer.mjs";
import { find, make, picture, say } from "./dom.mjs";
import { maxRequestBytes, whyNoPictures } from "./settings.mjs";
import { bytes, plural } from "./words.mjs";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST_FILE_BYTES = 64 * 2 ** 20;
const MOST_SENT_BYTES = 2 * 2 ** 20;
const MOST_PIXELS = 2 ** 26; // the server decodes no more
const LONGEST_SIDE = 2048; // in pixels, of what is made smaller
const SHORTEST_SIDE = 128;
const QUALITY = 0.9;

const list = find("#attached");
const question = find("#question");

// Each {name, item, part}; the part is null until the file has been read.
let attached = [];
let reading = null;
let numReading = 0;

export function startPictures() {
  addSource({ take, putBack, settled });
  const files = find("#files");
  find("#attach").addEventListener("click", () => files.click());
  files.addEventListener("change", () => {
    attach([...files.files]);
    files.value = "";
  });
  document.addEventListener("paste", (event) => {
    const { clipboardData: given, target } = event;
    if (target !== question && target.closest("input, textarea, dialog")) return;
    // Text that comes with a picture of itself, from a spreadsheet say, is pasted as text.
    if (!given.files.length || given.getData("text/plain")) return;
    event.preventDefault();
    attach([...given.files]);
  });
  startDrop();
}

// Files may be dropped anywhere: beside the field a browser would leave the page for them.
function startDrop() {
  const isOfFiles = (event) => event.dataTransfer?.types.includes("Files");
  const mark = (isOver) => document.body.classList.toggle("dropping", isOver);
  document.addEventListener("dragover", (event) => {
    if (!isOfFiles(event)) return;
    event.preventDefault();
    mark(true);
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) mark(false);
  });
  document.addEventListener("drop", (event) => {
    mark(false);
    if (!isOfFiles(event)) return;
    event.preventDefault();
    attach([...event.dataTransfer.files]);
  });
}

// --- what is attached ---------------------------------------------------------------------------

function attach(files) {
  showFault(whyNoPictures());
  if (whyNoPictures() || !files.length) return;
  const added = files.map((file) => ({ file, entry: add(file.name || "Pasted picture") }));
  const earlier = numReading ? reading : true;
  reading = Promise.all([earlier, readAll(added)]).then((areWell) => !areWell.includes(false));
  question.focus({ preventScroll: true });
}

// Whether every file that is being read becomes a picture: a message is not sent without one of them.
const settled = () => (numReading ? reading : true);

async function readAll(added) {
  const faults = [];
  numReading += 1;
  for (const { file, entry } of added) {
    try {
      await fill(entry, file);
    } catch (error) {
      faults.push(error.message);
      remove(entry);
    }
  }
  numReading -= 1;
  if (faults.length) showFault(faults.join(" "));
  tell();
  return !faults.length;
}

async function fill(entry, file) {
  const url = await read(file, entry.name);
  const sum = attached.reduce((size, { part }) => size + (part?.image_url.url.length ?? 0), url.length);
  if (sum > maxRequestBytes()) throw new Error(`${entry.name}: with it the pictures are larger than the ${bytes(maxRequestBytes())} that the server takes.`);
  show(entry, { type: "image_url", image_url: { url }, name: entry.name });
}

function add(name) {
  const item = list.appendChild(make("li", "", "…"));
  const entry = { name, item, part: null };
  attached.push(entry);
  return entry;
}

function show(entry, part) {
  entry.part = part;
  const button = make("button", "", "✕");
  button.type = "button";
  button.setAttribute("aria-label", `Remove ${entry.name}`);
  button.addEventListener("click", () => {
    const place = attached.indexOf(entry);
    remove(entry);
    tell();
    (list.querySelectorAll("button")[Math.min(place, attached.length - 1)] ?? question).focus();
  });
  entry.item.replaceChildren(picture(part), button);
}

function remove(entry) {
  entry.item.remove();
  attached = attached.filter((other) => other !== entry);
}

function tell() {
  say(find("#attached-note"), attached.length ? `${plural(attached.length, "picture")} to send` : "No pictures to send");
}

function take() {
  const ready = attached.filter(({ part }) => part);
  for (const entry of ready) remove(entry);
  say(find("#attached-note"), "");
  return ready.map(({ part }) => part);
}

// Puts pictures back that could not be sent, before those that came meanwhile.
function putBack(parts) {
  const later = attached;
  attached = [];
  for (const part of parts) show(add(part.name), part);
  list.append(...later.map(({ item }) => item));
  attached.push(...later);
}

// --- files --------------------------------------------------------------------------------------

// The data: URL of a file's picture. Throws an Error with a text for people.
async function read(file, name) {
  if (!KINDS.includes(file.type)) throw new Error(`${name}: use a PNG, JPEG, WebP or GIF picture.`);
  if (file.size > MOST_FILE_BYTES) throw new Error(`${name} has ${bytes(file.size)}, and ${bytes(MOST_FILE_BYTES)} are the limit.`);
  const image = await createImageBitmap(file).catch(() => null);
  if (!image) throw new Error(`${name} cannot be read as a picture.`);
  try {
    const most = Math.min(MOST_SENT_BYTES, maxRequestBytes() / 4);
    const isSmall = file.size <= most && image.width * image.height <= MOST_PIXELS;
    return await toUrl(isSmall ? file : await smaller(image, most, name));
  } finally {
    image.close();
  }
}

async function smaller(image, most, name) {
  const longest = Math.max(image.width, image.height);
  for (let side = Math.min(LONGEST_SIDE, longest); side >= SHORTEST_SIDE; side *= 0.75) {
    const made = await drawn(image, side / longest);
    if (made && made.size <= most) return made;
  }
  throw new Error(`${name} is too large for this server, which takes requests of ${bytes(maxRequestBytes())}.`);
}

function drawn(image, scale) {
  const canvas = make("canvas");
  canvas.width = Math.max(1, Math.round(scale * image.width));
  canvas.height = Math.max(1, Math.round(scale * image.height));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => {
    canvas.toBlob(done, "image/jpeg", QUALITY);
  });
}

function toUrl(blob) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(blob);
  });
}
