// Markdown from models as elements: code, headings, lists, quotes, tables, bold, italics, links. Text never becomes
// markup, and unclosed marks of a text that still streams count as closed at its end.

import {make} from "./dom.js";

const FENCE = /^\s*(```|~~~)\s*(\S*)/;
const HEADING = /^(#{1,6})\s+(.*)/;
const ITEM = /^\s*([-*+]|\d+[.)])\s+(.*)/;
const QUOTE = /^>\s?(.*)/;
const ROW = /^\s*\|(.*)\|\s*$/;
const RULE = /^\s*\|?[\s:|-]+\|?\s*$/;
/** In order of precedence: code, bold, italics, a link to the web. */
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|\*([^*\s][^*]*?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/;

/** The text as elements. */
export function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    const [block, next] = blockAt(lines, i);
    if (block) {
      blocks.push(block);
    }
    i = next;
  }
  return blocks;
}

/** [element or null, index of the line after it]. */
function blockAt(lines, i) {
  const line = lines[i];
  if (!line.trim()) {
    return [null, i + 1];
  }
  if (FENCE.test(line)) {
    return code(lines, i);
  }
  const heading = HEADING.exec(line);
  if (heading) {
    return [make(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2])), i + 1];
  }
  if (ITEM.test(line)) {
    return list(lines, i);
  }
  if (QUOTE.test(line)) {
    const end = endOf(lines, i, (one) => QUOTE.test(one));
    const inner = lines.slice(i, end).map((one) => QUOTE.exec(one)[1]);
    return [make("blockquote", {}, ...markdown(inner.join("\n"))), end];
  }
  if (ROW.test(line) && RULE.test(lines[i + 1] ?? "")) {
    return grid(lines, i);
  }
  const end = Math.max(i + 1, endOf(lines, i, isPlain));
  return [make("p", {}, ...inline(lines.slice(i, end).join("\n"))), end];
}

const isPlain = (line) =>
  line.trim() && ![FENCE, HEADING, ITEM, QUOTE].some((pattern) => pattern.test(line));

/** Index of the first line from i on that is not of this kind. */
function endOf(lines, i, isOfKind) {
  let end = i;
  while (end < lines.length && isOfKind(lines[end])) {
    end++;
  }
  return end;
}

function code(lines, i) {
  const [, fence, language] = FENCE.exec(lines[i]);
  const end = endOf(lines, i + 1, (line) => !line.trim().startsWith(fence));
  const text = lines.slice(i + 1, end).join("\n");
  const name = language ? {"data-language": language} : {};
  return [make("pre", {tabindex: "0", ...name}, make("code", {}, text)), end + 1];
}

function list(lines, i) {
  const ordered = /^\d/.test(ITEM.exec(lines[i])[1]);
  const items = [];
  let end = i;
  for (; end < lines.length && lines[end].trim(); end++) {
    const item = ITEM.exec(lines[end]);
    if (item) {
      items.push([item[2]]);
    } else {
      items.at(-1).push(lines[end].trim());
    }
  }
  const elements = items.map((parts) => make("li", {}, ...inline(parts.join("\n"))));
  return [make(ordered ? "ol" : "ul", {}, ...elements), end];
}

function grid(lines, i) {
  const end = endOf(lines, i, (line) => ROW.test(line));
  const cells = (line) => ROW.exec(line)[1].split("|").map((cell) => cell.trim());
  const head = cells(lines[i]).map((cell) => make("th", {scope: "col"}, ...inline(cell)));
  const rows = lines.slice(i + 2, end).map((line) =>
    make("tr", {}, ...cells(line).map((cell) => make("td", {}, ...inline(cell)))),
  );
  const element = make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  return [element, end];
}

/** Text and elements of one paragraph. */
function inline(text) {
  const match = INLINE.exec(text);
  if (!match) {
    return text ? [text] : [];
  }
  const [all, , codeText, bold, alsoBold, italic, linkText, link] = match;
  const before = text.slice(0, match.index);
  const after = text.slice(match.index + all.length);
  return [...(before ? [before] : []), element({codeText, bold: bold ?? alsoBold, italic, linkText, link}), ...inline(after)];
}

function element({codeText, bold, italic, linkText, link}) {
  if (codeText !== undefined) {
    return make("code", {}, codeText);
  }
  if (bold !== undefined) {
    return make("strong", {}, ...inline(bold));
  }
  if (italic !== undefined) {
    return make("em", {}, ...inline(italic));
  }
  return make("a", {href: link, rel: "noopener noreferrer", target: "_blank"}, linkText);
}
