// Formulas in markdown: $x$ and \(x\) in a line, $$x$$ and \[x\] apart. KaTeX makes MathML of them,
// which browsers draw themselves.

import "./vendor/katex-0.19.1.mjs";

const { katex } = globalThis;
const LONGEST = 5000;

// A dollar sign opens only before something, and closes only after something and before no digit:
// "$5 and $10" are prices. Code has no formulas, and formulas no code.
const INLINE = [/^\$(?![\s$])((?:\\[^]|[^\\$\n`])+?)(?<!\s)\$(?!\d)/, /^\\\(([^]+?)\\\)/];
const APART = [/^\$\$([^]+?)\$\$/, /^\\\[([^]+?)\\\]/];
const SIGN = /\$|\\\(|\\\[/;

// The elements and attributes that KaTeX makes, for the sanitiser.
export const MATH_TAGS = ["math", "menclose", "mfrac", "mi", "mmultiscripts", "mn", "mo", "mover", "mpadded", "mphantom", "mprescripts", "mroot", "mrow", "ms", "mspace", "msqrt", "mstyle", "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover"];
export const MATH_ATTRIBUTES = ["accent", "accentunder", "columnalign", "columnlines", "columnspacing", "depth", "display", "displaystyle", "fence", "height", "linethickness", "lspace", "mathcolor", "mathsize", "mathvariant", "maxsize", "minsize", "notation", "rowlines", "rowspacing", "rspace", "scriptlevel", "separator", "stretchy", "voffset", "width"];

function found(patterns, text, isApart) {
  for (const pattern of patterns) {
    const match = pattern.exec(text);
    if (match && match[1].trim() && match[0].length <= LONGEST) return { type: "math", raw: match[0], text: match[1], isApart };
  }
  return undefined;
}

function rendered({ text, raw, isApart }, escape) {
  try {
    return katex.renderToString(text, { output: "mathml", displayMode: isApart, throwOnError: true, trust: false, strict: "ignore", maxExpand: 200, maxSize: 20 });
  } catch {
    return `<code>${escape(raw)}</code>`;
  }
}

// The extension of the markdown parser.
export const mathExtension = (escape) => ({
  name: "math",
  level: "inline",
  start: (text) => {
    const at = text.search(SIGN);
    return at < 0 ? undefined : at;
  },
  tokenizer: (text) => found(APART, text, true) ?? found(INLINE, text, false),
  renderer: (token) => rendered(token, escape),
});
