"use strict";
// Elements, colours and numbers. Text only ever goes into text nodes.

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on")
      for (const [type, listener] of Object.entries(value)) node.addEventListener(type, listener);
    else if (name === "style")
      for (const [key, x] of Object.entries(value)) node.style.setProperty(key, x);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const NUM_COLORS = 9;
const color = (index) => css(`--c${index % NUM_COLORS}`);
const data = JSON.parse(byId("data").textContent);
const levelOf = (kind) => data.levels[kind] ?? "info";
const ICONS = { good: "✓", info: "i", watch: "!", bad: "✕" };
const SPOKEN = { good: "good", info: "for information", watch: "look closer", bad: "bad" };

const icon = (level) =>
  el("span", { class: `icon ${level}`, role: "img", "aria-label": SPOKEN[level] }, ICONS[level]);

/** A table with a row of headings; columns of numbers, by index, are right-aligned. */
function table(head, rows, { numeric = [], caption = null, ...attributes } = {}) {
  const cells = head.map((text, i) =>
    el("th", { scope: "col", class: numeric.includes(i) ? "num" : null }, text),
  );
  return el(
    "table",
    { class: "data", ...attributes },
    caption && el("caption", { class: "hidden" }, caption),
    el("thead", {}, el("tr", {}, cells)),
    el("tbody", {}, rows),
  );
}

/** A table of names and values. */
function pairs(entries) {
  const rows = entries.map(([name, value]) =>
    el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, String(value))),
  );
  return el("table", { class: "data" }, el("tbody", {}, rows));
}

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const superscript = (n) =>
  (n < 0 ? "⁻" : "") + [...String(Math.abs(n))].map((d) => SUPERSCRIPTS[d]).join("");

const PARTS = Object.keys(data.parts);
const partColor = (part) =>
  PARTS.includes(part) ? PARTS.indexOf(part) : PARTS.length + part.length;
const [partName, partMeaning] = [0, 1].map((i) => (part) => data.parts[part]?.[i] ?? (i ? "" : part));

/** 0.0123 → "0.0123", 2e-5 → "2×10⁻⁵", 12345 → "12.3k". */
function shown(value, digits = 3) {
  if (value == null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) {
    const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
    const short = String(Number(mantissa));
    return (short === "1" ? "" : `${short}×`) + `10${superscript(Number(exponent))}`;
  }
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(digits))}G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(digits))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(digits))}k`;
  return String(Number(value.toPrecision(size >= 1000 ? 4 : digits)));
}

const percent = (value, digits = 1) =>
  value == null ? "–" : `${Number((100 * value).toFixed(digits))}%`;

/** 0.5 → "50%"; more digits near 0% and near 100%, where they matter. */
function share(value) {
  const rest = Math.min(Math.abs(value), Math.abs(1 - value));
  return percent(value, rest < 0.001 ? 3 : rest < 0.01 ? 2 : 1);
}

function duration(seconds) {
  if (seconds < 60) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}
