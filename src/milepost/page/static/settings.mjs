// What a person sets for requests: kept in this browser, except the system prompt, which each chat has.

import { find, make, say } from "./dom.mjs";

const KEPT = "milepost-settings";
const NUMBERS = {
  "temperature": "temperature",
  "top-p": "top_p",
  "top-k": "top_k",
  "min-p": "min_p",
  "presence-penalty": "presence_penalty",
  "frequency-penalty": "frequency_penalty",
  "repetition-penalty": "repetition_penalty",
  "max-tokens": "max_tokens",
  "seed": "seed",
};
const FIELDS = [...Object.keys(NUMBERS), "model", "thinking", "tools"];

let models = [];

export function startSettings() {
  recall();
  for (const id of FIELDS) find(`#${id}`).addEventListener("change", keep);
  find("#model").addEventListener("change", showAttach);
  find("#tools").addEventListener("input", checkTools);
  find("#reset-settings").addEventListener("click", () => {
    for (const id of FIELDS) if (id !== "model") find(`#${id}`).value = "";
    checkTools();
    keep();
  });
  checkTools();
}

function recall() {
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem(KEPT)) ?? {};
  } catch {
    // What cannot be read is as good as nothing.
  }
  for (const id of FIELDS) if (typeof kept[id] === "string" && id !== "model") find(`#${id}`).value = kept[id];
  if (kept.model) find("#model").dataset.kept = kept.model;
}

function keep() {
  const given = FIELDS.map((id) => [id, find(`#${id}`).value]).filter(([, value]) => value !== "");
  try {
    localStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(given)));
  } catch {
    // A browser that keeps nothing still uses what is set.
  }
  showSummary();
}

function showSummary() {
  const given = FIELDS.filter((id) => id !== "model" && id !== "thinking" && find(`#${id}`).value.trim() !== "");
  say(find("#settings-count"), given.length ? ` (${given.length} set)` : "");
}

// Fills the choice of models; the first one serves unless another was chosen before.
export function showModels(served) {
  models = served;
  const choice = find("#model");
  const wanted = choice.value || choice.dataset.kept;
  choice.replaceChildren(...served.map(({ id }) => make("option", "", id)));
  if (served.some(({ id }) => id === wanted)) choice.value = wanted;
  showAttach();
}

function showAttach() {
  find("#attach").hidden = whyNoPictures() !== "";
}

const model = () => models.find(({ id }) => id === find("#model").value);

export const maxModelLen = () => model()?.max_model_len ?? null;
export const maxRequestBytes = () => model()?.max_request_bytes ?? Infinity;

// Why the model gets no pictures, or nothing.
export function whyNoPictures() {
  if (!model()) return "The server has not said yet what its model takes.";
  return model().input_modalities?.includes("image") ? "" : `${model().id} takes no images.`;
}

// The tools as the API takes them; throws an Error with a text for people.
function tools() {
  const text = find("#tools").value.trim();
  if (!text) return [];
  let parsed;
  try {
    parsed = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools: ${error.message}`, { cause: error });
  }
  if (!Array.isArray(parsed)) throw new Error("Tools: use a JSON list, as in the API's field tools");
  return parsed.map((tool) => (tool?.name && !tool.function ? { type: "function", function: tool } : tool));
}

function checkTools() {
  let fault = "";
  try {
    tools();
  } catch (error) {
    fault = error.message;
  }
  find("#tools").setAttribute("aria-invalid", String(fault !== ""));
  say(find("#tools-fault"), fault);
  showSummary();
}

// The fields of a request, besides its messages; throws an Error with a text for people.
export function requestFields() {
  const fields = {};
  for (const [id, name] of Object.entries(NUMBERS)) {
    const field = find(`#${id}`);
    if (field.validity.badInput) throw new Error(`${name}: use a number`);
    if (field.value !== "") fields[name] = Number(field.value);
  }
  if (find("#model").value) fields.model = find("#model").value;
  const thinking = find("#thinking").value;
  if (thinking === "on" || thinking === "off") fields.chat_template_kwargs = { enable_thinking: thinking === "on" };
  else if (thinking) fields.reasoning_effort = thinking;
  const given = tools();
  if (given.length) fields.tools = given;
  return fields;
}
