// Every forward value. Only the rows in sight exist: a graph may have a million of them.
const nodes = data.nodes;
const ROW = 26;
const OVERSCAN = 8;
const TALLEST = 10_000_000; // browsers clip elements beyond some 16 million pixels
const cell = (column, row) => nodes[column].values[nodes[column].codes[row]];
const timed = nodes.seconds.length > 0; // there is a device
const timeOf = (row) => (timed && nodes.seconds[row] >= 5e-11 ? times(nodes.seconds[row]) : "");
const rulesOf = new Map(); // owner → the rules that match it, in order
data.rules.forEach((rule, index) => {
  for (const owner of rule.matched) {
    if (!rulesOf.has(owner)) rulesOf.set(owner, []);
    rulesOf.get(owner).push(index);
  }
});
const list = { shown: [], active: -1, rule: null, fate: "", words: "", choose: null };

function showNodes(choose, clear) {
  list.choose = choose;
  const fates = [["", "every value"], ["saved", "saved"], ["left to PyTorch", "left to PyTorch"], ["recomputed", "recomputed"], ["offloaded", "offloaded"], ["none", "not needed by the backward"]];
  const search = make("input", { type: "search", placeholder: "name, operator or module", "aria-label": "filter by name, operator or module", id: "search" });
  const select = make("select", { "aria-label": "filter by what becomes of a value", id: "fate" });
  for (const [value, label] of fates) select.append(make("option", { value }, label));
  search.addEventListener("input", () => { list.words = search.value.trim().toLowerCase(); refresh(); });
  select.addEventListener("change", () => { list.fate = select.value; refresh(); });
  const all = make("button", { type: "button", id: "all", on: { click: () => {
    search.value = select.value = list.words = list.fate = "";
    clear();
  } } }, "Show all");
  byId("filters").append(search, select, all);
  byId("values").classList.toggle("timed", timed);
  byId("head").append(...["", "value", "module", "bytes", "FLOPs", ...(timed ? ["time"] : [])].map((name, at) => make("span", { class: at > 2 ? "number" : "", style: at > 2 ? "text-align: right" : "" }, name)));
  const box = byId("list");
  box.addEventListener("scroll", paint, { passive: true });
  box.addEventListener("keydown", walk);
  new ResizeObserver(paint).observe(box);
  refresh();
}

function refresh() {
  const groups = list.rule === null ? null : new Set(data.rules[list.rule].matched);
  const hits = (column) => nodes[column].values.map((value) => String(value).toLowerCase().includes(list.words));
  const operators = hits("operator"), modules = hits("module");
  list.shown = [];
  for (let row = 0; row < nodes.name.length; row += 1) {
    if (groups && !groups.has(nodes.owner[row])) continue;
    const fate = cell("fate", row);
    if (list.fate && (list.fate === "none" ? fate !== "" : fate !== list.fate)) continue;
    if (list.words && !operators[nodes.operator.codes[row]] && !modules[nodes.module.codes[row]] && !nodes.name[row].toLowerCase().includes(list.words)) continue;
    list.shown.push(row);
  }
  byId("runway").style.height = `${Math.min(list.shown.length * ROW, TALLEST)}px`;
  byId("list").scrollTop = 0;
  tellChosen();
  paint();
}

function tellChosen() {
  const box = byId("chosen");
  box.replaceChildren();
  const total = list.shown.reduce((sum, row) => sum + (nodes.owner[row] === row ? 1 : 0), 0);
  if (list.rule === null) { box.append(`${count(list.shown.length, "value")} of ${number(nodes.name.length)}`); return; }
  const rule = data.rules[list.rule];
  box.append(make("b", {}, rule.text), ` (${rule.source}) matches ${count(total, "decision")} in ${count(list.shown.length, "value")} and decides ${number(rule.decided)}. ${worthTitle(rule)}`);
}

// Beyond TALLEST the rows are packed denser than they are drawn: a scroll position stands for a share of the list.
function firstRow(box) {
  const whole = list.shown.length * ROW;
  if (whole <= TALLEST) return box.scrollTop / ROW;
  return (box.scrollTop / Math.max(1, TALLEST - box.clientHeight)) * (list.shown.length - box.clientHeight / ROW);
}

function paint() {
  const box = byId("list");
  const first = firstRow(box);
  const from = Math.max(0, Math.floor(first) - OVERSCAN);
  const to = Math.min(list.shown.length, Math.ceil(first + box.clientHeight / ROW) + OVERSCAN);
  const rows = [];
  for (let at = from; at < to; at += 1) rows.push(valueRow(at, box.scrollTop + (at - first) * ROW));
  byId("runway").replaceChildren(...rows);
  const active = list.shown.indexOf(list.active);
  if (active >= from && active < to) box.setAttribute("aria-activedescendant", `value-${list.active}`);
  else box.removeAttribute("aria-activedescendant");
}

