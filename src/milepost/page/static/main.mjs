// Joins the parts of the page: asks for the state every second while somebody looks, and for the key.

import { Refused, getJson, key, useKey } from "./api.mjs";
import { startChat } from "./chat.mjs";
import { find, say } from "./dom.mjs";
import { showFigures, showMemory, showPrompts, startFigures } from "./figures.mjs";
import { goToPrompt, showMap, startMap, takeColours } from "./map.mjs";
import { startPictures } from "./pictures.mjs";
import { showModels, startSettings } from "./settings.mjs";
import { bytes } from "./words.mjs";

const EVERY_MS = 1000;
const AFTER_ERROR_MS = 4000;
const THEME = "milepost-theme";
const BESIDE = "milepost-beside";

let isLocked = false;
let lastState = null;

// --- light and dark -----------------------------------------------------------------------------

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function setTheme() {
  const isDark = (localStorage.getItem(THEME) ?? (prefersDark.matches ? "dark" : "light")) === "dark";
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  say(find("#theme"), isDark ? "Light" : "Dark");
  find("#theme").setAttribute("aria-label", isDark ? "Use light colours" : "Use dark colours");
  takeColours();
}

function startTheme() {
  prefersDark.addEventListener("change", setTheme);
  find("#theme").addEventListener("click", () => {
    localStorage.setItem(THEME, document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    setTheme();
  });
  setTheme();
}

// --- panes on a narrow screen -------------------------------------------------------------------

function startPanes() {
  for (const name of ["chat", "cache"]) {
    find(`#show-${name}`).addEventListener("click", () => {
      document.body.dataset.pane = name;
      for (const other of ["chat", "cache"]) find(`#show-${other}`).setAttribute("aria-pressed", String(other === name));
      takeColours();
    });
  }
  find("#beside").addEventListener("click", () => {
    setBeside(document.body.dataset.beside !== "true");
    localStorage.setItem(BESIDE, document.body.dataset.beside);
  });
  setBeside(localStorage.getItem(BESIDE) !== "false");
}

function setBeside(isShown) {
  document.body.dataset.beside = String(isShown);
  say(find("#beside"), isShown ? "Hide cache" : "Show cache");
  takeColours();
}

// --- the key ------------------------------------------------------------------------------------

const dialog = find("#key-dialog");

function askForKey(why) {
  if (dialog.open) return;
  say(find("#key-why"), why);
  find("#key").value = key();
  dialog.returnValue = "";
  dialog.showModal();
}

function startKey() {
  find("#open-key").addEventListener("click", () => askForKey("Send this key with everything that the page asks."));
  dialog.addEventListener("close", () => {
    if (dialog.returnValue !== "save") return;
    useKey(find("#key").value.trim());
    isLocked = false;
    askModels();
    refresh();
  });
}

function onRefused(error) {
  if (error instanceof Refused && error.status === 401) askForKey("This server answers only with a key.");
}

// --- the state ----------------------------------------------------------------------------------

function isLookedAt() {
  return !document.hidden && find("#cache").offsetParent !== null;
}

async function refresh() {
  if (isLocked || !isLookedAt()) return true;
  try {
    show(await getJson("ui/state"));
    say(find("#status"), "");
    return true;
  } catch (error) {
    if (error instanceof Refused && error.status === 401) {
      isLocked = true;
      say(find("#cache-note"), "The cache is shown to the operator's key alone: use the button Key.");
      if (!key()) askForKey("This server answers only with a key. Its operator's key shows the cache as well.");
      return true;
    }
    say(find("#status"), error instanceof Refused ? error.message : "The server does not answer; asking again.");
    return false;
  }
}

function show(state) {
  lastState = state;
  const { engine } = state;
  say(find("#cache-note"), `${engine.device} · ${engine.dtype} · weights ${bytes(engine.weights_bytes)} · cache ${bytes(engine.cache_bytes)}`);
  showFigures(state);
  showMemory(state);
  const ms = showMap(state, showPrompts(state));
  document.documentElement.dataset.drawn = `${state.tree.runs.length} runs in ${ms.toFixed(1)} ms`;
}

async function askModels() {
  const { data } = await getJson("v1/models").catch(() => ({ data: [] }));
  if (!data.length) return;
  showModels(data);
  document.title = `${data[0].id} · Milepost`;
}

async function keepLooking() {
  for (;;) {
    const isWell = await refresh();
    await new Promise((done) => {
      setTimeout(done, isWell ? EVERY_MS : AFTER_ERROR_MS);
    });
  }
}

startFigures((id) => {
  if (lastState) goToPrompt(showPrompts(lastState), id !== null);
});
startMap();
startTheme();
startPanes();
startKey();
startSettings();
startChat(onRefused);
startPictures();
askModels();
keepLooking();
