// Elements are made here and filled with text alone. Only markdown.mjs makes elements of a text.

export const find = (selector) => document.querySelector(selector);

export function make(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

export function drawn(name, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

// A picture of a message, which its name stands for where it is not seen. It is never loaded from elsewhere.
export function picture({ image_url: { url }, name = "Picture" }) {
  const image = make("img");
  image.alt = name;
  image.title = name;
  if (url.startsWith("data:image/")) image.src = url;
  return image;
}

// Set a text only where it has changed, so that screen readers hear news alone.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// A bar of parts [class, size], each as wide as its share of the whole.
export function fillBar(bar, parts, whole) {
  parts.forEach(([className, size], place) => {
    const piece = bar.children[place] ?? bar.appendChild(make("i"));
    piece.className = className;
    piece.style.width = `${whole ? (100 * size) / whole : 0}%`;
  });
  while (bar.children.length > parts.length) bar.lastChild.remove();
}

const SAID_MS = 1500;

// A button that copies what `text` returns.
export function copyButton(text, label = "Copy") {
  const button = make("button", "quiet", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    say(button, (await copy(text())) ? "Copied" : "Not copied");
    setTimeout(() => say(button, "Copy"), SAID_MS);
  });
  return button;
}

// Pages that came over plain HTTP from elsewhere have no clipboard, but a field to copy from.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = document.body.appendChild(make("textarea", "hidden"));
    const focused = document.activeElement;
    field.value = text;
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return isCopied;
  }
}