function valueRow(at, top) {
  const row = list.shown[at];
  const fate = cell("fate", row);
  const lost = list.rule !== null && nodes.rule[row] !== list.rule;
  const what = fate || "not needed by the backward";
  return make("div", { class: `value${row === list.active ? " active" : ""}${lost ? " lost" : ""}`, role: "option", id: `value-${row}`, "aria-selected": String(row === list.active),
      "aria-posinset": at + 1, "aria-setsize": list.shown.length, "data-name": nodes.name[row], style: `top: ${top}px`, title: `${what}${lost ? ", by another line" : ""}${timeOf(row) ? `; one run takes ${timeOf(row)} on ${data.device}` : ""}`, on: { click: () => list.choose(row) } },
    make("span", { class: `dot dot-${spoken(fate)}`, "aria-label": what }),
    make("span", { class: "mono" }, nodes.name[row]), make("span", {}, cell("module", row)),
    make("span", { class: "number" }, nodes.bytes[row] ? bytes(nodes.bytes[row]) : ""), make("span", { class: "number" }, nodes.flops[row] ? flops(nodes.flops[row]) : cell("uncounted", row) ? "not counted" : ""),
    ...(timed ? [make("span", { class: "number" }, timeOf(row))] : []));
}

function walk(event) {
  const page = Math.floor(byId("list").clientHeight / ROW) - 1;
  const step = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity }[event.key];
  if (step === undefined || !list.shown.length) return;
  event.preventDefault();
  const now = list.shown.indexOf(list.active);
  const at = Math.min(list.shown.length - 1, Math.max(0, now < 0 && Math.abs(step) < Infinity ? 0 : now + step));
  list.choose(list.shown[at]);
  bringIntoView(at);
}

function bringIntoView(at) {
  const box = byId("list");
  const first = firstRow(box), fits = box.clientHeight / ROW;
  if (at < first || at + 1 > first + fits) {
    const wanted = at < first ? at : at + 1 - fits;
    const whole = list.shown.length * ROW;
    box.scrollTop = whole <= TALLEST ? wanted * ROW : (wanted / Math.max(1, list.shown.length - fits)) * (TALLEST - box.clientHeight);
  }
  paint();
}

const placeOf = (rule) => (data.sources.length > 1 ? rule.source : `line ${rule.line}`);

function standing(rule, row) {
  if (nodes.rule[row] === rule) return "decides";
  if (nodes.always[row]) return "a size is always saved";
  if (nodes.rule[row] < 0) return "the user's own checkpoint keeps it";
  return `overridden by ${placeOf(data.rules[nodes.rule[row]])}`;
}

function showDetail(row, choose) {
  const box = byId("detail");
  const fate = cell("fate", row);
  const rules = rulesOf.get(nodes.owner[row]) || [];
  const facts = [cell("operator", row), cell("shape", row) && `${cell("shape", row)} ${cell("dtype", row)}`, bytes(nodes.bytes[row]), nodes.flops[row] && flops(nodes.flops[row]), cell("uncounted", row) && "FLOPs not counted", timeOf(row) && `${timeOf(row)} on ${data.device}`];
  box.replaceChildren(
    make("h3", {}, nodes.name[row]),
    make("p", {}, facts.filter(Boolean).join(" · "), cell("module", row) ? ` · in ${cell("module", row)}` : ""),
    make("p", {}, make("span", { class: `fate fate-${spoken(fate)}` }, fate || "not needed by the backward"),
      ` · decided ${cell("action", row)}${cell("reason", row) ? `: ${cell("reason", row)}` : ""}` +
      (nodes.owner[row] !== row ? ` · one decision with ${nodes.name[nodes.owner[row]]}` : "")));
  if (!rules.length) { box.append(make("p", { class: "hint" }, "No rule matches it.")); return; }
  const found = make("ol");
  for (const rule of rules) {
    const decides = nodes.rule[row] === rule;
    found.append(make("li", { class: decides ? "" : "no-decision" },
      make("button", { type: "button", class: "choose", "data-rule": rule, on: { click: () => choose(rule) } }, `${placeOf(data.rules[rule])}: ${data.rules[rule].text}`),
      make("span", { class: "hint" }, standing(rule, row))));
  }
  box.append(found);
}
