// Markdown as nodes. What a model writes is hostile: no HTML is parsed, no image is loaded, only web links are links.

import { copyButton, h } from "./dom.js";

const MAX_DEPTH = 12; // of nested quotes, lists and emphasis
const MAX_SPAN = 4000; // characters in which the end of a span is looked for
const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** Shows a growing text: blocks that are complete are rendered once, only the last one again. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.reset();
  }

  reset() {
    this.element.replaceChildren();
    this.text = "";
    this.done = 0;
    this.tail = [];
  }

  update(text) {
    if (!text.startsWith(this.text)) this.reset();
    if (text === this.text) return;
    this.text = text;
    const blocks = split(text.slice(this.done));
    for (const node of this.tail) node.remove();
    this.tail = [];
    blocks.forEach((block, index) => {
      const node = render(block, 0);
      if (!node) return;
      this.element.append(node);
      if (index === blocks.length - 1) this.tail.push(node);
    });
    if (blocks.length > 1) this.done += blocks.at(-1).offset;
  }
}

/** Blocks of a text: {kind, lines, offset}, with the offset of the first line. */
function split(text) {
  const blocks = [];
  let offset = 0;
  let open = null;
  const begin = (kind, more = {}) => blocks.push((open = { kind, lines: [], offset, ...more }));
  for (const line of text.split("\n")) {
    place(line);
    offset += line.length + 1;
  }
  return blocks;

  function place(line) {
    if (open?.kind === "code") {
      const mark = line.trim();
      if (mark.length >= open.fence.length && mark === open.fence[0].repeat(mark.length) && /^ {0,3}\S/.test(line)) open = null;
      else open.lines.push(line.slice(Math.min(open.indent, line.length - line.trimStart().length)));
      return;
    }
    const blank = line.trim() === "";
    if (open?.kind === "list") {
      if (blank || /^\s{2,}\S/.test(line) || (ITEM.test(line) && !RULE.test(line))) {
        open.lines.push(line);
        return;
      }
      if (open.lines.at(-1).trim() !== "" && !startsBlock(line)) {
        open.lines.push(line); // a paragraph of an item goes on
        return;
      }
      open = null;
    }
    if (blank) {
      open = null;
      return;
    }
    const fence = FENCE.exec(line);
    if (fence) {
      begin("code", { fence: fence[2], indent: fence[1].length, language: fence[3].trim().split(/\s/)[0] });
      return;
    }
    if (open?.kind === "quote" && QUOTE.test(line)) {
      open.lines.push(QUOTE.exec(line)[1]);
      return;
    }
    if (QUOTE.test(line)) {
      begin("quote").lines;
      open.lines.push(QUOTE.exec(line)[1]);
      return;
    }
    const heading = HEADING.exec(line);
    if (heading) {
      begin("heading", { level: heading[1].length });
      open.lines.push(heading[2]);
      open = null;
      return;
    }
    if (open?.kind === "text" && open.lines.length === 1 && DIVIDER.test(line) && line.includes("-") && open.lines[0].includes("|")) {
      open.kind = "table";
      open.lines.push(line);
      return;
    }
    if (open?.kind === "table") {
      if (line.includes("|")) {
        open.lines.push(line);
        return;
      }
      open = null;
    }
    if (RULE.test(line)) {
      begin("rule");
      open = null;
      return;
    }
    if (ITEM.test(line) && (open?.kind !== "text" || !/^\s*\d/.test(line) || /^\s*1[.)]/.test(line))) {
      begin("list");
      open.lines.push(line);
      return;
    }
    if (open?.kind !== "text") begin("text");
    open.lines.push(line);
  }
}

const startsBlock = (line) => FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || RULE.test(line);

function render(block, depth) {
  switch (block.kind) {
    case "code":
      return codeBlock(block.lines.join("\n"), block.language);
    case "heading":
      return h(`h${Math.min(6, block.level + 2)}`, {}, inline(block.lines[0], depth));
    case "rule":
      return h("hr");
    case "quote":
      return h("blockquote", {}, nested(block.lines.join("\n"), depth + 1));
    case "list":
      return list(block.lines, depth);
    case "table":
      return table(block.lines, depth);
    default:
      return h("p", {}, inline(block.lines.join("\n"), depth));
  }
}

