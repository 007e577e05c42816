// Markdown to elements. HTML in a text is shown as text, pictures from elsewhere become links, and
// what the parser makes passes a sanitiser that knows the few elements listed here.

import DOMPurify from "./vendor/dompurify-3.5.0.mjs";
import highlighter from "./vendor/highlight-11.12.0.mjs";
import { Marked } from "./vendor/marked-18.2.1.mjs";

import { copyButton, make } from "./dom.mjs";
import { MATH_ATTRIBUTES, MATH_TAGS, mathExtension } from "./math.mjs";

const MOST_HIGHLIGHTED = 60_000;
const ALLOWED = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul", ...MATH_TAGS],
  ALLOWED_ATTR: ["align", "class", "href", "start", "title", ...MATH_ATTRIBUTES],
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["align", "start", ...MATH_ATTRIBUTES],
  FORBID_CONTENTS: ["annotation"], // a formula's source, which would be shown as text
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
};
const COLOURS_ALLOWED = { RETURN_DOM_FRAGMENT: true, ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"] };
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

const escape = (text) => text.replace(/[&<>"']/g, (character) => ESCAPES[character]);

const parser = new Marked({
  gfm: true,
  breaks: true,
  extensions: [mathExtension(escape)],
  renderer: {
    html: ({ raw }) => escape(raw),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    heading({ tokens, depth }) {
      const name = `h${Math.min(6, depth + 2)}`;
      return `<${name}>${this.parser.parseInline(tokens)}</${name}>\n`;
    },
  },
});

// Elements for a text, in a fragment.
export function rendered(text) {
  const fragment = DOMPurify.sanitize(parser.parse(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = make("div", "wide");
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", "Table");
    table.replaceWith(box);
    box.append(table);
  }
  for (const code of fragment.querySelectorAll("pre > code")) {
    const language = /^language-(\S+)$/.exec(code.className)?.[1] ?? "";
    code.parentElement.replaceWith(codeBlock(code.textContent.replace(/\n$/, ""), language));
  }
  return fragment;
}

// Code with its language, a button that copies it, and colours if the language is known.
export function codeBlock(text, language) {
  const block = make("figure", "code");
  const head = block.appendChild(make("figcaption"));
  head.append(make("span", "", language || "text"), copyButton(() => text, "Copy code"));
  const frame = block.appendChild(make("pre"));
  frame.tabIndex = 0;
  frame.append(colour(make("code", "", text), language));
  return block;
}

function colour(code, language) {
  const text = code.textContent;
  if (text.length > MOST_HIGHLIGHTED || !highlighter.getLanguage(language)) return code;
  const { value } = highlighter.highlight(text, { language, ignoreIllegals: true });
  code.replaceChildren(DOMPurify.sanitize(value, COLOURS_ALLOWED));
  return code;
}

// Shows a text that grows. Blocks before the last one are rendered once; drawing waits for the
// next frame, and longer where it takes long.
export class MarkdownView {
  constructor(element, afterDrawing = () => {}) {
    this.element = element;
    this.afterDrawing = afterDrawing;
    this.text = "";
    this.numDone = 0;
    this.tail = [];
    this.isWaiting = false;
    this.restUntil = 0;
  }

  append(text) {
    this.text += text.replaceAll("\r", "");
    if (this.isWaiting) return;
    this.isWaiting = true;
    setTimeout(() => requestAnimationFrame(() => this.draw()), Math.max(0, this.restUntil - performance.now()));
  }

  draw() {
    if (!this.isWaiting) return;
    this.isWaiting = false;
    const start = performance.now();
    const open = this.text.slice(this.numDone);
    const blocks = parser.lexer(open);
    const last = blocks.findLastIndex(({ type }) => type !== "space");
    const whole = blocks.slice(0, Math.max(0, last)).map(({ raw }) => raw).join("");
    for (const node of this.tail) node.remove();
    if (open.startsWith(whole)) {
      this.element.append(rendered(whole));
      this.numDone += whole.length;
    }
    const rest = rendered(this.text.slice(this.numDone));
    this.tail = [...rest.childNodes];
    this.element.append(rest);
    this.restUntil = performance.now() + 4 * (performance.now() - start);
    this.afterDrawing();
  }

  // The text is whole: it is rendered once more, since links may be defined at its end.
  finish() {
    this.isWaiting = false;
    this.tail = [];
    this.element.replaceChildren(rendered(this.text));
    this.afterDrawing();
  }
}
