// Draws the turns of a chat, with what can be done with each.

import { copyButton, fillBar, make, picture, say } from "./dom.mjs";
import { MarkdownView, codeBlock, rendered } from "./markdown.mjs";
import { cutBy, reportLine } from "./reply.mjs";
import { picturesOf, textOf, versions } from "./tree.mjs";
import { REASONS, plural } from "./words.mjs";

// A turn of a chat. `act` has what buttons do: edit, again, resume, show, answerCalls, maxModelLen.
export function drawTurn(chat, message, act) {
  if (message.role === "user") return drawQuestion(chat, message, act);
  if (message.role === "tool") return drawResult(chat, message);
  const answer = new Answer(chat, message, act);
  answer.end();
  return answer.element;
}

function start(className, who, chat, message, act) {
  const element = make("li", className);
  element.dataset.id = message.id;
  const head = element.appendChild(make("div", "head"));
  head.append(make("span", "who", who));
  const all = versions(chat, message);
  if (act && all.length > 1) head.append(chooser(all, message, act));
  return element;
}

// Buttons to the version before and after this one.
function chooser(all, message, act) {
  const box = make("span", "versions");
  const place = all.indexOf(message);
  const step = (to, sign, label) => {
    const one = button(sign, () => act.show(all[to]), label);
    one.disabled = to < 0 || to >= all.length;
    return one;
  };
  box.append(step(place - 1, "‹", "Version before"), make("span", "", `${place + 1} / ${all.length}`), step(place + 1, "›", "Version after"));
  return box;
}

function button(text, act, label = "") {
  const made = make("button", "quiet", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}

function actions(...buttons) {
  const box = make("div", "actions");
  box.append(...buttons);
  return box;
}

// --- questions ----------------------------------------------------------------------------------

function drawQuestion(chat, message, act) {
  const element = start("user", "You", chat, message, act);
  const said = make("div", "said plain", textOf(message.content));
  const edit = () => openEditor(element, textOf(message.content), act, message);
  const shown = picturesOf(message.content).map((part) => picture(part));
  if (shown.length) {
    const box = element.appendChild(make("div", "pictures"));
    box.append(...shown);
    said.hidden = !said.textContent;
  }
  element.append(said, actions(copyButton(() => textOf(message.content)), button("Edit", edit)));
  return element;
}

// Puts a field in place of a question; what is sent from it is another version of the question.
export function openEditor(element, text, act, message) {
  const form = make("form", "editor");
  const field = form.appendChild(make("textarea"));
  field.value = text;
  field.rows = Math.min(12, text.split("\n").length + 1);
  field.setAttribute("aria-label", "Edit the message");
  const send = make("button", "strong", "Send");
  const close = () => {
    form.remove();
    element.classList.remove("editing");
    element.querySelector(".actions button:last-child").focus();
  };
  form.append(actions(send, button("Cancel", close)));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) act.edit(message, field.value.trim());
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  element.classList.add("editing");
  element.append(form);
  field.focus();
}

function drawResult(chat, message) {
  const element = start("result", `Result of ${message.name}`, chat, message, null);
  element.append(codeBlock(message.content, isJson(message.content) ? "json" : ""));
  return element;
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

function tidy(text) {
  return isJson(text) ? JSON.stringify(JSON.parse(text), null, 2) : text;
}

// --- answers ------------------------------------------------------------------------------------

// An answer that may still be coming.
export class Answer {
  constructor(chat, message, act, follow = () => {}) {
    this.message = message;
    this.act = act;
    this.element = start("model", "Model", chat, message, act);
    this.said = this.element.appendChild(make("div", "said"));
    this.view = new MarkdownView(this.said, follow);
    this.calls = this.element.appendChild(make("div", "calls"));
    this.thought = null;
    if (message.reasoning) this.think(message.reasoning);
    this.view.text = message.content;
    if (message.content) this.said.replaceChildren(rendered(message.content));
  }

  take({ content, reasoning, hasCall }) {
    if (reasoning) this.think(reasoning);
    if (content) this.view.append(content);
    if (content && this.thought) say(this.summary, "Reasoning");
    if (hasCall) this.showCalls();
  }

  think(text) {
    if (!this.thought) {
      const box = make("details", "reasoning");
      this.summary = box.appendChild(make("summary", "", this.message.report || this.message.content ? "Reasoning" : "Reasoning…"));
      this.thought = box.appendChild(make("div", "thought"));
      this.element.insertBefore(box, this.said);
    }
    this.thought.append(text);
  }

  showCalls() {
    this.calls.replaceChildren(
      ...this.message.calls.map(({ name, input }) => {
        const box = make("div", "call");
        const line = box.appendChild(make("div", "name", "Calls "));
        line.append(make("code", "", name));
        if (input) box.append(codeBlock(tidy(input), "json"));
        return box;
      }),
    );
  }

  // The answer has ended: shows what it cost and what can be done with it.
  end() {
    const { message, act } = this;
    if (message.report) this.view.finish();
    if (this.summary) say(this.summary, "Reasoning");
    const isSilent = !message.content && (message.calls.length > 0 || message.reasoning);
    this.said.hidden = isSilent;
    this.showCalls();
    const { report } = message;
    if (!report) return;
    if (report.prompt !== null) this.element.append(bar(report));
    this.element.append(make("div", "gave", reportLine(report)));
    const cut = cutBy(report, act.maxModelLen());
    if (cut) this.element.append(cutLine(cut));
    const buttons = [copyButton(() => message.content || message.reasoning), button("Regenerate", () => act.again(message), "Regenerate this answer")];
    const isOpen = cut || report.note;
    if (isOpen && message.content && !message.calls.length) buttons.push(button("Continue", () => act.resume(message), "Continue this answer"));
    this.element.append(actions(...buttons));
    if (message.calls.length && act.isLast(message)) this.element.append(resultForm(message, act));
  }
}

function bar({ prompt, cached, lost }) {
  const made = make("div", "bar");
  fillBar(made, REASONS.map(([reason]) => [reason, reason === "reused" ? cached : lost[reason] ?? 0]), prompt);
  made.setAttribute("aria-hidden", "true");
  return made;
}

function cutLine(text) {
  const line = make("p", "cut");
  const sign = make("span", "sign", "✂");
  sign.setAttribute("aria-hidden", "true");
  line.append(sign, text);
  return line;
}

// Fields for what the called tools return: this page runs none.
function resultForm(message, act) {
  const form = make("form", "results");
  const fields = message.calls.map((call, place) => {
    const label = form.appendChild(make("label", "", `Result of ${call.name}${message.calls.length > 1 ? ` (${place + 1})` : ""}`));
    const field = label.appendChild(make("textarea"));
    field.rows = 2;
    field.spellcheck = false;
    return field;
  });
  form.append(make("p", "muted", "This page runs no tools: enter what each returns."), make("button", "strong", `Send ${plural(fields.length, "result")}`));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act.answerCalls(message, fields.map((field) => field.value));
  });
  return form;
}