function nested(text, depth) {
  if (depth > MAX_DEPTH) return [h("p", { text })];
  return split(text)
    .map((block) => render(block, depth))
    .filter(Boolean);
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const base = first[1].length;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= base + 1) items.push({ indent: found[1].length + found[2].length + 1, lines: [found[4]] });
    else {
      const item = items.at(-1);
      const space = line.length - line.trimStart().length;
      item.lines.push(line.slice(Math.min(space, item.indent)));
    }
  }
  const props = isOrdered && parseInt(first[2], 10) !== 1 ? { start: parseInt(first[2], 10) } : {};
  return h(isOrdered ? "ol" : "ul", props, items.map((item) => listItem(item, depth)));
}

function listItem(item, depth) {
  const task = /^\[([ xX])\]\s+/.exec(item.lines[0]);
  if (task) item.lines[0] = item.lines[0].slice(task[0].length);
  const nodes = nested(item.lines.join("\n").trim(), depth + 1);
  const isTight = !item.lines.slice(0, -1).some((line) => line.trim() === "");
  const shown = nodes.flatMap((node) => (isTight && node.tagName === "P" ? [...node.childNodes] : [node]));
  if (!task) return h("li", {}, shown);
  const box = h("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": task[1] === " " ? "open" : "done" });
  return h("li", { class: "task" }, box, shown);
}

function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return row.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines, depth) {
  const head = cells(lines[0]);
  const aligns = cells(lines[1]).map((cell) => (/^:-+:$/.test(cell) ? "center" : /-:$/.test(cell) ? "end" : null));
  const row = (tag, line) =>
    h("tr", {}, head.map((_, i) => h(tag, { class: aligns[i] && `align-${aligns[i]}` }, inline(line[i] ?? "", depth))));
  return h(
    "div",
    { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row("th", head)), h("tbody", {}, lines.slice(2).map((line) => row("td", cells(line))))),
  );
}

const KEYWORDS = new Set(
  ("abstract and as assert async await begin bool break case catch char class const continue def default defer del do double elif else end enum " +
    "except export extends extern false final finally float fn for from func function global go if impl import in int interface is lambda let " +
    "local long loop match mod module mut namespace new nil None not null or package pass private protected pub public raise range return " +
    "select self short static string struct super switch template then this throw trait True False true try type typedef typeof union use " +
    "using var void where while with yield SELECT FROM WHERE INSERT UPDATE DELETE CREATE TABLE JOIN GROUP ORDER BY AND OR NOT NULL").split(" "),
);
const TOKEN =
  /(\/\/[^\n]*|\/\*[\s\S]*?\*\/|(?<![\w$&])#[^\n]*|--[ ][^\n]*)|("""[\s\S]*?"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)|\b(\d[\d_]*(?:\.\d+)?(?:e[+-]?\d+)?|0x[\da-f]+)\b|([A-Za-z_]\w*)/gi;
const PLAIN = new Set(["", "text", "txt", "plain", "markdown", "md", "console", "output", "diff"]);

/** A coloured code; comments, strings, numbers and words that most languages share. */
function highlight(code, language) {
  if (PLAIN.has(language.toLowerCase()) || code.length > 20_000) return [code];
  const nodes = [];
  let last = 0;
  for (const found of code.matchAll(TOKEN)) {
    const kind = found[1] ? "comment" : found[2] ? "string" : found[3] ? "number" : KEYWORDS.has(found[4]) ? "keyword" : null;
    if (!kind) continue;
    nodes.push(code.slice(last, found.index), h("span", { class: `t-${kind}`, text: found[0] }));
    last = found.index + found[0].length;
  }
  nodes.push(code.slice(last));
  return nodes;
}

export function codeBlock(code, language = "") {
  return h(
    "figure",
    { class: "code" },
    h("figcaption", {}, h("span", { text: language || "code" }), copyButton(() => code)),
    h("pre", { tabindex: "0" }, h("code", {}, highlight(code, language))),
  );
}

const SPECIAL = /[\\`*_~[!<\n]|https?:\/\//g;

/** Nodes of one paragraph: code, emphasis, links, line breaks. */
function inline(text, depth) {
  if (depth > MAX_DEPTH) return [text];
  const nodes = [];
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) nodes.push(plain);
    plain = "";
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    if (!found) break;
    plain += text.slice(at, found.index);
    at = found.index;
    const span = spanAt(text, at, depth);
    if (span) {
      flush();
      nodes.push(span.node);
      at = span.end;
    } else if (text[at] === "\\" && /[\\`*_~[\]()#+\-.!<>|{}]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  plain += text.slice(at);
  flush();
  return nodes;
}

/** The span that begins at a character, and where it ends; null if none does. */
function spanAt(text, at, depth) {
  const window = text.slice(at, at + MAX_SPAN);
  switch (text[at]) {
    case "\n":
      return { node: h("br"), end: at + 1 };
    case "`": {
      const marks = /^`+/.exec(window)[0];
      const end = closing(window, marks);
      if (end < 0) return null;
      const code = window.slice(marks.length, end).replaceAll("\n", " ");
      return { node: h("code", { text: code.trim() === "" ? code : code.replace(/^ (.*) $/, "$1") }), end: at + end + marks.length };
    }
    case "*":
    case "_":
    case "~":
      return emphasis(text, window, at, depth);
    case "!":
      return window[1] === "[" ? link(window.slice(1), at + 1, depth) : null;
    case "[":
      return link(window, at, depth);
    case "<": {
      const found = /^<(https?:\/\/[^\s<>]+|mailto:[^\s<>]+)>/.exec(window);
      return found ? { node: anchor(found[1], [found[1]]), end: at + found[0].length } : null;
    }
    default: {
      const found = /^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}*_]/.exec(window);
      return found ? { node: anchor(found[0], [found[0]]), end: at + found[0].length } : null;
    }
  }
}

function closing(window, marks) {
  let end = window.indexOf(marks, marks.length);
  while (end >= 0 && (window[end + marks.length] === marks[0] || window[end - 1] === marks[0])) {
    end = window.indexOf(marks, end + 1);
  }
  return end;
}

function emphasis(text, window, at, depth) {
  const mark = text[at];
  const marks = new RegExp(`^\\${mark}{1,3}`).exec(window)[0];
  if (mark === "~" && marks.length !== 2) return null;
  if (/\s/.test(window[marks.length] ?? " ")) return null;
  if (mark === "_" && /\w/.test(text[at - 1] ?? " ")) return null;
  let end = closing(window, marks);
  while (end >= 0 && (/\s/.test(window[end - 1]) || (mark === "_" && /\w/.test(window[end + marks.length] ?? " ")))) {
    end = window.indexOf(marks, end + 1);
  }
  if (end < 0 || end === marks.length) return null;
  const inner = inline(window.slice(marks.length, end), depth + 1);
  const tags = mark === "~" ? ["del"] : marks.length === 3 ? ["strong", "em"] : marks.length === 2 ? ["strong"] : ["em"];
  const node = tags.reduceRight((children, tag) => [h(tag, {}, children)], inner)[0];
  return { node, end: at + end + marks.length };
}

function link(window, at, depth) {
  const found = /^\[((?:[^[\]\\\n]|\\.|\[[^[\]\n]*\]){0,500})\]\(\s*<?([^\s()<>]{1,2000}(?:\([^\s()]{0,200}\)[^\s()<>]{0,500})?)>?(?:\s+["'][^"'\n]{0,300}["'])?\s*\)/.exec(window);
  if (!found) return null;
  return { node: anchor(found[2], found[1] ? inline(found[1], depth + 1) : [found[2]]), end: at + found[0].length };
}

/** A link to the web or to mail; anything else is its text. */
function anchor(address, children) {
  let url = null;
  try {
    url = new URL(address);
  } catch {
    // Not an address: an answer has no page to be relative to.
  }
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return h("span", {}, children);
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, children);
}
